"""Show a comparison: tables of 80 columns in a terminal, CSV, and an offline page with links to the files that its
figures come from."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from allranks.analysis.report import html
from allranks.analysis.report.figures import ACTIVITY_COLOURS, PHASE_COLOURS, STATE_COLOURS
from allranks.analysis.report.html import Cell, Link, Section, long_cell, number_cell
from allranks.experiments.conclusions import Prediction
from allranks.experiments.gates import PROFILED, TIMED, ComparisonRow, Spread, find_spread, load_figures
from allranks.utils.text import csv_cell, format_bytes

Json = dict[str, Any]
PHASE_NAMES = {"forward": "in fwd", "backward": "in bwd", "after_backward": "after bwd"}
STATE_KEYS = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
LONG_S = 10.0
"""From here on times are shown in seconds."""


def time_unit(rows: Sequence[ComparisonRow]) -> tuple[float, str]:
    """Return (seconds, unit) in which the times of all rows are shown."""
    longest = max((s.max for r in rows if r.figures and (s := find_spread(r.figures, "step_time_s"))), default=0.0)
    return (1.0, "s") if longest >= LONG_S else (1e-3, "ms")


def number_text(value: float) -> str:
    """Format 168.42 as 168, 48.42 as 48.4."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def percent_text(share: float) -> str:
    return f"{share:.0%}"


def rate_text(value: float) -> str:
    return f"{value:,.0f}"


def range_text(found: Spread | None, text: Callable[[float], str], between: str = "-") -> str:
    """Return min and max of a figure, the unit once; empty if there is no range or it is too small to be shown."""
    if found is None:
        return ""
    low, high = text(found.min), text(found.max)
    if low == high:
        return ""
    unit = high.lstrip("0123456789.,")
    return f"{low.removesuffix(unit) if unit else low}{between}{high}"


def gate_text(row: ComparisonRow) -> str:
    """Return ✓ or ✗ for parity, mechanism and equal work."""
    return " ".join("✓" if ok else "✗" for ok in (row.gates.parity, row.gates.mechanism, row.gates.equal_work))


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for name in (*left, *right):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def speed_table(rows: list[ComparisonRow]) -> Table:
    """Return the table of gates, tokens/s and step times, each with its range over the repeats."""
    scale, unit = time_unit(rows)
    table = _table("Speed", ("strategy", "gates"), ("tokens/s", "min-max", f"step {unit}", "min-max"))
    for row in rows:
        if row.figures is None:
            table.add_row(row.strategy, gate_text(row), *["-"] * 4)
            continue
        speed, step = (find_spread(row.figures, name) for name in ("tokens_per_s", "step_time_s"))
        assert speed is not None and step is not None
        table.add_row(
            row.strategy,
            gate_text(row),
            rate_text(speed.value),
            Text(range_text(speed, rate_text) or "-"),
            number_text(step.value / scale),
            Text(range_text(step, lambda s: number_text(s / scale)) or "-"),
        )
    return table


def parts_table(rows: list[ComparisonRow]) -> Table:
    """Return the table of the parts of a step; below each figure is its range."""
    scale, unit = time_unit(rows)
    timed = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "optimizer"}
    shares = {"exposed_share": "exposed", "idle_share": "idle", "overlap": "overlap"}
    table = _table(f"Parts of a step, {unit}", ("strategy",), (*timed.values(), *shares.values()))
    for row in rows:
        if row.figures is not None:
            times = [_stacked(row.figures, name, lambda s: number_text(s / scale)) for name in timed]
            table.add_row(row.strategy, *times, *(_stacked(row.figures, name, percent_text) for name in shares))
    return table


def _stacked(figures: Json, name: str, text: Callable[[float], str]) -> Text:
    found = find_spread(figures, name)
    if found is None:
        return Text("-")
    return Text(text(found.value)).append(f"\n{range_text(found, text)}", style="dim")


def traffic_table(rows: list[ComparisonRow]) -> Table:
    """Return the table of collectives per step."""
    table = _table("Traffic per step", ("strategy", "collectives"), ("bytes", "formula"))
    for row in rows:
        if row.figures is None:
            continue
        kinds = row.figures["collectives"]
        theory = {c["kind"]: c["theory_bytes_of_kind"] or 0 for c in kinds}
        names = [f"{c['count']:g} {c['kind']} {PHASE_NAMES.get(c['phase'], 'in ' + c['phase'])}" for c in kinds]
        table.add_row(
            row.strategy,
            "\n".join(names) or "none",
            format_bytes(sum(c["bytes"] for c in kinds)),
            format_bytes(sum(theory.values())),
        )
    return table


