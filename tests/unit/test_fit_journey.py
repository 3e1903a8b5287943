"""Gradients on their way: what is there of buffers and of this rank's part, step by step."""

from __future__ import annotations

import pytest

from allranks.spec.strategies.base import GradientBuffers, bucket_sizes


@pytest.mark.parametrize(
    ("done", "filling", "part", "buffers"),
    [
        (0, True, 0, 100),  # the first fills
        (100, False, 50, 100),  # it travels
        (100, True, 50, 100 + 40),
        (150, False, 70, 100 + 40 + 30),  # two travel, and the third has begun
        (170, False, 85, 40 + 30),  # the first has been given back
        (180, False, 90, 30 + 10),
    ],
)
def test_two_travel_and_one_fills(done: int, filling: bool, part: int, buffers: int) -> None:
    assert GradientBuffers([100, 40, 30, 10], 2, copies=1).at(done, filling=filling) == (part, buffers)


def test_gloo_sends_a_copy() -> None:
    assert GradientBuffers([100, 40, 30], 2, copies=2).at(140, filling=True) == (70, 2 * 140 + 30)
    assert GradientBuffers([100, 40, 30], 2, copies=2).after_last_launch() == (85, 2 * 170)


def test_buckets_take_neighbours_up_to_their_size() -> None:
    assert bucket_sizes([10, 10, 10, 50, 5, 5], 25) == [20, 10, 50, 10]
    assert bucket_sizes([], 25) == []
