"""Smoke tests 05 to 08.

05 and 06 fine-tune Mistral with LoRA on one node and on two nodes through Slurm, on instruction rows padded to one length.
07 trains a mixture of experts with FSDP2 and LoRA: loading, evaluation, checkpoints, resume.
08 trains a tiny BERT on news, on three nodes of two CPU ranks, with gloo, through Slurm.
"""

from __future__ import annotations

import math
from typing import Any

from allranks.lab.smoke import criteria as c
from allranks.lab.smoke import figures as f
from allranks.lab.smoke.figures import base_spec
from allranks.lab.smoke.records import (
    Criterion,
    Evidence,
    Figure,
    Placement,
    SizedSpec,
    SmokeTest,
    Verdict,
    decide,
    not_reached,
)

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MISTRAL_PARAMETERS = 7_241_732_096
ADAPTERS_ONLY = Criterion("lora", "LoRA: only adapters trained and published", c.adapters_only)
PREPARED_ONCE = Criterion("race", "Rows prepared once, without a race", c.prepared_once)
THROUGHPUT_WRITTEN = Criterion("metrics", "Throughput written", c.throughput_written)
MISTRAL_SHAPES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def sft_spec(asked: Placement, name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe of the notes.

    Without a GPU the model is a tiny one of the same family; with a GPU it has the same shapes and random weights, because
    a smoke test downloads nothing (``--set model.name=...`` accepts a folder).
    """
    spec = base_spec(asked, name)
    spec |= {
        "adapter": {"type": "lora", "r": 8, "alpha": 16, "dropout": 0.05, "targets": LORA_TARGETS},
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
    scaled = ["synthetic instruction rows instead of yahma/alpaca-cleaned (no download)"]
    if asked.gpu and asked.scale != "tiny":
        spec["model"]["config"] = MISTRAL_SHAPES
        return spec, [*scaled, "Mistral-7B's shapes with random weights and a small vocabulary (no download)"]
    spec["data"] |= {"subset": 200, "max_length": 128}
    if asked.scale == "tiny":
        spec["model"]["config"] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        spec["train"] |= {"max_steps": 6}
    why = "requested by --scale tiny" if asked.scale == "tiny" else "no GPU"
    return spec, [
        *scaled,
        f"a tiny Mistral instead of 7 B parameters, 200 rows of 128 tokens instead of 2,048 of 512; {why}",
    ]


def sft_figures(wall_s: float, per_rank: float, runtime: float | None, samples: float | None) -> tuple[Figure, ...]:
    """Return the figures of one run of the notes."""
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
            name="tokens per rank, with padding",
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


def build_lora(asked: Placement) -> SizedSpec:
    spec, scaled = sft_spec(asked, "05-lora")
    return SizedSpec(spec=spec, scaled=scaled)


LORA_TEST = SmokeTest(
    name="05_lora_sft",
    title="LoRA fine-tuning with DDP, one node",
    source="seed 000, one node of 8 ranks",
    hardware="8 x NVIDIA H100 80GB HBM3, one node",
    nodes=1,
    ranks=8,
    min_nodes=1,
    cpu_ranks=2,
    parameters=MISTRAL_PARAMETERS,
    build=build_lora,
    criteria=(
        c.WORLD,
        Criterion("transport", "NCCL within the node, not by network", c.transport("SHM", "P2P", "NVLS")),
        PREPARED_ONCE,
        c.OWN_DATA,
        *c.DATA_PARALLEL_STEPS,
        c.SAVE,
        ADAPTERS_ONLY,
        THROUGHPUT_WRITTEN,
        c.RELOAD,
    ),
    figures=sft_figures(6.766, 756.7, 6.2282, 12.845),
)


def build_lora_two_nodes(asked: Placement) -> SizedSpec:
    spec, scaled = sft_spec(asked, "06-lora-2node")
    return SizedSpec(spec=spec, scaled=scaled)


LORA_TWO_NODES_TEST = SmokeTest(
    name="06_lora_sft_2node",
    title="LoRA fine-tuning with DDP, two nodes through Slurm",
    source="seed 000, two nodes of 8 ranks",
    hardware="16 x NVIDIA H100 80GB HBM3, two nodes, sockets",
    nodes=2,
    ranks=8,
    min_nodes=2,
    cpu_ranks=2,
    parameters=MISTRAL_PARAMETERS,
    build=build_lora_two_nodes,
    criteria=(
        Criterion("nodes", "Slurm starts the ranks on both nodes", c.nodes),
        Criterion("world", "Rendezvous: one group over both nodes", c.world),
        Criterion("network", "Connections between the nodes as decided", c.network_matches_policy),
        PREPARED_ONCE,
        c.OWN_DATA,
        *c.DATA_PARALLEL_STEPS,
        c.SAVE,
        ADAPTERS_ONLY,
        THROUGHPUT_WRITTEN,
        c.RELOAD,
    ),
    figures=sft_figures(11.585, 441.96, None, None),
)


SAVE_LIMIT_S = 10.0  # the time in the notes


def build_fsdp_moe(asked: Placement) -> SizedSpec:
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
        "a tiny mixture of experts of the same family instead of GLM-4.5-Air (107 B), synthetic instruction rows (no download)"
    ]
    return SizedSpec(spec=spec, scaled=scaled)


def evaluation(e: Evidence) -> Verdict:
    """Check that each evaluation has the same targets, communicates once, and gives a plausible perplexity."""
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


def save_is_quick(e: Evidence) -> Verdict:
    """Check that training pauses for a checkpoint no longer than for the weights-only one of the notes."""
    threshold = f"at most {SAVE_LIMIT_S:g} s"
    wrote = e.last("checkpoint")
    if len(wrote) < len(e.ranks):
        return not_reached(threshold)
    slowest = max(float(x["seconds"]) for x in wrote.values())
    return decide(slowest <= SAVE_LIMIT_S, f"{slowest:.2f} s", threshold)


FSDP_MOE_TEST = SmokeTest(
    name="07_fsdp_lora_moe",
    title="FSDP2 with LoRA on a mixture of experts",
    source="seed 001",
    hardware="16 x NVIDIA H200 141GB, two nodes, sockets",
    nodes=2,
    ranks=8,
    min_nodes=1,
    cpu_ranks=2,
    parameters=108_000_000_000,  # as in the notes
    build=build_fsdp_moe,
    criteria=(
        c.WORLD,
        Criterion("wrapper", "Model loaded and sharded on every rank", c.strategy_built("pytorch_zero3")),
        PREPARED_ONCE,
        Criterion("eval", "Evaluation: same rows, one collective, plausible perplexity", evaluation),
        c.FORWARD,
        c.BACKWARD,
        c.LOSS,
        c.STEPS,
        c.SAVE,
        Criterion("quick", "Checkpoint takes seconds, not minutes", save_is_quick),
        ADAPTERS_ONLY,
        c.RELOAD,
    ),
    figures=(
        Figure(
            name="evaluation",
            unit="s",
            definition="200 rows in the notes, 40 here",
            seed=300,
            measure=f.eval_seconds,
            depends=("hardware", "size", "ranks"),
        ),
        Figure(
            name="checkpoint",
            unit="s",
            definition="time without training",
            seed=10,
            measure=f.save_seconds,
            depends=("hardware", "size", "ranks"),
        ),
        Figure(
            name="perplexity before training",
            unit="",
            definition="weighted by tokens; in the notes of a trained model",
            seed=15.98,
            measure=f.first_perplexity,
            depends=("size",),
        ),
    ),
)


ARTIFACTS = ("config.json", "model.safetensors", "tokenizer.json")


def build_cpu_lab(asked: Placement) -> SizedSpec:
    spec = base_spec(asked, "08-cpu-lab")
    spec["cluster"] |= {"device": "cpu"}
    tiny = asked.scale == "tiny"
    spec |= {
        "model": {"name": "tiny:bert", "dtype": "float32"},
        "data": {
            "source": "builtin:news",
            "columns": {"text": ["title", "description"], "label": "label"},
            "subset": 240 if tiny else 2000,
            "max_length": 128,
        },
        "strategy": {"name": "pytorch_ddp"},
        "train": {"epochs": 1 if tiny else 3, "micro_batch_size": 8, "lr": 2e-3, "warmup_steps": 10},
    }
    scaled = ["synthetic news in four classes instead of AG News (no download)"]
    return SizedSpec(
        spec=spec, scaled=[*scaled, *(["240 rows and one epoch; requested by --scale tiny"] if tiny else [])]
    )


def preflight(e: Evidence) -> Verdict:
    """Check that every node sees the project and the packages."""
    wanted = len(e.plan.nodes)
    threshold = f"proj=ok pkgs=ok on {wanted} nodes"
    lines = [line for line in e.preflight if "proj=" in line]
    if not lines:
        return not_reached(threshold)
    good = [line for line in lines if "proj=ok" in line and "pkgs=ok" in line]
    return decide(len(good) == wanted, f"{len(good)} of {len(lines)} nodes", threshold)


def rank_banners(e: Evidence) -> Verdict:
    """Check that every rank's log starts with its number and the world size."""
    size = len(e.ranks)
    threshold = f"[RANK 0..{size - 1}] WORLD_SIZE={size}"
    if not e.heads:
        return not_reached(threshold)
    found = [r for r, text in e.heads.items() if f"[RANK {r}] WORLD_SIZE={size} " in text]
    return decide(len(found) == size, f"{len(found)} ranks print it", threshold)


def artifacts(e: Evidence) -> Verdict:
    """Check the files that the lab's hand-out lists."""
    threshold = ", ".join(ARTIFACTS)
    if e.step is None:
        return not_reached(threshold)
    missing = [name for name in ARTIFACTS if name not in e.files]
    return decide(
        not missing, f"{len(ARTIFACTS) - len(missing)} of {len(ARTIFACTS)} exist", threshold, ", ".join(missing)
    )


CPU_LAB_TEST = SmokeTest(
    name="08_cpu_lab",
    title="The lab: three nodes of two CPU ranks through Slurm",
    source="seed 003",
    hardware="3 Slurm nodes, 2 ranks each, CPU, gloo",
    nodes=3,
    ranks=2,
    min_nodes=3,
    cpu_ranks=2,
    parameters=None,
    build=build_cpu_lab,
    criteria=(
        Criterion("preflight", "Preflight: every node sees project and packages", preflight),
        Criterion("nodes", "Ranks on all nodes", c.nodes),
        c.WORLD,
        Criterion("banner", "Every rank prints its number and the world size", rank_banners),
        c.OWN_DATA,
        c.FORWARD,
        c.BACKWARD,
        c.SYNC,
        c.LOSS,
        c.STEPS,
        c.SAVE,
        Criterion("artifacts", "Model, configuration and tokenizer saved", artifacts),
        c.RELOAD,
    ),
    figures=(
        Figure(
            name="epoch",
            unit="s",
            definition="every row once, without evaluation",
            seed=None,
            measure=f.epoch_seconds,
            depends=("hardware",),
        ),
    ),
)
