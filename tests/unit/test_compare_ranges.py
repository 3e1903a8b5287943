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
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from allranks.analysis.report.html import Link, Text
from allranks.analysis.report.html import Table as HtmlTable
from allranks.analysis.trace.rank import RankResult, read_rank
from allranks.cli.compare import FIRST_REMOVED
from allranks.cli.compare import _show as show_comparison
from allranks.cli.console import SafeConsole, narrow_table
from allranks.experiments.compare import trace_figures, write_comparison
from allranks.experiments.gates import ComparisonRow, Spread, evaluate_strategies, find_spread, spread_of
from allranks.experiments.output import (
    csv_text,
    file_blocks,
    memory_table,
    number_text,
    parts_table,
    range_text,
    speed_table,
    traffic_table,
)
from allranks.rundir.paths import RunDir
from allranks.spec.strategies import REGISTRY
from allranks.utils.text import format_bytes
from tests.sampling import examples
from tests.unit.test_compare import WINDOW, measured, rank
from tests.unit.test_machine_load import load

PARTS = ("step_time_s", "forward_s", "backward_s", "optimizer_s")


def repeats(*step_s: float, share: float = 0.5) -> list[dict[str, Any]]:
    """Timed repeats whose steps all take the given seconds."""
    work = rank()["repeats"][0]
    return [{**work, **{p: [s * (1.0 if p == "step_time_s" else share)] * 3 for p in PARTS}} for s in step_s]


def three_repeats(scale: float = 1.0) -> dict[str, Any]:
    """Two ranks: repeats of 0.1, 0.3 and 0.2 s on the first, 0.1 s longer on the second, which also holds and sends more."""
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
    assert "-" in printed(parts_table(evaluate_strategies(found)))


@settings(max_examples=examples(100), deadline=None)
@given(st.floats(0, 1e12), st.lists(st.floats(0, 1e12), max_size=5))
def test_a_range_includes_its_figure(value: float, values: list[float]) -> None:
    found = spread_of(value, values)
    assert found.min <= found.value <= found.max and all(found.min <= v <= found.max for v in values)


def printed(table: Table, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_no_range_is_shown_where_there_is_none() -> None:
    one = Spread(value=0.1, min=0.1, max=0.1, samples=1)
    assert range_text(one, number_text) == range_text(None, number_text) == ""
    assert range_text(Spread(value=2.0, min=1.99, max=2.0, samples=3), number_text) == "", "too small to be seen"
    assert range_text(Spread(value=2.0, min=2**20, max=2**21, samples=3), format_bytes) == "1.0-2.0 MiB"
    assert range_text(Spread(value=2.0, min=2**10, max=2**21, samples=3), format_bytes) == "1.0 KiB-2.0 MiB"
    found = measured([{"zero1": rank()} for _ in range(2)])
    shown = printed(speed_table(evaluate_strategies(found)))
    assert re.search(r"zero1 +✓ ✓ ✓ +400 +- +100 +-\n", shown.replace(" \n", "\n")), shown


def test_tables_show_each_figure_with_its_range() -> None:
    rows = evaluate_strategies(three_repeats())
    speed = printed(speed_table(rows))
    assert re.search(r"zero1 +✓ ✓ ✓ +133 +100-200 +250 +150-350", speed), speed
    parts = printed(parts_table(rows))
    assert re.search(r"zero1 +125 +125 +125 +10% +20% +50%", parts), parts
    assert re.search(r"\n +75\.0-175 +75\.0-175 +75\.0-175 +2-18% +10-90%", parts), parts
    assert re.search(r"zero1 .* 90 B +70-90 B", printed(memory_table(rows, "zero1")))
    assert "step s" in printed(speed_table(evaluate_strategies(three_repeats(scale=100))))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 3e4])