def memory_table(rows: list[ComparisonRow], base: str | None) -> Table:
    """Return the table of memory per rank; the ratio is that of the state to the state of the strategy `base`."""
    table = _table("Memory per rank", ("strategy",), ("weights", "gradients", "optimizer", "ratio", "peak", "ranks"))
    whole = next((r.figures["memory"]["state_bytes"] for r in rows if r.strategy == base and r.figures), None)
    for row in rows:
        if row.figures is None:
            continue
        memory = row.figures["memory"]
        table.add_row(
            row.strategy,
            *(format_bytes(memory[k]) for k in STATE_KEYS),
            f"{memory['state_bytes'] / whole:.3f}" if whole else "-",
            format_bytes(memory["peak_bytes"]),
            Text(range_text(find_spread(row.figures, "peak_bytes"), format_bytes) or "equal"),
        )
    return table


def csv_text(rows: list[ComparisonRow]) -> str:
    """Return one line per strategy; units in the names, empty without figures. Ranges are columns with ``_min`` and
    ``_max``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = ["forward_s", "backward_s", "optimizer_s", "compute_s", "comm_s", "exposed_comm_s", "idle_s", "overlap"]
    memory = [*STATE_KEYS, "state_bytes", "peak_bytes"]
    ranged = [*TIMED, *PROFILED, "overlap", *memory]
    head = ["strategy", "parity", "mechanism", "equal_work", "parity_error", "tokens_per_s", "tokens_per_s_min"]
    head += ["tokens_per_s_max", "step_time_s", *parts, "collectives", "collective_bytes", *memory]
    head += [f"{name}_{end}" for name in ranged for end in ("min", "max")]
    writer.writerow([*head, "reasons"])
    for row in rows:
        f, gates = row.figures, row.gates
        line: list[Any] = [row.strategy, gates.parity, gates.mechanism, gates.equal_work, row.parity_error]
        if f:
            t = f["tokens_per_s"]
            line += [t["median"], t["min"], t["max"], f["step_time_s"]["median"], *(f[p] for p in parts)]
            line += [sum(c["count"] for c in f["collectives"]), sum(c["bytes"] for c in f["collectives"])]
            line += [f["memory"][k] for k in memory]
            for name in ranged:
                found = find_spread(f, name)
                line += [found.min, found.max] if found else ["", ""]
        else:
            line += [""] * (len(head) - len(line))
        writer.writerow([csv_cell(cell) for cell in (*line, "; ".join(row.reasons))])
    return out.getvalue()


Parts = Sequence[tuple[str, str, str]]
Columns = dict[str, tuple[str, Callable[[float], str]]]
TIME_PARTS: Parts = (
    ("forward_s", "forward", PHASE_COLOURS["forward"]),
    ("backward_s", "backward, including waits", PHASE_COLOURS["backward"]),
    ("optimizer_s", "optimizer, including waits", PHASE_COLOURS["optimizer"]),
    ("other_s", "data and bookkeeping", PHASE_COLOURS["other"]),
)
COMMUNICATION_PARTS: Parts = (
    ("hidden_s", "hidden behind compute", ACTIVITY_COLOURS["hidden"]),
    ("exposed_comm_s", "exposed", ACTIVITY_COLOURS["exposed"]),
)
STATE_PARTS: Parts = (
    ("weights_bytes", "weights", STATE_COLOURS["weights"]),
    ("gradients_bytes", "gradients", STATE_COLOURS["gradients"]),
    ("optimizer_bytes", "optimizer state", STATE_COLOURS["optimizer"]),
)
MAX_LINKED_RANKS = 8


RUN_FILES = {
    "measured.json": "compare/measured.json",
    "comparison.json": "comparison.json",
    "comparison.csv": "comparison.csv",
    "spec.yaml": "spec.yaml",
    "plan.json": "plan.json",
    "report of the job": "report.html",
}


def file_blocks(root: Path, names: Sequence[str]) -> list[html.Block | None]:
    """Return links to the files of a comparison in its run folder: results, and traces and step records of each
    strategy.

    Only what exists is linked: one link per rank, or one to their folder if there are many.
    """
    results = [Link(text, href) for text, href in RUN_FILES.items() if (root / href).is_file()]
    folders = {name: folder for name in names if (folder := root / "compare" / name).is_dir()}
    parts: dict[str, dict[str, list[Link]]] = {}
    for name, folder in folders.items():
        numbers = sorted(int(p.name.removeprefix("repeat")) for p in folder.glob("repeat*") if p.is_dir())
        parts[name] = {"traces": _rank_links(root, folder / "traces")}
        for n in numbers:  # in repeat 0 are the steps that were verified
            parts[name][f"repeat {n}" if n else "verified"] = _rank_links(root, folder / f"repeat{n}")
    columns = list(dict.fromkeys(column for known in parts.values() for column in known))
    rows: list[html.Row] = [
        [
            Cell("", links=[Link(name, _href(root, folder) + "/")]),
            *(Cell("" if (links := parts[name].get(column)) else "-", links=links or []) for column in columns),
        ]
        for name, folder in folders.items()
    ]
    note = (
        "Traces are those of the profiled steps; allranks trace compare/STRATEGY/traces analyses them. Verified: the "
        "step records of the parity gate; repeats: those of the timed steps. The links lead to the folder of this page."
    )
    return [
        html.Text("", links=results) if results else None,
        html.table("files", "", ["strategy", *columns], rows, note),
    ]


def _rank_links(root: Path, folder: Path) -> list[Link]:
    files = [(int(number), p) for p in folder.glob("rank*") if (number := p.name.split(".")[0][4:]).isdecimal()]
    if len(files) > MAX_LINKED_RANKS:
        return [Link(f"{len(files)} ranks", _href(root, folder) + "/")]
    return [Link(f"rank {number}", _href(root, p)) for number, p in sorted(files)]


def _href(root: Path, path: Path) -> str:
    return quote(path.relative_to(root).as_posix())


def comparison_page(
    name: str,
    measured: Json,
    rows: list[ComparisonRow],
    advice: list[str],
    predictions: list[Prediction],
    files: Sequence[html.Block | None] = (),
) -> str:
    """Return comparison.html."""
    good = [r for r in rows if r.figures]
    scale, unit = time_unit(rows)

    def ms(seconds: float) -> str:
        return number_text(seconds / scale)

    control = measured["negative_control"]["error"]
    gates = (
        "Only strategies that pass all three gates have figures. Negative control (ranks without communication): "
        f"{control:.2g} of the update away from one process (must be large)."
    )
    lines = (
        "The line in a bar reaches from min to max: of the repeats for timed steps, of ranks and steps for profiled "
        "steps, of ranks for memory."
    )
    sections = [
        Section("recommendation", "Recommendation", [("stack", [html.Text("", advice)])]),
        Section("gates", "Gates", [("stack", [_gate_table(rows)])], gates),
        Section("charts", "Charts", [("two", _charts(good, ms, unit))], lines),
        Section("figures", "Figures", [("stack", [*_page_tables(good, ms, unit, measured), _collective_table(good)])]),
        Section("prediction", "Predicted tokens/s, not measured", [("stack", [_prediction_table(predictions)])],
                short="Prediction"),
        Section("files", "Files", [("stack", files)]),
    ]  # fmt: skip
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
    """Return how many repeats count; those of a disturbed strategy are timed again, and the disturbed ones do not
    count."""
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


def _prediction_table(predictions: list[Prediction]) -> html.Table | None:
    ranks, errors = sorted({p.ranks for p in predictions}), {p.strategy: p.error for p in predictions}
    speed = {(p.strategy, p.ranks): p.tokens_per_s for p in predictions}
    rows: list[html.Row] = [
        [name, *(number_cell(two_digits(speed[name, n])) for n in ranks), number_cell(f"{error:.0%}")]
        for name, error in errors.items()
    ]
    note = (
        "Assumes the same links and the same batch per rank, with a two-parameter model fitted to this run's "
        "collectives. The error is how far the model is from the measured step time; strategies with a larger one than "
        "20 % have no row. Values have two digits because of it. If ranks shared cores here, the prediction assumes "
        "the same."
    )
    return html.table("prediction", "", ["strategy", *(f"{n:,} ranks" for n in ranks), "error here"], rows, note)


def two_digits(value: float) -> str:
    """Round to two digits: 1100248 becomes 1,100,000."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _page_tables(
    good: list[ComparisonRow], ms: Callable[[float], str], unit: str, measured: Json
) -> list[html.Table | None]:
    """Return the tables of figures: each cell is a figure and its range."""
    timed: Columns = {
        "tokens_per_s": ("tokens/s", rate_text), "step_time_s": (f"step, {unit}", ms), "forward_s": ("forward", ms),
        "backward_s": ("backward", ms), "optimizer_s": ("optimizer", ms),
    }  # fmt: skip
    profiled: Columns = {
        "profiled_step_s": (f"profiled step, {unit}", ms), "comm_s": ("communication", ms),
        "overlap": ("of it hidden", percent_text), "exposed_share": ("exposed, of the step", percent_text),
        "idle_share": ("idle, of the step", percent_text),
    }  # fmt: skip
    memory: Columns = {
        "weights_bytes": ("weights", format_bytes), "gradients_bytes": ("gradients", format_bytes),
        "optimizer_bytes": ("optimizer state", format_bytes), "state_bytes": ("sum", format_bytes),
        "peak_bytes": ("peak", format_bytes),
    }  # fmt: skip
    number = counted_repeats_text(measured, good)
    over = (
        "no range, as there is one repeat"
        if number == "1"
        else f"the range from min to max of the {number} repeats that count"
    )
    sums = "The median is computed for each part, so the sum can differ from the step."
    return [
        _page_table("Timed steps", f"Median, and {over}. {sums}", timed, good),
        _page_table("Profiled steps",
                    "Median of the ranks, and the range over ranks and steps. They are slower than timed steps.",
                    profiled, good),
        _page_table("Memory per rank", "The rank with most, and the range over ranks where they differ.", memory, good),
    ]  # fmt: skip


