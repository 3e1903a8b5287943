"""The timeline of one step of several ranks: phases on the host, and under them compute, communication and copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_low

from allranks.report.figure import Chart, Figure, axis, label, layout
from allranks.trace.charts import PAINTS, time_unit, worst_first
from allranks.trace.intervals import Span, clip, thin
from allranks.trace.records import PHASES, RankReport, TraceReport
from allranks.trace.units import seconds

MOST_RANKS = 8
MOST_SPANS = 250  # of one kind on one rank
ROW_PIXELS = 17
LOWEST = 130  # below, the title of the axis would lie on its numbers
_PHASE_PAINTS = {"forward": "--c8", "backward": "--c5", "optimizer": "--c7", "data": "--c3", "other": "--c6/0.5"}
_BANDS = {
    "compute": ("compute", PAINTS["compute"]),
    "comm": ("communication", PAINTS["exposed"]),
    "copy": ("copies", PAINTS["copy"]),
}
_Bar = tuple[float, float, float]  # row, start_s, length_s


def timeline_chart(report: TraceReport) -> Chart | None:
    """One step of up to eight ranks on the common clock, or the whole window where no steps were marked."""
    ranks = worst_first(report, MOST_RANKS)
    chosen = _choose(ranks)
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


def _choose(ranks: Sequence[RankReport]) -> int | None:
    """A step that all of the ranks have whole, of median length: neither the first, which warms up, nor an outlier."""
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
    """Bars by (name, colour), and the names of their rows from the top."""
    bars: dict[tuple[str, str], list[_Bar]] = {(p, _PHASE_PAINTS[p]): [] for p in PHASES} | {
        b: [] for b in _BANDS.values()
    }
    rows: dict[float, str] = {}
    at = 0.0
    for rank in ranks:
        start, end = windows[rank.rank]
        phases = [(p.phase, a, b) for p in rank.phase_spans if (a := max(p.start_s, start)) < (b := min(p.end_s, end))]
        if phases:
            rows[at] = f"rank {rank.rank} phases"
            for phase, a, b in phases[: 2 * MOST_SPANS]:
                bars[phase, _PHASE_PAINTS[phase]].append((at, a, b - a))
            at += 1
        for band in rank.bands:
            spans = thin(clip(list(band.spans), start, end), MOST_SPANS)
            if spans:
                name, _ = _BANDS[band.kind]
                rows[at] = name if phases else f"rank {rank.rank} {name}"
                bars[_BANDS[band.kind]] += [(at, a, b - a) for a, b in spans]
                at += 1
        at += 0.6
    return {key: spans for key, spans in bars.items() if spans}, rows


def _trace(name: str, paint: str, bars: Sequence[_Bar], zero: float, divisor: float) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": label(name),
        "legendgroup": label(name),
        "y": [row for row, _, _ in bars],
        "base": [(start - zero) / divisor for _, start, _ in bars],
        "x": [length / divisor for _, _, length in bars],
        "width": 0.86,
        "customdata": [f"{seconds(start - zero)} + {seconds(length)}" for _, start, length in bars],
        "hovertemplate": f"{label(name)}: %{{customdata}}<extra></extra>",
        "marker": {"color": paint, "line": {"width": 0}},
    }


def _layout(rows: dict[float, str], unit: str) -> Figure:
    last = max(rows)
    made = layout(
        max(LOWEST, int(70 + ROW_PIXELS * (last + 1))), f"time, {unit}", barmode="overlay", hovermode="closest"
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
    note = "Drag to zoom, double-click to go back. Clocks are those that paired collectives gave."
    if len(report.ranks) == 1:
        note = "Drag to zoom, double-click to go back."
    if len(ranks) < len(report.ranks):
        note += f" {len(ranks)} of {len(report.ranks)} ranks: the first, and those that held others up or waited most."
    if step is None:
        note += " No step was marked on all of these ranks."
    return (
        note
        + " Short gaps are closed where there are many; merged.json.gz has every event (open it at ui.perfetto.dev)."
    )
