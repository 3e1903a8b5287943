"""When a checkpoint is saved that no number of steps decides, and which intervals a spec can give."""

import math
import re
from typing import Any

import pytest

from allranks.cli.plan import checkpoint_line
from allranks.errors import SpecError
from allranks.rundir.heartbeat import HeartbeatPage, HeartbeatWriter
from allranks.spec import parse_spec
from allranks.spec.records import CheckpointSpec
from allranks.train.save_requests import REQUESTED, SCHEDULED, SHORTEST_S, SaveRequests, best_interval_s

TRAINING = {"model": {"name": "tiny:mistral"}, "data": {"source": "x"}}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps(requests: SaveRequests, clock: Clock, until_s: float, cost_s: float) -> list[float]:
    """The times at which a run with steps of 1 s saves, each wish agreed on one step later."""
    saved, wanted = [], 0
    while clock.now < until_s:
        clock.now += 1.0
        if wanted:
            requests.agreed = wanted
            saved.append(clock.now)
            assert requests.take() == wanted and requests.take() == 0
            clock.now += cost_s
            requests.saved(cost_s)
        wanted = requests.wanted()
    return saved


@pytest.mark.parametrize(
    ("every", "more", "saved"),
    [
        (None, {}, []),
        (7, {}, []),
        ("100s", {}, [101, 204, 307]),
        ("2min", {"mode": "none"}, []),
        ("auto", {"mode": "none"}, []),
        ("auto", {"mtbf_h": 2}, [6, 179, 352]),  # sqrt(2 * 2 s * 7200 s) is 169.7 s
    ],
)
def test_saves_come_by_the_time_the_spec_gives_or_leaves_to_be_measured(every: Any, more: Any, saved: list) -> None:
    clock = Clock()
    assert steps(SaveRequests(CheckpointSpec(every=every, **more), 2, clock=clock), clock, 380, 2.0) == saved


def test_the_interval_follows_young_and_scales_with_the_nodes() -> None:
    assert best_interval_s(8.0, 3600.0) == 240.0 and best_interval_s(0.01, 3600.0) == SHORTEST_S
    for nodes, mtbf_h in ((1, 1000.0), (50, 20.0)):
        requests = SaveRequests(CheckpointSpec(every="auto"), nodes)
        changed = [requests.saved(cost) for cost in (5.0, 5.1, 4.9, 5.0, 30.0, 30.0, 30.0)]
        assert changed == [True, False, False, False, False, False, True]  # the median of five
        assert requests.mtbf_h == mtbf_h and requests.every_s == math.sqrt(2 * 30.0 * 3600 * mtbf_h)


def test_a_request_on_the_heartbeat_page_is_taken_once_and_before_a_due_save() -> None:
    agent, rank, clock = HeartbeatPage(), HeartbeatWriter(), Clock()
    rank.open(f"/proc/self/fd/{agent.fd}")
    requests = SaveRequests(CheckpointSpec(every="1s"), 1, rank, clock)
    clock.now = 2.0
    agent.request_checkpoint()
    assert [requests.wanted() for _ in range(3)] == [REQUESTED, SCHEDULED, 0]


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        *(
            ({"every": every}, "checkpoint.every: expected a number of steps, auto, or")
            for every in ("soon", "0s", 0, 2.5)
        ),
        ({"every": "auto", "keep_best": True}, "checkpoint.every is auto, eval.every is 10; set checkpoint.every: 10"),
    ],
)
def test_other_intervals_are_refused_with_what_is_possible(checkpoint: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_spec({**TRAINING, "eval": {"every": 10}, "checkpoint": checkpoint})


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({"every": "auto"}, "from the cost of a save, measured in the run, and one failure in 250 h"),
        ({"every": "auto", "mtbf_h": 24}, "one failure in 24 h"),
        ({"every": "10min"}, "checkpoint every 10min of wall time"),
        ({"every": 10}, "None"),
    ],
)
def test_the_plan_says_what_decides(checkpoint: dict[str, Any], said: str) -> None:
    assert said in str(checkpoint_line(parse_spec({**TRAINING, "checkpoint": checkpoint}), 4))
