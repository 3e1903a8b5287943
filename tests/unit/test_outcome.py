"""The verdict on an attempt from what is in the run folder and what the agents reported; and which rank is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from allranks.launch import outcome, runs
from allranks.launch.failure_attribution import RankEnd, find_first_failure
from allranks.launch.outcome import RunResult, finalize_run
from allranks.launch.supervisor import JobEnd, LostAgent
from allranks.planning.planner import make_plan
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec


def end_of(rank: int, exitcode: int = 0, time: float = 100.0, **more: Any) -> RankEnd:
    return RankEnd(rank=rank, host=f"n{rank}", pid=10 + rank, exitcode=exitcode, time=time, **more)


def job(*ends: RankEnd, **more: Any) -> JobEnd:
    return JobEnd(**{"nodes": 2, "ended_nodes": 2, "ends": list(ends), **more})


GONE = LostAgent(node=1, host="n1", why="process 77 was killed")
LOST: dict[str, Any] = {"ended_nodes": 1, "lost": [GONE]}
ECHO = {"type": "RuntimeError", "message": "[gloo] Connection closed by peer", "echo": True}
WELL = job(end_of(0), end_of(1))
KILLED = [end_of(r, -9, ended_by_agent=True) for r in (0, 1)]


class Attempt:
    """A run of two ranks on two nodes, made by hand."""

    def __init__(self, folder: Path, launcher: str = "hosts") -> None:
        cluster = {"nodes": 2, "procs_per_node": 1, "launcher": launcher}
        hosts = {"hosts": ["n0", "n1"]} if launcher == "hosts" else {}
        self.spec = parse_spec(tiny_spec("builtin:instructions", folder, cluster={**cluster, **hosts}))
        self.plan = make_plan(self.spec, machine_facts())
        self.run = RunDir(folder / "runs" / "t-1")
        self.run.events.mkdir(parents=True)
        self.run.logs_of(1).mkdir(parents=True)
        runs.write_request(self.run, self.spec, self.plan)
        for rank in (0, 1):
            self.tell(rank, "start", attempt=1, pid=10 + rank, world_size=2, resumed_from=None)

    def tell(self, rank: int, event: str, *, time: float = 50.0, **fields: Any) -> None:
        with self.run.events_of(rank).open("a") as file:
            file.write(json.dumps({"event": event, "time": time, "rank": rank, **fields}) + "\n")

    def error(self, rank: int = 0, **fields: Any) -> None:
        self.tell(rank, "error", **{"attempt": 1, "step": 4, "exit_code": 1, "known": False, **fields})

    def stopped_after(self, step: int, *, saved: int) -> None:
        for rank in (0, 1):
            self.tell(rank, "stop", step=step, reason="SIGUSR1")
            self.tell(rank, "phase", name="done")
        self.saved(saved)

    def saved(self, step: int) -> None:
        self.run.checkpoint(step).mkdir(parents=True)

    def without_events(self) -> None:
        shutil.rmtree(self.run.events)
        self.run.events.mkdir()

    def hang(self, noticed: float = 60.0) -> None:
        self.run.hang(1).mkdir(parents=True)
        alarm = {"node": 1, "host": "n1", "rank": 1, "phase": "train", "part": "", "step": 4, "since": 1.0}
        report = {"attempt": 1, "kind": "dataloader_hang", "sentence": "rank 1 on n1 stalled in read", "stalled": []}
        report |= {"waiting": [], "alarm": {**alarm, "limit_s": 5.0, "time": noticed}, "judged": noticed + 1}
        write_json(self.run.hang_report(1), report)

    def driver(self, state: str, **more: Any) -> None:
        write_json(self.run.driver, {"job": "7", "state": state, **more})

    def conclude(self, code: int, end: JobEnd | None = None, **more: Any) -> RunResult:
        result = finalize_run(self.run, self.spec, self.plan, code, end=end, **more)
        assert read_json(self.run.metrics)["status"] == result.status
        return result


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


@pytest.fixture
def under_slurm(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path, "slurm")


@pytest.mark.parametrize("removed", [[1], [0, 1]])
def test_a_run_whose_ranks_all_ended_well_succeeded_without_its_events(attempt: Attempt, removed: list[int]) -> None:
    for rank in (0, 1):
        attempt.tell(rank, "phase", name="done")
    for rank in removed:
        attempt.run.events_of(rank).unlink()
    result = attempt.conclude(0, WELL)
    assert (result.status, result.exit_code) == ("succeeded", 0)
    note = f"the events of rank {', '.join(map(str, removed))} are missing, so their metrics are unknown"
    assert note in result.message and note in result.metrics["message"]


@pytest.mark.parametrize(
    "end",
    [
        job(end_of(0), ended_nodes=1),  # one of them is not known
        job(end_of(0), end_of(1, done=False)),
        job(end_of(0), end_of(1, -9, ended_by_agent=True)),
        job(end_of(0), end_of(1, 1)),
    ],
)
def test_without_events_only_good_ends_of_all_ranks_are_a_success(attempt: Attempt, end: JobEnd) -> None:
    attempt.without_events()
    result = attempt.conclude(1, end)
    assert (result.status, result.exit_code) == ("failed", 1)


def test_the_events_of_an_earlier_attempt_prove_nothing(attempt: Attempt) -> None:
    for rank in (0, 1):
        attempt.tell(rank, "phase", name="done")
    attempt.run.logs_of(2).mkdir()
    assert attempt.conclude(1, JobEnd(nodes=2)).status == "failed"


def test_an_agent_that_was_killed_before_all_ranks_stopped_is_named(attempt: Attempt) -> None:
    attempt.stopped_after(6, saved=6)
    result = attempt.conclude(1, job(end_of(0), **LOST, stopped="the agent of n1 is gone"))
    assert (result.status, result.exit_code) == ("stopped", 1)
    assert "stopped after step 6 (the agent on n1 is gone: process 77 was killed)" in result.message
    assert f"Continue with: allranks resume {attempt.run.name}" in result.message


@pytest.mark.parametrize(("free", "named"), [(4096, True), (1 << 30, False)])
def test_a_full_disk_may_be_a_reason(attempt: Attempt, monkeypatch: pytest.MonkeyPatch, free: int, named: bool) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free))
    message = attempt.conclude(1, job(end_of(0, 1, done=False), end_of(1, done=False))).message
    assert "rank 0 on n0 failed" in message and "ended with exit code 1" in message
    why = f"4.0 KiB are free in {attempt.run.root}, which may be why the rank recorded no reason"
    assert (why in message) == named


def test_a_stop_without_its_checkpoint_is_a_failure(attempt: Attempt) -> None:
    attempt.stopped_after(6, saved=4)
    result = attempt.conclude(0, msgspec.structs.replace(WELL, stopped="interrupted"))
    assert (result.status, result.exit_code) == ("failed", 1)
    assert "stopped before a checkpoint was written (interrupted). Continue after step 4" in result.message


def test_a_rank_that_failed_is_named_before_an_agent_that_disappeared(attempt: Attempt) -> None:
    """The error of a rank on a healthy node may be the echo of the lost agent, or the cause of everything."""
    attempt.error(type="ValueError", message="bad rows", echo=False)
    message = attempt.conclude(1, job(end_of(0, 1), **LOST)).message
    assert "rank 0 on n0 failed after step 4: ValueError: bad rows" in message and "is gone" not in message


def test_an_echo_of_a_lost_agent_is_not_the_cause(attempt: Attempt) -> None:
    attempt.error(**ECHO)
    attempt.saved(3)
    result = attempt.conclude(1, job(end_of(0, 1), **LOST))
    assert result.status == "failed"
    assert result.message.startswith("the agent on n1 is gone: process 77 was killed. Continue after step 3 with: ")
    again = attempt.conclude(1, job(end_of(0, 1)))  # without a lost agent it is all there is
    assert "rank 0 on n0 failed after step 4: RuntimeError: [gloo]" in again.message


def test_ranks_that_the_agents_ended_are_explained_by_the_reason(attempt: Attempt) -> None:
    reason = "n0: a signal stopped the ranks at once"
    message = attempt.conclude(1, job(*KILLED, reasons=[reason], ended="x")).message
    assert message == f"{reason}. No checkpoint had been written"
    message = attempt.conclude(1, job(*KILLED, ended="node 1 did not join within 300 s")).message
    assert message.startswith("the ranks were stopped: node 1 did not join within 300 s")
    end = job(*KILLED, lost=[GONE], ended="the launcher stopped the ranks")
    message = attempt.conclude(1, end, interrupted=True).message  # a person who interrupts comes before what follows
    assert message.startswith("interrupted; the ranks were killed before they had finished their step")


def test_a_refusal_of_a_node_is_the_environments_fault(attempt: Attempt) -> None:
    attempt.without_events()
    result = attempt.conclude(1, job(refused="n0: node 0 cannot listen on 10.0.0.1:9"))
    assert (result.exit_code, result.message) == (3, "n0: node 0 cannot listen on 10.0.0.1:9")
    write_json(attempt.run.agent_exit(1, "n0"), {"host": "n0", "node": 0, "failed": [], "refused": "no route"})
    result = attempt.conclude(1, None)
    assert (result.exit_code, result.message) == (3, "n0: no route")


def test_a_hang_is_the_verdict_whatever_its_end_looks_like(attempt: Attempt) -> None:
    unwritten = job(*KILLED, ended="ranks made no progress", hang="rank 1 on n1 stalled")
    assert attempt.conclude(1, unwritten).message.startswith("rank 1 on n1 stalled. Evidence: ")  # from the driver
    attempt.hang()
    ends = [end_of(0, 1, time=70.0), end_of(1, -9, time=71.0, ended_by_agent=True)]
    attempt.error(time=70.0, **ECHO)
    result = attempt.conclude(1, job(*ends, ended="ranks made no progress"))
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.message == f"rank 1 on n1 stalled in read. Evidence: {attempt.run.hang(1)}"


@pytest.mark.parametrize(
    ("time", "cause"),
    [(59.0, "rank 1 on n1 failed after step 4: KeyError: 'text'"), (61.0, "rank 1 on n1 stalled in read. Evidence")],
)
def test_an_error_before_a_hang_is_its_cause_and_one_after_it_is_not(attempt: Attempt, time: float, cause: str) -> None:
    attempt.hang()
    attempt.error(1, time=time, type="KeyError", message="'text'", echo=False)
    assert attempt.conclude(1, job(end_of(1, 1))).message.startswith(cause)


@pytest.mark.parametrize("by", ["slurm", "driver"])
def test_a_cancelled_job_is_called_so(under_slurm: Attempt, by: str) -> None:
    write_json(under_slurm.run.job, {"job": "7", "slurm": "x"})
    if by == "driver":
        under_slurm.driver("cancelled", exit_code=1)
    under_slurm.error(**ECHO)
    under_slurm.saved(3)
    reason = "CANCELLED by 0" if by == "slurm" else "unknown"
    result = under_slurm.conclude(1, job(end_of(0, 1), **{**LOST, "ended_nodes": 0}), scheduler_end_reason=reason)
    assert result.status == "failed"
    assert result.message == f"job 7 was cancelled. Continue after step 3 with: allranks resume {under_slurm.run.name}"


@pytest.mark.parametrize("asked", [False, True])
def test_a_job_that_the_launcher_cancelled_itself_is_explained_by_the_cause(under_slurm: Attempt, asked: bool) -> None:
    """Its first node did not answer, so the job was given up; only a person's request is called a cancellation."""
    under_slurm.driver("failed", gave_up="n0 does not answer. Job 7 was cancelled")
    assert under_slurm.conclude(1).message.endswith(". n0 does not answer. Job 7 was cancelled")
    under_slurm.hang()
    if asked:
        under_slurm.run.cancelled.touch()
    end = JobEnd(nodes=2, lost=[GONE])
    message = under_slurm.conclude(1, end, scheduler_end_reason="CANCELLED by 0").message
    assert message.startswith("job 7 was cancelled" if asked else "rank 1 on n1 stalled in read. Evidence: ")
    assert message.endswith(". n0 does not answer. Job 7 was cancelled")


