"""Compute the data of the charts from the steps of all ranks. Pure."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from allranks.analysis.metrics import WARMUP_STEPS
from allranks.analysis.report.run_data import PARTS, StepRecord

MAX_POINTS = 2000
SMOOTH_ABOVE = 60
Value = float | None
Ranks = dict[int, list[StepRecord]]


@dataclass(frozen=True)
class Rate:
    """Tokens per second over all ranks, up to a step."""

    step: int
    real: float
    trained: Value
    padded: Value


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


def rates(ranks: Ranks) -> list[Rate]:
    """Return tokens per second. Ranks are synchronous, so the time of the first rank is used."""
    found = []
    for row in common_steps(ranks):
        seconds = sum(row[0].seconds)
        real = _total([s.tokens for s in row])
        if seconds <= 0 or real is None:
            continue
        trained, padded = _total([s.trained for s in row]), _total([s.padded for s in row])
        found.append(
            Rate(
                row[0].step,
                real / seconds,
                None if trained is None else trained / seconds,
                None if padded is None else padded / seconds,
            )
        )
    return found


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
    mean: float
    p90: float

    @property
    def own(self) -> float:
        """Return the seconds of work without waiting for other ranks."""
        return self.parts.get("data", 0.0) + self.parts.get("forward", 0.0)


def rank_times(ranks: Ranks) -> list[RankTime]:
    """Return the parts of each rank's time. If the run ended during warm-up, all steps count."""
    found = []
    for rank, steps in ranks.items():
        warm, after = times(steps)
        each = sorted(after or warm)
        if not each:
            continue
        counted = [s for s in steps if s.step - s.count >= WARMUP_STEPS] or steps
        mean = statistics.fmean(each)
        parts = {p: _mean_part(counted, p) for p in PARTS if any(p in s.parts for s in counted)}
        other = max(mean - sum(parts.values()), 0.0) if parts else mean
        found.append(RankTime(rank, parts, other, mean, each[min(int(0.9 * len(each)), len(each) - 1)]))
    return found


def _mean_part(steps: list[StepRecord], part: str) -> float:
    weights = sum(s.count for s in steps if part in s.parts)
    return sum(s.parts[part] * s.count for s in steps if part in s.parts) / weights


@dataclass(frozen=True)
class Histogram:
    """Counts in equal bins. Values too long for the chart are counted in `beyond`; `longest` is the longest of them."""

    start: float
    width: float
    counts: list[int]
    warm: list[int]
    beyond: int
    longest: float | None

    @property
    def edges(self) -> list[float]:
        """Return the start of each bin."""
        return [self.start + i * self.width for i in range(len(self.counts))]


def histogram(warm: list[float], after: list[float]) -> Histogram | None:
    """Return step times in bins; a few very long ones must not compress all others into one bar."""
    ordered = sorted(after or warm)
    if not ordered:
        return None
    middle, usual = ordered[len(ordered) // 2], ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)]
    limit = max(usual, middle) * 1.5
    shown = [t for t in [*warm, *after] if t <= limit]
    low, high = min(shown), max(shown)
    width = round_up(max(high - low, middle * 0.02, 1e-6) / max(6, min(30, round(2 * len(shown) ** 0.5))))
    start = math.floor(low / width) * width
    bins = int((high - start) / width) + 1
    beyond = [t for t in [*warm, *after] if t > limit]
    counted, warmed = (_count([t for t in part if t <= limit], start, width, bins) for part in (after, warm))
    return Histogram(start, width, counted, warmed, len(beyond), max(beyond, default=None))


def round_up(value: float) -> float:
    """Round up to the next of 1, 2, 5, 10, 20, ...: readable axis steps."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(n * unit for n in (1, 2, 5, 10) if n * unit >= value * 0.999)


def _count(values: list[float], start: float, width: float, bins: int) -> list[int]:
    counts = [0] * bins
    for value in values:
        counts[min(int((value - start) / width), bins - 1)] += 1
    return counts


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
