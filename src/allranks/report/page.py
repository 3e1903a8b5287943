"""report.html: what a run did, on one page that opens offline, on a phone, in light and dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from allranks.report import (
    answers,
    cards,
    charts,
    tables,
    tables_experts,
    tables_facts,
    tables_network,
    tables_pace,
    tables_plan,
    text,
)
from allranks.report.gather import RunData, gather
from allranks.report.html import plotly_source, rendered
from allranks.rundir import RunDir, write_text_atomic

_Maker = Callable[[RunData], tables.Table | None]
_TABLES: dict[str, tuple[_Maker, ...]] = {
    "results": (
        tables.eval_table,
        tables.checkpoint_table,
        tables_experts.expert_table,
        tables.trace_table,
        tables_pace.pace_table,
    ),
    "attempts": (tables.attempt_table,),
    "plan": (tables_plan.plan_facts, tables_plan.rank_table, tables_plan.preflight_table),
    "environment": (tables_plan.environment_table, tables_network.findings_table, tables_network.network_table),
    "facts": (tables_facts.data_facts, tables_facts.model_facts, tables_facts.version_facts),
}


def write_report(run: RunDir) -> Path | None:
    """Write the page of a run, whatever there is of it.

    Returns:
        The page, or None where it could not be written (no such folder, disk full).
    """
    try:
        write_text_atomic(run.report, render(gather(run), plotly_source()))
    except OSError:
        return None
    return run.report


def render(data: RunData, plotly: str | None) -> str:
    """The page as HTML. Without plotly it has no charts, and says how to get them."""
    return rendered("report.html.j2", *_context(data, plotly), plotly)


def _context(data: RunData, plotly: str | None) -> tuple[dict[str, Any], str]:
    """What the template wants, and the charts."""
    made = cards.cards(data)
    groups = {
        "training": charts.training_charts(data),
        "speed": charts.speed_charts(data),
        "telemetry": charts.telemetry_charts(data),
    }
    figures = charts.figures_json([chart for group in groups.values() for chart in group]) if plotly else "{}"
    context = {
        "name": data.name,
        "status": data.status if data.status != "unknown" else "no verdict",
        "tone": cards.TONES.get(data.status, "muted"),
        "message": text.plain(data.metrics.get("message") or ""),
        "warnings": [
            *(text.plain(w) for w in text.items(data.plan.get("warnings"))),
            *(text.plain(e.get("message") or "") for story in data.stories.values() for e in story.of("warning")),
        ],
        "subtitle": cards.subtitle(data),
        "recorded": bool(data.stories),
        "cards": made,
        "card_columns": min(len(made), 4) if len(made) not in (5, 6, 9, 10) else (3 if len(made) < 9 else 5),
        "proof": cards.proof(data),
        "budget": cards.budget(data),
        "samples": answers.samples(data),
        "errors": tables.error_table(data),
        "hang": tables_pace.hang_table(data),
        "log": data.log,
        "hosts": list(data.telemetry),
        "charts": groups if plotly else {name: [] for name in groups},
        "charts_missing": plotly is None and any(groups.values()),
        "tables": {name: [t for make in makers if (t := make(data))] for name, makers in _TABLES.items()},
        "spec": data.spec,
    }
    return context, figures
