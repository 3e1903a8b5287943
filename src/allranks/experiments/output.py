"""Show a comparison: tables of 80 columns in a terminal, CSV, and an offline page with links to the source files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from allranks.analysis.report import html
from allranks.analysis.report.html import Cell, Link, Section, long_cell, number_cell
from allranks.experiments.gates import PROFILED, TIMED, ComparisonRow, Spread, find_spread, load_figures
from allranks.utils.palette import ACTIVITY_COLOURS, PHASE_COLOURS, STATE_COLOURS
from allranks.utils.text import csv_cell, format_bytes

Json = dict[str, Any]
Format = Callable[[float], str]
Columns = dict[str, tuple[str, Format]]
"""Figures by name, each with its heading and its format."""
Parts = Sequence[tuple[str, str, str]]
PHASE_NAMES = {"forward": "in fwd", "backward": "in bwd", "after_backward": "after bwd"}
STATE_KEYS = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
LONG_S = 10.0
"""From here on times are shown in seconds."""
TIMED_COLUMNS = ("tokens_per_s", *TIMED)
PROFILED_COLUMNS = ("profiled_step_s", "comm_s", "overlap", "exposed_share", "idle_share")
MEMORY_COLUMNS = (*STATE_KEYS, "state_bytes", "peak_bytes")


def figure_columns(rows: Sequence[ComparisonRow]) -> Columns:
    """Return the columns of all figures; times have one unit in all rows."""
    longest = max((s.max for r in rows if r.figures and (s := find_spread(r.figures, "step_time_s"))), default=0.0)
    scale, unit = (1.0, "s") if longest >= LONG_S else (1e-3, "ms")

    def time(seconds: float) -> str:
        value = seconds / scale
        return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"

    return {
        "tokens_per_s": ("tokens/s", "{:,.0f}".format),
        "step_time_s": (f"step {unit}", time),
        "forward_s": ("forward", time),
        "backward_s": ("backward", time),
        "optimizer_s": ("optimizer", time),
        "profiled_step_s": (f"profiled step {unit}", time),
        "comm_s": ("communication", time),
        "overlap": ("overlap", "{:.0%}".format),
        "exposed_share": ("exposed", "{:.0%}".format),
        "idle_share": ("idle", "{:.0%}".format),
        "weights_bytes": ("weights", format_bytes),
        "gradients_bytes": ("gradients", format_bytes),
        "optimizer_bytes": ("optimizer", format_bytes),
        "state_bytes": ("sum", format_bytes),
        "peak_bytes": ("peak", format_bytes),
    }


def range_text(spread: Spread, text: Format, between: str = "-") -> str:
    """Return min and max of a figure, the unit once; empty if they look the same."""
    low, high = text(spread.min), text(spread.max)
    if low == high:
        return ""
    unit = high.lstrip("0123456789.,")
    return f"{low.removesuffix(unit) if unit else low}{between}{high}"


def terminal_tables(rows: list[ComparisonRow], measured: Json) -> Iterator[tuple[Table, str]]:
    """Return the tables of a terminal, each with a note; below each figure is its range."""
    good, columns = [r for r in rows if r.figures], figure_columns(rows)
    number = counted_repeats_text(measured, rows)
    ranges = f"below: min-max of {number} repeats" if number != "1" else "one repeat has no range"
    speed = _terminal_table("Speed", columns, ("tokens_per_s", "step_time_s"), rows, gates=True)
    yield speed, f"gates: parity, mechanism, equal work; {ranges}"
    parts = ("forward_s", "backward_s", "optimizer_s", "exposed_share", "idle_share", "overlap")
    title = "Parts of a step, " + columns["step_time_s"][0].removeprefix("step ")
    yield _terminal_table(title, columns, parts, good), f"{ranges}; exposed, idle, overlap: of ranks and profiled steps"
    yield _traffic_table(good), ""
    memory = _terminal_table("Memory per rank", columns, (*STATE_KEYS, "peak_bytes"), good)
    yield memory, "rank with most; below: range of the ranks"


def _terminal_table(
    title: str, columns: Columns, names: Sequence[str], rows: list[ComparisonRow], *, gates: bool = False
) -> Table:
    table = _plain_table(title, ("strategy", "gates")[: 1 + gates], [columns[name][0] for name in names])
    for row in rows:
        passed = (row.gates.parity, row.gates.mechanism, row.gates.equal_work)
        marks = [" ".join("✓" if ok else "✗" for ok in passed)] * gates
        table.add_row(row.strategy, *marks, *(_stacked(row.figures, name, columns[name][1]) for name in names))
    return table


def _plain_table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _stacked(figures: Json | None, name: str, text: Format) -> Text:
    spread = find_spread(figures, name) if figures else None
    if spread is None:
        return Text("-")
    between = range_text(spread, text)
    return Text(text(spread.value)).append(f"\n{between}" if between else "", style="dim")


def _traffic_table(good: list[ComparisonRow]) -> Table:
    table = _plain_table("Traffic per step", ("strategy", "collectives"), ("bytes", "formula"))
    for row in good:
        kinds = row.figures["collectives"] if row.figures else []
        theory = {c["kind"]: c["theory_bytes_of_kind"] or 0 for c in kinds}
        names = [f"{c['count']:g} {c['kind']} {PHASE_NAMES.get(c['phase'], 'in ' + c['phase'])}" for c in kinds]
        sums = (sum(c["bytes"] for c in kinds), sum(theory.values()))
        table.add_row(row.strategy, "\n".join(names) or "none", *map(format_bytes, sums))
    return table


def csv_text(rows: list[ComparisonRow]) -> str:
    """Return one line per strategy; units in the names, empty without figures; ranges as ``_min`` and ``_max``."""
    out = io.StringIO()
    parts = ["forward_s", "backward_s", "optimizer_s", "compute_s", "comm_s", "exposed_comm_s", "idle_s", "overlap"]
    ranged = ["tokens_per_s", *TIMED, *PROFILED, "overlap", *MEMORY_COLUMNS]
    head = ["strategy", "parity", "mechanism", "equal_work", "parity_error", "tokens_per_s", "step_time_s", *parts]
    head += ["collectives", "collective_bytes", *MEMORY_COLUMNS]
    head += [*(f"{name}_{end}" for name in ranged for end in ("min", "max")), "reasons"]
    writer = csv.DictWriter(out, head, restval="", lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        gates = {name: getattr(row.gates, name) for name in ("parity", "mechanism", "equal_work")}
        line: Json = {"strategy": row.strategy, **gates, "parity_error": row.parity_error}
        if f := row.figures:
            line |= {**f, **f["memory"], "tokens_per_s": f["tokens_per_s"]["median"]}
            line |= {
                "step_time_s": f["step_time_s"]["median"],
                "collectives": sum(c["count"] for c in f["collectives"]),
            }
            line["collective_bytes"] = sum(c["bytes"] for c in f["collectives"])
            spreads = ((name, find_spread(f, name)) for name in ranged)
            line |= {f"{name}_{end}": getattr(s, end) for name, s in spreads if s for end in ("min", "max")}
        writer.writerow({key: csv_cell(cell) for key, cell in (line | {"reasons": "; ".join(row.reasons)}).items()})
    return out.getvalue()


RUN_FILES = {
    "measured.json": "compare/measured.json",
    "comparison.json": "comparison.json",
    "comparison.csv": "comparison.csv",
    "spec.yaml": "spec.yaml",
    "plan.json": "plan.json",
    "report of the job": "report.html",
}


def file_links(root: Path, names: Sequence[str]) -> html.Text | None:
    """Return links to the files of a comparison that exist in its run folder, and to the folder of each strategy."""
    files = [Link(text, href) for text, href in RUN_FILES.items() if (root / href).is_file()]
    files += [Link(name, f"compare/{quote(name)}/") for name in names if (root / "compare" / name).is_dir()]
    note = "A strategy's folder has the traces of its profiled steps, and the step records of its repeats."
    return html.Text("", [note], links=files) if files else None


def comparison_page(
    name: str, measured: Json, rows: list[ComparisonRow], advice: list[str], files: html.Text | None = None
) -> str:
    """Return comparison.html."""
    good = [r for r in rows if r.figures]
    columns = figure_columns(rows)
    control = measured["negative_control"]["error"]
    gates = (
        "Only strategies that pass all three gates have figures. Negative control (ranks without communication): "
        f"{control:.2g} of the update away from one process (must be large)."
    )
    lines = (
        "The line in a bar reaches from min to max: of the repeats for timed steps, of ranks and steps for profiled "
        "steps, of ranks for memory."
    )
    tables = [*_page_tables(good, columns, measured), _collective_table(good)]
    sections = [
        Section("recommendation", "Recommendation", [("stack", [html.Text("", advice)])]),
        Section("gates", "Gates", [("stack", [_gate_table(rows)])], gates),
        Section("charts", "Charts", [("two", _charts(good, columns))], lines),
        Section("figures", "Figures", [("stack", tables)]),
        Section("files", "Files", [("stack", [files])]),
    ]
    return html.render(html.Page("comparison of strategies", name, sections, _subtitle(measured, rows)))


def _subtitle(measured: Json, rows: list[ComparisonRow]) -> list[str]:
    nodes, accumulated, warmup = measured["nodes"], measured["grad_accum"], measured["warmup_steps"]
    return [
        f"{measured['model']}, {measured['parameters']:,} parameters, {measured['dtype']}",
        f"{measured['world_size']} ranks on {nodes} node{'s' * (nodes > 1)} ({measured['device']})",
        f"global batch {measured['global_batch_size']}, {accumulated} micro-step{'s' * (accumulated > 1)} per step",
        f"{_repeats_text(measured, rows)} of {measured['steps']} steps after {warmup} that do not count",
    ]


def _repeats_text(measured: Json, rows: list[ComparisonRow]) -> str:
    """Return how many repeats count; those of a disturbed strategy are timed again, and disturbed ones do not count."""
    wanted, timed = measured["repeats"], [load_figures(measured, r.strategy) for r in rows]
    more = max((t["repeats"] for t in timed), default=wanted) - wanted
    text = f"{wanted} alternating repeats" if wanted > 1 else "1 repeat"
    return text + (f" (up to {more} more where the machine was overloaded)" if more > 0 else "")


def counted_repeats_text(measured: Json, rows: Sequence[ComparisonRow]) -> str:
    """Return how many repeats of a strategy its figures use; disturbed ones count only if there are no others."""
    counted = sorted({load_figures(measured, r.strategy)["counted"] for r in rows if r.figures})
    return " to ".join(str(n) for n in dict.fromkeys(counted[:1] + counted[-1:])) or str(measured["repeats"])


def _gate_table(rows: list[ComparisonRow]) -> html.Table | None:
    def cells(row: ComparisonRow) -> list[Cell | str]:
        passed = (row.gates.parity, row.gates.mechanism, row.gates.equal_work)
        error = row.parity_error
        distance = "-" if error is None else "0 (bitwise)" if error == 0 else f"{error:.1e}"
        gates = [Cell("passed", "good") if ok else Cell("failed", "bad") for ok in passed]
        return [row.strategy, *gates, number_cell(distance), long_cell("; ".join(row.reasons + row.marks))]

    columns = ["strategy", "parity", "mechanism", "equal work", "distance from one process", "remarks"]
    return html.table("gates", "", columns, map(cells, rows))


def _collective_table(good: list[ComparisonRow]) -> html.Table | None:
    rows: list[html.Row] = []
    for row in good:
        for i, c in enumerate(row.figures["collectives"] if row.figures else []):
            theory = c["theory_bytes_of_kind"]
            numbers = (f"{c['count']:g}", format_bytes(c["bytes"]), "-" if theory is None else format_bytes(theory))
            name = "" if i else row.strategy
            rows.append([name, c["kind"], c["phase"].replace("_", " "), *map(number_cell, numbers)])
    columns = ["strategy", "kind", "launched in", "calls", "bytes", "formula, whole kind"]
    return html.table("collectives", "Collectives per step in the process group", columns, rows)


def _page_tables(good: list[ComparisonRow], columns: Columns, measured: Json) -> list[html.Table | None]:
    """Return the tables of figures: each cell is a figure and its range."""
    number = counted_repeats_text(measured, good)
    over = f"the range from min to max of the {number} repeats that count"
    over = "no range, as there is one repeat" if number == "1" else over
    timed = f"Median, and {over}. The median is computed for each part, so the sum can differ from the step."
    profiled = "Median of the ranks, and the range over ranks and steps. They are slower than timed steps."
    memory = "The rank with most, and the range over ranks where they differ."

    def cell(figures: Json, name: str) -> Cell:
        text, spread = columns[name][1], find_spread(figures, name)
        return number_cell(text(spread.value), range_text(spread, text, " to ")) if spread else number_cell("-")

    def table(title: str, note: str, names: Sequence[str]) -> html.Table | None:
        rows = [[r.strategy, *(cell(r.figures, name) for name in names)] for r in good if r.figures]
        return html.table("", title, ["strategy", *(columns[name][0] for name in names)], rows, note)

    return [
        table("Timed steps", timed, TIMED_COLUMNS),
        table("Profiled steps", profiled, PROFILED_COLUMNS),
        table("Memory per rank", memory, MEMORY_COLUMNS),
    ]


CHARTS: dict[str, tuple[str, Parts]] = {
    "tokens_per_s": ("Speed, tokens/s", [("tokens_per_s", "tokens/s", "--c1")]),
    "step_time_s": (
        "Time of a step, {unit}",
        [
            ("forward_s", "forward", PHASE_COLOURS["forward"]),
            ("backward_s", "backward, including waits", PHASE_COLOURS["backward"]),
            ("optimizer_s", "optimizer, including waits", PHASE_COLOURS["optimizer"]),
            ("other_s", "data and bookkeeping", PHASE_COLOURS["other"]),
        ],
    ),
    "comm_s": (
        "Communication of a profiled step, {unit}",
        [
            ("hidden_s", "hidden behind compute", ACTIVITY_COLOURS["hidden"]),
            ("exposed_comm_s", "exposed", ACTIVITY_COLOURS["exposed"]),
        ],
    ),
    "state_bytes": (
        "State per rank",
        [(key, label, STATE_COLOURS[label.split()[0]]) for key, label in zip(
            STATE_KEYS, ("weights", "gradients", "optimizer state"), strict=True)],
    ),
}  # fmt: skip
"""The figure that a chart's bars show, the title, and the parts of a bar: name, label, colour."""


