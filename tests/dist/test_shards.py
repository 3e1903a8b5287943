"""State in parts: written by some ranks under one strategy, read by others under another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import run_ranks

pytestmark = pytest.mark.dist
NAMES = ["pytorch_ddp", "zero2", "zero3", "pytorch_zero1", "pytorch_zero3"]


@pytest.mark.parametrize("how", [{"config": {"intermediate_size": 61}}, {"lora": True}], ids=["all", "lora"])
def test_every_strategy_reads_what_every_other_wrote_at_another_number_of_ranks(tmp_path: Path, how: dict[str, object]) -> None:
    run_ranks("save_shards", 2, tmp_path, folder=tmp_path, names=NAMES, how=how)
    for name in NAMES:
        assert sorted(p.name[:11] for p in (tmp_path / name).iterdir()) == ["shard-00001", "shard-00002"]
    assert run_ranks("load_shards", 3, tmp_path, folder=tmp_path, names=NAMES, sources=NAMES, how=how)[0] == []
