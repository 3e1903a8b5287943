"""Arithmetic on spans, against sets of points."""

from __future__ import annotations

import random

import pytest

from allranks.analysis.trace.intervals import (
    SegmentIndex,
    Span,
    clip,
    flatten,
    intersect,
    merge,
    subtract,
    total_length,
)


def points(spans: list[Span]) -> set[int]:
    return {p for a, b in spans for p in range(int(a), int(b))}


def spans(rng: random.Random, n: int) -> list[Span]:
    found = [(a := rng.randrange(60), a + rng.randrange(0, 12)) for _ in range(n)]
    return [(float(a), float(b)) for a, b in found]


@pytest.mark.parametrize("seed", range(40))
def test_union_difference_intersection_and_clipping_are_those_of_sets(seed: int) -> None:
    rng = random.Random(seed)
    one, other = spans(rng, rng.randrange(9)), spans(rng, rng.randrange(9))
    a, b = merge(one), merge(other)
    assert points(a) == points(one)
    assert all(a[i][1] < a[i + 1][0] for i in range(len(a) - 1)), "touching spans are one"
    assert points(subtract(a, b)) == points(one) - points(other)
    assert points(intersect(a, b)) == points(one) & points(other)
    low, high = sorted((rng.randrange(70), rng.randrange(70)))
    assert points(clip(a, low, high)) == points(one) & set(range(low, high))
    assert total_length(a) == len(points(one))


def test_of_labels_over_one_another_the_latest_begun_holds() -> None:
    found = flatten([(0, 100, 1), (10, 20, 2), (15, 30, 3), (50, 50, 4)])
    assert found == [(0, 10, 1), (10, 15, 2), (15, 30, 3), (30, 100, 1)]
    lookup = SegmentIndex(found)
    assert [lookup.at(t) for t in (-1, 0, 12, 15, 29.9, 30, 100)] == [-1, 1, 2, 3, 3, 1, -1]
