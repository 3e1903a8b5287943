"""Build the charts of the trace page. Pure; the size of a figure is bounded for any run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from allranks.analysis.report.figures import (
    ACTIVITY_COLOURS,
    Chart,
    Figure,
    axis,
    colour,
    common_byte_unit,
    label,
    layout,
    line,
    scale,
)
from allranks.analysis.trace.records import CPU_MEMORY, Breakdown, TraceReport
from allranks.utils.text import format_bytes, format_seconds

MAX_BARS = 128
MAX_CURVES = 8
_PARTS: tuple[tuple[str, str, Callable[[Breakdown], float]], ...] = (
    ("compute", "compute", lambda b: b.compute_s),
    ("exposed communication", "exposed", lambda b: b.exposed_comm_s),
    ("copies", "copy", lambda b: b.copy_s),
    ("idle", "idle", lambda b: b.idle_s),
)


def time_unit(values: Sequence[float]) -> tuple[float, str]:
    """Return (divisor, unit) suitable for the largest of some times."""
    top = max(values, default=0.0)
    return next(((d, u) for d, u in ((1.0, "s"), (1e-3, "ms")) if top >= d), (1e-6, "us"))


def breakdown_chart(report: TraceReport) -> Chart:
    """Return a bar per rank: compute, exposed communication, copies, idle."""
    ranks = report.ranks[:MAX_BARS]
    parts = [(name, ACTIVITY_COLOURS[paint], [of(r.total) for r in ranks]) for name, paint, of in _PARTS]
    figure = _bars([r.rank for r in ranks], [p for p in parts if any(p[2])])
    return Chart("breakdown", "Time by rank", report.definition + _left_out_note(report), figure)


def overlap_chart(report: TraceReport) -> Chart | None:
    """Return a bar per rank: communication hidden by compute, and exposed communication."""
    ranks = report.ranks[:MAX_BARS]
    if not any(r.total.comm_s for r in ranks):
        return None
    hidden = ("hidden behind compute", ACTIVITY_COLOURS["hidden"], [r.total.overlapped_comm_s for r in ranks])
    open_ = ("exposed", ACTIVITY_COLOURS["exposed"], [r.total.exposed_comm_s for r in ranks])
    known = [r.total.overlap for r in ranks if r.total.overlap is not None]
    low, high = f"{100 * min(known):.0f}", f"{100 * max(known):.0f}"
    note = f"Overlap is the hidden share of communication: {low if low == high else f'{low} to {high}'} %."
    return Chart("overlap", "Communication, hidden and exposed", note, _bars([r.rank for r in ranks], [hidden, open_]))


def waiting_chart(report: TraceReport) -> Chart | None:
    """Return a bar per rank: waiting for others in collectives, and transfer."""
    waited = {s.rank: s.wait_s for s in report.stragglers}
    if not waited:
        return None
    fake = report.startup.fake_wait_s if report.startup else {}
    launched: dict[int, float] = {}
    for row in report.launches:
        launched[row.rank] = launched.get(row.rank, 0.0) + row.time_s
    ranks = [r.rank for r in report.ranks if r.rank in waited][:MAX_BARS]
    rest = [max(launched.get(r, 0.0) - waited[r] - fake.get(r, 0.0), 0.0) for r in ranks]
    bars = [
        ("transfer", ACTIVITY_COLOURS["hidden"], rest),
        ("waiting for the last rank", ACTIVITY_COLOURS["wait"], [waited[r] for r in ranks]),
    ]
    note = "Sums over collectives, including concurrent ones. The other ranks wait for the rank with the least waiting."
    if report.pairing.unpaired:
        note += " Collectives that were not found on other ranks count as transfer."
    return Chart("waiting", "Transfer and waiting, by rank", note, _bars(ranks, bars))


def step_chart(report: TraceReport) -> Chart | None:
    """Return the time of each step by rank; the median and the extremes if there are many ranks."""
    ranks = [r for r in report.ranks if len(r.steps) > 1]
    if not ranks:
        return None
    divisor, unit = time_unit([s.breakdown.span_s for r in ranks for s in r.steps])
    shown = ranks
    note = "A step lasts from one profiler mark to the next."
    if len(ranks) > MAX_CURVES:
        shown = sorted(ranks, key=lambda r: -r.total.span_s)[:MAX_CURVES]
        note += f" Shown: the {MAX_CURVES} of {len(ranks)} ranks with the longest windows."
    traces = [
        line(
            f"rank {r.rank}",
            [float(s.step) for s in r.steps],
            [s.breakdown.span_s / divisor for s in r.steps],
            colour(i),
        )
        for i, r in enumerate(shown)
    ]
    made = layout(260, "step", yaxis=axis(rangemode="tozero", ticksuffix=f" {unit}"))
    if max(len(r.steps) for r in shown) <= 12:
        made["xaxis"]["dtick"] = 1
    return Chart("steps", "Time of a step", note, {"data": traces, "layout": made})


def bandwidth_chart(report: TraceReport) -> Chart | None:
    """Return bus bandwidth over the mean size, a curve per kind."""
    rows = [r for r in report.sizes if r.busbw_bytes_s and r.bytes and r.count]
    kinds = list(dict.fromkeys(r.kind for r in rows))
    if len(rows) == len(kinds):  # one size per kind does not make a curve
        return None
    traces = []
    for i, kind in enumerate(kinds):
        mine = sorted(((r.bytes or 0) / r.count, r.busbw_bytes_s or 0.0) for r in rows if r.kind == kind)
        traces.append(line(kind, [b for b, _ in mine], [bw / 1e9 for _, bw in mine], colour(i)))
    made = layout(
        260, "mean size of a message", yaxis=axis(rangemode="tozero", ticksuffix=" GB/s"), hovermode="closest"
    )
    ticks = [1024**p * f for p in range(4) for f in (1, 32)]
    made["xaxis"] |= {"type": "log", "tickvals": ticks, "ticktext": [format_bytes(t, digits=4) for t in ticks]}
    text = (
        "Bytes over transfer time, times the factor of nccl-tests that makes kinds and rank counts comparable. GB is "
        "10^9 bytes."
    )
    return Chart("bandwidth", "Bus bandwidth by size", text, {"data": traces, "layout": made})


def memory_chart(report: TraceReport) -> Chart | None:
    """Return allocated bytes over time, a curve per rank and device: the highest peaks."""
    found = [(r, m) for r in report.ranks for m in r.memory if m.points]
    if not found:
        return None
    shown = sorted(found, key=lambda item: -item[1].peak_bytes)[:MAX_CURVES]
    shown.sort(key=lambda item: (item[0].rank, item[1].device))
    t_divisor, t_unit = time_unit([m.points[-1][0] for _, m in shown])
    divisor, unit = common_byte_unit([float(m.peak_bytes) for _, m in shown])
    traces = [
        line(
            f"rank {r.rank}, {m.device}",
            [t / t_divisor for t, _ in m.points],
            scale([float(b) for _, b in m.points], divisor),
            colour(i),
            width=1.5,
            mode="lines",
        )
        for i, (r, m) in enumerate(shown)
    ]
    made = layout(280, f"time, {t_unit}", yaxis=axis(rangemode="tozero", ticksuffix=f" {unit}"))
    peaks = [m.peak_bytes for _, m in shown]
    low = f" (lowest: {format_bytes(min(peaks), digits=4)})" if min(peaks) < max(peaks) else ""
    note = f"Bytes allocated by PyTorch. The highest peak is {format_bytes(max(peaks), digits=4)}{low}."
    if len(shown) < len(found):
        note += f" Shown: the {len(shown)} highest of {len(found)} curves."
    if any(m.device == "cpu" for _, m in shown):
        note += f" {CPU_MEMORY}"
    return Chart("memory", "Memory over time", note, {"data": traces, "layout": made}, wide=True)


def _bars(ranks: Sequence[int], parts: Sequence[tuple[str, str, Sequence[float]]]) -> Figure:
    totals = [sum(values[i] for _, _, values in parts) for i in range(len(ranks))]
    divisor, unit = time_unit(totals)
    traces = [
        _bar(
            name,
            paint,
            [f"{format_seconds(v)}, {100 * v / t:.1f} %" if t else "-" for v, t in zip(values, totals, strict=True)],
            x=list(ranks),
            y=[v / divisor for v in values],
        )
        for name, paint, values in parts
    ]
    made = layout(
        280, "rank", yaxis=axis(rangemode="tozero", ticksuffix=f" {unit}"), bargap=0.25 if len(ranks) < 32 else 0.05
    )
    if len(ranks) <= 24:
        made["xaxis"] |= {"tickvals": list(ranks), "range": [min(ranks) - 0.9, max(ranks) + 0.9]}
    if len(ranks) <= 4:
        made["bargap"] = 0.5
    return {"data": traces, "layout": made}


def _left_out_note(report: TraceReport) -> str:
    rest = len(report.ranks) - MAX_BARS
    return f" {rest} more ranks are in summary.csv." if rest > 0 else ""


def _bar(name: str, paint: str, texts: list[str], **more: Any) -> Figure:
    """Return bars of one colour; ``texts`` are what is shown where the pointer is."""
    return {
        "type": "bar",
        "name": label(name),
        "legendgroup": label(name),
        "customdata": texts,
        "hovertemplate": f"{label(name)}: %{{customdata}}<extra></extra>",
        "marker": {"color": paint, "line": {"width": 0}},
        **more,
    }
