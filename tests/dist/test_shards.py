"""State in parts: written by some ranks under one strategy, read by others under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.harness import run_ranks
from tests.dist.plants import needs_deepspeed

pytestmark = pytest.mark.dist
NAMES = ["pytorch_ddp", "zero2", "zero3", "pytorch_zero1", "pytorch_zero3", "hf_trainer"]
DEEPSPEED = ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]
OTHERS = ["pytorch_ddp", "zero3", "pytorch_zero3"]
ODD = {"config": {"intermediate_size": 61}}


def loaded(
    tmp_path: Path, how: dict[str, Any], ranks: int, names: list[str], sources: list[str], **more: Any
) -> list[Any]:
    """(strategy, what wrote, name) of all that differs on any rank."""
    each = run_ranks("load_shards", ranks, tmp_path, names=names, sources=sources, how=how, **more)
    return sorted({tuple(w) for one in each for w in one})


@pytest.mark.parametrize("how", [ODD, {"lora": True}], ids=["all", "lora"])
def test_every_strategy_reads_what_every_other_wrote_at_another_number_of_ranks(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    run_ranks("save_shards", 2, tmp_path, names=NAMES, how=how)
    for name in NAMES:
        assert sorted(p.name[:11] for p in (tmp_path / name).iterdir()) == ["shard-00001", "shard-00002"]
    assert loaded(tmp_path, how, 3, NAMES, NAMES) == []


BF16 = {**ODD, "dtype": "bfloat16"}
full = pytest.mark.full


@needs_deepspeed
@pytest.mark.parametrize(
    ("how", "wrote", "reads"),
    [
        pytest.param(ODD, 2, 3, id="all-2-3"),
        pytest.param({"lora": True}, 3, 2, id="lora-3-2"),
        pytest.param(BF16, 2, 3, id="bf16-2-3", marks=full),
    ],
)
def test_deepspeed_and_others_read_what_each_other_wrote(
    tmp_path: Path, how: dict[str, Any], wrote: int, reads: int
) -> None:
    run_ranks("save_shards", wrote, tmp_path, names=[*DEEPSPEED, *OTHERS], how=how)
    assert loaded(tmp_path, how, reads, OTHERS, DEEPSPEED) == []
    assert loaded(tmp_path, how, reads, DEEPSPEED, [*OTHERS, *DEEPSPEED]) == []


WHOLE = {**ODD, "config_of_deepspeed": {"zero_optimization": {}}}  # stage 3 keeps small weights whole, which all are


@needs_deepspeed
def test_what_was_there_before_does_not_show_not_even_in_weights_that_stage_3_keeps_whole(tmp_path: Path) -> None:
    run_ranks("save_shards", 2, tmp_path, names=["pytorch_ddp", "deepspeed_zero3"], how=WHOLE)
    assert (
        loaded(
            tmp_path, WHOLE, 3, ["deepspeed_zero2", "deepspeed_zero3"], ["pytorch_ddp", "deepspeed_zero3"], trained=True
        )
        == []
    )


@needs_deepspeed
@pytest.mark.parametrize(
    ("plant", "name", "how"),
    [("copies_not_filled", "deepspeed_zero2", BF16), ("whole_weights_kept", "deepspeed_zero3", WHOLE)],
)
def test_a_bug_in_reading_would_be_seen(tmp_path: Path, plant: str, name: str, how: dict[str, Any]) -> None:
    run_ranks("save_shards", 2, tmp_path, names=["pytorch_ddp"], how=how)
    assert loaded(tmp_path, how, 3, [name], ["pytorch_ddp"], plant=plant, trained=True)


@needs_deepspeed
def test_padding_taken_for_weights_would_be_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="with a gap or an overlap"):
        run_ranks("save_shards", 3, tmp_path, names=["deepspeed_zero3"], how=ODD, plant="padding_taken_for_weights")


ON_HOST = ["zero1", "zero3", "pytorch_zero3"]


@pytest.mark.parametrize(
    ("names", "how"),
    [
        (["pytorch_ddp", "zero3", "pytorch_zero3"], {"moe": True, "lora": True}),
        (ON_HOST, {"options": {"offload": "optimizer"}}),
        pytest.param(["pytorch_zero2", "pytorch_zero3"], {"options": {"offload": "all"}, "lora": True}, marks=full),
    ],
    ids=["experts", "moments_on_host", "weights_on_host"],
)
def test_adapters_of_experts_and_what_is_on_the_host_too(
    tmp_path: Path, names: list[str], how: dict[str, object]
) -> None:
    run_ranks("save_shards", 2, tmp_path, names=names, how=how)
    assert loaded(tmp_path, how, 3, names, names) == []


@pytest.mark.parametrize(
    ("how", "ranks"), [pytest.param(ODD, 2, id="all-2"), pytest.param({"lora": True}, 4, id="lora-4", marks=full)]
)
def test_what_two_nodes_with_a_copy_each_write_is_written_once_and_read_by_others(
    tmp_path: Path, how: dict[str, object], ranks: int
) -> None:
    copies = {**how, "options": {"replicate": "nodes", **({"adapters": "sharded"} if "lora" in how else {})}}
    names, nodes = ["pytorch_zero3"], {"ranks_per_node": ranks // 2}
    run_ranks("save_shards", ranks, tmp_path, names=names, how=copies, **nodes)
    written = sum(t.numel() for p in (tmp_path / "pytorch_zero3").iterdir() for t in load_file(p).values())
    state = torch.load(tmp_path / "pytorch_zero3.pt", weights_only=True)
    assert written == sum(t.numel() for t in state.values())
    assert loaded(tmp_path, how, 3, ["pytorch_ddp", "pytorch_zero3"], names) == []
    assert loaded(tmp_path, copies, ranks, names, names, **nodes) == []
