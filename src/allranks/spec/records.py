"""Frozen records of the spec and of a comparison request.

Field names are the YAML keys; all defaults are defined here and nowhere else. The text below a field is its description
in the JSON Schema and in docs/spec.md (`validation.descriptions`). The ranks read the comparison request from the run
folder.

Annotations are not kept as text here (``from __future__ import annotations``): msgspec would compile each of them when
a spec is read, which would take a twentieth of the time of ``allranks plan``.
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
ATTENTION_AUTO: Final = "auto"
RECOMPUTE_MODES = (RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL)
"""From the fastest to the one that keeps least."""

QUANTIZE_NONE: Final = "none"
FLOAT8_MULTIPLE = 16
"""Rows and columns of a weight that is multiplied in 8-bit floats."""
NF4_DOUBLE: Final = "nf4_double"
NF4_BLOCK = 64
"""Elements of a row that share a scale."""
NF4_PIECE = 1 << 24
"""Elements that are quantised or dequantised at a time."""


def nf4_row_bytes(columns: int, mode: str) -> tuple[int, int]:
    """Return the bytes of a row in 4 bits, without and of its scales (`train.models.nf4`)."""
    blocks = columns // NF4_BLOCK
    return columns // 2, 8 + blocks if mode == NF4_DOUBLE else 4 * blocks


NARROW_RATIO = 16


def keeps_product(inner: int, width: int) -> bool:
    """Return whether ``selective`` keeps a matrix product's output: not if much wider than its sum is long (LoRA)."""
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


EVERY_AUTO: Final = "auto"
UNITS_S = {"s": 1, "min": 60, "h": 3600}
NODE_MTBF_H = 1000.0
"""Hours between failures of a node and of what runs on it: at 16 to 256 GPUs a day to three weeks between failures. In
the 54 days of Llama 3 405B (arXiv:2407.21783, section 3.3.4) 2,048 nodes had one in 3 hours, or 6,300 hours per
node."""

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 2)]  # what every random generator in use accepts, and its successor
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all spec sections: frozen; unknown keys are errors."""


class ModelSpec(Record, frozen=True):
    """The model and its form."""

    name: Annotated[str, Meta(min_length=1)]
    """hub name, local path, tiny:<family>, or mlp:<width>x<layers>"""
    revision: str | None = None
    """pinned hub revision"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of compute and of frozen weights; auto = bfloat16 on GPUs, float32 on CPUs"""
    attention: str = "sdpa"
    """attention implementation of transformers; auto = sdpa, by the fastest of the kernels that compute the same,
    chosen by a short trial at the start"""
    gradient_checkpointing: bool | Literal["none", "selective", "full", "auto"] = False
    """recompute activations in the backward pass: none or false; selective = element-wise operations only, keeping the
    outputs of matrix products and attention; full or true = whole blocks: least memory, about a third more compute;
    auto = the first of these that fits in memory"""
    compile: bool | Literal["auto"] = "auto"
    """compile each transformer block with torch.compile for training; the first step takes longer. If the compiler
    fails, the run continues without and says why. auto = on a GPU, if the run is long enough that this saves time; plan
    says why"""
    router_aux_loss: bool | float | Literal["auto", "off"] = "auto"
    """load-balancing loss of a mixture of experts, as transformers computes it, added for each micro-batch: a
    coefficient, off, or auto = as transformers does, with the coefficient of config.json if that sets
    output_router_logits"""
    quantize: Literal["none", "nf4", "nf4_double"] = QUANTIZE_NONE
    """QLoRA: keep the frozen linear layers of the blocks in 4 bits, next to LoRA; nf4 = 4.5 bits per weight, nf4_double
    = about 4.15, with double quantisation (the scales of blocks of 64 in 8 bits, too)"""
    float8: bool = False
    """multiply by the frozen linear layers of the blocks in 8-bit floats, next to LoRA; the weights stay as they are.
    For NVIDIA GPUs from Ada and Hopper on"""
    config: dict[str, Any] = {}
    """overrides of the model's config, for tiny: and mlp: models"""

    @property
    def recomputation(self) -> str:
        """The requested mode of recomputation: none | selective | full | auto."""
        return recomputation_mode(self.gradient_checkpointing)

    @property
    def implementation(self) -> str:
        """The attention implementation of transformers."""
        return "sdpa" if self.attention == ATTENTION_AUTO else self.attention


