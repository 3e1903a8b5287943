"""Frozen records of the spec and of a comparison request.

Field names are the YAML keys; all defaults are defined here and nowhere else. The ranks read the comparison request from the
run folder.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field


class StrategyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy and its options."""

    name: str
    options: dict[str, Any] = {}


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Strategies to compare, with the number of timed steps, warm-up steps and repeats."""

    strategies: list[StrategyChoice]
    repeats: int = 3
    steps: int = 10
    warmup_steps: int = 2


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 2)]  # what every random generator in use accepts, and its successor
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all spec sections: frozen; unknown keys are errors."""


class ModelSpec(Record, frozen=True):
    """The model and its form."""

    name: Annotated[str, Meta(min_length=1, description="hub name, local path, tiny:<family>, or mlp:<width>x<layers>")]
    revision: Annotated[str | None, Meta(description="pinned hub revision")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="precision of compute and of frozen weights; auto = bfloat16 on GPUs, float32 on CPUs"),
    ] = "auto"
    attention: Annotated[str, Meta(description="attention implementation of transformers")] = "sdpa"
    gradient_checkpointing: bool = False
    compile: bool = False
    config: Annotated[
        dict[str, Any], Meta(description="overrides of the model's config, for tiny: and mlp: models")
    ] = {}


class DataSpec(Record, frozen=True):
    """The rows, their conversion to text, and the conversion of text to sequences."""

    source: Annotated[str, Meta(min_length=1, description="hub name, local file, or builtin:<set>")]
    split: str = "train"
    config: Annotated[str | None, Meta(description="configuration (subset) name of a hub data set")] = None
    revision: Annotated[str | None, Meta(description="pinned hub revision")] = None
    template: Annotated[str, Meta(description="auto, alpaca, chat, text, classification, or a Jinja file")] = "auto"
    columns: dict[str, str | list[str]] = {}
    subset: Annotated[PositiveInt | None, Meta(description="rows, chosen by data.seed; null = all")] = None
    max_length: Annotated[int, Meta(ge=2, description="tokens; longer rows are truncated and counted")] = 512
    packing: Literal["isolated", "wrapped", "none"] = "isolated"
    mask_prompt: bool = True
    eval_fraction: Fraction = 0.05
    seed: Seed = 42


class AdapterSpec(Record, frozen=True):
    """LoRA, or none (full fine-tuning)."""

    type: Literal["none", "lora"] = "none"
    r: PositiveInt = 8
    alpha: Annotated[float, Meta(gt=0)] = 16
    dropout: Fraction = 0.0
    targets: Annotated[list[str] | None, Meta(description="module names; null = every linear layer")] = None
    target_parameters: Annotated[
        list[str], Meta(description="parameters, such as fused expert weights; without dropout")
    ] = []
    modules_to_save: Annotated[list[str], Meta(description="modules trained in full and saved with the adapter")] = []


class StrategySpec(Record, frozen=True):
    """Name and options of the strategy; in YAML, the options are next to the name."""

    name: str = "pytorch_ddp"
    options: dict[str, Any] = {}


class TrainSpec(Record, frozen=True):
    """The optimizer steps."""

    max_steps: Annotated[NonNegativeInt | None, Meta(description="default 10; 0 only evaluates")] = None
    epochs: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="instead of max_steps")] = None
    micro_batch_size: PositiveInt = 1
    grad_accum: Annotated[PositiveInt | None, Meta(description="default 1")] = None
    global_batch_size: Annotated[PositiveInt | None, Meta(description="instead of grad_accum")] = None
    lr: Annotated[float, Meta(ge=0)] = 5e-5
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegative = 0.0
    max_grad_norm: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="null = no clipping")] = 1.0
    seed: Seed = 42
    deterministic: Annotated[
        bool, Meta(description="use only deterministic kernels (torch.use_deterministic_algorithms); slower on GPUs")
    ] = False
    param_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="storage of trained weights and optimizer state; model.dtype is the precision of compute"),
    ] = "float32"


class EvalSpec(Record, frozen=True):
    """When to evaluate, and on which data."""

    source: Annotated[str | None, Meta(description="a separate set; null = data.eval_fraction")] = None
    every: Annotated[PositiveInt | None, Meta(description="steps; null = only at the end")] = None
    subset: Annotated[PositiveInt | None, Meta(description="rows, chosen by data.seed; null = all")] = 200
    batch_size: Annotated[PositiveInt | None, Meta(description="null = chosen")] = None
    baseline: Annotated[bool, Meta(description="evaluate before training too")] = False
    at_end: bool = True
    patience: Annotated[
        PositiveInt | None,
        Meta(
            description="end the training after this many evaluations in a row without a lower held-out loss; needs eval.every; null = never"
        ),
    ] = None
    min_delta: Annotated[
        NonNegative,
        Meta(description="by how much a held-out loss must be lower than the lowest before, for eval.patience"),
    ] = 0.0
    samples: Annotated[
        NonNegativeInt, Meta(description="number of sample answers to show, for data whose answers can be checked")
    ] = 3


class CheckpointSpec(Record, frozen=True):
    """What to save, and when."""

    mode: Literal["weights_only", "full", "none"] = "weights_only"
    every: Annotated[PositiveInt | None, Meta(description="steps; null = only at the end")] = None
    keep: PositiveInt = 5
    keep_best: Annotated[
        bool,
        Meta(
            description="also keep the checkpoint with the lowest held-out loss, beside the newest `keep`; checkpoints/best names it; needs eval.every"
        ),
    ] = False
    async_: Annotated[bool, Meta(description="continue training while it is written; one at a time")] = field(
        default=False, name="async"
    )
    at_end: bool = True
    timeout_s: Annotated[
        float, Meta(gt=0, description="how long ranks wait for a rank that does not take part in a save")
    ] = 120.0


