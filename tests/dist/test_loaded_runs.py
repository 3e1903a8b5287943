"""Whole runs from a model's folder: loaded in parts, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from tests.dist.harness import rows_spec, step_events, train, weights_of
from tests.dist.making import model_of
from tests.dist.test_loading import saved

pytestmark = pytest.mark.dist


def spec_of(tmp_path: Path, folder: Path, strategy: str, lora: bool) -> dict[str, Any]:
    return rows_spec(
        tmp_path, name=strategy, model={"name": str(folder), "config": {}}, strategy={"name": strategy},
        adapter={"type": "lora", "r": 4} if lora else {"type": "none"}, train={"max_steps": 3},
        data={"max_length": 256},  # a token is a byte here
    )  # fmt: skip


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_in_parts_from_a_folder_equals_a_plain_one(tmp_path: Path, lora: bool) -> None:
    folder = saved(tmp_path / "model")
    model_of()[1].save_pretrained(folder)
    runs: dict[str, RunDir] = {}
    for strategy in ("pytorch_ddp", "pytorch_zero3", "zero3"):
        _, runs[strategy] = train(tmp_path, spec_of(tmp_path, folder, strategy, lora), code=0)
    plain = weights_of(runs["pytorch_ddp"], 3)
    for strategy, how in (("pytorch_ddp", "whole"), ("pytorch_zero3", "parts"), ("zero3", "parts")):
        run = runs[strategy]
        loads = [next(e for e in read_events(run.events_of(rank)) if e["event"] == "load") for rank in range(2)]
        assert [e["how"] for e in loads] == [how, how]
        (log,) = (file.read_text() for file in run.logs_of(1).glob("*.rank0.log"))
        assert all(e["read_bytes"] > 50_000 and e["readers"] == "every rank" for e in loads)
        assert "loading: every rank read the weight files, because all ranks see the same files" in log
        ours = weights_of(run, 3)
        assert ours.keys() == plain.keys()
        assert max(float((ours[k] - plain[k]).abs().max()) for k in ours) < 1e-5
        assert step_events(run)[0]["loss"] == pytest.approx(step_events(runs["pytorch_ddp"])[0]["loss"], rel=1e-5)
