"""Mean and median. `statistics` would do, but its import takes longer than reading a small trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)


def median(values: Iterable[float]) -> float:
    """Of at least one value; the mean of the two in the middle of an even number."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