class SourceSpec(Record, frozen=True):
    """One source of a mixture (`data.sources`, a list). What is null here is as in `data`."""

    source: Annotated[str, Meta(min_length=1)]
    """hub name, local file, folder or pattern, or builtin:<set>"""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """share of the rows of an epoch, relative to the sum of all weights"""
    template: str | None = None
    """as data.template, for this source"""
    columns: dict[str, str | list[str]] | None = None
    """as data.columns, for this source"""
    split: str | None = None
    """as data.split, for this source"""
    config: str | None = None
    """as data.config, for this source"""
    revision: str | None = None
    """as data.revision, for this source"""


class DataSpec(Record, frozen=True):
    """The rows, their conversion to text, and the conversion of text to sequences."""

    source: Annotated[str, Meta(min_length=1)] | None = None
    """hub name, local file, folder of files or pattern such as texts/*.md, or builtin:<set>; required, unless
    data.sources is given"""
    sources: list[SourceSpec] | None = None
    """several sources, mixed by weight, in place of data.source"""
    split: str = "train"
    """split of a hub data set"""
    config: str | None = None
    """configuration (subset) name of a hub data set"""
    revision: str | None = None
    """pinned hub revision"""
    template: str = "auto"
    """auto, alpaca, chat, completion, text, classification, or a Jinja file"""
    columns: dict[str, str | list[str]] = {}
    """column names by role, where they differ from what the template expects, such as {prompt: question, response:
    answer}; documentation: own-data"""
    text_rows: Literal["auto", "file", "paragraph"] = "auto"
    """rows of .txt and .md files: one per file, or one per paragraph (blank lines separate them); auto = file for a
    folder or a pattern, paragraph for a single file"""
    subset: PositiveInt | None = None
    """number of rows, chosen by data.seed; null = all"""
    max_length: Annotated[int, Meta(ge=2)] = 512
    """maximum number of tokens; longer rows are truncated and counted"""
    packing: Literal["isolated", "wrapped", "none"] = "isolated"
    """isolated = several rows per sequence, without attention between them; wrapped = rows joined and cut; none = one
    row per sequence, padded"""
    mask_prompt: bool = True
    """train only the response; false trains prompts, too"""
    eval_fraction: Fraction = 0.05
    """share of the rows that is held out for evaluation, chosen by data.seed; 0 = none"""
    seed: Seed = 42
    """seed of the choice and the order of rows"""


class AdapterSpec(Record, frozen=True):
    """LoRA, or none (full fine-tuning)."""

    type: Literal["none", "lora"] = "none"
    """lora, or none = train all weights"""
    r: PositiveInt = 8
    """rank of LoRA's matrices"""
    alpha: Annotated[float, Meta(gt=0)] = 16
    """LoRA's scale: updates are multiplied by alpha / r"""
    dropout: Fraction = 0.0
    """dropout on the adapter's input"""
    targets: list[str] | None = None
    """module names; null = every linear layer"""
    target_parameters: list[str] = []
    """parameter names, such as fused expert weights; without dropout"""
    modules_to_save: list[str] = []
    """modules trained in full and saved with the adapter"""


class StrategySpec(Record, frozen=True):
    """Name and options of the strategy; in YAML, the options are next to the name."""

    name: str = "pytorch_ddp"
    """how gradients, weights and optimizer state are shared among ranks; see Strategies below"""
    options: dict[str, Any] = {}
    """options of the strategy; in YAML next to its name"""


