"""Every figure of a comparison has its range, and tables, CSV and page show it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from allranks.analysis.trace.rank import RankResult, read_rank
from allranks.experiments.compare import trace_figures, write_comparison
from allranks.experiments.gates import evaluate_strategies, find_spread
from allranks.experiments.output import csv_text, file_links, terminal_tables
from allranks.rundir.paths import RunDir
from tests.unit.test_compare import WINDOW, measured, rank

PARTS = ("step_time_s", "forward_s", "backward_s", "optimizer_s")


def repeats(*step_s: float, share: float = 0.5) -> list[dict[str, Any]]:
    """Timed repeats whose steps all take the given seconds."""
    work = rank()["repeats"][0]
    return [{**work, **{p: [s * (1.0 if p == "step_time_s" else share)] * 3 for p in PARTS}} for s in step_s]


def three_repeats(scale: float = 1.0) -> dict[str, Any]:
    """Two ranks: repeats of 0.1, 0.3 and 0.2 s on the first, 0.1 s longer on the second, which also holds and sends
    more."""
    first, second = rank(), rank()
    first["repeats"] = repeats(*(t * scale for t in (0.1, 0.3, 0.2)))
    second["repeats"] = repeats(*(t * scale for t in (0.2, 0.4, 0.3)))
    step = {k: v for k, v in WINDOW.items() if k != "collectives"}
    first["verified"]["window"]["steps"] = [
        {**step, "exposed_comm_s": 0.002, "overlapped_comm_s": 0.018},
        {**step, "exposed_comm_s": 0.018, "overlapped_comm_s": 0.002},
    ]
    second["verified"]["memory"] = {**second["verified"]["memory"], "peak_bytes": 70, "optimizer_bytes": 16}
    return measured([{"zero1": first}, {"zero1": second}], repeats=3)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    row = evaluate_strategies(found)[0]
    assert row.figures is not None, row.reasons
    return row.figures


def test_timed_figures_have_the_range_of_the_repeats() -> None:
    known = figures(three_repeats())
    steps = find_spread(known, "step_time_s")
    assert steps is not None and steps.samples == 3
    assert (steps.value, steps.min, steps.max) == pytest.approx((0.25, 0.15, 0.35))
    backward = find_spread(known, "backward_s")
    assert backward is not None and (backward.min, backward.max) == pytest.approx((0.075, 0.175))
    speed = find_spread(known, "tokens_per_s")
    assert speed is not None
    # the slowest rank's seconds
    assert (speed.value, speed.min, speed.max) == pytest.approx((120 / 0.9, 120 / 1.2, 120 / 0.6))
    assert known["tokens_per_s"] == {"median": speed.value, "min": speed.min, "max": speed.max}


def test_profiled_figures_have_the_range_of_ranks_and_steps() -> None:
    known = figures(three_repeats())
    exposed, share, hidden = (find_spread(known, n) for n in ("exposed_comm_s", "exposed_share", "overlap"))
    assert exposed and share and hidden
    assert (exposed.min, exposed.max, exposed.samples) == pytest.approx((0.002, 0.018, 3))
    assert (share.value, share.min, share.max) == pytest.approx((0.1, 0.02, 0.18))
    assert (hidden.value, hidden.min, hidden.max) == pytest.approx((0.5, 0.1, 0.9))


def test_memory_has_the_range_of_the_ranks() -> None:
    known = figures(three_repeats())
    peak, state = find_spread(known, "peak_bytes"), find_spread(known, "state_bytes")
    assert peak and state
    assert (peak.value, peak.min, peak.max) == (90, 70, 90)
    assert (state.value, state.min, state.max) == (40, 36, 40)


def test_traces_give_the_times_of_each_step(tmp_path: Path) -> None:
    """Two steps of 100 and 200 us: the first waits 30 us for an all-reduce that the second hides."""

    def event(name: str, cat: str, tid: int, ts: float, dur: float) -> dict[str, Any]:
        args = {"Input Dims": [[10]], "Input type": ["float"]} if "all" in name else {}
        return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    events = [
        event("ProfilerStep#1", "user_annotation", 1, 0, 100), event("aten::mm", "cpu_op", 1, 0, 40),
        event("gloo:all_reduce", "user_annotation", 2, 50, 30),
        event("ProfilerStep#2", "user_annotation", 1, 100, 200), event("aten::mm", "cpu_op", 1, 100, 180),
        event("gloo:all_reduce", "user_annotation", 2, 150, 30),
    ]  # fmt: skip
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    result = read_rank(path)
    assert isinstance(result, RankResult)
    found = trace_figures(result)
    assert [step["step_s"] for step in found["steps"]] == pytest.approx([100e-6, 200e-6])
    assert [step["exposed_comm_s"] for step in found["steps"]] == pytest.approx([30e-6, 0.0])
    assert [step["overlapped_comm_s"] for step in found["steps"]] == pytest.approx([0.0, 30e-6])
    assert found["step_s"] == pytest.approx(150e-6) and found["exposed_comm_s"] == pytest.approx(15e-6)


def test_a_profile_that_contradicts_itself_has_no_shares() -> None:
    found = three_repeats()
    for one in found["ranks"]:
        one["zero1"]["verified"]["window"]["exposed_comm_s"] = 0.2
    known = figures(found)
    assert find_spread(known, "exposed_share") is None and find_spread(known, "idle_share") is not None
    parts = [table for table, _ in terminal_tables(evaluate_strategies(found), found)][1]
    assert str(next(iter(parts.columns[4].cells))) == "-"


def printed(table: Table, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_csv_and_json_have_the_ranges_and_all_earlier_columns(tmp_path: Path) -> None:
    found = three_repeats()
    for r in found["ranks"]:
        r["broken"] = {"failed": "rank 1: RuntimeError: no", "verified": {}, "repeats": []}
    write_comparison(RunDir(tmp_path), found)
    good, bad = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    assert good["spread"]["step_time_s"] == pytest.approx({"value": 0.25, "min": 0.15, "max": 0.35, "samples": 3})
    assert good["forward_s"] == pytest.approx(0.125) and good["step_time_s"].keys() == {"median", "p90"}
    assert bad["spread"] is None and bad["tokens_per_s"] is None
    good, bad = csv.DictReader(io.StringIO((tmp_path / "comparison.csv").read_text()))
    assert float(good["step_time_s_min"]) == pytest.approx(0.15) and float(good["overlap_max"]) == pytest.approx(0.9)
    assert good["peak_bytes_min"] == "70" and bad["peak_bytes_min"] == "" and "RuntimeError" in bad["reasons"]
    assert None not in good and None not in bad, "every line has as many cells as the head"
    earlier = (
        "tokens_per_s tokens_per_s_min tokens_per_s_max step_time_s forward_s backward_s optimizer_s compute_s comm_s "
        "exposed_comm_s idle_s overlap"
    )
    assert good.keys() >= {*earlier.split(), "weights_bytes", "state_bytes", "peak_bytes", "collectives", "reasons"}
    assert csv_text([]).count("\n") == 1


def test_a_figure_that_is_not_known_leaves_its_cells_empty() -> None:
    alone = {**WINDOW, "comm_s": 0.0, "overlapped_comm_s": 0.0, "exposed_comm_s": 0.0, "collectives": []}
    rows = evaluate_strategies(measured([{"zero1": rank(window=alone)} for _ in range(2)]))
    (line,) = csv.DictReader(io.StringIO(csv_text(rows)))
    assert line["overlap"] == line["overlap_min"] == line["overlap_max"] == "" and line["reasons"] == ""
    assert line["peak_bytes_min"] == line["peak_bytes_max"] == "90"


class Page(HTMLParser):
    """Reads the bars, the ranges in them, and the links of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.bars: list[float] = []
        self.lines: list[tuple[float, float]] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        numbers = [float(n) for n in re.findall(r"([0-9.]+)%", known.get("style") or "")]
        if tag == "b":
            self.lines.append((numbers[0], numbers[1]))
        elif tag == "i" and numbers:
            self.bars.append(numbers[0])
        elif tag == "a":
            self.links += [link for link in [known["href"] or ""] if not link.startswith("#")]


def page_of(root: Path, found: dict[str, Any]) -> str:
    write_comparison(RunDir(root), found)
    return (root / "comparison.html").read_text()


def test_a_name_cannot_lead_out_of_the_page(tmp_path: Path) -> None:
    name = "javascript:alert(1)"
    (tmp_path / "compare" / name).mkdir(parents=True)
    links = file_links(tmp_path, [name])
    assert links is not None and links.links[-1].href == "compare/javascript%3Aalert%281%29/"
