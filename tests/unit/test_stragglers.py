"""A rank that is steadily slow is named; noise, a single slow step and work that does not matter are not."""

from __future__ import annotations

import random
from typing import Any

from allranks.observe.stragglers import WINDOW, Stragglers, judge, of_run

EVEN = {0: [0.10] * 30, 1: [0.10] * 30, 2: [0.10] * 30}
STEPS = [0.3] * 30


def slow(own: dict[int, list[float]], steps: list[float] = STEPS) -> list[int]:
    pace = judge(own, steps, {0: "n1", 1: "n2", 2: "n3"})
    return [r.rank for r in pace.slow] if pace else [-1]


def test_who_is_named() -> None:
    assert slow(EVEN) == []
    assert slow(EVEN | {1: [0.15] * 30}) == [1]
    assert slow(EVEN | {1: [0.13] * 30}) == []  # below the factor
    assert slow(EVEN | {1: [0.10] * 29 + [9.0]}) == []  # once is not steadily
    assert slow(EVEN | {1: [0.10, 0.16, 0.16] * 10}) == []  # two of three are not nearly all
    assert (
        slow({r: [v / 100 for v in own] for r, own in (EVEN | {1: [0.15] * 30}).items()}) == []
    )  # half a millisecond of 300
    assert slow({0: [0.1] * 30, 1: [0.2] * 30}) == [1]  # of two the slower
    assert slow({0: [0.1] * 30}) == [-1]
    assert slow({r: own[: WINDOW - 1] for r, own in EVEN.items()}) == [-1]


def test_uneven_batches_are_no_straggler() -> None:
    draw = random.Random(1)
    own = {r: [draw.uniform(0.06, 0.18) for _ in range(200)] for r in range(4)}
    pace = judge(own, [0.3] * 200, {})
    assert pace is not None
    assert pace.slow == []


def events(rank: int, own: float) -> list[dict[str, Any]]:
    start = {"event": "start", "rank": rank, "host": f"n{rank + 1}", "world_size": 3}
    return [
        start,
        *({"event": "step", "rank": rank, "step": s, "own_s": own, "step_time_s": 0.3} for s in range(1, 61)),
    ]


def test_it_is_said_once_while_the_run_goes_on_and_stands_in_the_summary() -> None:
    ranks = {0: events(0, 0.1), 1: events(1, 0.25), 2: events(2, 0.1)}
    listener = Stragglers()
    said = [text for moment in zip(*ranks.values(), strict=True) for event in moment for text in listener.take(event)]
    assert len(said) == 1
    assert "rank 1 on n2 is slow" in said[0]
    assert "2.5 times" in said[0]
    pace = of_run(ranks)
    assert pace is not None
    assert (pace.ranks[0].rank, pace.ranks[0].relative, pace.ranks[0].slow) == (1, 2.5, True)


def test_events_without_own_time_or_of_one_rank_say_nothing() -> None:
    assert of_run({0: events(0, 0.1)}) is None
    old = {r: [{k: v for k, v in e.items() if k != "own_s"} for e in events(r, 0.1)] for r in (0, 1)}
    assert of_run(old) is None
    listener = Stragglers()
    assert [t for e in old[0] + old[1] for t in listener.take(e)] == []