class TrainSpec(Record, frozen=True):
    """The optimizer steps."""

    max_steps: NonNegativeInt | None = None
    """number of optimizer steps (default 10); 0 only evaluates"""
    epochs: Annotated[float, Meta(gt=0)] | None = None
    """number of epochs, instead of max_steps"""
    micro_batch_size: PositiveInt = 1
    """sequences per rank in one forward and backward pass"""
    grad_accum: PositiveInt | None = None
    """micro-batches per optimizer step (default 1)"""
    global_batch_size: PositiveInt | None = None
    """sequences per optimizer step over all ranks, instead of grad_accum"""
    lr: Annotated[float, Meta(ge=0)] = 5e-5
    """learning rate of AdamW after warm-up"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """learning rate after warm-up: linear or cosine decay to 0 at the last step, or constant"""
    warmup_steps: NonNegativeInt = 0
    """steps in which the learning rate rises from 0 to lr"""
    weight_decay: NonNegative = 0.0
    """weight decay of AdamW"""
    max_grad_norm: Annotated[float, Meta(gt=0)] | None = 1.0
    """maximum gradient norm for clipping; null = no clipping"""
    seed: Seed = 42
    """seed of new weights and dropout; data.seed is for the data"""
    deterministic: bool = False
    """use only deterministic kernels (torch.use_deterministic_algorithms); slower on GPUs"""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """storage of trained weights and optimizer state; model.dtype is the precision of compute"""


class EvalSpec(Record, frozen=True):
    """When to evaluate, and on which data."""

    source: str | None = None
    """separate data for evaluation; null = data.eval_fraction of the rows"""
    every: PositiveInt | None = None
    """steps between evaluations; null = only at the end"""
    subset: PositiveInt | None = 200
    """number of rows, chosen by data.seed; null = all"""
    batch_size: PositiveInt | None = None
    """sequences per batch; null = chosen automatically"""
    baseline: bool = False
    """evaluate before training too"""
    at_end: bool = True
    """evaluate after the last step"""
    patience: PositiveInt | None = None
    """end the training after this many consecutive evaluations without a lower held-out loss; needs eval.every; null =
    never"""
    min_delta: NonNegative = 0.0
    """minimum improvement over the lowest held-out loss, for eval.patience"""
    samples: NonNegativeInt = 3
    """number of sample answers to show, for data whose answers can be checked"""


class CheckpointSpec(Record, frozen=True):
    """What to save, and when."""

    mode: Literal["weights_only", "full", "none"] = "weights_only"
    """weights_only = a Hugging Face folder or adapter; full = also what an exact resume needs; none = nothing"""
    every: PositiveInt | Annotated[str, Meta(pattern="^(auto|[1-9][0-9]*(s|min|h))$")] | None = None
    """steps between checkpoints, or time, such as 600s, 10min or 2h; auto = from the measured cost of a save and
    mtbf_h; null = only at the end"""
    mtbf_h: Annotated[float, Meta(gt=0)] | None = None
    """hours between failures of the whole run, for every: auto; null = 1000 divided by the number of nodes"""
    keep: PositiveInt = 5
    """number of newest checkpoints that are kept"""
    keep_best: bool = False
    """also keep the checkpoint with the lowest held-out loss, beside the newest `keep`; checkpoints/best names it;
    needs eval.every"""
    async_: bool = field(default=False, name="async")
    """continue training while it is written; one at a time"""
    at_end: bool = True
    """save after the last step"""
    timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """how long ranks wait for a rank that does not take part in a save"""

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints; None if a time or nothing decides."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_s(self) -> float | None:
        """Seconds between checkpoints; None unless the spec names a time."""
        if not isinstance(self.every, str) or self.every == EVERY_AUTO:
            return None
        unit = self.every.lstrip("0123456789")
        return float(self.every.removesuffix(unit)) * UNITS_S[unit]

    def failure_interval_h(self, nodes: int) -> float:
        """Return the hours between failures of a run on so many nodes."""
        return self.mtbf_h if self.mtbf_h is not None else NODE_MTBF_H / nodes

    def least_bytes(self, weights_bytes: int) -> int:
        """Return least bytes of the first checkpoint: weights (``full``: and two AdamW moments); 0 if none is saved."""
        if self.mode == "none" or not (self.every or self.at_end):
            return 0
        return weights_bytes * (3 if self.mode == "full" else 1)


class ScriptSpec(Record, frozen=True):
    """The user's own torchrun program."""

    path: Annotated[str, Meta(min_length=1)] | None = None
    """the Python file that every rank runs, like `python PATH`; either this or module"""
    module: Annotated[str, Meta(pattern="^[A-Za-z_]\\w*(\\.[A-Za-z_]\\w*)*$")] | None = None
    """the module that every rank runs, like `python -m MODULE`; either this or path"""
    args: list[str] = []
    """command-line arguments of the program"""
    workdir: Annotated[str, Meta(min_length=1)] | None = None
    """working directory of the program; module is looked up there first; path does not depend on it; null = the current
    folder of the command"""
    grace_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    """seconds between SIGTERM, which a stop sends to every rank, and SIGKILL"""


class RendezvousSpec(Record, frozen=True):
    """Rendezvous settings. Null means: determined on the nodes."""

    address: str | None = None
    """address of the first node for the rendezvous"""
    port: Annotated[int, Meta(ge=1, le=65534)] | None = None
    """port of the store on the first node; the control channel uses the next port, port + 1"""
    interface: str | None = None
    """network interface of the ranks, such as eth0"""


