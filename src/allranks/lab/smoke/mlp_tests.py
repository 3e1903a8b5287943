"""Smoke tests 01 to 04, with a multilayer perceptron.

01 trains in one process, saves the model and loads it again. 02 averages gradients between two ranks with
DistributedDataParallel. 03 shards the optimizer state between two ranks with DeepSpeed, in bfloat16. 04 does the same on four
nodes of two ranks, through Slurm.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from allranks.lab.smoke import criteria as c
from allranks.lab.smoke import figures as f
from allranks.lab.smoke.figures import base_spec, mlp_spec
from allranks.lab.smoke.records import ComparableBy, Criterion, Figure, Placement, SizedSpec, SmokeTest

ALL_DEPENDENCES: tuple[ComparableBy, ...] = ("hardware", "size", "ranks")


def parameters_figure(seed: float) -> Figure:
    return Figure(
        name="parameters",
        unit="",
        definition="all weights and biases",
        seed=seed,
        measure=f.parameters,
        depends=("size",),
    )


def global_batch_figure(seed: float) -> Figure:
    return Figure(
        name="global batch",
        unit="rows",
        definition="rows of a step over all ranks",
        seed=seed,
        measure=f.global_batch,
        depends=("ranks",),
    )


def samples_figure(seed: float | None, correct: float | None = None, correction: str = "") -> Figure:
    return Figure(
        name="samples",
        unit="1/s",
        definition="batch rows over all ranks, by training time",
        seed=seed,
        correct=correct,
        correction=correction,
        measure=f.samples_per_s,
        depends=ALL_DEPENDENCES,
    )


def last_loss_figure(seed: float, remark: str = "", *, ranks: bool = True) -> Figure:
    return Figure(
        name="last loss",
        unit="",
        definition=f"mean squared error of step 100{remark}",
        seed=seed,
        measure=f.last_loss,
        depends=("size", "ranks") if ranks else ("size",),
    )


def peak_memory_figure(
    seed: float, depends: tuple[ComparableBy, ...] = ALL_DEPENDENCES, *, where: str = " on a rank"
) -> Figure:
    return Figure(
        name="peak GPU memory",
        unit="GB",
        definition=f"most that torch had allocated{where}",
        seed=seed,
        measure=f.peak_gb,
        depends=depends,
    )


def timing_figures(
    seed_steps: float | None, seed_samples: float | None, *, seed_time: float | None = None
) -> tuple[Figure, ...]:
    """Return the figures of speed; samples only if the number in the notes is correct."""
    found = [
        Figure(
            name="training time",
            unit="s",
            definition="all steps, including the first",
            seed=seed_time,
            measure=f.training_time,
            depends=ALL_DEPENDENCES,
        ),
        Figure(
            name="steps",
            unit="1/s",
            definition="steps by training time",
            seed=seed_steps,
            measure=f.steps_per_s,
            depends=ALL_DEPENDENCES,
        ),
        samples_figure(seed_samples),
        Figure(
            name="samples after warm-up",
            unit="1/s",
            definition="batch rows over all ranks, by the median step after five",
            seed=None,
            measure=f.warm_samples_per_s,
            depends=ALL_DEPENDENCES,
        ),
        Figure(
            name="first step beyond the median",
            unit="s",
            definition="compilation, first allocations and connections",
            seed=None,
            measure=f.first_step,
            depends=ALL_DEPENDENCES,
        ),
    ]
    return tuple(found)


def build_single(asked: Placement) -> SizedSpec:
    base = base_spec(asked, "01-single") | {"strategy": {"name": "single"}, "model": {"dtype": "float32"}}
    base["train"] = {"max_grad_norm": None, "weight_decay": 0.01}
    spec, scaled = mlp_spec(asked, base, 1024, 3, "wide", 32, 100)
    return SizedSpec(spec=spec, scaled=scaled)


SINGLE_TEST = SmokeTest(
    name="01_single",
    title="One process: steps, checkpoint, reload",
    source="seed 004, test 01 (job 10212764)",
    hardware="1 x NVIDIA A100 80GB PCIe",
    nodes=1,
    ranks=1,
    min_nodes=1,
    cpu_ranks=1,
    parameters=25_175_040,
    build=build_single,
    criteria=(c.GPU, c.TORCH, c.WORLD, c.FORWARD, c.BACKWARD, c.STEPS, c.BATCH, c.SAVE, c.RELOAD),
    figures=(
        parameters_figure(25_175_040),
        *timing_figures(95.0, None, seed_time=1.05),
        last_loss_figure(1.0137, ranks=False),
        peak_memory_figure(0.52, ("hardware", "size"), where=""),
    ),
)


def build_ddp(asked: Placement) -> SizedSpec:
    base = base_spec(asked, "02-ddp") | {"strategy": {"name": "pytorch_ddp"}, "model": {"dtype": "float32"}}
    base["train"] = {"max_grad_norm": None, "weight_decay": 0.01}
    spec, scaled = mlp_spec(asked, base, 2048, 3, "wide", 64, 100)
    return SizedSpec(spec=spec, scaled=scaled)


DDP_TEST = SmokeTest(
    name="02_ddp",
    title="Two ranks on one node: DDP",
    source="seed 004, test 02 (job 10213612)",
    hardware="2 x NVIDIA A100 80GB PCIe, one node",
    nodes=1,
    ranks=2,
    min_nodes=1,
    cpu_ranks=2,
    parameters=100_681_728,
    build=build_ddp,
    criteria=(
        c.WORLD,
        Criterion("transport", "NCCL by shared memory or peer to peer, not by network", c.transport("SHM", "P2P")),
        c.GPU,
        c.BARRIERS,
        Criterion("wrapper", "DDP wrapper created", c.strategy_built("pytorch_ddp")),
        c.OWN_DATA,
        *c.DATA_PARALLEL_STEPS,
        c.SAVE,
        c.RELOAD,
    ),
    figures=(
        parameters_figure(100_681_728),
        global_batch_figure(128),
        *timing_figures(23.7, 3033, seed_time=4.21),
        last_loss_figure(1.0099, "; in the notes of one rank only"),
        peak_memory_figure(2.44, ("hardware", "size")),
    ),
)


ENGINE_CREATED = Criterion("engine", "DeepSpeed's engine created", c.engine)
ZERO1 = Criterion("zero", "ZeRO stage 1, optimizer state sharded", c.zero_stage(1))
FUSED_ADAM = Criterion("jit", "FusedAdam compiled, its time separate", c.fused_adam)
STATE_SAVED = Criterion("state", "Optimizer state of every rank saved", c.state_files)


# weights in bfloat16, as in the notes: DeepSpeed keeps master weights in float32 itself
DEEPSPEED_TRAIN = {"max_grad_norm": 1.0, "weight_decay": 0.01, "param_dtype": "bfloat16"}


def build_zero1(asked: Placement) -> SizedSpec:
    base = base_spec(asked, "03-zero1") | {"strategy": {"name": "deepspeed_zero1"}, "model": {"dtype": "bfloat16"}}
    base["train"] = DEEPSPEED_TRAIN
    spec, scaled = mlp_spec(asked, base, 4096, 6, "blocks", 32, 100)
    if asked.gpu and has_nvcc():  # DeepSpeed compiles its own AdamW for it, as in the notes
        spec["strategy"]["config"] = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    elif asked.gpu:
        scaled = [*scaled, "torch's fused AdamW instead of DeepSpeed's FusedAdam, which needs nvcc (CUDA_HOME or PATH)"]
    return SizedSpec(spec=spec, scaled=scaled)


def has_nvcc() -> bool:
    """Return whether CUDA's compiler is found where DeepSpeed looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").is_file()


