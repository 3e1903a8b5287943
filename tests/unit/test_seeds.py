"""The field notes' jobs as specs: each says what its notes say, can be planned anywhere, and has a twin."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from allranks.cli.run import run_command
from allranks.planning.planner import make_plan
from allranks.spec import load_spec
from allranks.spec.loader import spec_to_dict
from tests.conftest import REPO
from tests.unit.test_plan import facts

SEEDS = REPO / "examples" / "seeds"
PAGE = REPO / "docs" / "seeds.md"
SPECS = sorted(str(p.relative_to(SEEDS).with_suffix("")) for p in SEEDS.glob("0*/*.yaml"))
FULL = [name for name in SPECS if not name.endswith("-tiny")]

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MISTRAL = {
    "model.name": "mistralai/Mistral-7B-v0.1", "model.dtype": "bfloat16", "model.gradient_checkpointing": False,
    "data.source": "yahma/alpaca-cleaned", "data.split": "train", "data.template": "alpaca", "data.subset": 2048,
    "data.max_length": 512, "data.packing": "none", "data.mask_prompt": False, "data.eval_fraction": 0.0,
    "adapter.type": "lora", "adapter.r": 8, "adapter.alpha": 16.0, "adapter.dropout": 0.05, "adapter.targets": SEVEN,
    "strategy.name": "hf_trainer", "train.max_steps": 10, "train.micro_batch_size": 1, "train.grad_accum": 1,
    "train.lr": 5e-5, "train.schedule": "linear",
}  # fmt: skip
GLM = {
    "model.name": "zai-org/GLM-4.5-Air", "model.dtype": "bfloat16", "model.gradient_checkpointing": True,
    "data.max_length": 8192, "data.eval_fraction": 0.1, "data.seed": 42, "train.weight_decay": 0.01,
    "adapter.r": 64, "adapter.alpha": 128.0, "adapter.dropout": 0.1, "adapter.targets": SEVEN[:4],
    "strategy.name": "pytorch_zero3", "train.epochs": 1.0, "train.lr": 4e-5, "train.micro_batch_size": 1,
    "train.grad_accum": 2, "eval.every": 100, "eval.subset": 200, "eval.batch_size": 2, "eval.baseline": False,
    "checkpoint.mode": "weights_only", "checkpoint.every": 100, "checkpoint.keep": 5,
}  # fmt: skip
YELP = {
    "model.name": "HuggingFaceTB/SmolLM2-360M-Instruct", "model.dtype": "float32",
    "data.source": "Yelp/yelp_review_full", "train.global_batch_size": 8, "train.lr": 5e-5, "adapter.type": "none",
    "observe.profile.wait": 1, "observe.profile.warmup": 2, "observe.profile.active": 3,
}  # fmt: skip
BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
LAB = {
    "model.config": {**BERT, "max_position_embeddings": 256}, "data.source": "fancyzhx/ag_news", "data.subset": 2000,
    "train.epochs": 3.0, "observe.log_every": 10, "strategy.name": "hf_trainer",
    "strategy.find_unused_parameters": False, "cluster.env": {"OMP_NUM_THREADS": "2"}, "cluster.stage": "auto",
}  # fmt: skip
SMOKE = {
    "data.source": "builtin:noise", "adapter.type": "none", "train.max_steps": 100, "train.lr": 1e-4,
    "train.schedule": "constant", "train.weight_decay": 0.01, "checkpoint.mode": "full",
}  # fmt: skip
ADAMW = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
BUCKETS = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
ZERO1 = SMOKE | {
    "model.dtype": "bfloat16", "strategy.name": "deepspeed_zero1", "train.micro_batch_size": 32,
    "train.max_grad_norm": 1.0, "strategy.config.gradient_clipping": 1.0, "strategy.config.bf16": {"enabled": True},
    "strategy.config.zero_optimization": {"stage": 1, **BUCKETS, "overlap_comm": True, "contiguous_gradients": True},
    "strategy.config.optimizer": {"type": "AdamW", "params": ADAMW},
}  # fmt: skip
UNCLIPPED = SMOKE | {"train.max_grad_norm": None}
DDP = UNCLIPPED | {"strategy.name": "pytorch_ddp", "train.micro_batch_size": 64, "cluster.timeout_s": 120}
NODES = {"strategy.config.train_batch_size": 256, "cluster.timeout_s": 600}
GPU = ("cuda", "nccl")
# What the notes say of each job (what Slurm gets: tests/golden/test_sbatch.py); and (nodes, ranks, device, backend,
# dtype, sequences an update) of its plan.
JOBS: dict[str, tuple[dict[str, Any], tuple[int, int, str, str, str, int]]] = {
    "000/one-node": (MISTRAL, (1, 8, *GPU, "bfloat16", 8)),
    "000/two-nodes": (MISTRAL, (2, 16, *GPU, "bfloat16", 16)),
    "001/two-nodes-slurm": (GLM, (2, 16, *GPU, "bfloat16", 32)),
    "001/two-nodes-by-hand": (GLM | {"cluster.hosts": ["node0", "node1"]}, (2, 16, *GPU, "bfloat16", 32)),
    "002/ddp": (YELP | {"train.micro_batch_size": 1}, (1, 2, *GPU, "float32", 8)),
    "002/sharding": (YELP | {"train.micro_batch_size": 4}, (1, 2, *GPU, "float32", 8)),
    "003/lab": (LAB, (3, 6, "cpu", "gloo", "float32", 48)),
    "004/01-single-gpu": (UNCLIPPED | {"strategy.name": "single"}, (1, 1, *GPU, "float32", 32)),
    "004/02-ddp-2-gpus": (DDP, (1, 2, *GPU, "float32", 128)),
    "004/03-deepspeed-zero1": (ZERO1 | {"strategy.config.train_batch_size": 64}, (1, 2, *GPU, "bfloat16", 64)),
    "004/04-deepspeed-4-nodes": (ZERO1 | NODES, (4, 8, *GPU, "bfloat16", 256)),
}


def at(raw: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        raw = raw[part]
    return raw


def test_every_job_has_a_twin_and_a_readme_that_names_it() -> None:
    assert set(FULL) == set(JOBS), "a job without the values of its notes"
    assert {name.split("/")[0] for name in FULL} == {path.name for path in SEEDS.iterdir() if path.is_dir()}
    for name in FULL:
        assert f"{name}-tiny" in SPECS
        folder, spec = name.split("/")
        readme = (SEEDS / folder / "README.md").read_text()
        assert spec in readme
        assert len(readme.splitlines()) <= 12 and "](../../../docs/seeds.md" in readme


@pytest.mark.parametrize("name", FULL)
def test_a_job_is_that_of_its_notes(name: str) -> None:
    said, planned = JOBS[name]
    spec = load_spec(SEEDS / f"{name}.yaml")
    raw = spec_to_dict(spec)
    assert {key: at(raw, key) for key in said} == said
    plan = make_plan(spec, facts(gpus=2 if spec.cluster.launcher == "local" else 0))
    assert plan.batch is not None and plan.warnings == []
    kind = (plan.device, plan.backend, plan.dtype)
    assert (len(plan.nodes), plan.world_size, *kind, plan.batch.global_batch_size) == planned


@pytest.mark.parametrize("name", FULL)
def test_a_twin_is_the_same_recipe_smaller(name: str) -> None:
    full, twin = (load_spec(SEEDS / f"{one}.yaml") for one in (name, f"{name}-tiny"))
    assert twin.model is not None and twin.data is not None and full.model is not None and full.data is not None
    assert twin.model.name.startswith(("tiny:", "mlp:")) and twin.data.source.startswith("builtin:")
    assert twin.model.gradient_checkpointing == full.model.gradient_checkpointing
    assert (twin.data.packing, twin.data.mask_prompt) == (full.data.packing, full.data.mask_prompt)
    assert twin.adapter == full.adapter
    if not name.startswith("002/"):  # there the strategy is what is compared
        assert twin.strategy.name == full.strategy.name
    assert (twin.train.schedule, twin.train.grad_accum) == (full.train.schedule, full.train.grad_accum)
    assert twin.checkpoint.mode == full.checkpoint.mode
    assert twin.cluster.launcher == full.cluster.launcher or full.cluster.nodes == 1
    assert make_plan(twin, facts()).device == "cpu"


@pytest.mark.parametrize("name", SPECS)
def test_a_dry_run_shows_all_without_gpu_or_slurm(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(run_command, [str(SEEDS / f"{name}.yaml"), "--dry-run", "--json"], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0), done.output
    shown = json.loads(done.stdout)
    assert shown["fit"]["verdict"] != "too large" and shown["fit"]["needed_bytes"] > 0
    if name == "001/two-nodes-slurm":  # the notes filled 138 GB; every node holds a copy of the weights
        assert round(shown["fit"]["needed_bytes"] / 2**30) == 45
    launcher = shown["launcher"]
    assert shown.get("batch_script", "").count("#SBATCH --ntasks-per-node=1\n") == (launcher == "slurm")
    assert len(shown.get("commands", [])) == (2 if launcher == "hosts" else 0)
    assert list(tmp_path.iterdir()) == [], "a dry run touches nothing"


ROW = re.compile(r"^\| (?!notes say |---)(.+) \|$", re.MULTILINE)
TEST = re.compile(r"`((?:unit|dist|cluster|golden|lint)/test_\w+\.py)::(test_\w+)`")


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((REPO / "tests" / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_line_of_the_page_names_tests_that_exist_or_says_that_there_is_none() -> None:
    rows = [match[1].split(" | ") for match in ROW.finditer(PAGE.read_text())]
    assert len(rows) > 150
    for row in rows:
        assert len(row) == 3, row
        named = TEST.findall(row[2])
        assert named or row[2].startswith(("no test: ", "GPU: ")), row
        assert row[2].count("::") == len(named), f"written otherwise than `unit/test_x.py::test_y`: {row[2]}"
        for path, name in named:
            assert (REPO / "tests" / path).is_file() and name in names_in(path), f"{path}::{name}"
