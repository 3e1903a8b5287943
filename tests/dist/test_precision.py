"""Mixed precision under every strategy and engine, against float64 and plain autocast; and what would be seen if it were not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import run_ranks, shared_strategies

pytestmark = pytest.mark.dist
NAMES = shared_strategies()
LIMIT = 1.25
EXPERTS = ("pytorch_ddp", "zero1", "zero3", "pytorch_zero2", "pytorch_zero3")


def check(tmp_path: Path, world: int, pairs: list[tuple[str, str]]) -> None:
    found = run_ranks("precisions", world, tmp_path, 280, folder=tmp_path, pairs=pairs)[0]
    assert [tuple(one[:2]) for one in found] == pairs
    wrong = {
        (name, form): [round(o / l, 2) for o, l in zip(ours, limits, strict=True)]
        for name, form, ours, limits in found
        if any(o > LIMIT * l for o, l in zip(ours, limits, strict=True))
    }
    assert not wrong, wrong


@pytest.mark.parametrize("world", [2, 3])
def test_every_strategy_is_as_precise_as_plain_autocast(tmp_path: Path, world: int) -> None:
    check(tmp_path, world, [(name, "whole") for name in NAMES])
