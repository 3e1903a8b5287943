"""Show a comparison as tables in a terminal, as CSV, and as an offline page."""

from __future__ import annotations

import csv
import io
from importlib import resources
from typing import Any

from rich.table import Table

from allranks.analysis.report.html import html_environment
from allranks.experiments.communication_model import Prediction
from allranks.experiments.gates import ComparisonRow
from allranks.utils.formatting import NO_VALUE, format_bytes
from allranks.utils.redaction import redact_forms
from allranks.utils.tables import FittedColumn, fitted_table
from allranks.utils.text import csv_cell
from allranks.version import __version__

Json = dict[str, Any]
TIME_PARTS = (
    ("forward_s", "forward", "#4c78a8"),
    ("backward_s", "backward, including waits", "#72b7b2"),
    ("optimizer_s", "optimizer, including waits", "#f2a541"),
    ("other_s", "data and bookkeeping", "#9d9da1"),
)
MEMORY_PARTS = (
    ("weights_bytes", "weights", "#4c78a8"),
    ("gradients_bytes", "gradients", "#f2a541"),
    ("optimizer_bytes", "optimizer state", "#72b7b2"),
)


PHASE_NAMES = {"forward": "in fwd", "backward": "in bwd", "after_backward": "after bwd"}


def milliseconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def gate_text(row: ComparisonRow) -> str:
    """Return ✓ or ✗ for parity, mechanism and equal work."""
    return " ".join("✓" if ok else "✗" for ok in (row.gates.parity, row.gates.mechanism, row.gates.equal_work))


SPEED_COLUMNS = (
    FittedColumn("strategy", fold_to=12),
    FittedColumn("gates"),
    FittedColumn("tokens/s", right=True),
    FittedColumn("spread", right=True, drop=1),
    FittedColumn("step", right=True),
    FittedColumn("fwd", right=True, drop=4),
    FittedColumn("bwd", right=True, drop=3),
    FittedColumn("optim", right=True, drop=5),
    FittedColumn("exposed", right=True, drop=2),
    FittedColumn("idle", right=True, drop=7),
    FittedColumn("overlap", right=True, drop=6),
)


def speed_table(rows: list[ComparisonRow], width: int) -> tuple[Table, list[str]]:
    """Return the table of gates and times, and the columns that do not fit the width."""
    cells = []
    for row in rows:
        f = row.figures
        if f is None:
            cells.append([row.strategy, gate_text(row), *[NO_VALUE] * 9])
            continue
        t = f["tokens_per_s"]
        cells.append(
            [
                row.strategy,
                gate_text(row),
                f"{t['median']:,.0f}",
                f"{t['min']:,.0f}-{t['max']:,.0f}",
                milliseconds_text(f["step_time_s"]["median"]),
                *(
                    milliseconds_text(f[p])
                    for p in ("forward_s", "backward_s", "optimizer_s", "exposed_comm_s", "idle_s")
                ),
                NO_VALUE if f["overlap"] is None else f"{f['overlap']:.0%}",
            ]
        )
    return fitted_table(SPEED_COLUMNS, cells, width, title="Speed (times in ms per step)")


TRAFFIC_COLUMNS = (
    FittedColumn("strategy", fold_to=12),
    FittedColumn("collectives per step", fold_to=16),
    FittedColumn("bytes", right=True),
    FittedColumn("theory", right=True, drop=3),
    FittedColumn("weights", right=True, drop=6),
    FittedColumn("grads", right=True, drop=5),
    FittedColumn("optim", right=True, drop=4),
    FittedColumn("ratio", right=True, drop=1),
    FittedColumn("peak", right=True, drop=2),
)


