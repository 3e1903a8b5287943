"""Frozen records of the spec and of a comparison request.

Field names are the YAML keys; all defaults are defined here and nowhere else. The ranks read the comparison request from the
run folder.

Annotations are not kept as text here (``from __future__ import annotations``): msgspec would compile each of them when a
spec is read, which would take a twentieth of the time of ``allranks plan``.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, field

from allranks.spec.launchers import BUILT_IN, DEFAULT_LAUNCHER, LauncherInfo, launcher_info

RECOMPUTE_NONE: Final = "none"
RECOMPUTE_SELECTIVE: Final = "selective"
RECOMPUTE_FULL: Final = "full"
RECOMPUTE_AUTO: Final = "auto"
COMPILE_AUTO: Final = "auto"
RECOMPUTE_MODES = (RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL)
"""From the fastest to the one that keeps least."""

NARROW_RATIO = 16


def keeps_product(inner: int, width: int) -> bool:
    """Return whether ``selective`` keeps the output of a matrix product: not if it is much wider than the sum is long, as in LoRA."""
    return inner * NARROW_RATIO >= width


def recomputation_mode(value: bool | str) -> str:
    """Return the mode for a value of ``model.gradient_checkpointing``: none | selective | full | auto."""
    return {True: RECOMPUTE_FULL, False: RECOMPUTE_NONE}[value] if isinstance(value, bool) else value


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
    gradient_checkpointing: Annotated[
        bool | Literal["none", "selective", "full", "auto"],
        Meta(
            description="recompute activations in the backward pass: none or false; selective = element-wise operations only, keeping the "
            "outputs of matrix products and attention; full or true = whole blocks: least memory, about a third more compute; auto = the "
            "first of these that fits in memory"
        ),
    ] = False
    compile: Annotated[
        bool | Literal["auto"],
        Meta(
            description="compile each transformer block with torch.compile for training; the first step takes longer. If the compiler "
            "fails, the run continues without and says why. auto = on a GPU, if the run is long enough that this saves time; plan says why"
        ),
    ] = "auto"
    router_aux_loss: Annotated[
        bool | float | Literal["auto", "off"],
        Meta(
            description="load-balancing loss of a mixture of experts, as transformers computes it, added for each micro-batch: a "
            "coefficient, off, or auto = as transformers does, with the coefficient of config.json if that sets output_router_logits"
        ),
    ] = "auto"
    config: Annotated[
        dict[str, Any], Meta(description="overrides of the model's config, for tiny: and mlp: models")
    ] = {}

    @property
    def recomputation(self) -> str:
        """The requested mode of recomputation: none | selective | full | auto."""
        return recomputation_mode(self.gradient_checkpointing)


class SourceSpec(Record, frozen=True):
    """One source of a mixture (`data.sources`, a list). What is null here is as in `data`."""

    source: Annotated[str, Meta(min_length=1, description="hub name, local file, folder or pattern, or builtin:<set>")]
    weight: Annotated[
        float, Meta(gt=0, description="share of the rows of an epoch, relative to the sum of all weights")
    ] = 1.0
    template: Annotated[str | None, Meta(description="as data.template, for this source")] = None
    columns: Annotated[dict[str, str | list[str]] | None, Meta(description="as data.columns, for this source")] = None
    split: Annotated[str | None, Meta(description="as data.split, for this source")] = None
    config: Annotated[str | None, Meta(description="as data.config, for this source")] = None
    revision: Annotated[str | None, Meta(description="as data.revision, for this source")] = None


class DataSpec(Record, frozen=True):
    """The rows, their conversion to text, and the conversion of text to sequences."""

    source: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="hub name, local file, folder of files or pattern such as texts/*.md, or builtin:<set>; required, unless "
            "data.sources is given"
        ),
    ] = None
    sources: Annotated[
        list[SourceSpec] | None, Meta(description="several sources, mixed by weight, in place of data.source")
    ] = None
    split: Annotated[str, Meta(description="split of a hub data set")] = "train"
    config: Annotated[str | None, Meta(description="configuration (subset) name of a hub data set")] = None
    revision: Annotated[str | None, Meta(description="pinned hub revision")] = None
    template: Annotated[
        str, Meta(description="auto, alpaca, chat, completion, text, classification, or a Jinja file")
    ] = "auto"
    columns: Annotated[
        dict[str, str | list[str]],
        Meta(
            description="column names by role, where they differ from what the template expects, such as {prompt: question, response: "
            "answer}; docs/own-data.md"
        ),
    ] = {}
    text_rows: Annotated[
        Literal["auto", "file", "paragraph"],
        Meta(
            description="rows of .txt and .md files: one per file, or one per paragraph (blank lines separate them); auto = file for a "
            "folder or a pattern, paragraph for a single file"
        ),
    ] = "auto"
    subset: Annotated[PositiveInt | None, Meta(description="number of rows, chosen by data.seed; null = all")] = None
    max_length: Annotated[
        int, Meta(ge=2, description="maximum number of tokens; longer rows are truncated and counted")
    ] = 512
    packing: Annotated[
        Literal["isolated", "wrapped", "none"],
        Meta(
            description="isolated = several rows per sequence, without attention between them; wrapped = rows joined and cut; none = "
            "one row per sequence, padded"
        ),
    ] = "isolated"
    mask_prompt: Annotated[bool, Meta(description="train only the response; false trains prompts, too")] = True
    eval_fraction: Annotated[
        Fraction, Meta(description="share of the rows that is held out for evaluation, chosen by data.seed; 0 = none")
    ] = 0.05
    seed: Annotated[Seed, Meta(description="seed of the choice and the order of rows")] = 42


class AdapterSpec(Record, frozen=True):
    """LoRA, or none (full fine-tuning)."""

    type: Annotated[Literal["none", "lora"], Meta(description="lora, or none = train all weights")] = "none"
    r: Annotated[PositiveInt, Meta(description="rank of LoRA's matrices")] = 8
    alpha: Annotated[float, Meta(gt=0, description="LoRA's scale: updates are multiplied by alpha / r")] = 16
    dropout: Annotated[Fraction, Meta(description="dropout on the adapter's input")] = 0.0
    targets: Annotated[list[str] | None, Meta(description="module names; null = every linear layer")] = None
    target_parameters: Annotated[
        list[str], Meta(description="parameter names, such as fused expert weights; without dropout")
    ] = []
    modules_to_save: Annotated[list[str], Meta(description="modules trained in full and saved with the adapter")] = []


class StrategySpec(Record, frozen=True):
    """Name and options of the strategy; in YAML, the options are next to the name."""

    name: Annotated[
        str, Meta(description="how gradients, weights and optimizer state are shared among ranks; see Strategies below")
    ] = "pytorch_ddp"
    options: Annotated[dict[str, Any], Meta(description="options of the strategy; in YAML next to its name")] = {}


class TrainSpec(Record, frozen=True):
    """The optimizer steps."""

    max_steps: Annotated[
        NonNegativeInt | None, Meta(description="number of optimizer steps (default 10); 0 only evaluates")
    ] = None
    epochs: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="number of epochs, instead of max_steps")
    ] = None
    micro_batch_size: Annotated[
        PositiveInt, Meta(description="sequences per rank in one forward and backward pass")
    ] = 1
    grad_accum: Annotated[PositiveInt | None, Meta(description="micro-batches per optimizer step (default 1)")] = None
    global_batch_size: Annotated[
        PositiveInt | None, Meta(description="sequences per optimizer step over all ranks, instead of grad_accum")
    ] = None
    lr: Annotated[float, Meta(ge=0, description="learning rate of AdamW after warm-up")] = 5e-5
    schedule: Annotated[
        Literal["linear", "cosine", "constant"],
        Meta(description="learning rate after warm-up: linear or cosine decay to 0 at the last step, or constant"),
    ] = "linear"
    warmup_steps: Annotated[NonNegativeInt, Meta(description="steps in which the learning rate rises from 0 to lr")] = 0
    weight_decay: Annotated[NonNegative, Meta(description="weight decay of AdamW")] = 0.0
    max_grad_norm: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="maximum gradient norm for clipping; null = no clipping")
    ] = 1.0
    seed: Annotated[Seed, Meta(description="seed of new weights and dropout; data.seed is for the data")] = 42
    deterministic: Annotated[
        bool, Meta(description="use only deterministic kernels (torch.use_deterministic_algorithms); slower on GPUs")
    ] = False
    param_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="storage of trained weights and optimizer state; model.dtype is the precision of compute"),
    ] = "float32"


class EvalSpec(Record, frozen=True):
    """When to evaluate, and on which data."""

    source: Annotated[
        str | None, Meta(description="separate data for evaluation; null = data.eval_fraction of the rows")
    ] = None
    every: Annotated[PositiveInt | None, Meta(description="steps between evaluations; null = only at the end")] = None
    subset: Annotated[PositiveInt | None, Meta(description="number of rows, chosen by data.seed; null = all")] = 200
    batch_size: Annotated[PositiveInt | None, Meta(description="sequences per batch; null = chosen automatically")] = (
        None
    )
    baseline: Annotated[bool, Meta(description="evaluate before training too")] = False
    at_end: Annotated[bool, Meta(description="evaluate after the last step")] = True
    patience: Annotated[
        PositiveInt | None,
        Meta(
            description="end the training after this many consecutive evaluations without a lower held-out loss; needs eval.every; null = never"
        ),
    ] = None
    min_delta: Annotated[
        NonNegative,
        Meta(description="minimum improvement over the lowest held-out loss, for eval.patience"),
    ] = 0.0
    samples: Annotated[
        NonNegativeInt, Meta(description="number of sample answers to show, for data whose answers can be checked")
    ] = 3


class CheckpointSpec(Record, frozen=True):
    """What to save, and when."""

    mode: Annotated[
        Literal["weights_only", "full", "none"],
        Meta(
            description="weights_only = a Hugging Face folder or adapter; full = also what an exact resume needs; none = "
            "nothing"
        ),
    ] = "weights_only"
    every: Annotated[PositiveInt | None, Meta(description="steps between checkpoints; null = only at the end")] = None
    keep: Annotated[PositiveInt, Meta(description="number of newest checkpoints that are kept")] = 5
    keep_best: Annotated[
        bool,
        Meta(
            description="also keep the checkpoint with the lowest held-out loss, beside the newest `keep`; checkpoints/best names it; needs eval.every"
        ),
    ] = False
    async_: Annotated[bool, Meta(description="continue training while it is written; one at a time")] = field(
        default=False, name="async"
    )
    at_end: Annotated[bool, Meta(description="save after the last step")] = True
    timeout_s: Annotated[
        float, Meta(gt=0, description="how long ranks wait for a rank that does not take part in a save")
    ] = 120.0

    def least_bytes(self, weights_bytes: int) -> int:
        """Return what the first checkpoint takes at least: its weights, and for ``full`` the two moments of AdamW; 0 if none is saved."""
        if self.mode == "none" or not (self.every or self.at_end):
            return 0
        return weights_bytes * (3 if self.mode == "full" else 1)


class ScriptSpec(Record, frozen=True):
    """The user's own torchrun program."""

    path: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="the Python file that every rank runs, like `python PATH`; either this or module"),
    ] = None
    module: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")] | None,
        Meta(description="the module that every rank runs, like `python -m MODULE`; either this or path"),
    ] = None
    args: Annotated[list[str], Meta(description="command-line arguments of the program")] = []
    workdir: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="working directory of the program; module is looked up there first; path does not depend on it; "
            "null = the current folder of the command"
        ),
    ] = None
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="seconds between SIGTERM, which a stop sends to every rank, and SIGKILL",
        ),
    ] = 30.0


