"""The load of experts and what was chosen on the nodes, in the report and while a run is followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.report import page as page_module
from allranks.analysis.report.html import MAX_ROWS
from allranks.analysis.report.page import write_report
from tests.unit.report_runs import complete_run
from tests.unit.test_report import Page


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "plotly_source", lambda: "0")


def page_of(folder: Path, load: Any, *events: dict[str, Any]) -> str:
    run = complete_run(folder)
    metrics = json.loads(run.metrics.read_text())
    run.metrics.write_text(json.dumps({**metrics, "expert_load": load}))
    with run.events_of(0).open("a") as file:
        for event in events:
            file.write(json.dumps({"time": 0, "rank": 0, **event}) + "\n")
    return Page(write_report(run)).text


def layer(number: int, greatest: float, **other: Any) -> dict[str, Any]:
    return {"layer": f"{number}", "min": 0.0, "mean": 0.125, "max": greatest, "most": 7, "unused": 3, **other}


def test_the_least_even_blocks_come_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    layers = [layer(i, 0.2 + i / 100) for i in range(1, MAX_ROWS + 5)]
    text = page_of(tmp_path, {"experts": 8, "layers": layers})
    assert "Expert load block smallest even largest by expert unused 20 0.0 % 12.5 % 40.0 % 7 3 19" in text
    assert "4 more even blocks are not shown." in text


@pytest.mark.parametrize(
    "load", [None, "x", [], {"layers": None}, {"layers": [3, None]}, {"layers": [layer(1, float("nan"), most="<b>")]}]
)
def test_a_load_that_is_damaged_or_not_there_breaks_nothing(tmp_path: Path, load: Any) -> None:
    text = page_of(tmp_path, load)
    assert ("Expert load" in text) == (isinstance(load, dict) and isinstance((load["layers"] or [0])[0], dict))
    assert "succeeded" in text


def test_what_was_chosen_on_the_nodes_is_told(tmp_path: Path) -> None:
    event = {"event": "remark", "what": "strategy", "message": "adapters: whole <b>everywhere</b>"}
    assert "Adapters: whole <b>everywhere</b>." in page_of(tmp_path, None, event, {"event": "remark"})
