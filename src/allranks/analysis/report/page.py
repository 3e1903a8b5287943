"""Write report.html: the results of a run on one offline page, with light and dark mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from allranks.analysis.report import charts, setup_tables, summary, tables
from allranks.analysis.report import (
    tables as tables_experts,
)
from allranks.analysis.report.html import plotly_source, render_page
from allranks.analysis.report.run_data import RunData, read_run_data
from allranks.rundir.files import write_text_atomic
from allranks.rundir.paths import RunDir
from allranks.utils import formatting, text

_Maker = Callable[[RunData], tables.Table | None]
_TABLES: dict[str, tuple[_Maker, ...]] = {
    "results": (
        tables.eval_table,
        tables.checkpoint_table,
        tables_experts.expert_table,
        tables.trace_table,
        tables.straggler_table,
        tables.machine_table,
        tables.link_table,
    ),
    "attempts": (tables.attempt_table,),
    "plan": (setup_tables.plan_facts, setup_tables.rank_table, setup_tables.preflight_table),
    "environment": (setup_tables.environment_table, setup_tables.findings_table, setup_tables.network_table),
    "facts": (setup_tables.data_facts, setup_tables.model_facts, setup_tables.version_facts),
}


def write_report(run: RunDir) -> Path | None:
    """Write the page of a run from whatever data exists.

    Returns:
        The page, or None if it could not be written (no such folder, disk full).
    """
    try:
        return write_page(run)
    except OSError:
        return None


def write_page(run: RunDir) -> Path:
    """Write the page of a run and return its path.

    Raises:
        OSError: the page cannot be written.
    """
    write_text_atomic(run.report, render(read_run_data(run), plotly_source()))
    return run.report


def render(data: RunData, plotly: str | None) -> str:
    """Return the page as HTML. Without plotly it has no charts, and explains how to get them."""
    return render_page("report.html.j2", *_context(data, plotly), plotly)


def _context(data: RunData, plotly: str | None) -> tuple[dict[str, Any], str]:
    """Return the context of the template, and the charts."""
    made = summary.key_figures(data)
    groups = {
        "training": charts.training_charts(data),
        "speed": charts.speed_charts(data),
        "telemetry": charts.telemetry_charts(data),
    }
    figures = charts.figures_json([chart for group in groups.values() for chart in group]) if plotly else "{}"
    context = {
        "name": data.name,
        "status": data.status if data.status != "unknown" else "no verdict",
        "tone": summary.STATUS_TONES.get(data.status, "muted"),
        "message": text.sanitize(data.metrics.get("message") or ""),
        "warnings": [
            *(text.sanitize(w) for w in formatting.as_list(data.plan.get("warnings"))),
            *(text.sanitize(e.get("message") or "") for story in data.histories.values() for e in story.of("warning")),
        ],
        "subtitle": summary.subtitle(data),
        "recorded": bool(data.histories),
        "cards": made,
        "card_columns": min(len(made), 4) if len(made) not in (5, 6, 9, 10) else (3 if len(made) < 9 else 5),
        "proof": summary.proof_items(data),
        "budget": summary.time_budget(data),
        "samples": summary.sample_answers(data),
        "errors": tables.error_table(data),
        "hang": tables.hang_table(data),
        "log": data.log,
        "hosts": list(data.telemetry),
        "charts": groups if plotly else {name: [] for name in groups},
        "charts_missing": plotly is None and any(groups.values()),
        "tables": {name: [t for make in makers if (t := make(data))] for name, makers in _TABLES.items()},
        "spec": data.spec,
    }
    return context, figures