class SlurmSpec(Record, frozen=True):
    """Options of sbatch; ``extra`` lines are passed through."""

    partition: str | None = None
    """--partition; null = the cluster's default"""
    account: str | None = None
    """--account that is charged"""
    qos: str | None = None
    """--qos, quality of service"""
    time: str | None = None
    """--time limit, such as 02:00:00 (in quotes)"""
    gpus_per_node: PositiveInt | None = None
    """--gpus-per-node; also the default of cluster.procs_per_node"""
    gres: str | None = None
    """--gres, such as gpu:a100:4; its GPUs are the default of cluster.procs_per_node"""
    cpus_per_task: PositiveInt | None = None
    """--cpus-per-task: CPUs of a node; one task per node starts its ranks"""
    mem: str | None = None
    """--mem per node, such as 64G"""
    constraint: str | None = None
    """--constraint: features that nodes must have"""
    reservation: str | None = None
    """--reservation to use"""
    chdir: str | None = None
    """--chdir: working directory of the job"""
    exclusive: bool = False
    """--exclusive: share no node with other jobs"""
    exclude: list[str] = []
    """--exclude: nodes to avoid"""
    max_requeues: NonNegativeInt = 3
    """how often a job may be requeued: near its time limit, after preemption, or after the loss of a node"""
    signal_s: PositiveInt = 120
    """seconds before the time limit at which the ranks receive the stop signal"""
    extra: list[str] = []
    """further options of sbatch, as --name=value"""


class RestartSpec(Record, frozen=True):
    """Restarts without a user after an attempt failed, by the cause of the failure."""

    max: NonNegativeInt | None = None
    """at most as many; 0 = none; null = 3 for a training, 0 for your own program"""


class ClusterSpec(Record, frozen=True):
    """Where the run executes."""

    profile: str | None = None
    """another spec, whose cluster section gives defaults for this one's"""
    launcher: Annotated[str, Meta(extra_json_schema={"enum": list(BUILT_IN)})] = DEFAULT_LAUNCHER
    """local = this machine; slurm = submit a job; hosts = one command per node, started by hand"""
    nodes: PositiveInt = 1
    """number of nodes"""
    spares: NonNegativeInt = 0
    """slurm: nodes in addition, which take the place of nodes that fail preflight, are lost, or are suspected of a
    failure"""
    procs_per_node: PositiveInt | None = None
    """ranks per node; null = one per GPU, two without GPUs"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda if the allocation requests GPUs (gpus_per_node, gres, extra), else what the nodes report when the job
    runs; local: cuda if this machine has GPUs"""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """torch.distributed backend; auto = nccl on GPUs, gloo on CPUs"""
    device_memory_gib: Annotated[float, Meta(gt=0, le=1000000.0)] | None = None
    """memory that one rank may use, of its GPU or of its node; null = detected on this machine"""
    hosts: list[str] = []
    """names or addresses of the nodes, for launcher: hosts; the first one hosts the rendezvous"""
    rendezvous: RendezvousSpec = RendezvousSpec()
    """where the ranks meet; null values are determined on the nodes"""
    slurm: SlurmSpec = SlurmSpec()
    """options of sbatch"""
    modules: list[str] = []
    """environment modules that nodes load, in this order"""
    setup: list[str] = []
    """shell lines that nodes run before the ranks start"""
    env: dict[str, str] = {}
    """environment variables of the ranks; they take precedence over those that allranks sets"""
    python: str | None = None
    """Python of the agents and ranks, which must have allranks: a virtual environment's folder, an interpreter
    (.../bin/python3), conda:NAME, an Apptainer image (.sif), or with slurm pyxis:IMAGE; null = the one that runs
    this"""
    cache: str | None = None
    """Hugging Face and data cache; null = HF_HOME"""
    stage: Literal["auto", "always", "never"] = "auto"
    """copy code, packages, model and data to the nodes: auto = what they do not see; always; never"""
    exclude_bad: bool = False
    """slurm: continue without nodes that fail preflight, if the batch can be shared by the rest"""
    group_readable: bool = False
    """let the group read run folders (0750 and 0640 instead of 0700 and 0600); a setgid bit on run_root does the
    same"""
    timeout_s: Annotated[int, Meta(ge=1)] = 600
    """timeout of collectives, in seconds"""
    restarts: RestartSpec = RestartSpec()
    """restarts without a user, by the cause of a failure"""
    price_per_gpu_hour: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """what a GPU costs an hour (on CPUs: a rank), for the costs in plan, summary, report and sweep; null = not shown"""
    currency: Annotated[str, Meta(pattern=r"^[^\s<>&]{1,8}$")] = "USD"
    """currency of the price, as shown"""

    @property
    def launched_by(self) -> LauncherInfo:
        """What `launcher` means."""
        return launcher_info(self.launcher)

    @property
    def allocated_nodes(self) -> int:
        """How many nodes a job has, with the spare ones."""
        return self.nodes + self.spares