def test_the_verdict_does_not_depend_on_the_disk(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "write_json", Mock(side_effect=OSError(28, "No space left on device")))
    result = finalize_run(attempt.run, attempt.spec, attempt.plan, 0, end=WELL)
    assert (result.status, result.exit_code) == ("succeeded", 0)
    assert "cannot be written" in result.message and "No space left on device" in result.message


def error(rank: int, time: float, *, echo: bool = False) -> dict[str, Any]:
    return {"rank": rank, "type": "RuntimeError", "message": "bad", "time": time, "echo": echo}


PAGE = end_of(1, 1, time=20.0, failure="ValueError: rows: none")  # its event could not be written
ECHO_ON_PAGE = end_of(1, 1, time=18.0, failure="RuntimeError: Connection reset by peer")
GAVE_UP = end_of(0, 1, time=1.0, failure="sys.exit: lost a peer")  # perhaps since a peer has failed
LOST_A_PEER = {0: "lost a peer"}
EARLY = end_of(2, 0, time=5.0, done=False)  # its peers fail because of it
BY_AGENT = [
    end_of(0, code, time=1.0, done=False, ended_by_agent=True, **more)
    for code, more in ((-9, {}), (-6, {"failure": "ValueError: made up"}))
]


@pytest.mark.parametrize(
    ("ends", "errors", "exits", "rank", "cause"),
    [
        # the end of the process is the time of an error that only the page holds: an earlier event still comes first
        ([PAGE], [error(0, 19.0, echo=True)], {}, 1, "ValueError"),
        ([PAGE, end_of(0, 1)], [error(0, 19.0)], {}, 0, "RuntimeError"),
        ([ECHO_ON_PAGE, end_of(0, -9, time=19.0)], [], {}, 0, "SIGKILL"),
        ([ECHO_ON_PAGE], [], {}, 1, "RuntimeError"),
        ([GAVE_UP, end_of(1, -11, time=2.0)], [], LOST_A_PEER, 1, "SIGSEGV"),
        ([EARLY], [error(0, 4.0, echo=True)], {}, 2, "exit code 0"),
        ([EARLY], [error(0, 9.0)], {}, 0, "RuntimeError"),  # those that have an error of their own come first
        ([BY_AGENT[0], end_of(1, 7, time=9.0)], [], {}, 1, "exit code 7"),
        ([BY_AGENT[1], end_of(1, 7, time=9.0)], [], {}, 1, "exit code 7"),
    ],
)
def test_which_rank_failed_first(
    ends: list[RankEnd], errors: list[dict[str, Any]], exits: dict[int, str], rank: int, cause: str
) -> None:
    first = find_first_failure(ends, errors, {rank: 7}, exits)
    assert first is not None
    assert (first.rank, first.cause, first.step) == (rank, cause, 7)
    assert first.echo == (ends == [ECHO_ON_PAGE])


def test_what_the_first_failure_says_and_where_there_is_none() -> None:
    for ends, exits, message in (
        ([PAGE], None, "rows: none"),
        ([GAVE_UP], LOST_A_PEER, "ended with exit code 1: lost a peer"),
        ([EARLY], None, "ended with exit code 0 before it had finished its work"),
    ):
        first = find_first_failure(ends, [], {}, exits)
        assert first is not None and (first.message, first.host) == (message, f"n{ends[0].rank}")
    for end in (end_of(2), *BY_AGENT):
        assert find_first_failure([end], [], {}) is None
