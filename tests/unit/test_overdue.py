"""How long ranks that were asked to stop may take, and a job that Slurm holds although its run folder says that it is
over: what is to be seen, and when it is acted upon."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import yaml

from allranks.errors import EnvironmentNotAble
from allranks.launch.slurm import liveness
from allranks.launch.slurm.job import CANCEL_COMPLETES_S, IN_ALLOCATION, POLL_INTERVAL_S, UNANSWERED_S, SlurmJob
from allranks.launch.slurm.liveness import CLEANING, ENDED, HEARTBEAT_S, LIMITS_S, SILENT, DriverLiveness
from allranks.launch.slurm.requeue import StopAndRequeue
from allranks.launch.stop_limit import FACTOR, LEAST_S, STEPS, StopLimit
from allranks.launch.supervisor import JobEnd
from allranks.nodes.slurm import srun
from allranks.nodes.slurm.answers import JobInfo
from allranks.nodes.slurm.commands import JobState, Slurm
from allranks.planning.planner import make_plan
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec
from tests.dist.harness import until


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs_of(1).mkdir(parents=True)
    run.hang(1).mkdir(parents=True)
    return run


def says(state: str, **more: Any) -> dict[str, Any]:
    return {"job": "7", "state": state, "attempt": 1, "restart": 0, "host": "n1", **more}


def test_what_a_waiting_job_is_said_to_wait_for(run: RunDir) -> None:
    """Slurm's reason, and its estimate of the start where it has one; once."""
    job, start = SlurmJob(run, Slurm([], "none"), "7"), "2026-03-02T10:14:02"
    for state, said in (
        ({"reason": "None"}, "job 7 is pending: Slurm has not said why yet"),
        ({"reason": "Priority"}, "job 7 is pending: Priority"),
        ({"reason": "Priority", "start": "N/A"}, None),
        ({"reason": "Resources", "start": start}, f"job 7 is pending: Resources, estimated start {start}"),
        ({"state": "RUNNING", "nodes": "n[1-2]"}, "job 7 is running on n[1-2]"),
    ):
        job._state = JobState(**{"state": "PENDING", **state})
        assert job.news() == said


def test_a_hang_is_not_begun_anew_and_other_failures_are_left_to_slurm(run: RunDir) -> None:
    assert liveness.liveness_problem(run, says("failed"), "PENDING") == ""
    write_json(run.hang_report(1), {})
    assert liveness.liveness_problem(run, says("failed"), "PENDING") == ENDED
    assert liveness.liveness_problem(run, says("running"), "PENDING") == ""


@pytest.fixture
def look(run: RunDir) -> Callable[..., str]:
    """Move the clock, write the driver's record, and look at the job in this state."""
    now = [0.0]
    driver = DriverLiveness(run, "7", lambda: now[0])

    def look(later_s: float = 0.0, record: dict[str, Any] | None = None, state: str = "RUNNING") -> str:
        now[0] += later_s
        if record:
            write_json(run.driver, record)
        return driver.look(state)

    return look


def test_a_driver_whose_beat_stays_the_same_is_silent_and_one_that_beats_is_not(look: Callable[..., str]) -> None:
    limit_s = LIMITS_S[SILENT]
    assert limit_s == 80.0 >= 60.0 + 2 * HEARTBEAT_S, "NFS may show a beat a minute late, and one may be missing"
    for beat in range(21):
        assert look(limit_s / 2, says("running", beat=beat)) == ""
    assert (look(limit_s), look(1.0)) == ("", SILENT)
    assert look(0.0, says("running", beat=21)) == ""  # it was only late
    assert look(limit_s + 1.0) == SILENT


def test_what_lasts_for_too_long_is_told_and_each_change_counts_anew(look: Callable[..., str]) -> None:
    assert look(0.0, says("failed")) == look(LIMITS_S[ENDED] - 1) == look(0.0, None, "COMPLETING") == ""
    assert look(LIMITS_S[CLEANING] + 1, None, "COMPLETING") == CLEANING
    assert (look(), look(LIMITS_S[ENDED] + 1)) == ("", ENDED)
    assert look(0.0, says("failed", restart=1)) == ""