def _page_table(title: str, note: str, columns: Columns, good: list[ComparisonRow]) -> html.Table | None:
    def cell(figures: Json, name: str) -> Cell:
        text, found = columns[name][1], find_spread(figures, name)
        return number_cell(text(found.value) if found else "-", range_text(found, text, " to "))

    rows = [[r.strategy, *(cell(r.figures, name) for name in columns)] for r in good if r.figures]
    return html.table("", title, ["strategy", *(head for head, _ in columns.values())], rows, note)


def _charts(good: list[ComparisonRow], ms: Callable[[float], str], unit: str) -> list[html.Bars | None]:
    """Return the charts: bars with the range of the whole bar."""
    speed: Parts = (("tokens_per_s", "tokens/s", "--c1"),)
    return [
        _chart("Speed, tokens/s", good, lambda f: {"tokens_per_s": f["tokens_per_s"]["median"]}, speed,
               "tokens_per_s", rate_text),
        _chart(f"Time of a step, {unit}", good, _times, TIME_PARTS, "step_time_s", ms),
        _chart(f"Communication of a profiled step, {unit}", good, _communication, COMMUNICATION_PARTS, "comm_s", ms),
        _chart("State per rank", good, lambda f: f["memory"], STATE_PARTS, "state_bytes", format_bytes),
    ] if good else []  # fmt: skip


