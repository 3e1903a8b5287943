"""04: the same engine over four nodes of two ranks, through Slurm."""

from __future__ import annotations

from allranks.smoke import criteria as c
from allranks.smoke.ladder import mlp
from allranks.smoke.ladder.t03_deepspeed_zero1 import ENGINE, STATE, ZERO1
from allranks.smoke.records import Asked, Criterion, Sized, SmokeTest
from allranks.smoke.sizes import base_spec, mlp_spec


def build(asked: Asked) -> Sized:
    base = base_spec(asked, "04-multinode") | {"strategy": {"name": "deepspeed_zero1"}, "model": {"dtype": "bfloat16"}}
    base["train"] = {"clip_norm": 1.0, "weight_decay": 0.01}
    spec, scaled = mlp_spec(asked, base, 4096, 8, "blocks", 32, 100)
    return Sized(spec=spec, scaled=scaled)


TEST = SmokeTest(
    name="04_multinode_deepspeed",
    title="Four nodes of two ranks: DeepSpeed ZeRO-1, bfloat16",
    source="seed 004, test 04 (job 10213927)",
    hardware="8 x NVIDIA A100 80GB PCIe, four nodes, 100 Gbit/s InfiniBand",
    nodes=4,
    ranks=2,
    least_nodes=4,
    cpu_ranks=2,
    one_gpu_node=True,
    parameters=1_073_905_664,
    build=build,
    criteria=(
        Criterion("nodes", "All nodes allocated", c.nodes),
        Criterion("across", "NCCL by InfiniBand between nodes", c.transport("NET/IB", across=True)),
        Criterion("within", "NCCL peer to peer within a node", c.transport("P2P")),
        Criterion("world", "All ranks initialise and pass the barrier", c.world),
        ENGINE,
        c.BF16,
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
        mlp.parameters(1_073_905_664),
        mlp.global_batch(256),
        *(figure for figure in mlp.timing(1.34, None, seed_time=74.6) if figure.name != "samples"),
        mlp.samples(10.7, 343.0, "theirs is steps x ranks: 1.34 x 8; with 32 rows a rank it is 1.34 x 256"),
        mlp.last_loss(1.0, ", over all ranks"),
        mlp.peak_memory(7.12),
    ),
)
