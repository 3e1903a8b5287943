"""Build plotly figures as plain dictionaries from the steps of all ranks. Pure.

A series has at most `MAX_POINTS` points. The page replaces the names of colours by values, so one figure works in light
and dark mode. Titles are HTML above the figure; the page puts the title of a y axis above its upper end.
"""

from __future__ import annotations

import bisect
import html
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from allranks.analysis.metrics import WARMUP_STEPS
from allranks.analysis.report.run_data import PARTS, StepRecord
from allranks.rundir.files import replace_non_finite
from allranks.utils.text import byte_unit

MAX_POINTS = 1000
SMOOTH_ABOVE = 60
Value = float | None
Ranks = dict[int, list[StepRecord]]


def downsample(xs: Sequence[float], ys: Sequence[Value], limit: int = MAX_POINTS) -> tuple[list[float], list[Value]]:
    """Return at most `limit` points: the lowest and the highest of every interval, so that no peak is lost."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    buckets = max(limit // 2, 1)
    keep: list[int] = []
    for b in range(buckets):
        start, end = b * len(xs) // buckets, (b + 1) * len(xs) // buckets
        known = [i for i in range(start, end) if ys[i] is not None]
        if known:
            low = min(known, key=lambda i: ys[i] or 0.0)
            high = max(known, key=lambda i: ys[i] or 0.0)
            keep += sorted({low, high})
        else:
            keep.append(start)
    return [xs[i] for i in keep], [ys[i] for i in keep]


def smooth(values: Sequence[Value], width: int) -> list[Value]:
    """Return the mean over the `width` neighbours of each value, of those that are known."""
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    half = width // 2
    out: list[Value] = []
    for i in range(len(values)):
        start, end = max(i - half, 0), min(i + half + 1, len(values))
        n = counts[end] - counts[start]
        out.append((sums[end] - sums[start]) / n if n else None)
    return out


def smoothing_width(points: int) -> int | None:
    """Return the number of neighbours to average over; None if the curve is short enough without smoothing."""
    return max(7, points // 40) if points > SMOOTH_ABOVE else None


def common_steps(ranks: Ranks) -> list[list[StepRecord]]:
    """Return the steps that every rank has logged, because a sum needs all ranks. One list per step, rank 0 first."""
    tables = [{step.step: step for step in steps} for steps in ranks.values() if steps]
    if not tables:
        return []
    return [[t[n] for t in tables] for n in sorted(tables[0]) if all(n in t for t in tables[1:])]


def rates(ranks: Ranks) -> list[tuple[int, float, Value]]:
    """Return (step, real tokens per second, trained tokens per second) over all ranks.

    Ranks are synchronous, so the time of the first rank is used.
    """
    lines = []
    for row in common_steps(ranks):
        seconds, real, trained = sum(row[0].seconds), _total([s.tokens for s in row]), _total([s.trained for s in row])
        if seconds > 0 and real is not None:
            lines.append((row[0].step, real / seconds, None if trained is None else trained / seconds))
    return lines


def _total(values: list[Value]) -> Value:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def times(steps: list[StepRecord]) -> tuple[list[float], list[float]]:
    """Return the seconds of each optimizer step: (warm-up steps, later steps)."""
    warm: list[float] = []
    after: list[float] = []
    for step in steps:
        start = step.step - len(step.seconds)
        for i, seconds in enumerate(step.seconds):
            (after if start + i >= WARMUP_STEPS else warm).append(seconds)
    return warm, after


@dataclass(frozen=True)
class RankTime:
    """A rank's mean step after warm-up, by part; `other` is the time outside all parts."""

    rank: int
    parts: dict[str, float]
    other: float


def rank_times(ranks: Ranks) -> list[RankTime]:
    """Return the parts of each rank's time. If the run ended during warm-up, all steps count."""
    lines = []
    for rank, steps in ranks.items():
        warm, after = times(steps)
        each = after or warm
        if not each:
            continue
        counted = [s for s in steps if s.step - s.count >= WARMUP_STEPS] or steps
        mean = statistics.fmean(each)
        parts = {p: _mean_part(counted, p) for p in PARTS if any(p in s.parts for s in counted)}
        other = max(mean - sum(parts.values()), 0.0) if parts else mean
        lines.append(RankTime(rank, parts, other))
    return lines


