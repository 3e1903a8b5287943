"""Charts of the time a step takes: its distribution, and where it goes on each rank. Pure."""

from __future__ import annotations

import statistics
from typing import Any

from allranks.observe.summary import WARMUP_STEPS, quantile
from allranks.report.figure import Chart, Figure, axis, colour, layout, marker_line
from allranks.report.gather import RunData
from allranks.report.series import Histogram, RankTime, histogram, rank_times, times
from allranks.report.text import seconds_text

LYING_UP_TO = 12
HEIGHT = 280
SLOWER = 1.10
PART_COLOURS = {"data": 4, "forward": 0, "backward": 2, "optimizer": 1}


def step_time_chart(data: RunData) -> Chart | None:
    """How long steps took: a histogram of rank 0's, warm-up apart."""
    warm, after = times(data.zero.steps)
    bins = histogram(warm, after)
    if bins is None:
        return None
    factor, unit = _time_unit(bins.start + bins.width * len(bins.counts))
    kinds = (
        ("after warm-up", bins.counts, colour(0)),
        (f"warm-up (first {WARMUP_STEPS} steps)", bins.warm, "--c6/0.7"),
    )
    traces = [_bars(name, bins, counts, paint, factor, unit) for name, counts, paint in kinds if any(counts)]
    figure = {"data": traces, "layout": layout(340, f"step time in {unit}", bargap=0.06, hovermode="closest")}
    few = {"dtick": 1} if max(map(sum, zip(bins.counts, bins.warm, strict=True))) <= 5 else {}
    figure["layout"]["yaxis"] = axis(title={"text": "steps", "standoff": 4}, rangemode="tozero", tickformat="~s", **few)
    counted = after or warm
    median, p90 = quantile(counted, 0.5), quantile(counted, 0.9)
    figure["layout"]["shapes"] = [
        marker_line(median * factor, "solid", "--ink"),
        marker_line(p90 * factor, "dash", "--ink"),
    ]
    note = f"Solid line: median {seconds_text(median)}; dashed: p90 {seconds_text(p90)}{'' if after else ', of warm-up steps only'}."
    if bins.beyond:
        note += f" {bins.beyond} step{'s were' if bins.beyond > 1 else ' was'} too long for this chart: up to {seconds_text(bins.longest)}."
    return Chart("step-time", "Step time", note, figure)


def _time_unit(longest: float) -> tuple[float, str]:
    return (1000.0, "ms") if longest < 2 else (1.0, "s")


def _bars(name: str, bins: Histogram, counts: list[int], paint: str, factor: float, unit: str) -> Figure:
    return {
        "type": "bar",
        "name": name,
        "x": [edge * factor for edge in bins.edges],
        "y": counts,
        "offset": 0,
        "width": 0.96 * bins.width * factor,
        "marker": {"color": paint, "line": {"width": 0}},
        "hovertemplate": f"%{{y}} steps of %{{x:.6~g}} {unit} to {bins.width * factor:.3g} {unit} more<extra>{name}</extra>",
    }


def rank_time_chart(data: RunData) -> Chart | None:
    """Mean step of each rank, split into its parts where they are known, and its p90."""
    ranks = rank_times({rank: story.steps for rank, story in data.stories.items()})
    parted = any(r.parts for r in ranks)
    if not ranks or (len(ranks) == 1 and not parted):
        return None
    lying = len(ranks) <= LYING_UP_TO
    factor, unit = _time_unit(max(r.p90 for r in ranks))
    names: list[Any] = [f"rank {r.rank}" if lying else r.rank for r in ranks]
    traces = [
        _rank_bars(
            part, names, [r.parts.get(part, 0.0) * factor for r in ranks], colour(PART_COLOURS[part]), lying, unit
        )
        for part in PART_COLOURS
        if any(part in r.parts for r in ranks)
    ]
    rest = "other" if parted else "mean step"
    traces.append(
        _rank_bars(rest, names, [r.other * factor for r in ranks], "--c6/0.6" if parted else colour(0), lying, unit)
    )
    traces.append(_p90_marks(names, ranks, factor, lying, unit))
    title = "Where a step's time goes" if parted else "Step time by rank"
    return Chart(
        "rank-time", title, _rank_note(ranks, parted), {"data": traces, "layout": _rank_layout(names, lying, unit)}
    )


def _rank_bars(name: str, ranks: list[Any], values: list[float], paint: str, lying: bool, unit: str) -> Figure:
    along, across = ("x", "y") if lying else ("y", "x")
    return {
        "type": "bar",
        "name": name,
        "width": [min(0.7, 0.2 + 0.1 * len(ranks))] * len(ranks),
        along: values,
        across: ranks,
        "orientation": "h" if lying else "v",
        "marker": {"color": paint, "line": {"width": 0}},
        "hovertemplate": f"%{{{across}}}: %{{{along}:.3~g}} {unit}<extra>{name}</extra>",
    }


def _p90_marks(names: list[Any], ranks: list[RankTime], factor: float, lying: bool, unit: str) -> Figure:
    along, across = ("x", "y") if lying else ("y", "x")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "p90",
        along: [r.p90 * factor for r in ranks],
        across: names,
        "marker": {
            "symbol": "line-ns" if lying else "line-ew",
            "size": 12,
            "color": "--ink",
            "line": {"width": 2, "color": "--ink"},
        },
        "hovertemplate": f"%{{{across}}}: %{{{along}:.3~g}} {unit}<extra>p90</extra>",
    }


def _rank_layout(names: list[Any], lying: bool, unit: str) -> Figure:
    if not lying:
        found = layout(HEIGHT, "rank", hovermode="closest", bargap=0.25)
        found["yaxis"] = axis(rangemode="tozero", ticksuffix=f" {unit}")
        return found
    found = layout(max(HEIGHT, 130 + 30 * len(names)), f"mean step time in {unit}", hovermode="closest", bargap=0.35)
    found["yaxis"] = {"type": "category", "autorange": "reversed", "automargin": True}
    found["xaxis"]["rangemode"] = "tozero"
    return found


def _rank_note(ranks: list[RankTime], parted: bool) -> str:
    parts = ["Mean of the steps after warm-up, by rank; the mark is p90."]
    if parted and len(ranks) > 1:
        parts.append("Backward includes waiting for the other ranks.")
    return " ".join([*parts, straggler(ranks)]).strip()


def straggler(ranks: list[RankTime]) -> str:
    """A sentence that names the rank for which the others seem to wait; empty where none stands out."""
    if len(ranks) < 2:
        return ""
    parted = all(r.parts for r in ranks)
    work = {r.rank: r.own if parted else r.mean for r in ranks}
    slowest = max(work, key=lambda rank: work[rank])
    usual = statistics.median([v for rank, v in work.items() if rank != slowest])
    if usual <= 0 or work[slowest] / usual < SLOWER or work[slowest] - usual < 0.001:
        return "No rank stands out." if parted else ""
    what = "data and forward" if parted else "a step"
    more = work[slowest] / usual - 1
    return f"Rank {slowest} needs {more:.0%} longer than the others for {what}; they probably wait for it."