class ScriptSpec(Record, frozen=True):
    """The user's own torchrun program."""

    path: Annotated[str, Meta(min_length=1)]
    args: list[str] = []


class RendezvousSpec(Record, frozen=True):
    """Rendezvous settings. Null means: determined on the nodes."""

    address: str | None = None
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65534)] | None,
        Meta(description="of the store on the first node; the control channel uses the next port, port + 1"),
    ] = None
    interface: str | None = None


class SlurmSpec(Record, frozen=True):
    """Options of sbatch; ``extra`` lines are passed through."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    gpus_per_node: Annotated[PositiveInt | None, Meta(description="also the default of cluster.procs_per_node")] = None
    gres: Annotated[
        str | None, Meta(description="such as gpu:a100:4; its GPUs are the default of cluster.procs_per_node")
    ] = None
    cpus_per_task: PositiveInt | None = None
    mem: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    chdir: str | None = None
    exclusive: bool = False
    exclude: list[str] = []
    max_requeues: Annotated[
        NonNegativeInt,
        Meta(
            description="how often a job may be requeued: near its time limit, after preemption, or after the loss of a node"
        ),
    ] = 3
    signal_s: Annotated[
        PositiveInt, Meta(description="seconds before the time limit at which the ranks receive the stop signal")
    ] = 120
    extra: Annotated[list[str], Meta(description="further options of sbatch, as --name=value")] = []


class ClusterSpec(Record, frozen=True):
    """Where the run executes."""

    profile: Annotated[
        str | None, Meta(description="another spec, whose cluster section gives defaults for this one's")
    ] = None
    launcher: Literal["local", "slurm", "hosts"] = "local"
    nodes: PositiveInt = 1
    procs_per_node: Annotated[PositiveInt | None, Meta(description="ranks; null = one per GPU, two without GPUs")] = (
        None
    )
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(
            description="auto = cuda if the allocation requests GPUs (gpus_per_node, gres, extra), else what the nodes report when the job runs; "
            "local: cuda if this machine has GPUs"
        ),
    ] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    device_memory_gib: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(description="memory that one rank may use, of its GPU or of its node; null = detected on this machine"),
    ] = None
    hosts: list[str] = []
    rendezvous: RendezvousSpec = RendezvousSpec()
    slurm: SlurmSpec = SlurmSpec()
    modules: list[str] = []
    setup: list[str] = []
    env: dict[str, str] = {}
    python: Annotated[
        str | None,
        Meta(
            description="Python of the nodes: a virtual environment's folder, conda:NAME, an Apptainer image (.sif) or pyxis:IMAGE; "
            "null = the one that runs this"
        ),
    ] = None
    cache: Annotated[str | None, Meta(description="Hugging Face and data cache; null = HF_HOME")] = None
    stage: Literal["auto", "always", "never"] = "auto"
    exclude_bad: Annotated[
        bool,
        Meta(description="slurm: continue without nodes that fail preflight, if the batch can be shared by the rest"),
    ] = False
    group_readable: Annotated[
        bool,
        Meta(
            description="let the group read run folders (0750 and 0640 instead of 0700 and 0600); a setgid bit on run_root does the same"
        ),
    ] = False
    timeout_s: Annotated[int, Meta(ge=1, description="of collectives")] = 600


class ProfileSpec(Record, frozen=True):
    """A window of the PyTorch profiler, in optimizer steps of each attempt; `{}` uses the defaults."""

    wait: Annotated[NonNegativeInt, Meta(description="steps without profiling")] = 5
    warmup: Annotated[NonNegativeInt, Meta(description="warm-up steps of the profiler before recording")] = 2
    active: Annotated[PositiveInt, Meta(description="steps recorded")] = 3
    ranks: Annotated[list[NonNegativeInt] | None, Meta(description="only these ranks; null = all")] = None


class ObserveSpec(Record, frozen=True):
    """What to record during the run."""

    log_every: PositiveInt = 1
    telemetry_s: Annotated[float, Meta(ge=0, description="seconds between samples; 0 = off")] = 1.0
    profile: ProfileSpec | None = None
    hang_s: Annotated[
        Annotated[float, Meta(gt=0)] | Literal["auto"] | None,
        Meta(
            description="seconds without progress in a step of training after which stacks are taken, the stalled rank is named and the run ends; "
            "auto = half of cluster.timeout_s, at most 300 (off for `script`); null = off"
        ),
    ] = "auto"
    proof_at_end: Annotated[
        bool,
        Meta(description="after the last step each rank records its hash of the weights and its part of the state"),
    ] = False
    tensorboard: bool = False
    wandb: bool = False


class RunSpec(Record, frozen=True):
    """One requested run."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "run"
    model: ModelSpec | None = None
    data: DataSpec | None = None
    adapter: AdapterSpec = AdapterSpec()
    strategy: StrategySpec = StrategySpec()
    train: TrainSpec = TrainSpec()
    eval: EvalSpec = EvalSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    script: ScriptSpec | None = None
    cluster: ClusterSpec = ClusterSpec()
    observe: ObserveSpec = ObserveSpec()
    run_root: Annotated[str, Meta(min_length=1)] = "runs"
