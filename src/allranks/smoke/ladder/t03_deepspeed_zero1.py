"""03: DeepSpeed shares the optimizer's state between two ranks, in bfloat16."""

from __future__ import annotations

from allranks.smoke import criteria as c
from allranks.smoke import figures as f
from allranks.smoke.ladder import mlp
from allranks.smoke.records import Asked, Criterion, Figure, Sized, SmokeTest
from allranks.smoke.sizes import base_spec, mlp_spec

ENGINE = Criterion("engine", "DeepSpeed's engine created", c.engine)
ZERO1 = Criterion("zero", "ZeRO stage 1, optimizer state in parts", c.zero_stage(1))
FUSED = Criterion("jit", "FusedAdam compiled, its time apart", c.fused_adam)
STATE = Criterion("state", "Optimizer state of every rank saved", c.state_files)


def build(asked: Asked) -> Sized:
    base = base_spec(asked, "03-zero1") | {"strategy": {"name": "deepspeed_zero1"}, "model": {"dtype": "bfloat16"}}
    base["train"] = {"clip_norm": 1.0, "weight_decay": 0.01}
    spec, scaled = mlp_spec(asked, base, 4096, 6, "blocks", 32, 100)
    return Sized(spec=spec, scaled=scaled)


TEST = SmokeTest(
    name="03_deepspeed_zero1",
    title="Two ranks on one node: DeepSpeed ZeRO-1, bfloat16",
    source="seed 004, test 03 (job 10213866)",
    hardware="2 x NVIDIA A100 80GB PCIe, one node",
    nodes=1,
    ranks=2,
    least_nodes=1,
    cpu_ranks=2,
    parameters=805_429_248,
    build=build,
    criteria=(
        c.WORLD,
        Criterion("transport", "NCCL by shared memory or peer to peer, not by network", c.transport("SHM", "P2P")),
        ENGINE,
        c.BF16,
        FUSED,
        c.BATCH,
        c.FORWARD,
        c.BACKWARD,
        c.SYNC,
        c.LOSS,
        c.STEPS,
        ZERO1,
        c.SAVE,
        STATE,
        c.RELOAD,
    ),
    figures=(
        mlp.parameters(805_429_248),
        mlp.global_batch(64),
        *mlp.timing(4.3, 275, seed_time=23.14),
        Figure(
            name="engine's start",
            unit="s",
            definition="DeepSpeed's initialisation, operators built in it; theirs is the compilation alone",
            seed=22,
            measure=f.engine_start,
            depends=("hardware",),
        ),
        Figure(
            name="optimizer state a rank",
            unit="GB",
            definition="master weights and two moments in float32, 12 bytes x parameters / ranks",
            seed=3.0,
            correct=4.83,
            correction="their files have 4.83 GB a rank, 12 x 805,429,248 / 2",
            measure=f.state_gb_a_rank,
            depends=("size", "ranks"),
        ),
        mlp.last_loss(1.0078),
        mlp.peak_memory(9.68),
    ),
)
