"""05: LoRA fine-tuning of a language model with DDP on one node."""

from __future__ import annotations

from allranks.smoke import criteria as c
from allranks.smoke.ladder.sft import LORA, METRICS, MISTRAL_PARAMETERS, ONCE, sft_figures, sft_spec
from allranks.smoke.records import Asked, Criterion, Sized, SmokeTest


def build(asked: Asked) -> Sized:
    spec, scaled = sft_spec(asked, "05-lora")
    return Sized(spec=spec, scaled=scaled)


TEST = SmokeTest(
    name="05_lora_sft",
    title="LoRA fine-tuning with DDP, one node",
    source="seed 000, one node of 8 ranks",
    hardware="8 x NVIDIA H100 80GB HBM3, one node",
    nodes=1,
    ranks=8,
    least_nodes=1,
    cpu_ranks=2,
    parameters=MISTRAL_PARAMETERS,
    build=build,
    criteria=(
        c.WORLD,
        Criterion("transport", "NCCL within the node, not by network", c.transport("SHM", "P2P", "NVLS")),
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
    figures=sft_figures(6.766, 756.7, 6.2282, 12.845),
)
