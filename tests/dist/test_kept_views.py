"""Checkpoints that follow each other use the views of the one before, and each holds the state of its moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(420)]
UNUSED: dict[str, Any] = {"extra": "sometimes", "late": True}
FIND: dict[str, Any] = {**UNUSED, "options": {"find_unused_parameters": True}}
BUFFERS: dict[str, Any] = {"lora": True, "buffers": True}
MORE = [
    ("pytorch_zero1", FIND), ("hf_trainer", FIND), ("pytorch_zero2", {"options": {"offload": "optimizer"}}), ("pytorch_zero1", BUFFERS),
    ("pytorch_zero3", BUFFERS), ("zero1", {"tied": True}), ("zero2", {"dtype": "bfloat16"}),
]  # fmt: skip


def ranks(case: str, world: int, folder: Path, **args: Any) -> list[Any]:
    return run_ranks(case, world, folder, limit_s=300, module="view_cases", folder=folder, **args)


@pytest.mark.parametrize(
    "cases",
    [[("pytorch_ddp", FIND), ("zero3", BUFFERS)], pytest.param(MORE, marks=pytest.mark.full)],
    ids=["few", "more"],
)
def test_each_checkpoint_holds_the_state_of_its_moment(tmp_path: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    for found in ranks("in_turns", 2, tmp_path, cases=cases):
        for one in found:
            assert one["wrong"] == [], (one["name"], one["how"])
            late = one["keys"][-1] > one["keys"][0]
            assert late == (one["name"] in ("pytorch_ddp", "pytorch_zero1", "hf_trainer") and "late" in one["how"])
            if "buffers" not in one["how"]:  # of which one is elsewhere after each step
                assert one["made"] in ([True, False], [True, False, True] if late else []), (one["name"], one["made"])


def test_a_rank_without_optimizer_state_waits_for_its_copy(tmp_path: Path) -> None:
    found = ranks("without_state", 2, tmp_path)
    assert [one["ranges"] for one in found] == [1, 0]
    for one in found:
        assert one["apart"] == [0, 0]
        assert one["moved"] > 0