# The state of the node as scontrol shows it is part of the question whether it is lost; 127.0.0.1 stands for a node on
# whose slurmd port ({port}) something listens or does not.
ANSWERS = """#!/bin/sh
echo "$@" >> {called}
case "$1 $2" in
  {silent}) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
  "scontrol show")
    case "$3" in
      job) echo "JobId=7 JobName=j JobState={job_state} Reason=None Restarts={restarts}" ;;
      node) {node}; echo "NodeName=127.0.0.1 State={node_state} CPUTot=2" ;;
      config) echo "SlurmdPort = {port}" ;;
    esac ;;
  "scontrol requeue") {requeue} ;;
  "scontrol update") grep -q requeue {called} || {{ echo "Job is no longer pending execution" >&2; exit 1; }} ;;
  sinfo*) echo "{node_state}" ;;
  *python*) exec "$@" ;;
esac
"""
USUAL = {"restarts": 0, "node_state": "ALLOCATED", "job_state": "RUNNING", "port": 1, "requeue": "true"}
HOST = "127.0.0.1"
CUT_OFF = "DOWN*+NOT_RESPONDING"


@pytest.fixture
def planned(run: RunDir) -> RunDir:
    """A run with a spec and a plan."""
    cluster = {"launcher": "slurm", "nodes": 2, "procs_per_node": 2, "slurm": {"exclude": ["n9"], "max_requeues": 1}}
    spec = tiny_spec("builtin:instructions", run.root, cluster=cluster)
    run.spec.write_text(yaml.safe_dump(spec))
    write_json(run.plan, msgspec.to_builtins(make_plan(parse_spec(spec), machine_facts())))
    return run


class Answers:
    """A program that answers as Slurm does, and notes how it was called."""

    def __init__(self, run: RunDir, **known: Any) -> None:
        self._run, self.stub, self._called = run, run.root / "stub", run.root / "called"
        self._known: dict[str, Any] = {**USUAL, "silent": "nothing", "node": "true"}
        self.change(**known)
        self.slurm = Slurm([str(self.stub)], "a stub")

    def change(self, **known: Any) -> None:
        self._known |= known
        self.stub.write_text(ANSWERS.format(called=self._called, **self._known))
        self.stub.chmod(0o755)
        self._called.write_text("")

    @property
    def calls(self) -> str:
        return self._called.read_text()

    def act(self, sign: str, driver: str, state: str = "RUNNING", **more: Any) -> bool:
        record = {**says(driver, **more), "host": HOST}
        return liveness.handle_dead_driver(sign, self._run, self.slurm, "7", JobState(state=state), record)


