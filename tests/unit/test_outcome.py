"""The verdict on an attempt from what is in the run folder and what the agents reported; and which rank is named."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from allranks.launch import runs
from allranks.launch.failure_attribution import RankEnd, find_first_failure
from allranks.launch.outcome import RunResult, finalize_run
from allranks.launch.supervisor import JobEnd, LostAgent
from allranks.planning.planner import make_plan
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import RunSpec
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec


def end_of(rank: int, exitcode: int = 0, time: float = 100.0, **more: Any) -> RankEnd:
    return RankEnd(rank=rank, host=f"n{rank}", pid=10 + rank, exitcode=exitcode, time=time, **more)


GONE = LostAgent(node=1, host="n1", why="process 77 was killed")
LOST = {"type": "RuntimeError", "message": "[gloo] Connection closed by peer"}
ECHO = {**LOST, "echo": True, "exit_code": 1, "known": False}


class Attempt:
    """A run of two ranks on two nodes, made by hand."""

    def __init__(self, folder: Path, launcher: str = "hosts") -> None:
        cluster = {"nodes": 2, "procs_per_node": 1, "launcher": launcher, "hosts": ["n0", "n1"]}
        if launcher == "slurm":
            del cluster["hosts"]
        self.spec: RunSpec = parse_spec(tiny_spec("builtin:instructions", folder, cluster=cluster))
        self.plan: LaunchPlan = make_plan(self.spec, machine_facts())
        self.run = RunDir(folder / "runs" / "t-1")
        self.run.events.mkdir(parents=True)
        self.run.logs_of(1).mkdir(parents=True)
        runs.write_request(self.run, self.spec, self.plan)
        for rank in (0, 1):
            self.tell(rank, "start", attempt=1, pid=10 + rank, world_size=2, resumed_from=None)

    def tell(self, rank: int, event: str, *, time: float = 50.0, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time, "rank": rank, **fields})
        with self.run.events_of(rank).open("a") as file:
            file.write(line + "\n")

    def stopped_after(self, step: int) -> None:
        for rank in (0, 1):
            self.tell(rank, "stop", step=step, reason="SIGUSR1")
            self.tell(rank, "phase", name="done")
        self.saved(step)

    def saved(self, step: int) -> None:
        self.run.checkpoint(step).mkdir(parents=True)

    def conclude(self, code: int, end: JobEnd | None = None, **how: Any) -> RunResult:
        found = finalize_run(self.run, self.spec, self.plan, code, end=end, **how)
        assert read_json(self.run.metrics)["status"] == found.status
        return found


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


WELL = JobEnd(nodes=2, ended_nodes=2, ends=[end_of(0), end_of(1)])


@pytest.mark.parametrize("removed", [[1], [0, 1]])
def test_a_run_without_events_whose_ranks_all_ended_well_has_succeeded(attempt: Attempt, removed: list[int]) -> None:
    for rank in {0, 1} - set(removed):
        attempt.tell(rank, "phase", name="done")
    for rank in removed:
        attempt.run.events_of(rank).unlink()
    found = attempt.conclude(0, WELL)
    assert (found.status, found.exit_code) == ("succeeded", 0)
    note = f"the events of rank {', '.join(map(str, removed))} are missing, so their metrics are unknown"
    assert note in found.message and note in found.metrics["message"]


@pytest.mark.parametrize(
    "end",
    [
        JobEnd(nodes=2, ended_nodes=1, ends=[end_of(0)]),  # one of them is not known
        JobEnd(nodes=2, ended_nodes=2, ends=[end_of(0), end_of(1, done=False)]),
        JobEnd(nodes=2, ended_nodes=2, ends=[end_of(0), end_of(1, -9, ended_by_agent=True)]),
        JobEnd(nodes=2, ended_nodes=2, ends=[end_of(0), end_of(1, 1)]),
    ],
)
def test_without_events_only_good_ends_of_all_ranks_are_a_success(attempt: Attempt, end: JobEnd) -> None:
    shutil.rmtree(attempt.run.events)
    attempt.run.events.mkdir()
    found = attempt.conclude(1, end)
    assert (found.status, found.exit_code) == ("failed", 1)


def test_the_events_of_an_earlier_attempt_prove_nothing(attempt: Attempt) -> None:
    for rank in (0, 1):
        attempt.tell(rank, "phase", name="done")
    attempt.run.logs_of(2).mkdir()
    assert attempt.conclude(1, JobEnd(nodes=2)).status == "failed"


def test_an_agent_that_was_killed_after_whose_end_all_ranks_saved_and_stopped_is_named(attempt: Attempt) -> None:
    attempt.stopped_after(6)
    end = JobEnd(nodes=2, ended_nodes=1, ends=[end_of(0)], lost=[GONE], stopped="the agent of n1 is gone")
    found = attempt.conclude(1, end)
    assert (found.status, found.exit_code) == ("stopped", 1)
    assert "stopped after step 6 (the agent on n1 is gone: process 77 was killed)" in found.message
    assert f"Continue with: allranks resume {attempt.run.root}" in found.message


@pytest.mark.parametrize(("free", "told"), [(4096, True), (1 << 30, False)])
def test_a_full_disk_is_named_where_a_rank_left_no_reason(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, free: int, told: bool
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free))
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=2, ends=[end_of(0, 1, done=False), end_of(1, done=False)]))
    assert "rank 0 on n0 failed" in found.message and "ended with exit code 1" in found.message
    said = f"4.0 KiB are free in {attempt.run.root}, which may be why the rank recorded no reason"
    assert (said in found.message) == told


def test_a_stop_without_its_checkpoint_is_a_failure(attempt: Attempt) -> None:
    attempt.stopped_after(6)
    attempt.run.checkpoint(6).rmdir()
    attempt.saved(4)
    found = attempt.conclude(0, msgspec.structs.replace(WELL, stopped="interrupted"))
    assert (found.status, found.exit_code) == ("failed", 1)
    assert "stopped before a checkpoint was written (interrupted). Continue after step 4" in found.message


def test_a_failed_rank_is_named_before_an_agent_that_disappeared_unless_it_only_noticed_that(attempt: Attempt) -> None:
    """The error of a rank on a healthy node may be the echo of the lost agent, or the cause of everything."""
    ended = {"attempt": 1, "exit_code": 1, "known": False, "echo": False, "step": 4}
    attempt.tell(0, "error", type="ValueError", message="bad rows", **ended)
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=1, ends=[end_of(0, 1)], lost=[GONE]))
    assert "rank 0 on n0 failed after step 4: ValueError: bad rows" in found.message
    assert "is gone" not in found.message


def test_an_echo_of_a_lost_agent_is_not_the_cause(attempt: Attempt) -> None:
    attempt.tell(0, "error", attempt=1, step=4, **ECHO)
    attempt.saved(3)
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=1, ends=[end_of(0, 1)], lost=[GONE]))
    assert found.status == "failed"
    assert found.message.startswith("the agent on n1 is gone: process 77 was killed. Continue after step 3 with: ")
    again = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=2, ends=[end_of(0, 1)]))
    assert "rank 0 on n0 failed after step 4: RuntimeError: [gloo]" in again.message, (
        "without a lost agent it is all there is"
    )


def test_ranks_that_the_agents_ended_are_explained_by_the_reason(attempt: Attempt) -> None:
    ends = [end_of(r, -9, ended_by_agent=True) for r in (0, 1)]
    reasons = ["n0: a signal stopped the ranks at once"]
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=2, ends=ends, reasons=reasons, ended="x"))
    assert found.message == "n0: a signal stopped the ranks at once. No checkpoint had been written"
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=2, ends=ends, ended="node 1 did not join within 300 s"))
    assert found.message.startswith("the ranks were stopped: node 1 did not join within 300 s")


def test_a_refusal_of_a_node_is_the_environments_fault(attempt: Attempt) -> None:
    shutil.rmtree(attempt.run.events)
    attempt.run.events.mkdir()
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=2, refused="n0: node 0 cannot listen on 10.0.0.1:9"))
    assert (found.exit_code, found.message) == (3, "n0: node 0 cannot listen on 10.0.0.1:9")
    write_json(attempt.run.agent_exit(1, "n0"), {"host": "n0", "node": 0, "failed": [], "refused": "no route"})
    found = attempt.conclude(1, None)
    assert (found.exit_code, found.message) == (3, "n0: no route")


def hang(attempt: Attempt, noticed: float) -> None:
    attempt.run.hang(1).mkdir(parents=True)
    alarm = {"node": 1, "host": "n1", "rank": 1, "phase": "train", "part": "", "step": 4, "since": 1.0, "limit_s": 5.0}
    write_json(
        attempt.run.hang_report(1),
        {"attempt": 1, "kind": "dataloader_hang", "sentence": "rank 1 on n1 stalled in read", "stalled": [],
         "waiting": [], "alarm": {**alarm, "time": noticed}, "judged": noticed + 1},
    )  # fmt: skip


def test_a_hang_is_the_verdict_whatever_its_end_looks_like(attempt: Attempt) -> None:
    hang(attempt, noticed=60.0)
    ends = [end_of(0, 1, time=70.0), end_of(1, -9, time=71.0, ended_by_agent=True)]
    attempt.tell(0, "error", time=70.0, attempt=1, step=4, **ECHO)
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=2, ends=ends, ended="ranks made no progress"))
    assert (found.status, found.exit_code) == ("failed", 1)
    assert found.message == f"rank 1 on n1 stalled in read. Evidence: {attempt.run.hang(1)}"


def test_a_hang_whose_report_could_not_be_written_is_known_from_the_driver(attempt: Attempt) -> None:
    ends = [end_of(r, -9, ended_by_agent=True) for r in (0, 1)]
    reported = JobEnd(nodes=2, ended_nodes=2, ends=ends, ended="ranks made no progress", hang="rank 1 on n1 stalled")
    assert attempt.conclude(1, reported).message.startswith("rank 1 on n1 stalled. Evidence: ")


@pytest.mark.parametrize("before", [True, False])
def test_an_error_before_a_hang_is_its_cause_and_one_after_it_is_not(attempt: Attempt, before: bool) -> None:
    hang(attempt, noticed=60.0)
    time = 59.0 if before else 61.0
    attempt.tell(1, "error", time=time, type="KeyError", message="'text'", attempt=1, step=4, exit_code=1, echo=False)
    found = attempt.conclude(1, JobEnd(nodes=2, ended_nodes=2, ends=[end_of(1, 1)]))
    error = "failed after step 4: KeyError: 'text'"
    expected = f"rank 1 on n1 {error if before else 'stalled in read. Evidence'}"
    assert found.message.startswith(expected)


def test_a_person_who_interrupts_is_named_before_what_follows(attempt: Attempt) -> None:
    ends = [end_of(r, -9, ended_by_agent=True) for r in (0, 1)]
    end = JobEnd(nodes=2, ended_nodes=2, ends=ends, lost=[GONE], ended="the launcher stopped the ranks")
    found = attempt.conclude(1, end, interrupted=True)
    assert found.message.startswith("interrupted; the ranks were killed before they had finished their step")


@pytest.mark.parametrize("said_by", ["slurm", "driver"])
def test_a_cancelled_job_is_called_so(tmp_path: Path, said_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of the run is enough where its folder is in the default run root
    attempt = Attempt(tmp_path, "slurm")
    write_json(attempt.run.job, {"job": "7", "slurm": "x"})
    if said_by == "driver":
        write_json(attempt.run.driver, {"job": "7", "state": "cancelled", "exit_code": 1})
    attempt.tell(0, "error", attempt=1, step=4, **ECHO)
    attempt.saved(3)
    told = "CANCELLED by 0" if said_by == "slurm" else "unknown"
    found = attempt.conclude(1, JobEnd(nodes=2, ends=[end_of(0, 1)], lost=[GONE]), scheduler_end_reason=told)
    assert found.status == "failed"
    assert found.message == f"job 7 was cancelled. Continue after step 3 with: allranks resume {attempt.run.name}"


def test_what_was_given_up_is_added_to_a_failure(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "slurm")
    write_json(attempt.run.driver, {"job": "7", "state": "failed", "gave_up": "the driver of job 7 recorded nothing"})
    assert attempt.conclude(1).message.endswith(". the driver of job 7 recorded nothing")


@pytest.mark.parametrize("asked", [False, True])
def test_a_job_that_the_launcher_cancelled_itself_is_explained_by_the_cause(tmp_path: Path, asked: bool) -> None:
    """Its first node did not answer, so the job was given up; only a person's request is called a cancellation."""
    attempt = Attempt(tmp_path, "slurm")
    hang(attempt, noticed=60.0)
    gave_up = "n0 does not answer. Job 7 was cancelled"
    write_json(attempt.run.driver, {"job": "7", "state": "failed", "gave_up": gave_up})
    if asked:
        attempt.run.cancelled.touch()
    said = attempt.conclude(1, JobEnd(nodes=2, lost=[GONE]), scheduler_end_reason="CANCELLED by 0").message
    assert said.startswith("job 7 was cancelled" if asked else "rank 1 on n1 stalled in read. Evidence: ")
    assert said.endswith(". n0 does not answer. Job 7 was cancelled")


