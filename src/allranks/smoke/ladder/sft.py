"""What the two LoRA tests of the notes share: Mistral, instruction rows padded to one length, LoRA on seven projections."""

from __future__ import annotations

from typing import Any

from allranks.smoke import criteria as c
from allranks.smoke import figures as f
from allranks.smoke.records import Asked, Criterion, Figure
from allranks.smoke.sizes import base_spec

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MISTRAL_PARAMETERS = 7_241_732_096
LORA = Criterion("lora", "LoRA: adapters alone trained and published", c.adapters_only)
ONCE = Criterion("race", "Rows prepared once, without a race", c.prepared_once)
METRICS = Criterion("metrics", "Throughput written", c.throughput_written)
SHAPES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def sft_spec(asked: Asked, name: str) -> tuple[dict[str, Any], list[str]]:
    """The notes' recipe. Without a GPU the model is a tiny one of the same family; with one it is of the same shapes, with
    weights drawn, since nothing is fetched by a smoke test (``--set model.name=...`` takes a folder)."""
    spec = base_spec(asked, name)
    spec |= {
        "adapter": {"type": "lora", "r": 8, "alpha": 16, "dropout": 0.05, "targets": TARGETS},
        "strategy": {"name": "pytorch_ddp"},
        "train": {"max_steps": 10, "micro_batch_size": 1, "grad_accum": 1, "lr": 5e-5, "schedule": "linear"},
        "data": {
            "source": "builtin:instructions",
            "template": "alpaca",
            "subset": 2048,
            "max_length": 512,
            "packing": "none",
        },
        "eval": {"subset": 8, "samples": 0},
        "model": {"name": "tiny:mistral", "dtype": "bfloat16" if asked.gpu else "float32"},
    }
    scaled = ["made-up instruction rows instead of yahma/alpaca-cleaned: nothing is fetched"]
    if asked.gpu and asked.scale != "tiny":
        spec["model"]["config"] = SHAPES
        return spec, [*scaled, "Mistral-7B's shapes with weights drawn and a small vocabulary: nothing is fetched"]
    spec["data"] |= {"subset": 200, "max_length": 128}
    if asked.scale == "tiny":
        spec["model"]["config"] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        spec["train"] |= {"max_steps": 6}
    why = "asked for with --scale tiny" if asked.scale == "tiny" else "no GPU"
    return spec, [
        *scaled,
        f"a tiny Mistral instead of 7 B parameters, 200 rows of 128 tokens instead of 2,048 of 512; {why}",
    ]


def sft_figures(wall_s: float, per_rank: float, runtime: float | None, samples: float | None) -> tuple[Figure, ...]:
    """Of one run of the notes."""
    both = ("hardware", "size", "ranks")
    return (
        Figure(
            name="wall time",
            unit="s",
            definition="training of 10 steps, without starting the ranks",
            seed=wall_s,
            measure=f.wall_time,
            depends=both,
        ),
        Figure(
            name="tokens a rank, padding counted",
            unit="1/s",
            definition="steps x rows x max_length by wall time: padding and warm-up count",
            seed=per_rank,
            measure=f.padded_tokens_per_s_per_rank,
            depends=both,
        ),
        Figure(
            name="tokens, all ranks",
            unit="1/s",
            definition="without padding, after warm-up",
            seed=None,
            measure=f.real_tokens_per_s,
            depends=both,
        ),
        Figure(
            name="samples",
            unit="1/s",
            definition="batch rows over all ranks, by training time",
            seed=samples,
            measure=f.samples_per_s,
            depends=both,
        ),
    )
