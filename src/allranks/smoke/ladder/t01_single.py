"""01: one process trains a small perceptron, saves it and reads it again."""

from __future__ import annotations

from allranks.smoke import criteria as c
from allranks.smoke.ladder import mlp
from allranks.smoke.records import Asked, Sized, SmokeTest
from allranks.smoke.sizes import base_spec, mlp_spec


def build(asked: Asked) -> Sized:
    base = base_spec(asked, "01-single") | {"strategy": {"name": "single"}, "model": {"dtype": "float32"}}
    base["train"] = {"clip_norm": None, "weight_decay": 0.01}
    spec, scaled = mlp_spec(asked, base, 1024, 3, "wide", 32, 100)
    return Sized(spec=spec, scaled=scaled)


TEST = SmokeTest(
    name="01_single",
    title="One process: steps, checkpoint, reload",
    source="seed 004, test 01 (job 10212764)",
    hardware="1 x NVIDIA A100 80GB PCIe",
    nodes=1,
    ranks=1,
    least_nodes=1,
    cpu_ranks=1,
    parameters=25_175_040,
    build=build,
    criteria=(c.GPU, c.TORCH, c.WORLD, c.FORWARD, c.BACKWARD, c.STEPS, c.BATCH, c.SAVE, c.RELOAD),
    figures=(
        mlp.parameters(25_175_040),
        *mlp.timing(95.0, None, seed_time=1.05),
        mlp.last_loss(1.0137, ranks=False),
        mlp.peak_memory(0.52, ("hardware", "size"), where=""),
    ),
)