class ProfileSpec(Record, frozen=True):
    """A window of the PyTorch profiler, in optimizer steps of each attempt; `{}` uses the defaults."""

    wait: NonNegativeInt = 5
    """steps without profiling"""
    warmup: NonNegativeInt = 2
    """warm-up steps of the profiler before recording"""
    active: PositiveInt = 3
    """number of recorded steps"""
    ranks: list[NonNegativeInt] | None = None
    """only these ranks; null = all"""


class TrackingSpec(Record, frozen=True):
    """How trackers file the run."""

    project: str | None = None
    """project of W&B, experiment of MLflow; null = that of WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME, else allranks"""
    group: str | None = None
    """group of runs; null = none, in a sweep its folder's name"""
    tags: list[str] = []
    """tags of the run"""
    offline: bool = False
    """keep everything in the run folder: W&B's offline mode, a file store of MLflow"""


class ObserveSpec(Record, frozen=True):
    """What to record during the run."""

    log_every: PositiveInt = 1
    """steps between logged steps"""
    telemetry_s: Annotated[float, Meta(ge=0)] = 1.0
    """seconds between samples; 0 = off"""
    profile: ProfileSpec | None = None
    """window of the PyTorch profiler; null = off"""
    hang_s: Annotated[float, Meta(gt=0)] | Literal["auto"] | None = "auto"
    """seconds without progress in a step of training after which stacks are taken, the stalled rank is named and the
    run ends; auto = half of cluster.timeout_s, at most 300; for `script` 120 without progress or work of any rank; null
    = off"""
    verify_every: PositiveInt | None = None
    """steps after which ranks that hold the same weights compare them; they do so before each checkpoint and at the
    end, too; null = never"""
    proof_at_end: bool = False
    """after the last step each rank records its hash of the weights and its part of the state"""
    trackers: list[str] = []
    """where rank 0 also sends its metrics: tensorboard, wandb, mlflow, or a class of yours, package.module:Class"""
    tracking: TrackingSpec = TrackingSpec()
    """project, group and tags for trackers"""
    tensorboard: bool = False
    """the same as trackers: [tensorboard]"""
    wandb: bool = False
    """the same as trackers: [wandb]"""
    notify: str | None = None
    """http(s) address that gets a JSON message when the run ends, fails or starts again; env:NAME = the address is in
    this environment variable, as it must be if it holds a secret (Slack); null = none"""

    @property
    def all_trackers(self) -> list[str]:
        """The trackers, each once."""
        more = [name for name, wanted in (("tensorboard", self.tensorboard), ("wandb", self.wandb)) if wanted]
        return list(dict.fromkeys([*self.trackers, *more]))


class RunSpec(Record, frozen=True):
    """One requested run."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "run"
    """name of the run; its folder is run_root/name-time"""
    model: ModelSpec | None = None
    """the model and its form"""
    data: DataSpec | None = None
    """the rows, and how they become sequences"""
    adapter: AdapterSpec = AdapterSpec()
    """LoRA, or none"""
    strategy: StrategySpec = StrategySpec()
    """how ranks share gradients, weights and optimizer state; its options stand next to its name"""
    train: TrainSpec = TrainSpec()
    """the optimizer steps"""
    eval: EvalSpec = EvalSpec()
    """when to evaluate, and on which data"""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """what to save, and when"""
    script: ScriptSpec | None = None
    """your own torchrun program, in place of model, data and train"""
    cluster: ClusterSpec = ClusterSpec()
    """where the run executes"""
    observe: ObserveSpec = ObserveSpec()
    """what to record during the run"""
    run_root: Annotated[str, Meta(min_length=1)] = "runs"
    """folder that contains the runs"""