def _mean_part(steps: list[StepRecord], part: str) -> float:
    weights = sum(s.count for s in steps if part in s.parts)
    return sum(s.parts[part] * s.count for s in steps if part in s.parts) / weights


def band(rows: Sequence[Sequence[Value]]) -> tuple[list[Value], list[Value], list[Value]]:
    """Return (lowest, median, highest) of each row's known values."""
    low: list[Value] = []
    middle: list[Value] = []
    high: list[Value] = []
    for row in rows:
        known = [v for v in row if v is not None]
        low.append(min(known, default=None))
        middle.append(statistics.median(known) if known else None)
        high.append(max(known, default=None))
    return low, middle, high


class Elapsed:
    """Convert times of day to seconds since the start, without the time between attempts."""

    def __init__(self, moments: Sequence[float]) -> None:
        self._moments = sorted(moments)
        gaps = [b - a for a, b in zip(self._moments, self._moments[1:], strict=False)]
        limit = max(120.0, 20 * statistics.median(gaps)) if gaps else 120.0
        self._lost = [0.0]
        for gap in gaps:
            self._lost.append(self._lost[-1] + (gap if gap > limit else 0.0))

    def __call__(self, moment: float) -> float:
        if not self._moments:
            return 0.0
        at = max(bisect.bisect_right(self._moments, moment) - 1, 0)
        return max(moment - self._moments[0] - self._lost[at], 0.0)


MAX_LINES = 8
Figure = dict[str, Any]


@dataclass(frozen=True)
class LegendEntry:
    """A line of the legend. The page shows the legend as HTML, which wraps better than plotly's.

    ``shape`` is solid, dot, dash, box, mark or diamond.
    """

    name: str
    group: str
    colour: str
    opacity: str
    shape: str


@dataclass(frozen=True)
class Chart:
    """A figure with its heading and the note below it."""

    id: str
    title: str
    note: str
    figure: Figure
    wide: bool = False
    log: bool = False
    """Whether a button changes the scale of the first y axis."""
    kind: ClassVar[str] = "chart"

    @property
    def legend(self) -> list[LegendEntry]:
        """Return the meaning of the colours; nothing if there is only one."""
        shown = [t for t in self.figure["data"] if t.get("showlegend") is not False]
        return [_legend_entry(trace) for trace in shown] if len(shown) > 1 else []

    @property
    def height(self) -> int:
        return self.figure["layout"]["height"]


def _legend_entry(trace: Figure) -> LegendEntry:
    line_, marker = trace.get("line") or {}, trace.get("marker") or {}
    paint, _, opacity = str(line_.get("color") or marker.get("color")).partition("/")
    shape = "box" if trace["type"] == "bar" else line_.get("dash", "mark")
    if marker.get("symbol") == "diamond":
        shape = "diamond"
    return LegendEntry(
        html.unescape(trace["name"]), trace.get("legendgroup") or trace["name"], paint, opacity or "1", shape
    )


def label(text: str) -> str:
    """Escape text inside a figure: plotly parses tags in it."""
    return html.escape(text, quote=False)


def line(name: str, xs: Sequence[float], ys: Sequence[Value], paint: str, *, axis: int = 1, **more: Any) -> Figure:
    """Return a curve, thinned if it has more points than are visible; a few points get markers."""
    limit = more.pop("limit", MAX_POINTS)
    x, y = downsample(xs, ys, limit)
    style = {"color": paint, "width": more.pop("width", 2), "dash": more.pop("dash", "solid")}
    few = len(x) <= 40
    trace = {
        "type": "scatter",
        "name": label(name),
        "x": x,
        "y": y,
        "mode": "lines+markers" if few else "lines",
        "line": style,
        "marker": {"size": 5, "color": paint},
        "legendgroup": label(more.pop("group", name)),
        **({"yaxis": f"y{axis}"} if axis > 1 else {}),
    }
    return trace | more


