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


ON_HOST = ["zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"]


@pytest.mark.parametrize(
    ("names", "how"),
    [
        (["pytorch_ddp", "zero3", "pytorch_zero3"], {"moe": True, "lora": True}),
        (ON_HOST, {"options": {"offload": "optimizer"}}),
        (["pytorch_zero2", "pytorch_zero3"], {"options": {"offload": "all"}, "lora": True}),
    ],
    ids=["experts", "moments_on_host", "weights_on_host"],
)
def test_adapters_of_experts_and_what_is_on_the_host_too(tmp_path: Path, names: list[str], how: dict[str, object]) -> None:
    run_ranks("save_shards", 2, tmp_path, folder=tmp_path, names=names, how=how)
    assert run_ranks("load_shards", 3, tmp_path, folder=tmp_path, names=names, sources=names, how=how)[0] == []
