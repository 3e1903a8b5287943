"""State in parts: written by some ranks under one strategy, read by others under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks
from tests.dist.plants import HAVE_DEEPSPEED

pytestmark = pytest.mark.dist
NAMES = ["pytorch_ddp", "zero2", "zero3", "pytorch_zero1", "pytorch_zero3"]
DEEPSPEED = ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]
OTHERS = ["pytorch_ddp", "zero3", "pytorch_zero3"]
ODD = {"config": {"intermediate_size": 61}}
needs_deepspeed = pytest.mark.skipif(not HAVE_DEEPSPEED, reason="deepspeed is not installed: pip install 'allranks[deepspeed]'")


def save_then_load(tmp_path: Path, how: dict[str, Any], first: tuple[int, list[str]], then: tuple[int, list[str]], plant: str = "") -> list[Any]:
    """(strategy, what wrote, name) of all that differs on any rank."""
    (wrote, sources), (reads, names) = first, then
    run_ranks("save_shards", wrote, tmp_path, folder=tmp_path, names=sources, how=how, plant=plant)
    for name in sources:
        found = sorted(p.name[:11] for p in (tmp_path / name).iterdir())
        assert found == [f"shard-{r + 1:05}" for r in range(wrote)]
    each = run_ranks("load_shards", reads, tmp_path, folder=tmp_path, names=names, sources=sources, how=how, plant=plant)
    return sorted({tuple(w) for one in each for w in one})


@pytest.mark.parametrize("how", [ODD, {"lora": True}], ids=["all", "lora"])
def test_every_strategy_reads_what_every_other_wrote_at_another_number_of_ranks(tmp_path: Path, how: dict[str, Any]) -> None:
    assert save_then_load(tmp_path, how, (2, NAMES), (3, NAMES)) == []


@needs_deepspeed
@pytest.mark.parametrize("how", [ODD, {"lora": True}, {**ODD, "dtype": "bfloat16"}], ids=["all", "lora", "bf16"])
@pytest.mark.parametrize(("wrote", "reads"), [(2, 3), (3, 2)])
def test_others_read_what_deepspeed_wrote(tmp_path: Path, how: dict[str, Any], wrote: int, reads: int) -> None:
    assert save_then_load(tmp_path, how, (wrote, DEEPSPEED), (reads, OTHERS)) == []


@needs_deepspeed
@pytest.mark.parametrize("how", [ODD, {"lora": True}, {**ODD, "dtype": "bfloat16"}], ids=["all", "lora", "bf16"])
@pytest.mark.parametrize(("wrote", "reads"), [(2, 3), (3, 2)])
def test_deepspeed_reads_what_it_and_others_wrote(tmp_path: Path, how: dict[str, Any], wrote: int, reads: int) -> None:
    assert save_then_load(tmp_path, how, (wrote, [*OTHERS, *DEEPSPEED]), (reads, DEEPSPEED)) == []
