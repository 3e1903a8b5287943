"""How long ranks that were asked to stop may take: from the events of a run."""

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from allranks.launch import stop_limit
from allranks.launch.runs import SignalCounts, follow
from allranks.launch.slurm.job import IN_ALLOCATION
from allranks.launch.slurm.requeue import StopAndRequeue
from allranks.launch.stop_limit import FACTOR, LEAST_S, STEPS, StopLimit
from allranks.launch.supervisor import JobEnd
from allranks.nodes.slurm.answers import JobInfo
from allranks.planning.planner import make_plan
from allranks.rundir.events import EventTail
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import ClusterSpec
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec

LEAST = 3.0
PLAN = make_plan(parse_spec(tiny_spec(Path("rows.json"), Path())), machine_facts())
assert PLAN.hang is not None
UNKNOWN = PLAN.hang.long_s


def phase(name: str, at: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"event": "phase", "name": name, "time": at, **more}


def step(seconds: float) -> dict[str, Any]:
    return {"event": "step", "step_time_s": seconds}


BEGUN = [{"event": "start", "attempt": 1}, phase("build")]
TRAINED = [*BEGUN, phase("train"), {"event": "step", "step_times_s": [9.0, 10.0]}, step(8.0)]
EVALUATED = [*TRAINED, phase("evaluate", 100.0), phase("train", 140.0)]


def append(run: RunDir, events: list[dict[str, Any]]) -> None:
    run.events.mkdir(parents=True, exist_ok=True)
    with run.events_of(0).open("ab") as file:
        file.write(b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def limit_of(tmp_path: Path, events: list[dict[str, Any]], attempt: int = 1) -> StopLimit:
    run = RunDir(tmp_path)
    run.logs_of(attempt).mkdir(parents=True)
    append(run, events)
    return StopLimit(run, PLAN, LEAST)


@pytest.mark.parametrize(
    ("events", "limit_s", "words"),
    [
        (BEGUN, LEAST, "no step was trained yet"),
        ([*BEGUN, phase("train")], UNKNOWN, "finish their step"),
        (TRAINED, LEAST_S + FACTOR * STEPS * 10.0, "finish their step"),
        ([*TRAINED, phase("save", limit_s=300.0)], 300.0, "write a full checkpoint within 300 s"),
        ([*TRAINED, {"event": "checkpoint", "mode": "full", "written_s": 400.0}, phase("save", limit_s=300.0)],
         FACTOR * 400.0, "write a full checkpoint within 800 s"),
        ([*TRAINED, phase("evaluate", 100.0)], UNKNOWN, "finish the evaluation"),
        ([*EVALUATED, phase("evaluate", 200.0)], FACTOR * 40.0, "finish the evaluation"),
    ],
    ids=["nothing-trained", "first-step", "step", "first-save", "save", "first-evaluation", "evaluation"],
)  # fmt: skip
def test_each_phase_has_the_limit_that_was_measured(tmp_path: Path, events: list, limit_s: float, words: str) -> None:
    limit = limit_of(tmp_path, events)
    assert limit.limit_s == limit_s
    assert words in limit.text


def test_the_limit_begins_again_when_the_checkpoint_does(tmp_path: Path) -> None:
    """Ranks that reach the save in time may use all of its limit."""
    limit, now = limit_of(tmp_path, TRAINED), time.monotonic()
    assert not limit.expired(now + 65)
    append(RunDir(tmp_path), [phase("save", limit_s=50.0)])
    assert not limit.expired(now + 69)
    assert not limit.expired(now + 118)
    assert limit.expired(now + 120)


def test_a_resumed_run_that_has_not_begun_has_nothing_to_save(tmp_path: Path) -> None:
    limit = limit_of(tmp_path, [*TRAINED, phase("save", limit_s=300.0)], attempt=2)
    assert limit.limit_s == LEAST
    append(RunDir(tmp_path), [{"event": "start", "attempt": 2}, phase("train")])
    limit.expired(time.monotonic() + 2)
    assert limit.limit_s == LEAST_S + FACTOR * STEPS * 10.0, "times of the earlier attempt count"


def test_what_the_ranks_do_before_they_end_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_limit, "POLL_S", -1.0)
    run, said, counts = RunDir(tmp_path), list[str](), SignalCounts()
    limit_of(tmp_path, TRAINED)
    later = [[], [phase("save", limit_s=300.0)], [step(20.0), phase("train")], [phase("done")]]

    def poll() -> int | None:
        append(run, later.pop(0))
        return None if later else 0

    job: Any = SimpleNamespace(poll=poll, news=lambda: None, request_stop=said.append, interrupt_grace_s=LEAST)
    view: Any = SimpleNamespace(say=said.append, event=lambda event: None)
    counts.interrupts = 1
    assert follow(job, EventTail(run, 2), view, counts, partial(StopLimit, run, PLAN)) == 0
    assert ["finish their step" in text for text in said] == [False, True, False] and "within 300 s" in said[2]


@pytest.mark.parametrize("needed_s, left_s, why", [(300.0, 290.0, "time_limit"), (300.0, 400.0, ""), (100.0, 90.0, "")])
def test_ranks_under_slurm_are_stopped_early_if_their_checkpoint_takes_longer_than_the_signal_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed_s: float, left_s: float, why: str
) -> None:
    monkeypatch.delenv(IN_ALLOCATION, raising=False)
    job = JobInfo(job="7", state="RUNNING", start_time=time.time() - 60, time_limit_s=int(left_s) + 60)
    slurm: Any = SimpleNamespace(try_job=lambda number: job)
    record: Any = None
    ending = StopAndRequeue(RunDir(tmp_path), slurm, record, job="7", restart=0, cluster=ClusterSpec())
    ending.check_time_limit(needed_s)
    assert ending.why == why


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_slurm_requeued_after_a_node_failed_is_not_over(tmp_path: Path, restarts: int) -> None:
    states: list[str] = []
    record: Any = SimpleNamespace(write=lambda state, **more: states.append(state))
    slurm: Any = SimpleNamespace(restarts=lambda job: restarts)
    ending = StopAndRequeue(RunDir(tmp_path), slurm, record, job="7", restart=0, cluster=ClusterSpec())
    ending.why = "node_fail"
    with pytest.raises(SystemExit) if restarts else nullcontext():
        ending.requeue(parse_spec(tiny_spec(Path("rows.json"), Path())), PLAN, 1, JobEnd(), stopped=True)
    assert states == ["requeued"] * restarts
