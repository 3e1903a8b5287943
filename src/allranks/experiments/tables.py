"""Show a comparison as tables of 80 columns in a terminal, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from allranks.experiments.gates import PROFILED, TIMED, ComparisonRow, Spread, find_spread
from allranks.utils.formatting import format_bytes
from allranks.utils.text import csv_cell

Json = dict[str, Any]
PHASE_NAMES = {"forward": "in fwd", "backward": "in bwd", "after_backward": "after bwd"}
STATE_PARTS = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
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
            *(format_bytes(memory[k]) for k in STATE_PARTS),
            f"{memory['state_bytes'] / whole:.3f}" if whole else "-",
            format_bytes(memory["peak_bytes"]),
            Text(range_text(find_spread(row.figures, "peak_bytes"), format_bytes) or "equal"),
        )
    return table


def csv_text(rows: list[ComparisonRow]) -> str:
    """Return one line per strategy; units in the names, empty without figures. Ranges are columns with ``_min`` and ``_max``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = ["forward_s", "backward_s", "optimizer_s", "compute_s", "comm_s", "exposed_comm_s", "idle_s", "overlap"]
    memory = [*STATE_PARTS, "state_bytes", "peak_bytes"]
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