@pytest.fixture
def slurmd() -> Iterator[int]:
    """The port of something that accepts connections, as the slurmd of a healthy node."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def test_a_first_node_that_is_cut_off_is_named_and_its_job_cancelled(planned: RunDir) -> None:
    slurm = Answers(planned, node_state=CUT_OFF)
    assert slurm.act(ENDED, "failed")
    assert "scancel 7" in slurm.calls and "requeue" not in slurm.calls
    record = read_json(planned.driver)
    assert record["state"] == "failed"
    assert f"{HOST}, the job's first node, where its script and ranks 0-1 ran, has finished" in record["gave_up"]
    assert "Slurm's state of the node is DOWN" in record["gave_up"] and "Job 7 was cancelled" in record["gave_up"]
    assert f"--set 'cluster.slurm.exclude=[n9,{HOST}]'" in record["gave_up"]


def test_what_an_earlier_start_said_ends_no_later_one(planned: RunDir) -> None:
    """Slurm has begun the job anew, and its script has yet to write its first record."""
    slurm = Answers(planned, restarts=1, node_state=CUT_OFF)
    assert not slurm.act(ENDED, "failed") and not slurm.act(SILENT, "running")
    assert "scancel" not in slurm.calls and "requeue" not in slurm.calls
    slurm.change(restarts=0)
    assert not slurm.act(ENDED, "failed", "PENDING")
    assert "scancel" not in slurm.calls
    slurm.change(restarts=1)
    assert slurm.act(ENDED, "failed", "PENDING")
    waits = Answers(planned)  # only for its nodes
    assert waits.act(CLEANING, "done", "COMPLETING") and waits.calls == ""


def test_a_lost_first_node_is_left_out_while_the_job_may_go_back_to_the_queue(planned: RunDir) -> None:
    slurm = Answers(planned, node_state=CUT_OFF)
    assert not slurm.act(SILENT, "running")
    assert slurm.calls.count("scontrol update") == 1, "Slurm excludes nodes only for a job that is pending"
    assert "scontrol requeue 7" in slurm.calls and f"ExcNodeList=n9,{HOST}" in slurm.calls
    assert "scancel" not in slurm.calls
    assert read_json(planned.driver)["state"] == "requeued"
    slurm.change(restarts=1)  # as often as the spec allows
    assert slurm.act(SILENT, "running", restart=1)
    assert "scancel 7" in slurm.calls and "requeue" not in slurm.calls
    record = read_json(planned.driver)
    assert (record["state"], record["exit_code"]) == ("failed", 1)


def test_a_job_that_was_cancelled_or_that_slurm_does_not_requeue_is_cancelled(planned: RunDir) -> None:
    slurm = Answers(planned, node_state=CUT_OFF, requeue="echo requeue is disabled >&2; exit 1")
    assert slurm.act(SILENT, "running")
    assert "scontrol requeue 7" in slurm.calls and "scancel 7" in slurm.calls
    slurm.change(requeue="true")
    planned.cancelled.touch()
    assert slurm.act(SILENT, "running")
    assert "requeue" not in slurm.calls and "scancel 7" in slurm.calls


SILENT_DRIVER = f"the driver of job 7 on {HOST} recorded nothing for too long"
SILENT_NODE = f"{HOST}, the job's first node, where its script and ranks 0-1 ran, has recorded nothing for too long"
NOT_LOST = "its slurmd answers, so the node is not lost"


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"silent": '"scontrol show node"'}, (SILENT_DRIVER, NOT_LOST)),
        (
            {"node": 'echo "slurm_load_node error" >&2; exit 1'},
            (SILENT_NODE, "unknown: "),
        ),  # it says nothing of this one
    ],
)
def test_without_evidence_that_the_node_is_lost_the_job_is_cancelled_with_the_reason(
    planned: RunDir, slurmd: int, known: dict[str, str], words: tuple[str, ...]
) -> None:
    slurm = Answers(planned, port=slurmd, **known)
    assert slurm.act(SILENT, "running")
    assert "requeue" not in slurm.calls and "scancel 7" in slurm.calls
    record = read_json(planned.driver)
    assert (record["state"], record["exit_code"]) == ("failed", 1)
    assert all(word in record["gave_up"] for word in (*words, "Job 7 was cancelled")), record["gave_up"]
    assert "exclude" not in record["gave_up"], "nothing is known against the node"


@pytest.mark.parametrize(("sign", "state"), [(ENDED, "failed"), (SILENT, "running")])
@pytest.mark.parametrize("silent", ["scontrol*", "scancel*"])
def test_without_answers_the_job_is_followed(planned: RunDir, slurmd: int, sign: str, state: str, silent: str) -> None:
    """Also where only the cancelling fails: nothing is recorded that did not happen."""
    write_json(planned.driver, says(state, host=HOST, beat=1))
    before, now, slurm = planned.driver.read_bytes(), [1000.0], Answers(planned, port=slurmd)
    job = SlurmJob(planned, slurm.slurm, "7", lambda: now[0])
    job._overdue = DriverLiveness(planned, "7", lambda: now[0])
    assert job.poll() is None
    slurm.change(silent=silent)
    for _ in range(2):
        now[0] += LIMITS_S[sign] + 1
        assert job.poll() is None
    assert planned.driver.read_bytes() == before
    slurm.change(silent="nothing")
    now[0] += 1.0 + POLL_INTERVAL_S
    assert job.poll() == 1
    assert "scancel 7" in slurm.calls


def test_a_full_disk_does_not_end_the_command_that_follows_a_job(
    planned: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness, "write_json", Mock(side_effect=OSError(28, "No space left on device")))
    slurm = Answers(planned, node_state=CUT_OFF)
    assert slurm.act(ENDED, "failed")
    assert "scancel 7" in slurm.calls
    assert "cannot be written" in caplog.text and "Job 7 was cancelled" in caplog.text
    assert not slurm.act(SILENT, "running")


def test_a_pending_job_is_cancelled_at_once_and_a_running_one_is_asked_for_a_checkpoint(run: RunDir) -> None:
    at_once, saving = ["scancel 7"], ["scancel --signal=USR1 --batch 7"]
    for state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RUNNING"):
        slurm = Answers(run, job_state=state)
        SlurmJob(run, slurm.slurm, "7").request_stop("interrupted")
        cancelling = [call for call in slurm.calls.splitlines() if "scancel" in call]
        assert cancelling == (saving if state == "RUNNING" else at_once), state
        run.cancelled.unlink()  # it was there, so that the job is not requeued


def test_a_slurm_that_does_not_answer_ends_nothing_and_is_reported_after_a_while(run: RunDir) -> None:
    slurm, now = Answers(run), [1000.0]
    job = SlurmJob(run, slurm.slurm, "7", lambda: now[0])

    def after(seconds: float) -> tuple[int | None, str | None]:
        now[0] += seconds
        return job.poll(), job.news()

    assert after(0.0) == (None, "job 7 is running on ")
    slurm.change(silent="scontrol*")
    assert after(5.0) == (None, None)
    code, said = after(UNANSWERED_S)
    assert code is None and said and "Slurm has not answered for 60 s" in said and "still following the run" in said
    assert "Unable to contact slurm controller" in said
    assert job.news() is None
    assert after(100000.0)[0] is None, "a controller that is down for a day does not end a job"
    job.request_stop("interrupted")
    assert "--signal=USR1" in slurm.calls, "it ran when Slurm last answered"
    slurm.change(silent="nothing")
    assert after(5.0) == (None, "job 7 is running on ")


def test_a_cancelled_job_is_waited_for_in_a_bounded_time(run: RunDir) -> None:
    """As where a node does not answer, or where scancel itself does not reach Slurm."""
    for silent, expected in (("nothing", 0), ("scancel*", 1)):
        now = [1000.0]
        job = SlurmJob(run, Answers(run, silent=silent).slurm, "7", lambda now=now: now[0])
        assert job.poll() is None
        job.news()
        job.kill()
        notes = [said for said in [job.news()] if said]
        assert all("could not signal" in said and "Cancel it by hand: scancel 7" in said for said in notes)
        assert len(notes) == expected
        now[0] += CANCEL_COMPLETES_S
        assert job.poll() is None
        job.kill()  # a second request does not start the time anew
        now[0] += 1.0 + POLL_INTERVAL_S
        assert job.poll() == 1


def test_a_job_that_is_gone_has_ended_as_its_driver_recorded(run: RunDir) -> None:
    """A driver that recorded nothing, or another job, gives no success."""
    slurm, cancelled = Answers(run), says("cancelled", exit_code=3)
    slurm.stub.write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n")
    ends = [(says("done"), 0), (says("stopped"), 0), (says("failed"), 1), (cancelled, 3), (says("running"), 1)]
    for record, code in (*ends, (says("done", job="8"), 1)):
        write_json(run.driver, record)
        assert SlurmJob(run, slurm.slurm, "7").poll() == code, record


def test_a_call_that_fails_for_lack_of_slurm_is_no_end(run: RunDir) -> None:
    slurm = Slurm([str(run.root / "nowhere")], "none")
    job = SlurmJob(run, slurm, "7")
    assert job.poll() is None
    assert job.end_reason().startswith("unknown")
    with pytest.raises(EnvironmentNotAble):
        SlurmJob.submit(run, slurm)


def test_a_step_that_does_not_heed_its_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As srun where it reaches neither its tasks nor Slurm's controller: it stays a minute and more."""
    monkeypatch.setattr(srun, "STEP_END_S", 0.5)
    step = srun.SrunStep(["sh", "-c", f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"])
    try:
        until((tmp_path / "ready").exists)
        assert step.poll() is None
        step.end()
        until(lambda: step.poll() is not None)
        assert step.poll() == 1
    finally:
        step._process.kill()


LEAST = 3.0
SPEC = parse_spec(tiny_spec(Path("rows.json"), Path()))
PLAN = make_plan(SPEC, machine_facts())
assert PLAN.hang is not None
UNMEASURED_S = PLAN.hang.long_s


def phase(name: str, at: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"event": "phase", "name": name, "time": at, **more}


BEGUN = [{"event": "start", "attempt": 1}, phase("build")]
STEP = {"event": "step", "step_time_s": 8.0}
TRAINED = [*BEGUN, phase("train"), {"event": "step", "step_times_s": [9.0, 10.0]}, STEP]
SAVES, SAVED = phase("save", limit_s=300.0), {"event": "checkpoint", "mode": "full", "written_s": 400.0}
STEP_S = LEAST_S + FACTOR * STEPS * 10.0
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
        ([*BEGUN, phase("train")], UNMEASURED_S, "finish their step"),
        (TRAINED, STEP_S, "finish their step"),
        ([*TRAINED, SAVES], 300.0, "write a full checkpoint within 300 s"),
        ([*TRAINED, SAVED, SAVES], FACTOR * 400.0, "write a full checkpoint within 800 s"),
        ([*TRAINED, phase("evaluate", 100.0)], UNMEASURED_S, "finish the evaluation"),
        ([*EVALUATED, phase("evaluate", 200.0)], FACTOR * 40.0, "finish the evaluation"),
    ],
)
def test_each_phase_has_its_limit(tmp_path: Path, events: list[dict[str, Any]], limit_s: float, words: str) -> None:
    limit = limit_of(tmp_path, events)
    assert limit.limit_s == limit_s and words in limit.text


