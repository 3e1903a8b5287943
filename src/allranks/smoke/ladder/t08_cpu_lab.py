"""08: the lab: a tiny BERT on news, three nodes of two CPU ranks, gloo, through Slurm."""

from __future__ import annotations

from allranks.smoke import criteria as c
from allranks.smoke import figures as f
from allranks.smoke.evidence import Evidence
from allranks.smoke.judging import decide, not_reached
from allranks.smoke.records import Asked, Criterion, Figure, Judgement, Sized, SmokeTest
from allranks.smoke.sizes import base_spec

ARTIFACTS = ("config.json", "model.safetensors", "tokenizer.json")


def build(asked: Asked) -> Sized:
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
    scaled = ["made-up news in four classes instead of AG News: nothing is fetched"]
    return Sized(
        spec=spec, scaled=[*scaled, *(["240 rows and one epoch; asked for with --scale tiny"] if tiny else [])]
    )


def preflight(e: Evidence) -> Judgement:
    """Every node sees the project and the packages."""
    wanted = len(e.plan.nodes)
    threshold = f"proj=ok pkgs=ok on {wanted} nodes"
    lines = [line for line in e.preflight if "proj=" in line]
    if not lines:
        return not_reached(threshold)
    good = [line for line in lines if "proj=ok" in line and "pkgs=ok" in line]
    return decide(len(good) == wanted, f"{len(good)} of {len(lines)} nodes", threshold)


def banners(e: Evidence) -> Judgement:
    """Every rank's log begins with its number and the world size; the largest is one less than that."""
    size = len(e.ranks)
    threshold = f"[RANK 0..{size - 1}] WORLD_SIZE={size}"
    if not e.heads:
        return not_reached(threshold)
    found = [r for r, text in e.heads.items() if f"[RANK {r}] WORLD_SIZE={size} " in text]
    return decide(len(found) == size, f"{len(found)} ranks say so", threshold)


def artifacts(e: Evidence) -> Judgement:
    """What the hand-out lets students list."""
    threshold = ", ".join(ARTIFACTS)
    if e.step is None:
        return not_reached(threshold)
    missing = [name for name in ARTIFACTS if name not in e.files]
    return decide(
        not missing, f"{len(ARTIFACTS) - len(missing)} of {len(ARTIFACTS)} there", threshold, ", ".join(missing)
    )


TEST = SmokeTest(
    name="08_cpu_lab",
    title="The lab: three nodes of two CPU ranks through Slurm",
    source="seed 003",
    hardware="3 Slurm nodes, 2 ranks each, CPU, gloo",
    nodes=3,
    ranks=2,
    least_nodes=3,
    cpu_ranks=2,
    parameters=None,
    build=build,
    criteria=(
        Criterion("preflight", "Preflight: every node sees project and packages", preflight),
        Criterion("nodes", "Ranks on all nodes", c.nodes),
        c.WORLD,
        Criterion("banner", "Every rank says its number and the world size", banners),
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
