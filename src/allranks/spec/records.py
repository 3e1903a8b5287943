"""The spec as frozen records. Field names are the YAML keys; every default is written here and nowhere else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all spec sections: frozen, and unknown keys are errors."""


class ModelSpec(Record, frozen=True):
    """Which model, in which form."""

    name: Annotated[str, Meta(min_length=1, description="hub name, local path, tiny:<family>, or mlp:<width>x<layers>")]
    revision: Annotated[str | None, Meta(description="pinned hub revision")] = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Annotated[str, Meta(description="attention implementation of transformers")] = "sdpa"
    gradient_checkpointing: bool = False
    compile: bool = False
    config: Annotated[
        dict[str, Any], Meta(description="overrides of the model's config, for tiny: and mlp: models")
    ] = {}


class DataSpec(Record, frozen=True):
    """Which rows, how they become text, and how text becomes sequences."""

    source: Annotated[str, Meta(min_length=1, description="hub name, local file, or builtin:<set>")]
    split: str = "train"
    config: Annotated[str | None, Meta(description="configuration (subset) name of a hub data set")] = None
    revision: Annotated[str | None, Meta(description="pinned hub revision")] = None
    template: Annotated[str, Meta(description="auto, alpaca, chat, text, classification, or a Jinja file")] = "auto"
    columns: dict[str, str | list[str]] = {}
    subset: Annotated[PositiveInt | None, Meta(description="rows, chosen by data.seed; null = all")] = None
    max_length: Annotated[int, Meta(ge=2, description="tokens; longer rows are cut and counted")] = 512
    packing: Literal["isolated", "wrapped", "none"] = "isolated"
    mask_prompt: bool = True
    eval_fraction: Fraction = 0.05
    seed: int = 42


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
    modules_to_save: Annotated[list[str], Meta(description="modules trained whole and saved with the adapter")] = []


class StrategySpec(Record, frozen=True):
    """Name and options of the strategy; in YAML the options stand beside the name."""

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
    clip_norm: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="null = no clipping")] = 1.0
    seed: int = 42


class EvalSpec(Record, frozen=True):
    """When and on what to evaluate."""

    source: Annotated[str | None, Meta(description="a set of its own; null = data.eval_fraction")] = None
    every: Annotated[PositiveInt | None, Meta(description="steps; null = only at the end")] = None
    subset: Annotated[PositiveInt | None, Meta(description="rows, chosen by data.seed; null = all")] = 200
    batch_size: Annotated[PositiveInt | None, Meta(description="null = chosen")] = None
    baseline: Annotated[bool, Meta(description="evaluate before training too")] = False
    at_end: bool = True
    samples: Annotated[NonNegativeInt, Meta(description="sample answers shown; where answers can be checked")] = 3


class CheckpointSpec(Record, frozen=True):
    """What is saved, and when."""

    mode: Literal["lite", "full", "none"] = "lite"
    every: Annotated[PositiveInt | None, Meta(description="steps; null = only at the end")] = None
    keep: PositiveInt = 5
    async_: Annotated[bool, Meta(description="go on with training while it is written; one at a time")] = field(
        default=False, name="async"
    )
    at_end: bool = True
    timeout_s: Annotated[float, Meta(gt=0, description="how long ranks wait for one that takes no part in a save")] = (
        120.0
    )


class ScriptSpec(Record, frozen=True):
    """The user's own torchrun program."""

    path: Annotated[str, Meta(min_length=1)]
    args: list[str] = []


class RendezvousSpec(Record, frozen=True):
    """Null means: found out on the nodes."""

    address: str | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    interface: str | None = None


class SlurmSpec(Record, frozen=True):
    """Options of sbatch; ``extra`` lines are passed through."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    gpus_per_node: PositiveInt | None = None
    gres: str | None = None
    cpus_per_task: PositiveInt | None = None
    mem: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    chdir: str | None = None
    exclusive: bool = False
    exclude: list[str] = []
    max_requeues: Annotated[NonNegativeInt, Meta(description="times a job may go back to the queue and go on")] = 3
    signal_s: Annotated[
        PositiveInt, Meta(description="seconds before the time limit at which the ranks are asked to stop")
    ] = 120
    extra: Annotated[list[str], Meta(description="further options of sbatch, as --name=value")] = []


class ClusterSpec(Record, frozen=True):
    """Where it runs."""

    profile: Annotated[
        str | None, Meta(description="another spec, whose cluster section stands below this one's values")
    ] = None
    launcher: Literal["local", "slurm", "hosts"] = "local"
    nodes: PositiveInt = 1
    procs_per_node: Annotated[PositiveInt | None, Meta(description="ranks; null = one a GPU, else two")] = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    device_memory_gib: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(description="memory that one rank may use, of its GPU or of its node; null = asked from this machine"),
    ] = None
    hosts: list[str] = []
    rendezvous: RendezvousSpec = RendezvousSpec()
    slurm: SlurmSpec = SlurmSpec()
    modules: list[str] = []
    setup: list[str] = []
    env: dict[str, str] = {}
    environment: str | None = None
    cache: Annotated[str | None, Meta(description="Hugging Face and data cache; null = HF_HOME")] = None
    stage: Literal["auto", "always", "never"] = "auto"
    exclude_bad: Annotated[
        bool, Meta(description="slurm: go on without nodes that fail preflight, if the batch can be shared by the rest")
    ] = False
    timeout_s: Annotated[int, Meta(ge=1, description="of collectives")] = 600


class ProfileSpec(Record, frozen=True):
    """A window of the PyTorch profiler, in optimizer steps of each attempt; `{}` takes the defaults."""

    wait: Annotated[NonNegativeInt, Meta(description="steps that run untouched")] = 5
    warmup: Annotated[NonNegativeInt, Meta(description="steps between making ready and recording")] = 2
    active: Annotated[PositiveInt, Meta(description="steps recorded")] = 3
    ranks: Annotated[list[NonNegativeInt] | None, Meta(description="only these; null = all")] = None


class ObserveSpec(Record, frozen=True):
    """What is recorded while it runs."""

    log_every: PositiveInt = 1
    telemetry_s: Annotated[float, Meta(ge=0, description="seconds between samples; 0 = off")] = 1.0
    profile: ProfileSpec | None = None
    hang_s: Annotated[
        Annotated[float, Meta(gt=0)] | Literal["auto"] | None,
        Meta(
            description="seconds without progress in a step of training after which stacks are taken, the rank that fell out is named and the run ends; "
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
    """One run, as asked for."""

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