def test_the_verdict_does_not_depend_on_the_disk(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    from allranks.launch import outcome

    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(outcome, "write_json", full)
    found = finalize_run(attempt.run, attempt.spec, attempt.plan, 0, end=WELL)
    assert (found.status, found.exit_code) == ("succeeded", 0)
    assert "cannot be written" in found.message and "No space left on device" in found.message


def error(rank: int, time: float, *, echo: bool = False, message: str = "bad") -> dict[str, Any]:
    return {"rank": rank, "type": "RuntimeError", "message": message, "time": time, "echo": echo}


def first_failure(*known: Any) -> Any:
    found = find_first_failure(*known)
    assert found is not None
    return found


def test_an_error_that_only_the_page_holds_is_found_and_an_echo_there_is_one() -> None:
    """Its event could not be written. The end of the process is its time, so an earlier event still comes first."""
    page = end_of(1, 1, time=20.0, failure="ValueError: rows: none")
    found = first_failure([page], [error(0, 19.0, echo=True)], {1: 7})
    assert (found.rank, found.host, found.cause, found.message, found.step) == (1, "n1", "ValueError", "rows: none", 7)
    assert first_failure([page, end_of(0, 1)], [error(0, 19.0)], {}).rank == 0
    echo = end_of(1, 1, time=18.0, failure="RuntimeError: Connection reset by peer")
    found = first_failure([echo, end_of(0, -9, time=19.0)], [], {})
    assert (found.rank, found.cause, found.echo) == (0, "SIGKILL", False)
    only = first_failure([echo], [], {})
    assert (only.rank, only.echo) == (1, True)


def test_the_text_of_sys_exit_on_the_page_is_no_error_of_its_own() -> None:
    """A program may end so because its peer has failed, which is the cause."""
    gave_up = end_of(0, 1, time=1.0, failure="sys.exit: lost a peer")
    found = first_failure([gave_up, end_of(1, -11, time=2.0)], [], {}, {0: "lost a peer"})
    assert (found.rank, found.cause) == (1, "SIGSEGV")
    assert first_failure([gave_up], [], {}, {0: "lost a peer"}).message == "ended with exit code 1: lost a peer"


def test_a_rank_that_ended_early_with_exit_code_0_is_named_if_nothing_else_failed() -> None:
    """Its peers fail because of it; those of them that have an error of their own come first."""
    early = end_of(2, 0, time=5.0, done=False)
    found = first_failure([early], [error(0, 4.0, echo=True)], {2: 6})
    assert (found.rank, found.cause, found.step) == (2, "exit code 0", 6)
    assert found.message == "ended with exit code 0 before it had finished its work"
    assert first_failure([early], [error(0, 9.0)], {}).rank == 0
    assert find_first_failure([end_of(2)], [], {}) is None


@pytest.mark.parametrize("more", [{"exitcode": -9}, {"exitcode": -6, "failure": "ValueError: made up"}])
def test_a_rank_that_its_agent_ended_is_never_named(more: dict[str, Any]) -> None:
    ended = end_of(0, time=1.0, done=False, ended_by_agent=True, **more)
    assert find_first_failure([ended], [], {}) is None
    assert first_failure([ended, end_of(1, 7, time=9.0)], [], {}).rank == 1
