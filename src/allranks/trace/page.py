"""summary.html: a trace report on one page that opens offline, in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks.report import charts as report_charts
from allranks.report.figure import Chart
from allranks.report.html import plotly_source, rendered
from allranks.report.tables import Table
from allranks.report.text import plain
from allranks.trace import charts
from allranks.trace import page_tables as tables
from allranks.trace.records import TraceReport
from allranks.trace.timeline import timeline_chart

SEVERITIES = {"error": "bad", "warning": "warn", "note": "muted"}


def summary_html(report: TraceReport) -> str:
    """The page. Without plotly (the `report` extra) it has no charts, and says how to get them."""
    plotly = plotly_source()
    return rendered("summary.html.j2", *_context(report, plotly), plotly)


def _context(report: TraceReport, plotly: str | None) -> tuple[dict[str, Any], str]:
    """What the template wants, and the charts."""
    groups = {name: [c for c in made if c] for name, made in _charts(report).items()} if plotly else {}
    figures = report_charts.figures_json([c for made in groups.values() for c in made])
    cards = tables.cards(report)
    context = {
        "name": plain(report.name, 200),
        "subtitle": _subtitle(report),
        "cards": cards,
        "card_columns": len(cards) if len(cards) < 6 else (4 if len(cards) > 6 else 3),
        "problems": [
            (SEVERITIES[p.severity], p.severity, plain(f"{p.file}: {p.message}" if p.file else p.message))
            for p in report.problems
        ],
        "charts": {name: groups.get(name, []) for name in ("time", "timeline", "collectives", "memory")},
        "charts_missing": plotly is None,
        "tables": {name: [t for t in made if t] for name, made in _tables(report).items()},
        "startup": _startup(report),
    }
    return context, figures


def _charts(report: TraceReport) -> dict[str, Sequence[Chart | None]]:
    return {
        "time": [charts.breakdown_chart(report), charts.overlap_chart(report), charts.step_chart(report)],
        "timeline": [timeline_chart(report)],
        "collectives": [charts.waiting_chart(report), charts.bandwidth_chart(report)],
        "memory": [charts.memory_chart(report)],
    }


def _tables(report: TraceReport) -> dict[str, Sequence[Table | None]]:
    own = "Time on the host without what ran inside it; sums over ranks."
    return {
        "time": [tables.rank_table(report)],
        "collectives": [tables.collective_table(report), tables.launch_table(report)],
        "stragglers": [tables.straggler_table(report), tables.wait_table(report)],
        "program": [tables.phase_table(report), tables.module_table(report)],
        "tops": [
            tables.top_table("kernels", "Kernels", report.top_kernels, "Sums over ranks."),
            tables.top_table("operators", "Operators", report.top_operators, own),
        ],
        "files": [tables.file_table(report)],
    }


def _subtitle(report: TraceReport) -> list[str]:
    n, world = len(report.ranks), report.world_size
    names = sorted({r.device_name for r in report.ranks if r.device_name})
    parts = [
        f"window {report.window}" if report.window else "",
        f"{n} of {world} ranks" if world and world != n else f"{n} rank{'s' if n > 1 else ''}",
        report.device.upper(),
        *names[:4],
        report.backend or "",
    ]
    return [plain(p, 200) for p in parts if p]


def _startup(report: TraceReport) -> str:
    s = report.startup
    if s is None or s.skew_s <= 0:
        return ""
    removed = max(s.removed_s.values(), default=0.0)
    cut = (
        f" Up to {tables.seconds(removed)} of a rank were left out: its windows begin after {s.until}."
        if removed > 0
        else ""
    )
    return plain(f"Profilers started {tables.seconds(s.skew_s)} apart.{cut}")
