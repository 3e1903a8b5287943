"""Gradients on their way to the ranks that keep them: buffers that fill, buffers that travel, parts that have arrived.

Follows ``train/strategies/scatter.py``: at most two whole buffers travel at once, and they are given back only when a later one
takes their place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

AT_ONCE = 2


class Journey:
    """Flats in the order in which backward fills them, in bytes.

    Args:
        copies: what travels is there so many times: gloo reduces a copy of what it is given.
    """

    def __init__(self, flats: Sequence[int], world: int, *, copies: int) -> None:
        self._flats, self._world, self._copies = list(flats), world, copies
        self._ends = list(accumulate(self._flats))

    def at(self, done: int, *, filling: bool) -> tuple[int, int]:
        """(parts that this rank keeps, buffers), when gradients of `done` bytes have come.

        Args:
            filling: more gradients come just now, into the buffer behind those that are full.
        """
        full = bisect_right(self._ends, done)
        total = self._ends[full - 1] if full else 0
        travelling = sum(self._flats[max(0, full - AT_ONCE) : full]) * self._copies
        begun = self._flats[full] if full < len(self._flats) and (filling or done > total) else 0
        return _share(total, self._world), travelling + begun

    def launched_last(self) -> tuple[int, int]:
        """The same when the last one sets off, before the oldest is given back."""
        return _share(sum(self._flats), self._world), sum(self._flats[-AT_ONCE - 1 :]) * self._copies


def _share(n: int, world: int) -> int:
    return -(-n // world)
