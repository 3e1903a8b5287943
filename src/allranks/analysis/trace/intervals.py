"""Set operations on time intervals, and mean and median.

A *merged* list has ascending (start, end) pairs with start < end that neither overlap nor touch. Mean and median are
here because importing `statistics` takes longer than reading a small trace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[float, float]
MergedSpans = list[Span]


def merge(spans: Iterable[Span]) -> MergedSpans:
    """Return the union of spans in any order. Empty and reversed ones are dropped."""
    out: MergedSpans = []
    start = end = None
    for a, b in sorted(spans):
        if b <= a:
            continue
        if end is None or a > end:
            if end is not None:
                out.append((start, end))  # type: ignore[arg-type]
            start, end = a, b
        elif b > end:
            end = b
    if end is not None:
        out.append((start, end))  # type: ignore[arg-type]
    return out


def total_length(merged: Sequence[Span]) -> float:
    """Return the total length."""
    return sum(b - a for a, b in merged)


def clip(merged: Sequence[Span], start: float, end: float) -> MergedSpans:
    """Return the part of a merged list inside [start, end]."""
    first = bisect_right(merged, (start, float("inf"))) - 1
    if first < 0 or merged[first][1] <= start:
        first += 1
    last = bisect_left(merged, (end, float("-inf")))
    return [(max(a, start), min(b, end)) for a, b in merged[first:last]]


def intersect(one: Sequence[Span], other: Sequence[Span]) -> MergedSpans:
    """Return the intersection of two merged lists."""
    out: MergedSpans = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            out.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return out


def subtract(one: Sequence[Span], other: Sequence[Span]) -> MergedSpans:
    """Return the part of the first merged list outside the second."""
    out: MergedSpans = []
    j = 0
    for start, end in one:
        at = start
        while j < len(other) and other[j][1] <= at:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > at:
                out.append((at, other[k][0]))
            at = max(at, other[k][1])
            k += 1
        if at < end:
            out.append((at, end))
    return out


def flatten(spans: Iterable[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Convert nested or overlapping labelled spans to disjoint segments; the latest start takes precedence."""
    edges: list[tuple[float, int, int]] = []
    kept = list(spans)
    for i, (a, b, _) in enumerate(kept):
        if b > a:
            edges += [(a, 1, i), (b, 0, i)]
    edges.sort()
    out: list[tuple[float, float, int]] = []
    stack: list[int] = []
    at = 0.0
    for t, opens, i in edges:
        if stack and t > at:
            label = kept[stack[-1]][2]
            if out and out[-1][1] == at and out[-1][2] == label:
                out[-1] = (out[-1][0], t, label)
            else:
                out.append((at, t, label))
        at = t
        if opens:
            stack.append(i)
        else:
            stack.remove(i)
    return out


class SegmentIndex:
    """Return the label at a time, from disjoint segments."""

    def __init__(self, segments: Sequence[tuple[float, float, int]]) -> None:
        self.starts = [s[0] for s in segments]
        self.ends = [s[1] for s in segments]
        self.labels = [s[2] for s in segments]

    def at(self, t: float) -> int:
        """Return the label at a time, or -1."""
        i = bisect_right(self.starts, t) - 1
        return self.labels[i] if i >= 0 and t < self.ends[i] else -1


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


def median(values: Iterable[float]) -> float:
    """Return the median of at least one value; the mean of the two middle values of an even number."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
