"""The demo and the small mixture of experts as they stand in examples/, shortened, under every strategy: the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.conftest import REPO
from tests.dist.harness import allranks, folders, shared_strategies

pytestmark = [pytest.mark.dist, pytest.mark.full, pytest.mark.timeout(3600)]
SHORT = {
    "train.max_steps": "5", "train.epochs": "null", "train.grad_accum": "2", "eval.every": "3", "eval.baseline": "true", "eval.subset": "16",
    "checkpoint.every": "3", "checkpoint.mode": "full", "cluster.launcher": "local", "cluster.nodes": "1", "cluster.procs_per_node": "2",
}  # fmt: skip
WHOLE = {"adapter.type": "none", "adapter.modules_to_save": "[]", "adapter.targets": "null", "data.packing": "none"}
LESS = {
    "adapter.modules_to_save": "[]",
    "model.dtype": "bfloat16",
    "model.gradient_checkpointing": "true",
    "checkpoint.async": "true",
}


def figures(tmp_path: Path, example: str, strategy: str, more: dict[str, str]) -> tuple[float, ...]:
    """First and last losses of a run, before and after training."""
    values = {**SHORT, **more, "strategy": f"{{name: {strategy}}}", "run_root": str(tmp_path / "runs")}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    before = set(folders(tmp_path))
    done = allranks("run", str(REPO / "examples" / example), *sets, cwd=tmp_path, limit_s=300)
    assert done.returncode == 0, f"{strategy}: {done.stderr}"
    (new,) = set(folders(tmp_path)) - before
    metrics: Any = read_json(RunDir(new).metrics)
    return tuple(metrics[k] for k in ("train_loss_first", "train_loss_last", "eval_loss_first", "eval_loss"))


@pytest.mark.parametrize(
    ("example", "more", "rel"),
    [
        ("demo.yaml", {"adapter.dropout": "0.1", "eval.samples": "2"}, 1e-4),
        ("demo.yaml", {**WHOLE, "eval.samples": "0"}, 1e-4),
        ("demo.yaml", {**LESS, "eval.samples": "0"}, 2e-2),
        ("glm-tiny-fsdp-lora.yaml", {}, 2e-2),
    ],
    ids=["lora", "whole", "bfloat16", "experts"],
)
def test_an_example_learns_the_same_under_every_strategy(
    tmp_path: Path, example: str, more: dict[str, str], rel: float
) -> None:
    wanted = figures(tmp_path, example, "pytorch_ddp", more)
    assert wanted[1] < wanted[0] and wanted[3] < wanted[2]
    others = [name for name in shared_strategies() if name != "pytorch_ddp"]
    wrong = {n: got for n in others if (got := figures(tmp_path, example, n, more)) != pytest.approx(wanted, rel=rel)}
    assert not wrong, f"wanted {wanted}"
