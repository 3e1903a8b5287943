"""The chart of memory by rank, and the area that stands for many lines. Pure."""

from __future__ import annotations

from allranks.report.charts_steps import step_shapes
from allranks.report.figure import MOST_LINES, Chart, Figure, axis, byte_unit, colour, label, line, scaled, step_layout
from allranks.report.gather import RunData
from allranks.report.series import Value, band, common_steps, thin
from allranks.report.story import Step
from allranks.report.text import bytes_text


def memory_chart(data: RunData) -> Chart | None:
    """Memory in use by rank, and the highest peak of all."""
    ranks = {rank: s.steps for rank, s in data.stories.items() if any(p.memory is not None for p in s.steps)}
    if not ranks:
        return None
    peaks = {rank: max((s.peak for s in steps if s.peak is not None), default=None) for rank, steps in ranks.items()}
    divisor, unit = byte_unit([*peaks.values(), *(s.memory for steps in ranks.values() for s in steps)])
    traces = _memory_traces(ranks, divisor)
    traces += _peak_trace(ranks, divisor)
    figure = {
        "data": traces,
        "layout": step_layout(
            280, [float(s.step) for s in data.zero.steps], yaxis=axis(rangemode="tozero", ticksuffix=f" {unit}")
        ),
    }
    figure["layout"]["shapes"] = step_shapes(data)
    kind = "of the CUDA allocator" if data.plan.get("device") == "cuda" else "resident in the process"
    known = {rank: peak for rank, peak in peaks.items() if peak is not None}
    top = max(known, key=lambda rank: known[rank], default=None)
    where = f" The highest peak is rank {top}'s: {bytes_text(known[top])}." if top is not None else ""
    return Chart("memory", "Memory by rank", f"Memory {kind} at the end of each step.{where}", figure)


def _memory_traces(ranks: dict[int, list[Step]], divisor: float) -> list[Figure]:
    if len(ranks) <= MOST_LINES:
        return [
            line(
                f"rank {r}",
                [float(s.step) for s in steps],
                scaled([s.memory for s in steps], divisor),
                colour(i),
                width=1.5,
                mode="lines",
            )
            for i, (r, steps) in enumerate(ranks.items())
        ]
    rows = common_steps(ranks)
    low, middle, high = band([[s.memory for s in row] for row in rows])
    return band_traces([float(row[0].step) for row in rows], low, middle, high, divisor, "ranks")


def band_traces(
    xs: list[float], low: list[Value], middle: list[Value], high: list[Value], divisor: float, what: str
) -> list[Figure]:
    """Lowest to highest as an area, and the median: for more lines than can be told apart."""
    group = f"median of the {what} (area: lowest to highest)"
    return [
        line(
            f"lowest of the {what}",
            xs,
            scaled(low, divisor),
            "--c1/0.5",
            width=1,
            mode="lines",
            showlegend=False,
            group=group,
        ),
        line(
            f"highest of the {what}",
            xs,
            scaled(high, divisor),
            "--c1/0.5",
            width=1,
            mode="lines",
            showlegend=False,
            fill="tonexty",
            fillcolor="--c1/0.18",
            group=group,
        ),
        line(group, xs, scaled(middle, divisor), colour(0), mode="lines"),
    ]


def _peak_trace(ranks: dict[int, list[Step]], divisor: float) -> list[Figure]:
    tops: dict[int, float] = {}
    for steps in ranks.values():
        for step in steps:
            if step.peak is not None:
                tops[step.step] = max(tops.get(step.step, 0.0), step.peak)
    xs = sorted(tops)
    name = label("highest peak so far")
    x, y = thin([float(n) for n in xs], scaled([tops[n] for n in xs], divisor))
    return [line(name, x, y, "--muted", width=1.5, dash="dash", mode="lines")] if xs else []
