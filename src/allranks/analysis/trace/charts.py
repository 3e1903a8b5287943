"""Build the charts and the timeline of the trace page. Pure; the size of a figure is bounded for any run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median_low
from typing import Any

from allranks.analysis.report.figures import (
    ACTIVITY_COLOURS,
    PHASE_COLOURS,
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
from allranks.analysis.trace.intervals import Span, clip, close_short_gaps
from allranks.analysis.trace.records import CPU_MEMORY, PHASES, Breakdown, RankReport, TraceReport
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


def worst_first(report: TraceReport, count: int) -> list[RankReport]:
    """Return some ranks in order: the first, those that others waited for, those with the most exposed
    communication."""
    order = [s.rank for s in report.stragglers[: count // 2]]
    order = [report.ranks[0].rank, *order]
    order += [r.rank for r in sorted(report.ranks, key=lambda r: -r.total.exposed_comm_s)]
    chosen = set(list(dict.fromkeys(order))[:count])
    return [r for r in report.ranks if r.rank in chosen]


MAX_TIMELINE_RANKS = 8
MAX_TIMELINE_SPANS = 250  # per kind and rank
ROW_PIXELS = 17
MIN_TIMELINE_HEIGHT = 130  # below it, the title of the axis would overlap its numbers
_BANDS = {
    "compute": ("compute", ACTIVITY_COLOURS["compute"]),
    "comm": ("communication", ACTIVITY_COLOURS["exposed"]),
    "copy": ("copies", ACTIVITY_COLOURS["copy"]),
}
_Bar = tuple[float, float, float]  # row, start_s, length_s


def timeline_chart(report: TraceReport) -> Chart | None:
    """Return one step of up to eight ranks on the common clock, or the whole window if no steps were marked."""
    ranks = worst_first(report, MAX_TIMELINE_RANKS)
    chosen = _choose_step(ranks)
    windows = {r.rank: _window(r, chosen) for r in ranks}
    ranks = [r for r in ranks if windows[r.rank][1] > windows[r.rank][0]]
    bars, rows = _collect(ranks, windows)
    if not bars:
        return None
    zero = min(windows[r.rank][0] for r in ranks)
    divisor, unit = time_unit([windows[r.rank][1] - zero for r in ranks])
    traces = [_trace(name, paint, spans, zero, divisor) for (name, paint), spans in bars.items()]
    figure = {"data": traces, "layout": _layout(rows, unit)}
    what = f"step {chosen}" if chosen is not None else "the whole window"
    return Chart("timeline", f"Timeline of {what}", _note(report, ranks, chosen), figure, wide=True)


def _choose_step(ranks: Sequence[RankReport]) -> int | None:
    """Choose a step that all of the ranks have completely, of median length and not the first one."""
    common = set.intersection(*({s.step for s in r.steps if not s.trimmed} for r in ranks))
    if not common:
        common = set.intersection(*({s.step for s in r.steps} for r in ranks))
    lengths = {n: max(s.end_s - s.start_s for r in ranks for s in r.steps if s.step == n) for n in common}
    if not lengths:
        return None
    middle = median_low(lengths.values())
    return next(n for n in sorted(lengths) if lengths[n] == middle)


def _window(rank: RankReport, step: int | None) -> Span:
    found = next((s for s in rank.steps if s.step == step), None)
    return (found.start_s, found.end_s) if found else (rank.start_s, rank.end_s)


def _collect(
    ranks: Iterable[RankReport], windows: dict[int, Span]
) -> tuple[dict[tuple[str, str], list[_Bar]], dict[float, str]]:
    """Return bars by (name, colour), and the names of their rows from the top."""
    bars: dict[tuple[str, str], list[_Bar]] = {(p, PHASE_COLOURS[p]): [] for p in PHASES} | {
        b: [] for b in _BANDS.values()
    }
    rows: dict[float, str] = {}
    at = 0.0
    for rank in ranks:
        start, end = windows[rank.rank]
        phases = [(p.phase, a, b) for p in rank.phase_spans if (a := max(p.start_s, start)) < (b := min(p.end_s, end))]
        if phases:
            rows[at] = f"rank {rank.rank} phases"
            for phase, a, b in phases[: 2 * MAX_TIMELINE_SPANS]:
                bars[phase, PHASE_COLOURS[phase]].append((at, a, b - a))
            at += 1
        for band in rank.bands:
            spans = close_short_gaps(clip(list(band.spans), start, end), MAX_TIMELINE_SPANS)
            if spans:
                name, _ = _BANDS[band.kind]
                rows[at] = name if phases else f"rank {rank.rank} {name}"
                bars[_BANDS[band.kind]] += [(at, a, b - a) for a, b in spans]
                at += 1
        at += 0.6
    return {key: spans for key, spans in bars.items() if spans}, rows


def _trace(name: str, paint: str, bars: Sequence[_Bar], zero: float, divisor: float) -> Figure:
    return _bar(
        name,
        paint,
        [f"{format_seconds(start - zero)} + {format_seconds(length)}" for _, start, length in bars],
        orientation="h",
        y=[row for row, _, _ in bars],
        base=[(start - zero) / divisor for _, start, _ in bars],
        x=[length / divisor for _, _, length in bars],
        width=0.86,
    )


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


def _layout(rows: dict[float, str], unit: str) -> Figure:
    last = max(rows)
    made = layout(
        max(MIN_TIMELINE_HEIGHT, int(70 + ROW_PIXELS * (last + 1))),
        f"time, {unit}",
        barmode="overlay",
        hovermode="closest",
    )
    made["yaxis"] = axis(
        range=[last + 0.6, -0.6],
        tickvals=list(rows),
        ticktext=[label(name) for name in rows.values()],
        showgrid=False,
        fixedrange=True,
        tickfont={"size": 10},
    )
    return made


def _note(report: TraceReport, ranks: Sequence[RankReport], step: int | None) -> str:
    note = "Drag to zoom, double-click to reset. Clocks are aligned by paired collectives."
    if len(report.ranks) == 1:
        note = "Drag to zoom, double-click to reset."
    if len(ranks) < len(report.ranks):
        note += f" {len(ranks)} of {len(report.ranks)} ranks: the first, those that others waited for, and those that waited most."
    if step is None:
        note += " No step was marked on all of these ranks."
    return (
        note
        + " If there are many short gaps, they are closed; merged.json.gz has every event (open it at ui.perfetto.dev)."
    )