class RendezvousSpec(Record, frozen=True):
    """Rendezvous settings. Null means: determined on the nodes."""

    address: Annotated[str | None, Meta(description="address of the first node for the rendezvous")] = None
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65534)] | None,
        Meta(description="port of the store on the first node; the control channel uses the next port, port + 1"),
    ] = None
    interface: Annotated[str | None, Meta(description="network interface of the ranks, such as eth0")] = None


class SlurmSpec(Record, frozen=True):
    """Options of sbatch; ``extra`` lines are passed through."""

    partition: Annotated[str | None, Meta(description="--partition; null = the cluster's default")] = None
    account: Annotated[str | None, Meta(description="--account that is charged")] = None
    qos: Annotated[str | None, Meta(description="--qos, quality of service")] = None
    time: Annotated[str | None, Meta(description="--time limit, such as 02:00:00 (in quotes)")] = None
    gpus_per_node: Annotated[
        PositiveInt | None, Meta(description="--gpus-per-node; also the default of cluster.procs_per_node")
    ] = None
    gres: Annotated[
        str | None, Meta(description="--gres, such as gpu:a100:4; its GPUs are the default of cluster.procs_per_node")
    ] = None
    cpus_per_task: Annotated[
        PositiveInt | None, Meta(description="--cpus-per-task: CPUs of a node; one task per node starts its ranks")
    ] = None
    mem: Annotated[str | None, Meta(description="--mem per node, such as 64G")] = None
    constraint: Annotated[str | None, Meta(description="--constraint: features that nodes must have")] = None
    reservation: Annotated[str | None, Meta(description="--reservation to use")] = None
    chdir: Annotated[str | None, Meta(description="--chdir: working directory of the job")] = None
    exclusive: Annotated[bool, Meta(description="--exclusive: share no node with other jobs")] = False
    exclude: Annotated[list[str], Meta(description="--exclude: nodes to avoid")] = []
    max_requeues: Annotated[
        NonNegativeInt,
        Meta(
            description="how often a job may be requeued: near its time limit, after preemption, or after the loss of a "
            "node"
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
    launcher: Annotated[
        str,
        Meta(
            description="local = this machine; slurm = submit a job; hosts = one command per node, started by hand",
            extra_json_schema={"enum": list(BUILT_IN)},
        ),
    ] = DEFAULT_LAUNCHER
    nodes: Annotated[PositiveInt, Meta(description="number of nodes")] = 1
    procs_per_node: Annotated[
        PositiveInt | None, Meta(description="ranks per node; null = one per GPU, two without GPUs")
    ] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(
            description="auto = cuda if the allocation requests GPUs (gpus_per_node, gres, extra), else what the nodes report when the "
            "job runs; "
            "local: cuda if this machine has GPUs"
        ),
    ] = "auto"
    backend: Annotated[
        Literal["auto", "gloo", "nccl"],
        Meta(description="torch.distributed backend; auto = nccl on GPUs, gloo on CPUs"),
    ] = "auto"
    device_memory_gib: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(description="memory that one rank may use, of its GPU or of its node; null = detected on this machine"),
    ] = None
    hosts: Annotated[
        list[str],
        Meta(description="names or addresses of the nodes, for launcher: hosts; the first one hosts the rendezvous"),
    ] = []
    rendezvous: Annotated[
        RendezvousSpec, Meta(description="where the ranks meet; null values are determined on the nodes")
    ] = RendezvousSpec()
    slurm: Annotated[SlurmSpec, Meta(description="options of sbatch")] = SlurmSpec()
    modules: Annotated[list[str], Meta(description="environment modules that nodes load, in this order")] = []
    setup: Annotated[list[str], Meta(description="shell lines that nodes run before the ranks start")] = []
    env: Annotated[
        dict[str, str],
        Meta(description="environment variables of the ranks; they take precedence over those that allranks sets"),
    ] = {}
    python: Annotated[
        str | None,
        Meta(
            description="Python of the agents and ranks, which must have allranks: a virtual environment's folder, an interpreter "
            "(.../bin/python3), conda:NAME, an Apptainer image (.sif), or with slurm pyxis:IMAGE; null = the one that runs this"
        ),
    ] = None
    cache: Annotated[str | None, Meta(description="Hugging Face and data cache; null = HF_HOME")] = None
    stage: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="copy code, packages, model and data to the nodes: auto = what they do not see; always; never"
        ),
    ] = "auto"
    exclude_bad: Annotated[
        bool,
        Meta(description="slurm: continue without nodes that fail preflight, if the batch can be shared by the rest"),
    ] = False
    group_readable: Annotated[
        bool,
        Meta(
            description="let the group read run folders (0750 and 0640 instead of 0700 and 0600); a setgid bit on run_root does the "
            "same"
        ),
    ] = False
    timeout_s: Annotated[int, Meta(ge=1, description="timeout of collectives, in seconds")] = 600

    @property
    def launched_by(self) -> LauncherInfo:
        """What `launcher` means."""
        return launcher_info(self.launcher)