def test_tables_fit_a_terminal_of_80_columns(scale: float) -> None:
    """The longest names, millions of tokens per second, steps of milliseconds to hours, and three digits of MiB."""
    one = three_repeats(scale)["ranks"]
    for r in one:
        v = r["zero1"]["verified"]
        v["memory"] = {k: n * 11 * 2**20 for k, n in v["memory"].items()}
        moved = {"kind": "reduce_scatter", "phase": "after_backward", "count": 1234, "bytes": 999 * 2**20}
        v["expected"], v["measured"] = [moved], [moved]
        for repeat in r["zero1"]["repeats"]:
            repeat["tokens"] = [int(4e6 * scale)] * 3
    names = [name for name in REGISTRY if name != "single"]
    rows = evaluate_strategies(measured([dict.fromkeys(names, r["zero1"]) for r in one], repeats=3))
    for table in (speed_table(rows), parts_table(rows), traffic_table(rows), memory_table(rows, "zero1")):
        narrow, wide = ([line.rstrip() for line in printed(table, w).splitlines()] for w in (80, 200))
        assert narrow == wide, "\n".join(narrow)
        assert narrow_table(table, Console(width=80), FIRST_REMOVED) == []


@pytest.mark.parametrize("width", [70, 60, 40])
def test_below_80_columns_ranges_are_left_out_and_no_number_is_cut(width: int) -> None:
    rows = evaluate_strategies(three_repeats())
    for table in (speed_table(rows), parts_table(rows), traffic_table(rows), memory_table(rows, "zero1")):
        full = printed(table, 200)
        titles = [str(column.header) for column in table.columns]
        removed = narrow_table(table, Console(width=width), FIRST_REMOVED)
        assert table.columns[0].header == "strategy" and len(table.columns) + len(removed) == len(titles)
        lines = printed(table, width).splitlines()
        assert "…" not in "".join(lines) and max(map(len, lines)) <= width
        assert all(word in full for line in lines for word in line.split())
    table = speed_table(rows)
    table.add_row("x" * 30, *["y" * 12] * 5)
    narrow_table(table, Console(width=80), FIRST_REMOVED)
    assert [str(column.header) for column in table.columns] == ["strategy", "gates", "tokens/s", "step ms"]


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
    earlier = "tokens_per_s tokens_per_s_min tokens_per_s_max step_time_s forward_s backward_s optimizer_s compute_s comm_s exposed_comm_s idle_s overlap"
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


def test_charts_draw_ranges_to_scale(tmp_path: Path) -> None:
    page = Page(page_of(tmp_path, three_repeats()))
    # speed: 100 to 200 tokens/s around 133, and the longest is 200
    assert page.lines[0] == pytest.approx((50.0, 50.0)) and page.bars[0] == pytest.approx(100 * 2 / 3, abs=0.01)
    # step: 150 to 350 ms; three parts of 125 ms each, and the bar of the parts is the longest
    assert page.lines[1] == pytest.approx((40.0, 53.333), abs=0.01) and page.bars[1:4] == pytest.approx(
        [33.333] * 3, abs=0.01
    )
    assert page.lines[2] == pytest.approx((90.0, 10.0)), "state of 36 to 40 bytes"
    assert len(page.lines) == 3 and all(left + width <= 100.001 for left, width in page.lines)


def test_the_page_shows_ranges_in_its_tables(tmp_path: Path) -> None:
    html = page_of(tmp_path, three_repeats())
    for text in ("250<small>150 to 350</small>", "50%<small>10 to 90%</small>", "90 B<small>70 to 90 B</small>"):
        assert re.search(f"<td[^>]*>{text}</td>", html), text
    alone = page_of(tmp_path, measured([{"zero1": rank()} for _ in range(2)]))
    assert "<small>" not in alone and "<b " not in alone and "there is one repeat" in alone


def run_folder(root: Path, names: tuple[str, ...], ranks: int = 2) -> None:
    for name in names:
        for part, suffix in (("traces", "json.gz"), ("repeat0", "jsonl"), ("repeat2", "jsonl"), ("repeat10", "jsonl")):
            for r in range(ranks):
                path = root / "compare" / name / part / f"rank{r}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"")
    (root / "compare" / "measured.json").write_text("{}")


