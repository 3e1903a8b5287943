"""A rank that is steadily slow is named; noise, a single slow step and work that does not matter are not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from allranks.analysis.machine_load import Lost
from allranks.analysis.stragglers import (
    BACKWARD,
    OPTIMIZER,
    OWN,
    WINDOW_STEPS,
    StragglerDetector,
    measure_pace,
    pace_of_run,
    straggler_message,
)

EVEN = {0: [0.10] * 30, 1: [0.10] * 30, 2: [0.10] * 30}
STEPS = [0.3] * 30


def slow(own: dict[int, list[float]], steps: list[float] = STEPS) -> list[int]:
    pace = measure_pace({OWN: own}, steps, {0: "n1", 1: "n2", 2: "n3"})
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
    assert slow({r: own[: WINDOW_STEPS - 1] for r, own in EVEN.items()}) == [-1]


def test_backward_passes_are_judged_by_themselves() -> None:
    pace = measure_pace({OWN: EVEN, BACKWARD: EVEN | {2: [0.25] * 30}}, STEPS, {})
    assert pace is not None
    assert [(r.rank, r.relative, r.backward_relative, r.slow_in) for r in pace.ranks] == [
        (2, 1.0, 2.5, ("own_backward_s",)),
        (0, 1.0, pytest.approx(0.571, abs=1e-3), ()),
        (1, 1.0, pytest.approx(0.571, abs=1e-3), ()),
    ]
    assert "rank 2 is slow: its backward passes take 2.5 times" in straggler_message(pace.ranks[0])
    both = measure_pace({OWN: EVEN | {2: [0.2] * 30}, BACKWARD: EVEN | {2: [0.25] * 30}}, STEPS, {})
    assert both is not None
    assert both.ranks[0].slow_in == ("own_s", "own_backward_s")
    assert "backward passes take 2.5 times" in straggler_message(both.ranks[0])
    untold = measure_pace({OWN: EVEN, BACKWARD: {r: own[:5] for r, own in EVEN.items()}}, STEPS, {})
    assert untold is not None
    assert [r.backward_s for r in untold.ranks] == [None] * 3


def test_uneven_batches_are_no_straggler() -> None:
    draw = random.Random(1)
    own = {r: [draw.uniform(0.06, 0.18) for _ in range(200)] for r in range(4)}
    pace = measure_pace({OWN: own}, [0.3] * 200, {})
    assert pace is not None
    assert pace.slow == []


NO_WAIT = {r: [0.0] * 30 for r in EVEN}


@pytest.mark.parametrize(
    ("own", "queued", "reason", "names"),
    [
        ({1: [0.3] * 30}, {1: [0.2] * 30}, "machine", []),  # all of the difference was taken
        ({1: [0.3] * 30}, {1: [0.05] * 30}, "own", [1]),  # not all of it
        ({1: [0.3] * 30}, {}, "own", [1]),
        ({1: [0.1] * 30}, {}, None, []),
        ({0: [0.2] * 30, 1: [0.2] * 30}, {0: [0.1] * 30, 2: [0.0] * 30}, "own", [1]),  # hidden by the load of rank 0
        ({1: [0.3] * 30}, {1: [0.5] * 30}, "unknown", [1]),  # more than there was: the clocks disagree
        ({1: [0.3] * 30}, {1: [0.2] * 3}, "unknown", [1]),  # not told in all steps
        ({1: [0.3] * 30}, {1: [-9.0] * 30}, "unknown", [1]),
    ],
)
def test_time_that_was_taken_is_no_work(own: Any, queued: Any, reason: str | None, names: list[int]) -> None:
    pace = measure_pace({OWN: EVEN | own}, STEPS, {}, {OWN: NO_WAIT | queued})
    assert pace is not None
    assert [r.rank for r in pace.slow] == names
    found = next(r for r in pace.ranks if r.rank == 1)
    assert found.reason == reason
    assert ("not known whether its CPU time was taken" in straggler_message(found)) == (reason == "unknown")


def test_time_that_other_threads_or_the_hypervisor_may_have_cost_is_no_work() -> None:
    own = {OWN: EVEN | {1: [0.3] * 30}}
    for lost, names in ((Lost(threads_share=0.6), []), (Lost(stolen_share=0.6), []), (Lost(threads_share=0.1), [1])):
        pace = measure_pace(own, STEPS, {}, {OWN: NO_WAIT}, {1: lost})
        assert pace is not None
        assert [r.rank for r in pace.slow] == names
    pace = measure_pace(own, STEPS, {}, {OWN: NO_WAIT}, {0: Lost(stolen_share=0.9), 2: Lost(threads_share=7.0)})
    assert pace is not None
    assert [r.rank for r in pace.slow] == [1], "what others may have lost makes no rank slow or fast"


def events(rank: int, own: float) -> list[dict[str, Any]]:
    start = {"event": "start", "rank": rank, "host": f"n{rank + 1}", "world_size": 3}
    return [
        start,
        *({"event": "step", "rank": rank, "step": s, "own_s": own, "step_time_s": 0.3} for s in range(1, 61)),
    ]


def test_it_is_said_once_while_the_run_goes_on_and_stands_in_the_summary() -> None:
    ranks = {0: events(0, 0.1), 1: events(1, 0.25), 2: events(2, 0.1)}
    listener = StragglerDetector()
    said = [text for moment in zip(*ranks.values(), strict=True) for event in moment for text in listener.take(event)]
    assert len(said) == 1
    assert "rank 1 on n2 is slow" in said[0]
    assert "2.5 times" in said[0]
    pace = pace_of_run(ranks)
    assert pace is not None
    assert (pace.ranks[0].rank, pace.ranks[0].relative, pace.ranks[0].slow) == (1, 2.5, True)


def said(ranks: dict[int, list[dict[str, Any]]], listener: StragglerDetector) -> list[str]:
    return [text for moment in zip(*ranks.values(), strict=True) for event in moment for text in listener.take(event)]


def test_warm_up_and_an_attempt_before_do_not_count() -> None:
    """A rank that was slow until the run was started again, which goes on after step 24."""
    ranks = {r: events(r, 0.1) for r in range(3)}
    slow = ranks | {1: events(1, 0.4)}
    listener = StragglerDetector()
    assert said({r: own[:25] for r, own in slow.items()}, listener) == []  # 24 steps, of which 5 are warm-up
    assert said({r: [own[0], *own[25:44]] for r, own in ranks.items()}, listener) == []
    assert len(said(slow, StragglerDetector())) == 1


def test_a_slow_optimizer_is_named() -> None:
    pace = measure_pace({OWN: EVEN, OPTIMIZER: EVEN | {1: [0.3] * 30}}, STEPS, {})
    assert pace is not None
    assert (pace.ranks[0].rank, pace.ranks[0].slow_in, pace.ranks[0].optimizer_relative) == (1, (OPTIMIZER,), 3.0)
    assert "rank 1 is slow: its optimizer takes 3.0 times" in straggler_message(pace.ranks[0])