def smoothed(
    name: str,
    xs: Sequence[float],
    ys: Sequence[Value],
    paint: str,
    window: int | None,
    *,
    faint: str = "",
    **style: Any,
) -> list[Figure]:
    """Return a curve; with a window its running mean, and behind it the values with the opacity `faint`."""
    if not window:
        return [line(name, xs, ys, paint, **style)]
    mean = line(name, xs, smooth(ys, window), paint, **style)
    behind = {**style, "width": 1, "mode": "lines", "group": name, "showlegend": False, "hoverinfo": "skip"}
    return [line(name, xs, ys, f"{paint}/{faint}", **behind), mean] if faint else [mean]


def layout(height: int, x_title: str, y: Figure, **more: Any) -> Figure:
    """Return a layout with one x axis and a y axis; `more` adds or replaces entries."""
    return {
        "height": height,
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "barmode": "stack",
        "xaxis": {"title": {"text": x_title, "standoff": 6}, "zeroline": False, "automargin": True},
        "yaxis": y,
        **more,
    }


def step_layout(height: int, steps: Sequence[float], y: Figure, **more: Any) -> Figure:
    """Return a layout over steps, without ticks between steps."""
    axes = layout(height, "step", y, **more)
    if steps and max(steps) - min(steps) <= 10:
        axes["xaxis"]["dtick"] = 1
    return axes


def axis(title: str, low: float = 0.0, high: float = 1.0, *, unit: str = "", **more: Any) -> Figure:
    """Return a y axis that uses a part of the height; the unit is in its title and beside the values."""
    named = {
        "title": {"text": f"{title} ({unit.strip()})" if unit else title},
        "ticksuffix": f" {unit}" if unit else "",
    }
    return {**named, "domain": [low, high], "automargin": True, "exponentformat": "e", "zeroline": False, **more}


def scale_type(values: Sequence[Value]) -> Figure:
    """Return a logarithmic scale for positive values of more than two orders of magnitude; otherwise a linear one."""
    known = [v for v in values if v is not None]
    return {"type": "log"} if known and 0 < 100 * min(known) < max(known) else {}


def warmup_shapes(first: int, last: int) -> list[Figure]:
    """Return the shape that marks the warm-up steps; nothing if the chart shows only warm-up steps, or none of them."""
    if first > WARMUP_STEPS or last <= WARMUP_STEPS:
        return []
    return [marked_area(min(first, 1) - 0.5, WARMUP_STEPS + 0.5, "--shade")]


def marked_area(start: float, end: float, paint: str) -> Figure:
    """Return an area behind all rows."""
    return {**_shape("rect", start, end), "fillcolor": paint, "line": {"width": 0}, "layer": "below"}


def marker_line(x: float, dash: str = "dot", paint: str = "--muted") -> Figure:
    """Return a vertical line through all rows."""
    return {**_shape("line", x, x), "line": {"color": paint, "width": 1, "dash": dash}}


def _shape(kind: str, start: float, end: float) -> Figure:
    return {"type": kind, "xref": "x", "yref": "paper", "x0": start, "x1": end, "y0": 0, "y1": 1}


def common_byte_unit(values: Sequence[Value]) -> tuple[float, str]:
    """Return (divisor, unit) suitable for the largest of some byte counts."""
    return byte_unit(max((v for v in values if v is not None), default=0.0))


def scale(values: Sequence[Value], divisor: float) -> list[Value]:
    """Return values in a larger unit."""
    return [None if v is None else v / divisor for v in values]


def figures_json(charts: list[Chart]) -> str:
    """Return all figures by id, as JSON that is safe inside a script element."""
    figures = {chart.id: round_numbers(replace_non_finite(chart.figure)) for chart in charts}
    text = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def round_numbers(value: Any) -> Any:
    """Round the numbers of a figure to six digits: more are not visible and would enlarge the page."""
    if isinstance(value, float):
        short = float(f"{value:.6g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, dict):
        return {key: round_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_numbers(item) for item in value]
    return value