def _times(figures: Json) -> Json:
    known = sum(figures[p] for p in ("forward_s", "backward_s", "optimizer_s"))
    return {**figures, "other_s": max(figures["step_time_s"]["median"] - known, 0.0)}


def _communication(figures: Json) -> Json:
    return {**figures, "hidden_s": max(figures["comm_s"] - figures["exposed_comm_s"], 0.0)}


def _chart(
    title: str,
    rows: list[ComparisonRow],
    values: Callable[[Json], Json],
    parts: Parts,
    whole: str,
    text: Callable[[float], str],
) -> html.Bars:
    """Return stacked bars as shares of the longest one, or of the longest range; `whole` is the figure that a bar
    shows."""
    found = [(r.strategy, values(r.figures), find_spread(r.figures, whole)) for r in rows if r.figures]
    ends = [max(sum(v[k] for k, _, _ in parts), spread.max if spread else 0.0) for _, v, spread in found]
    longest = max(ends, default=1.0) or 1.0

    def bar(name: str, value: Json, spread: Spread | None) -> html.Bar:
        made = [html.Part(label, text(value[k]), 100 * value[k] / longest, colour) for k, label, colour in parts]
        low, high = (spread.min, spread.max) if spread else (0.0, 0.0)
        total = text(spread.value if spread else 0.0)
        return html.Bar(
            name, made, total, range_text(spread, text, " to "), (100 * low / longest, 100 * (high - low) / longest)
        )

    keys = [(label, colour) for _, label, colour in parts] if len(parts) > 1 else []
    return html.Bars(title, [bar(*one) for one in found], keys)
