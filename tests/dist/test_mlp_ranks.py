"""Perceptrons on noise under every strategy: the weights of one process, its evaluation, and a checkpoint that gives them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import run_ranks, shared_strategies

pytestmark = pytest.mark.dist
USUAL = ("pytorch_ddp", "zero3", "pytorch_zero3", "deepspeed_zero1", "deepspeed_zero3")


@pytest.mark.parametrize("which", ["usual", pytest.param("others", marks=pytest.mark.full)])
def test_every_strategy_trains_a_perceptron(which: str, tmp_path: Path) -> None:
    names = [n for n in shared_strategies() if (n in USUAL) == (which == "usual")]
    cases = [(n, "blocks" if i % 2 else "wide", "float32") for i, n in enumerate(names)]
    results = run_ranks("every_strategy", 2, tmp_path, module="mlps", folder=tmp_path, cases=cases)
    for one, both in zip(results[0], results[1], strict=True):
        assert one["files"] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert one["error"] < 1e-5, one
        assert one["loss"] == pytest.approx(one["wanted"], rel=1e-5)
        assert one["loss"] == both["loss"] and one["same"] and both["same"], one


@pytest.mark.full
def test_in_bfloat16(tmp_path: Path) -> None:
    names = [
        n
        for n in ("pytorch_ddp", "pytorch_zero3", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
        if n in shared_strategies()
    ]
    results = run_ranks(
        "every_strategy", 2, tmp_path, module="mlps", folder=tmp_path, cases=[(n, "blocks", "bfloat16") for n in names]
    )
    for one in results[0]:
        assert one["same"], one
        assert one["loss"] == pytest.approx(one["wanted"], rel=2e-2), (
            one
        )  # weights of 8 bits; DeepSpeed has masters in float32