def files_of(folder: Path, *strategies: str) -> tuple[Text, HtmlTable]:
    results, files = file_blocks(folder, strategies)
    assert isinstance(results, Text) and isinstance(files, HtmlTable)
    return results, files


def test_the_page_links_what_its_figures_come_from(tmp_path: Path) -> None:
    run_folder(tmp_path, ("zero1",))
    page = Page(page_of(tmp_path, three_repeats()))
    assert all((tmp_path / unquote(link)).exists() for link in page.links), page.links
    assert not any(link.startswith(("/", "file:", "http")) for link in page.links)
    wanted = ["compare/measured.json", "comparison.json", "comparison.csv", "compare/zero1/"]
    wanted += [
        f"compare/zero1/{part}" for part in ("traces/rank1.json.gz", "repeat0/rank0.jsonl", "repeat10/rank1.jsonl")
    ]
    assert set(wanted) <= set(page.links)
    assert files_of(tmp_path, "zero1")[1].columns == ["strategy", "traces", "verified", "repeat 2", "repeat 10"]


def test_many_ranks_have_one_link_and_what_is_missing_has_none(tmp_path: Path) -> None:
    run_folder(tmp_path, ("zero1",), ranks=12)
    results, files = files_of(tmp_path, "zero1", "zero2")
    assert [row[0].links[0].text for row in files.rows] == ["zero1"], "zero2 left nothing"
    assert files.rows[0][1].links == [Link("12 ranks", "compare/zero1/traces/")]
    assert [link.href for link in results.links] == ["compare/measured.json"]


def test_repeats_that_do_not_count_are_told_from_those_that_do(tmp_path: Path) -> None:
    found = three_repeats()
    taken = {"host": "n1", **load(0, 0.0, 0.5)}
    for one in found["ranks"]:
        repeats = one["zero1"]["repeats"]
        repeats += [{**repeats[0], "load": taken}] * 2
    html = page_of(tmp_path, {**found, "repeats": 3})
    assert "3 alternating repeats (up to 2 more where the machine was overloaded)" in html
    assert "2 of 5 repeats are not counted" in html and "min to max of the 3 repeats that count" in html
    assert 'data-is="equal work"' in html and 'href="#gates"' in html, "the names of cells on a phone, and navigation"


def test_a_name_cannot_lead_out_of_the_page(tmp_path: Path) -> None:
    name = "javascript:alert(1)"
    run_folder(tmp_path, (name,))
    hrefs = [row[0].links[0].href for row in files_of(tmp_path, name)[1].rows]
    assert hrefs == ["compare/javascript%3Aalert%281%29/"]


def test_rows_without_figures_have_no_range() -> None:
    found = measured([{"zero1": rank(error=1.0)} for _ in range(2)])
    rows: list[ComparisonRow] = evaluate_strategies(found)
    assert (
        rows[0].figures is None and "zero1" in printed(speed_table(rows)) and "zero1" not in printed(parts_table(rows))
    )


@pytest.mark.parametrize(("count", "words"), [(3, "min-max of 3 repeats"), (1, "one repeat has no range")])
def test_the_terminal_output_says_what_the_ranges_are_of(tmp_path: Path, count: int, words: str) -> None:
    found = three_repeats()
    for one in found["ranks"]:
        one["zero1"]["repeats"] = one["zero1"]["repeats"][:count]
    for one in found["ranks"]:
        one["zero1"]["verified"]["error"] = 0.0  # gives a remark, which follows the tables
    done = write_comparison(RunDir(tmp_path), {**found, "repeats": count})

    def shown(width: int) -> list[str]:
        out = io.StringIO()
        show_comparison(SafeConsole(width=width, file=out), done)
        return [line.rstrip() for line in out.getvalue().partition("zero1: ")[0].splitlines()]

    assert shown(80) == shown(200), "tables and notes fit 80 columns"
    assert words in "\n".join(shown(80))
    titles = ["Speed", "Parts of a step, ms", "Traffic per step", "Memory per rank"]
    assert [line for line in shown(80) if line in titles] == titles