class ProfileSpec(Record, frozen=True):
    """A window of the PyTorch profiler, in optimizer steps of each attempt; `{}` uses the defaults."""

    wait: Annotated[NonNegativeInt, Meta(description="steps without profiling")] = 5
    warmup: Annotated[NonNegativeInt, Meta(description="warm-up steps of the profiler before recording")] = 2
    active: Annotated[PositiveInt, Meta(description="number of recorded steps")] = 3
    ranks: Annotated[list[NonNegativeInt] | None, Meta(description="only these ranks; null = all")] = None


class ObserveSpec(Record, frozen=True):
    """What to record during the run."""

    log_every: Annotated[PositiveInt, Meta(description="steps between logged steps")] = 1
    telemetry_s: Annotated[float, Meta(ge=0, description="seconds between samples; 0 = off")] = 1.0
    profile: Annotated[ProfileSpec | None, Meta(description="window of the PyTorch profiler; null = off")] = None
    hang_s: Annotated[
        Annotated[float, Meta(gt=0)] | Literal["auto"] | None,
        Meta(
            description="seconds without progress in a step of training after which stacks are taken, the stalled rank is named and "
            "the run ends; "
            "auto = half of cluster.timeout_s, at most 300; for `script` 120 without progress or work of any rank; null = off"
        ),
    ] = "auto"
    proof_at_end: Annotated[
        bool,
        Meta(description="after the last step each rank records its hash of the weights and its part of the state"),
    ] = False
    tensorboard: Annotated[bool, Meta(description="also write metrics for TensorBoard")] = False
    wandb: Annotated[bool, Meta(description="also send metrics to Weights & Biases")] = False