def traffic_table(rows: list[ComparisonRow], base: str | None, width: int) -> tuple[Table, list[str]]:
    """Return the table of collectives and memory, and the columns that do not fit the width."""
    whole = next((r.figures["memory"]["state_bytes"] for r in rows if r.strategy == base and r.figures), None)
    cells = []
    for row in rows:
        if row.figures is None:
            continue
        m, kinds = row.figures["memory"], row.figures["collectives"]
        theory = {c["kind"]: c["theory_bytes_of_kind"] or 0 for c in kinds}
        cells.append(
            [
                row.strategy,
                "\n".join(
                    f"{c['count']:g} {c['kind']} {PHASE_NAMES.get(c['phase'], 'in ' + c['phase'])}" for c in kinds
                )
                or "none",
                format_bytes(sum(c["bytes"] for c in kinds)),
                format_bytes(sum(theory.values())),
                *(format_bytes(m[k]) for k, _, _ in MEMORY_PARTS),
                f"{m['state_bytes'] / whole:.3f}" if whole else NO_VALUE,
                format_bytes(m["peak_bytes"]),
            ]
        )
    return fitted_table(TRAFFIC_COLUMNS, cells, width, title="Traffic per step and memory per rank")


def csv_text(rows: list[ComparisonRow]) -> str:
    """Return one line per strategy; units in the names, empty without figures."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = ["forward_s", "backward_s", "optimizer_s", "compute_s", "comm_s", "exposed_comm_s", "idle_s", "overlap"]
    memory = ["weights_bytes", "gradients_bytes", "optimizer_bytes", "state_bytes", "peak_bytes"]
    head = ["strategy", "parity", "mechanism", "equal_work", "parity_error", "tokens_per_s", "tokens_per_s_min"]
    head += ["tokens_per_s_max", "step_time_s", *parts, "collectives", "collective_bytes", *memory, "reasons"]
    writer.writerow(head)
    for row in rows:
        f, gates = row.figures, row.gates
        line: list[Any] = [row.strategy, gates.parity, gates.mechanism, gates.equal_work, row.parity_error]
        if f:
            t = f["tokens_per_s"]
            line += [t["median"], t["min"], t["max"], f["step_time_s"]["median"], *(f[p] for p in parts)]
            line += [sum(c["count"] for c in f["collectives"]), sum(c["bytes"] for c in f["collectives"])]
            line += [f["memory"][k] for k in memory]
        else:
            line += [""] * (len(head) - len(line) - 1)
        writer.writerow([csv_cell(cell) for cell in (*line, "; ".join(row.reasons))])
    return out.getvalue()


def comparison_page(
    name: str, measured: Json, rows: list[ComparisonRow], advice: list[str], predictions: list[Prediction]
) -> str:
    """Return comparison.html."""
    template = (resources.files("allranks.experiments") / "templates" / "comparison.html.j2").read_text("utf-8")
    environment = html_environment()
    environment.filters |= {"bytes": format_bytes, "ms": milliseconds_text, "rough": two_digits}
    good = [r for r in rows if r.figures]
    html = environment.from_string(template).render(
        name=name,
        measured=measured,
        rows=rows,
        good=good,
        advice=advice,
        times=_bars(good, _times, TIME_PARTS),
        memory=_bars(good, lambda f: f["memory"], MEMORY_PARTS),
        parts=TIME_PARTS,
        kinds=MEMORY_PARTS,
        ranks=sorted({p.ranks for p in predictions}),
        errors={p.strategy: p.error for p in predictions},
        predictions=_by_strategy(predictions),
        gate_text=gate_text,
        version=__version__,
    )
    return redact_forms(html)


def two_digits(value: float) -> str:
    """Round to two digits: 1100248 becomes 1,100,000."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _times(figures: Json) -> Json:
    known = sum(figures[p] for p in ("forward_s", "backward_s", "optimizer_s"))
    return {**figures, "other_s": max(figures["step_time_s"]["median"] - known, 0.0)}


def _bars(rows: list[ComparisonRow], values: Any, parts: tuple[tuple[str, str, str], ...]) -> list[Json]:
    """Return stacked bars as shares of the longest one."""
    found = [(r.strategy, values(r.figures)) for r in rows]
    longest = max((sum(v[k] for k, _, _ in parts) for _, v in found), default=1.0) or 1.0
    return [
        {
            "strategy": name,
            "total": sum(v[k] for k, _, _ in parts),
            "parts": [
                {"label": text, "colour": c, "value": v[k], "width": 100 * v[k] / longest} for k, text, c in parts
            ],
        }
        for name, v in found
    ]


def _by_strategy(predictions: list[Prediction]) -> dict[str, dict[int, float]]:
    out: dict[str, dict[int, float]] = {}
    for p in predictions:
        out.setdefault(p.strategy, {})[p.ranks] = p.tokens_per_s
    return out
