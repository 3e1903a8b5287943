"""06: the same over two nodes, through Slurm."""

from __future__ import annotations

from allranks.smoke import criteria as c
from allranks.smoke.ladder.sft import LORA, METRICS, MISTRAL_PARAMETERS, ONCE, sft_figures, sft_spec
from allranks.smoke.records import Asked, Criterion, Sized, SmokeTest


def build(asked: Asked) -> Sized:
    spec, scaled = sft_spec(asked, "06-lora-2node")
    return Sized(spec=spec, scaled=scaled)


TEST = SmokeTest(
    name="06_lora_sft_2node",
    title="LoRA fine-tuning with DDP, two nodes through Slurm",
    source="seed 000, two nodes of 8 ranks",
    hardware="16 x NVIDIA H100 80GB HBM3, two nodes, sockets",
    nodes=2,
    ranks=8,
    least_nodes=2,
    cpu_ranks=2,
    parameters=MISTRAL_PARAMETERS,
    build=build,
    criteria=(
        Criterion("nodes", "Slurm starts the ranks on both nodes", c.nodes),
        Criterion("world", "Rendezvous: one group over both nodes", c.world),
        Criterion("network", "Connections between the nodes as decided", c.as_decided),
        ONCE,
        c.OWN_DATA,
        c.BATCH,
        c.FORWARD,
        c.BACKWARD,
        c.SYNC,
        c.LOSS,
        c.STEPS,
        c.SAVE,
        LORA,
        METRICS,
        c.RELOAD,
    ),
    figures=sft_figures(11.585, 441.96, None, None),
)