def _charts(good: list[ComparisonRow], columns: Columns) -> list[html.Bars | None]:
    """Return the charts: stacked bars as shares of the longest one, or of the longest range."""
    unit = columns["step_time_s"][0].removeprefix("step ")
    charts = ((whole, title.format(unit=unit), parts) for whole, (title, parts) in CHARTS.items())
    return [_chart(good, *chart, columns[chart[0]][1]) for chart in charts] if good else []


def _chart(rows: list[ComparisonRow], whole: str, title: str, parts: Parts, show: Format) -> html.Bars | None:
    bars = []
    for row in rows:
        values, spread = _bar_parts(row.figures or {}), find_spread(row.figures or {}, whole)
        made = [(label, paint, values[key]) for key, label, paint in parts]
        if spread is None:
            bars.append(html.BarValues(row.strategy, made, 0.0))
        else:
            ends, text = (spread.min, spread.max), range_text(spread, show, " to ")
            bars.append(html.BarValues(row.strategy, made, spread.value, ends, text))
    return html.stacked_bars(title, bars, show)


def _bar_parts(figures: Json) -> Json:
    timed = sum(figures[part] for part in ("forward_s", "backward_s", "optimizer_s"))
    return {
        **figures,
        **figures["memory"],
        "tokens_per_s": figures["tokens_per_s"]["median"],
        "other_s": max(figures["step_time_s"]["median"] - timed, 0.0),
        "hidden_s": max(figures["comm_s"] - figures["exposed_comm_s"], 0.0),
    }