def test_the_limit_begins_again_when_the_checkpoint_does(tmp_path: Path) -> None:
    """Ranks that reach the save in time may use all of its limit."""
    limit, now = limit_of(tmp_path, TRAINED), time.monotonic()
    assert not limit.expired(now + 65)
    append(RunDir(tmp_path), [phase("save", limit_s=50.0)])
    assert [limit.expired(now + later_s) for later_s in (69, 118, 120)] == [False, False, True]


def test_a_resumed_run_that_has_not_begun_has_nothing_to_save(tmp_path: Path) -> None:
    limit = limit_of(tmp_path, [*TRAINED, SAVES], attempt=2)
    assert limit.limit_s == LEAST
    append(RunDir(tmp_path), [{"event": "start", "attempt": 2}, phase("train")])
    limit.expired(time.monotonic() + 2)
    assert limit.limit_s == STEP_S, "times of the earlier attempt count"


def ending_of(folder: Path, slurm: Any, record: Any = None) -> StopAndRequeue:
    return StopAndRequeue(RunDir(folder), slurm, record, job="7", restart=0, signal_s=120)


@pytest.mark.parametrize(
    ("needed_s", "left_s", "why"), [(300.0, 290.0, "time_limit"), (300.0, 400.0, ""), (100.0, 90.0, "")]
)
def test_ranks_are_stopped_early_for_a_long_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed_s: float, left_s: float, why: str
) -> None:
    monkeypatch.delenv(IN_ALLOCATION, raising=False)
    job = JobInfo(job="7", state="RUNNING", start_time=time.time() - 60, time_limit_s=int(left_s) + 60)
    ending = ending_of(tmp_path, SimpleNamespace(try_job=lambda number: job))
    ending.check_time_limit(needed_s)
    assert ending.why == why


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_slurm_requeued_after_a_node_failed_is_not_over(tmp_path: Path, restarts: int) -> None:
    states: list[str] = []
    record = SimpleNamespace(write=lambda state, **more: states.append(state))
    ending = ending_of(tmp_path, SimpleNamespace(restarts=lambda job: restarts), record)
    ending.why = "node_fail"
    with pytest.raises(SystemExit) if restarts else nullcontext():
        ending.requeue(SPEC, PLAN, 1, JobEnd(), stopped=True, failed=False, hosts=list)
    assert states == ["requeued"] * restarts
