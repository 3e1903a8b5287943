"""07: FSDP2 with LoRA on a mixture of experts: loading, evaluation, checkpoints, going on."""

from __future__ import annotations

import math

from allranks.smoke import criteria as c
from allranks.smoke import figures as f
from allranks.smoke.evidence import Evidence
from allranks.smoke.judging import decide, not_reached
from allranks.smoke.ladder.sft import LORA, ONCE
from allranks.smoke.records import Asked, Criterion, Figure, Judgement, Sized, SmokeTest
from allranks.smoke.sizes import base_spec

SAVE_LIMIT_S = 10.0  # what the notes are proud of


def build(asked: Asked) -> Sized:
    spec = base_spec(asked, "07-fsdp-moe")
    tiny = asked.scale == "tiny"
    spec |= {
        "model": {"name": "tiny:glm4_moe", "dtype": "bfloat16", "config": {"num_hidden_layers": 2, "vocab_size": 1024}},
        "adapter": {"type": "lora", "r": 8, "alpha": 16, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        "strategy": {"name": "pytorch_zero3"},
        "train": {"max_steps": 6 if tiny else 20, "micro_batch_size": 2, "grad_accum": 2, "lr": 4e-3},
        "data": {
            "source": "builtin:instructions",
            "subset": 200 if tiny else 800,
            "max_length": 128,
            "eval_fraction": 0.15,
        },
        "eval": {"every": 3 if tiny else 10, "subset": 40, "batch_size": 2, "baseline": True, "samples": 0},
    }
    scaled = [
        "a tiny mixture of the same family instead of GLM-4.5-Air (107 B), made-up instruction rows: nothing is fetched"
    ]
    return Sized(spec=spec, scaled=scaled)


def evaluation(e: Evidence) -> Judgement:
    """Each evaluation sees the same targets, communicates once, and its perplexity is one that a model can have."""
    threshold = "same targets each time, 1 collective, perplexity from 1 to twice the vocabulary"
    evals = e.events("eval").get(0, [])
    data = e.last("data").get(0, {})
    if len(evals) < 2:
        return not_reached(threshold)
    targets, collectives = {x["targets"] for x in evals}, {x["collectives"] for x in evals}
    values = [x["perplexity"] for x in evals]
    fine = all(v is not None and math.isfinite(v) and 1 <= v < 2 * data["vocab_size"] for v in values)
    ok = fine and len(targets) == 1 and collectives == {1}
    shown = " -> ".join("-" if v is None else f"{v:.1f}" for v in values)
    return decide(
        ok, f"{len(evals)} times, {'/'.join(map(str, sorted(targets)))} targets, perplexity {shown}", threshold
    )


def quick_save(e: Evidence) -> Judgement:
    """Training stands still for a checkpoint no longer than the notes' light one took."""
    threshold = f"at most {SAVE_LIMIT_S:g} s"
    wrote = e.last("checkpoint")
    if len(wrote) < len(e.ranks):
        return not_reached(threshold)
    slowest = max(float(x["seconds"]) for x in wrote.values())
    return decide(slowest <= SAVE_LIMIT_S, f"{slowest:.2f} s", threshold)


TEST = SmokeTest(
    name="07_fsdp_lora_moe",
    title="FSDP2 with LoRA on a mixture of experts",
    source="seed 001",
    hardware="16 x NVIDIA H200 141GB, two nodes, sockets",
    nodes=2,
    ranks=8,
    least_nodes=1,
    cpu_ranks=2,
    parameters=108_000_000_000,  # as the notes name it
    build=build,
    criteria=(
        c.WORLD,
        Criterion("wrapper", "Model loaded and sharded on every rank", c.built("pytorch_zero3")),
        ONCE,
        Criterion("eval", "Evaluation: same rows, one collective, perplexity sane", evaluation),
        c.FORWARD,
        c.BACKWARD,
        c.LOSS,
        c.STEPS,
        c.SAVE,
        Criterion("quick", "Checkpoint takes seconds, not minutes", quick_save),
        LORA,
        c.RELOAD,
    ),
    figures=(
        Figure(
            name="evaluation",
            unit="s",
            definition="200 rows there, 40 here",
            seed=300,
            measure=f.eval_seconds,
            depends=("hardware", "size", "ranks"),
        ),
        Figure(
            name="checkpoint",
            unit="s",
            definition="training stands still for it",
            seed=10,
            measure=f.save_seconds,
            depends=("hardware", "size", "ranks"),
        ),
        Figure(
            name="perplexity before training",
            unit="",
            definition="weighted by tokens; theirs of a trained model",
            seed=15.98,
            measure=f.first_perplexity,
            depends=("size",),
        ),
    ),
)