ZERO1_TEST = SmokeTest(
    name="03_deepspeed_zero1",
    title="Two ranks on one node: DeepSpeed ZeRO-1, bfloat16",
    source="seed 004, test 03 (job 10213866)",
    hardware="2 x NVIDIA A100 80GB PCIe, one node",
    nodes=1,
    ranks=2,
    min_nodes=1,
    cpu_ranks=2,
    parameters=805_429_248,
    build=build_zero1,
    criteria=(
        c.WORLD,
        Criterion("transport", "NCCL by shared memory or peer to peer, not by network", c.transport("SHM", "P2P")),
        ENGINE_CREATED,
        c.BF16,
        FUSED_ADAM,
        *c.DATA_PARALLEL_STEPS,
        ZERO1,
        c.SAVE,
        STATE_SAVED,
        c.RELOAD,
    ),
    figures=(
        parameters_figure(805_429_248),
        global_batch_figure(64),
        *timing_figures(4.3, 275, seed_time=23.14),
        Figure(
            name="engine start-up",
            unit="s",
            definition="DeepSpeed's initialisation including operator builds; in the notes only the compilation",
            seed=22,
            measure=f.engine_start,
            depends=("hardware",),
        ),
        Figure(
            name="optimizer state per rank",
            unit="GB",
            definition="master weights and two moments in float32, 12 bytes x parameters / ranks",
            seed=3.0,
            correct=4.83,
            correction="the files in the notes have 4.83 GB per rank, 12 x 805,429,248 / 2",
            measure=f.state_gb_a_rank,
            depends=("size", "ranks"),
        ),
        last_loss_figure(1.0078),
        peak_memory_figure(9.68),
    ),
)


def build_multinode_zero1(asked: Placement) -> SizedSpec:
    base = base_spec(asked, "04-multinode") | {"strategy": {"name": "deepspeed_zero1"}, "model": {"dtype": "bfloat16"}}
    base["train"] = DEEPSPEED_TRAIN
    spec, scaled = mlp_spec(asked, base, 4096, 8, "blocks", 32, 100)
    return SizedSpec(spec=spec, scaled=scaled)


MULTINODE_ZERO1_TEST = SmokeTest(
    name="04_multinode_deepspeed",
    title="Four nodes of two ranks: DeepSpeed ZeRO-1, bfloat16",
    source="seed 004, test 04 (job 10213927)",
    hardware="8 x NVIDIA A100 80GB PCIe, four nodes, 100 Gbit/s InfiniBand",
    nodes=4,
    ranks=2,
    min_nodes=4,
    cpu_ranks=2,
    one_gpu_node=True,
    parameters=1_073_905_664,
    build=build_multinode_zero1,
    criteria=(
        Criterion("nodes", "All nodes allocated", c.nodes),
        Criterion("across", "NCCL by InfiniBand between nodes", c.transport("NET/IB", across=True)),
        Criterion("within", "NCCL peer to peer within a node", c.transport("P2P")),
        Criterion("world", "All ranks initialise and pass the barrier", c.world),
        ENGINE_CREATED,
        c.BF16,
        *c.DATA_PARALLEL_STEPS,
        ZERO1,
        c.SAVE,
        STATE_SAVED,
        c.RELOAD,
    ),
    figures=(
        parameters_figure(1_073_905_664),
        global_batch_figure(256),
        *(figure for figure in timing_figures(1.34, None, seed_time=74.6) if figure.name != "samples"),
        samples_figure(10.7, 343.0, "the notes give steps x ranks: 1.34 x 8; with 32 rows per rank it is 1.34 x 256"),
        last_loss_figure(1.0, ", over all ranks"),
        peak_memory_figure(7.12),
    ),
)
