"""The charts of a run, in the groups in which the page shows them. Pure; plotly itself is not needed to make them."""

from __future__ import annotations

import json
from typing import Any

from allranks.report.charts_hosts import host_charts
from allranks.report.charts_memory import memory_chart
from allranks.report.charts_steps import loss_chart, score_chart, throughput_chart
from allranks.report.charts_time import rank_time_chart, step_time_chart
from allranks.report.figure import Chart
from allranks.report.gather import RunData
from allranks.rundir import finite


def training_charts(data: RunData) -> list[Chart]:
    """What was learned."""
    return [chart for chart in (loss_chart(data), score_chart(data)) if chart]


def speed_charts(data: RunData) -> list[Chart]:
    """What it cost in time and memory."""
    makers = (throughput_chart, step_time_chart, rank_time_chart, memory_chart)
    return [chart for make in makers if (chart := make(data))]


def telemetry_charts(data: RunData) -> list[Chart]:
    """What the hosts were doing."""
    return host_charts(data)


def figures_json(charts: list[Chart]) -> str:
    """All figures by id, as JSON that is safe inside a script element."""
    figures = {chart.id: compact(finite(chart.figure)) for chart in charts}
    text = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def compact(value: Any) -> Any:
    """The same figure with numbers of six digits: more cannot be seen, and would make the page large."""
    if isinstance(value, float):
        short = float(f"{value:.6g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [compact(item) for item in value]
    return value
