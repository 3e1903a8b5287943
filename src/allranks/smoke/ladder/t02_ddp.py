"""02: two ranks of one node average gradients with DistributedDataParallel."""

from __future__ import annotations

from allranks.smoke import criteria as c
from allranks.smoke.ladder import mlp
from allranks.smoke.records import Asked, Criterion, Sized, SmokeTest
from allranks.smoke.sizes import base_spec, mlp_spec


def build(asked: Asked) -> Sized:
    base = base_spec(asked, "02-ddp") | {"strategy": {"name": "pytorch_ddp"}, "model": {"dtype": "float32"}}
    base["train"] = {"clip_norm": None, "weight_decay": 0.01}
    spec, scaled = mlp_spec(asked, base, 2048, 3, "wide", 64, 100)
    return Sized(spec=spec, scaled=scaled)


TEST = SmokeTest(
    name="02_ddp",
    title="Two ranks on one node: DDP",
    source="seed 004, test 02 (job 10213612)",
    hardware="2 x NVIDIA A100 80GB PCIe, one node",
    nodes=1,
    ranks=2,
    least_nodes=1,
    cpu_ranks=2,
    parameters=100_681_728,
    build=build,
    criteria=(
        c.WORLD,
        Criterion("transport", "NCCL by shared memory or peer to peer, not by network", c.transport("SHM", "P2P")),
        c.GPU,
        c.BARRIERS,
        Criterion("wrapper", "DDP wrapper created", c.built("pytorch_ddp")),
        c.OWN_DATA,
        c.BATCH,
        c.FORWARD,
        c.BACKWARD,
        c.SYNC,
        c.LOSS,
        c.STEPS,
        c.SAVE,
        c.RELOAD,
    ),
    figures=(
        mlp.parameters(100_681_728),
        mlp.global_batch(128),
        *mlp.timing(23.7, 3033, seed_time=4.21),
        mlp.last_loss(1.0099, "; theirs is one rank's own"),
        mlp.peak_memory(2.44, ("hardware", "size")),
    ),
)