class RunSpec(Record, frozen=True):
    """One requested run."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
            description="name of the run; its folder is run_root/name-time",
        ),
    ] = "run"
    model: Annotated[ModelSpec | None, Meta(description="the model and its form")] = None
    data: Annotated[DataSpec | None, Meta(description="the rows, and how they become sequences")] = None
    adapter: Annotated[AdapterSpec, Meta(description="LoRA, or none")] = AdapterSpec()
    strategy: Annotated[
        StrategySpec,
        Meta(description="how ranks share gradients, weights and optimizer state; its options stand next to its name"),
    ] = StrategySpec()
    train: Annotated[TrainSpec, Meta(description="the optimizer steps")] = TrainSpec()
    eval: Annotated[EvalSpec, Meta(description="when to evaluate, and on which data")] = EvalSpec()
    checkpoint: Annotated[CheckpointSpec, Meta(description="what to save, and when")] = CheckpointSpec()
    script: Annotated[
        ScriptSpec | None, Meta(description="your own torchrun program, in place of model, data and train")
    ] = None
    cluster: Annotated[ClusterSpec, Meta(description="where the run executes")] = ClusterSpec()
    observe: Annotated[ObserveSpec, Meta(description="what to record during the run")] = ObserveSpec()
    run_root: Annotated[str, Meta(min_length=1, description="folder that contains the runs")] = "runs"
