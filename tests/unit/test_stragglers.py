"""A rank that is steadily slow is named; noise, a single slow step and work that does not matter are not."""

import random
from typing import Any

import pytest

from allranks.analysis import stragglers
from allranks.analysis.machine_load import Lost
from allranks.analysis.stragglers import BACKWARD, OPTIMIZER, OWN, StragglerDetector, measure_pace, straggler_message

EVEN = {0: [0.10] * 30, 1: [0.10] * 30, 2: [0.10] * 30}
STEPS = [0.3] * 30
Samples = dict[int, list[float]]


def pace_by(own: Samples, *more: Any, steps: list[float] = STEPS, **parts: Samples) -> stragglers.Pace:
    pace = measure_pace({OWN: own, **parts}, steps, {}, *more)
    assert pace is not None
    return pace


def slow(pace: stragglers.Pace) -> list[int]:
    return [r.rank for r in pace.slow]


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (EVEN, []),
        (EVEN | {1: [0.15] * 30}, [1]),
        (EVEN | {1: [0.13] * 30}, []),  # below the factor
        (EVEN | {1: [0.10] * 29 + [9.0]}, []),  # once is not steadily
        (EVEN | {1: [0.10, 0.16, 0.16] * 10}, []),  # two of three are not nearly all
        ({0: [0.001] * 30, 1: [0.0015] * 30, 2: [0.001] * 30}, []),  # half a millisecond of 300
        ({0: [0.1] * 30, 1: [0.2] * 30}, [1]),  # of two the slower
    ],
)
def test_who_is_named(own: Samples, names: list[int]) -> None:
    assert slow(pace_by(own)) == names


def test_one_rank_and_too_few_steps_have_no_pace() -> None:
    assert measure_pace({OWN: {0: [0.1] * 30}}, STEPS, {}) is None
    assert measure_pace({OWN: {r: own[: stragglers.WINDOW_STEPS - 1] for r, own in EVEN.items()}}, STEPS, {}) is None


def test_backward_passes_are_judged_by_themselves() -> None:
    pace = pace_by(EVEN, **{BACKWARD: EVEN | {2: [0.25] * 30}})
    assert [(r.rank, r.relative, r.backward_relative, r.slow_in) for r in pace.ranks] == [
        (2, 1.0, 2.5, ("own_backward_s",)),
        (0, 1.0, pytest.approx(0.571, abs=1e-3), ()),
        (1, 1.0, pytest.approx(0.571, abs=1e-3), ()),
    ]
    assert "rank 2 is slow: its backward passes take 2.5 times" in straggler_message(pace.ranks[0])
    both = pace_by(EVEN | {2: [0.2] * 30}, **{BACKWARD: EVEN | {2: [0.25] * 30}}).ranks[0]
    assert both.slow_in == ("own_s", "own_backward_s") and "backward passes take 2.5 times" in straggler_message(both)
    untold = pace_by(EVEN, **{BACKWARD: {r: own[:5] for r, own in EVEN.items()}})
    assert [r.backward_s for r in untold.ranks] == [None] * 3


def test_a_slow_optimizer_is_named() -> None:
    first = pace_by(EVEN, **{OPTIMIZER: EVEN | {1: [0.3] * 30}}).ranks[0]
    assert (first.rank, first.slow_in, first.optimizer_relative) == (1, (OPTIMIZER,), 3.0)
    assert "rank 1 is slow: its optimizer takes 3.0 times" in straggler_message(first)


def test_uneven_batches_are_no_straggler() -> None:
    draw = random.Random(1)
    assert slow(pace_by({r: [draw.uniform(0.06, 0.18) for _ in range(200)] for r in range(4)}, steps=[0.3] * 200)) == []


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
    pace = pace_by(EVEN | own, {OWN: NO_WAIT | queued})
    assert slow(pace) == names
    found = next(r for r in pace.ranks if r.rank == 1)
    assert found.reason == reason
    assert ("not known whether its CPU time was taken" in straggler_message(found)) == (reason == "unknown")


def test_time_that_other_threads_or_the_hypervisor_may_have_cost_is_no_work() -> None:
    own = EVEN | {1: [0.3] * 30}
    for lost, names in ((Lost(threads_share=0.6), []), (Lost(stolen_share=0.6), []), (Lost(threads_share=0.1), [1])):
        assert slow(pace_by(own, {OWN: NO_WAIT}, {1: lost})) == names
    others = pace_by(own, {OWN: NO_WAIT}, {0: Lost(stolen_share=0.9), 2: Lost(threads_share=7.0)})
    assert slow(others) == [1], "what others may have lost makes no rank slow or fast"


def events(rank: int, own: float) -> list[dict[str, Any]]:
    start = {"event": "start", "rank": rank, "host": f"n{rank + 1}", "world_size": 3}
    step = {"event": "step", "rank": rank, "own_s": own, "step_time_s": 0.3}
    return [start, *({**step, "step": s} for s in range(1, 61))]


def said(ranks: dict[int, list[dict[str, Any]]], listener: StragglerDetector) -> list[str]:
    return [text for moment in zip(*ranks.values(), strict=True) for event in moment for text in listener.take(event)]


def test_it_is_said_once_while_the_run_goes_on_and_stands_in_the_summary() -> None:
    ranks = {0: events(0, 0.1), 1: events(1, 0.25), 2: events(2, 0.1)}
    (text,) = said(ranks, StragglerDetector())
    assert "rank 1 on n2 is slow" in text and "2.5 times" in text
    pace = stragglers.pace_of_run(ranks)
    assert pace is not None and (pace.ranks[0].rank, pace.ranks[0].relative, pace.ranks[0].slow) == (1, 2.5, True)


def test_warm_up_and_an_attempt_before_do_not_count() -> None:
    """A rank that was slow until the run was started again, which goes on after step 24."""
    ranks = {r: events(r, 0.1) for r in range(3)}
    slow = ranks | {1: events(1, 0.4)}
    listener = StragglerDetector()
    assert said({r: own[:25] for r, own in slow.items()}, listener) == []  # 24 steps, of which 5 are warm-up
    assert said({r: [own[0], *own[25:44]] for r, own in ranks.items()}, listener) == []
    assert len(said(slow, StragglerDetector())) == 1
