"""A job that Slurm holds although its run folder says that it is over: what is seen, and when it is acted upon."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from allranks.errors import EnvironmentNotAble
from allranks.launch.launchers import get_launcher
from allranks.launch.slurm import liveness
from allranks.launch.slurm.job import CANCEL_COMPLETES_S, POLL_INTERVAL_S, UNANSWERED_S, SlurmJob
from allranks.launch.slurm.liveness import CLEANING, ENDED, LIMITS_S, SILENT, DriverLiveness, liveness_problem
from allranks.nodes.slurm import srun
from allranks.nodes.slurm.commands import JobState, Slurm
from allranks.planning.planner import make_plan
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from allranks.spec.loader import parse_spec
from allranks.utils.machine import machine_facts
from tests.conftest import tiny_spec


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
    job = SlurmJob(run, Slurm([], "none"), "7")
    for state, said in (
        (JobState(state="PENDING", reason="None"), "job 7 is pending: Slurm has not said why yet"),
        (JobState(state="PENDING", reason="Priority"), "job 7 is pending: Priority"),
        (JobState(state="PENDING", reason="Priority", start="N/A"), None),
        (
            JobState(state="PENDING", reason="Resources", start="2026-03-02T10:14:02"),
            "job 7 is pending: Resources, estimated start 2026-03-02T10:14:02",
        ),
        (JobState(state="RUNNING", nodes="n[1-2]"), "job 7 is running on n[1-2]"),
    ):
        job._state = state
        assert job.news() == said


def test_a_hang_is_not_begun_anew_and_other_failures_are_left_to_slurm(run: RunDir) -> None:
    assert liveness_problem(run, says("failed"), "PENDING") == ""
    write_json(run.hang_report(1), {})
    assert liveness_problem(run, says("failed"), "PENDING") == ENDED
    assert liveness_problem(run, says("running"), "PENDING") == ""


def test_a_driver_whose_beat_stays_the_same_is_silent_and_one_that_beats_is_not(run: RunDir) -> None:
    now = [0.0]
    look = DriverLiveness(run, "7", lambda: now[0]).look
    # NFS may show a beat a minute late, and one may be missing
    assert LIMITS_S[SILENT] == 80.0 >= 60.0 + 2 * liveness.HEARTBEAT_S
    for beat in range(20):
        write_json(run.driver, says("running", beat=beat))
        assert look("RUNNING") == ""
        now[0] += LIMITS_S[SILENT] / 2
    write_json(run.driver, says("running", beat=20))
    assert look("RUNNING") == ""
    now[0] += LIMITS_S[SILENT]
    assert look("RUNNING") == ""
    now[0] += 1.0
    assert look("RUNNING") == SILENT
    write_json(run.driver, says("running", beat=21))  # it was only late
    assert look("RUNNING") == ""
    now[0] += LIMITS_S[SILENT] + 1.0
    assert look("RUNNING") == SILENT


def test_what_lasts_for_too_long_is_told_and_each_change_counts_anew(run: RunDir) -> None:
    now = [0.0]
    look = DriverLiveness(run, "7", lambda: now[0]).look
    write_json(run.driver, says("failed"))
    assert look("RUNNING") == ""
    now[0] = LIMITS_S[ENDED] - 1
    assert look("RUNNING") == ""
    assert look("COMPLETING") == ""
    now[0] += LIMITS_S[CLEANING] + 1
    assert look("COMPLETING") == CLEANING
    assert look("RUNNING") == ""
    now[0] += LIMITS_S[ENDED] + 1
    assert look("RUNNING") == ENDED
    write_json(run.driver, says("failed", restart=1))
    assert look("RUNNING") == ""


# The state of the node as scontrol shows it is part of the question whether it is lost; 127.0.0.1 stands for a node on
# whose slurmd port ({port}) something listens or does not.
ANSWERS = """#!/bin/sh
echo "$@" >> {called}
case "$1 $2" in
  {silent}) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
  "scontrol show")
    case "$3" in
      job) echo "JobId=7 JobName=j JobState={job_state} Reason=None Restarts={restarts}" ;;
      node) echo "NodeName=127.0.0.1 State={node_state} CPUTot=2" ;;
      config) echo "SlurmdPort = {port}" ;;
    esac ;;
  "scontrol requeue") {requeue} ;;
  "scontrol update") grep -q requeue {called} || {{ echo "Job is no longer pending execution" >&2; exit 1; }} ;;
  sinfo*) echo "{node_state}" ;;
  *python*) exec "$@" ;;
esac
"""


@pytest.fixture
def asked(run: RunDir) -> RunDir:
    cluster = {"launcher": "slurm", "nodes": 2, "procs_per_node": 2, "slurm": {"exclude": ["n9"], "max_requeues": 1}}
    spec = tiny_spec("builtin:instructions", run.root, cluster=cluster)
    run.spec.write_text(yaml.safe_dump(spec))
    write_json(run.plan, msgspec.to_builtins(make_plan(parse_spec(spec), machine_facts())))
    return run


class Answers:
    """A program that answers as Slurm does, and notes what it was asked."""

    def __init__(self, run: RunDir, **known: Any) -> None:
        self._stub, self._called = run.root / "stub", run.root / "called"
        self._known: dict[str, Any] = {"restarts": 0, "node_state": "ALLOCATED", "job_state": "RUNNING"}
        self.change(**{"port": 1, "requeue": "true", "silent": "nothing", **known})
        self.slurm = Slurm([str(self._stub)], "a stub")

    def change(self, **known: Any) -> None:
        self._known |= known
        self._stub.write_text(ANSWERS.format(called=self._called, **self._known))
        self._stub.chmod(0o755)
        self._called.write_text("")

    @property
    def called(self) -> str:
        return self._called.read_text()

    def act(self, run: RunDir, sign: str, state: str, driver: dict[str, Any]) -> bool:
        return liveness.handle_dead_driver(sign, run, self.slurm, "7", JobState(state=state), {**driver, "host": HOST})


HOST = "127.0.0.1"
CUT_OFF = "DOWN*+NOT_RESPONDING"


@pytest.fixture
def slurmd() -> Iterator[int]:
    """The port of something that accepts connections, as the slurmd of a healthy node."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def test_a_first_node_that_is_cut_off_is_named_and_its_job_cancelled(asked: RunDir) -> None:
    answers = Answers(asked, node_state=CUT_OFF)
    assert answers.act(asked, ENDED, "RUNNING", says("failed"))
    assert "scancel 7" in answers.called and "requeue" not in answers.called
    said = read_json(asked.driver)
    assert said["state"] == "failed"
    assert f"{HOST}, the job's first node, where its script and ranks 0-1 ran, has finished" in said["gave_up"]
    assert "Slurm's state of the node is DOWN" in said["gave_up"] and "Job 7 was cancelled" in said["gave_up"]
    assert f"--set 'cluster.slurm.exclude=[n9,{HOST}]'" in said["gave_up"]


def test_what_an_earlier_start_said_ends_no_later_one(asked: RunDir) -> None:
    """Slurm has begun the job anew, and its script has yet to write its first record."""
    answers = Answers(asked, restarts=1, node_state=CUT_OFF)
    assert not answers.act(asked, ENDED, "RUNNING", says("failed"))
    assert not answers.act(asked, SILENT, "RUNNING", says("running"))
    assert "scancel" not in answers.called and "requeue" not in answers.called
    answers.change(restarts=0)
    assert not answers.act(asked, ENDED, "PENDING", says("failed"))
    assert "scancel" not in answers.called
    answers.change(restarts=1)
    assert answers.act(asked, ENDED, "PENDING", says("failed"))


def test_a_lost_first_node_is_left_out_while_the_job_may_go_back_to_the_queue(asked: RunDir) -> None:
    answers = Answers(asked, node_state=CUT_OFF)
    assert not answers.act(asked, SILENT, "RUNNING", says("running"))
    assert answers.called.count("scontrol update") == 1, "Slurm excludes nodes only for a job that is pending"
    assert "scontrol requeue 7" in answers.called and f"ExcNodeList=n9,{HOST}" in answers.called
    assert "scancel" not in answers.called
    assert read_json(asked.driver)["state"] == "requeued"
    answers.change(restarts=1)  # as often as the spec allows
    assert answers.act(asked, SILENT, "RUNNING", says("running", restart=1))
    assert "scancel 7" in answers.called and "requeue" not in answers.called
    said = read_json(asked.driver)
    assert (said["state"], said["exit_code"]) == ("failed", 1)


def test_agents_requeue_only_if_the_node_is_lost(asked: RunDir, slurmd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS_S, SILENT, 0.2)
    monkeypatch.setattr(liveness, "EXAMINE_S", 0.1)
    monkeypatch.setattr(liveness, "HEARTBEAT_S", 1.0)
    answers = Answers(asked, port=slurmd)
    for node_state, state, requeued in (
        ("ALLOCATED", "running", 0), (CUT_OFF, "done", 0), (CUT_OFF, "running", 1), (CUT_OFF, None, 0),
    ):  # fmt: skip
        if state:
            write_json(asked.driver, says(state, host=HOST))
        answers.change(node_state=node_state)
        liveness.continue_without_driver(asked, "7", answers.slurm)
        assert answers.called.count("scontrol requeue 7") == requeued and "scancel" not in answers.called
    answers.change(node_state=CUT_OFF)
    liveness.continue_without_driver(asked, "7", answers.slurm, stopped=lambda: True)
    assert not answers.called, "Slurm itself ends the job"


def test_a_driver_that_ended_without_a_record_is_named_with_what_slurm_says(asked: RunDir) -> None:
    for record, named in (({"end": None}, True), ({"end": {"ends": []}}, False)):
        write_json(asked.driver, {**says("running", host=HOST), **record})
        assert bool(get_launcher("slurm").describe_lost_driver(asked, "FAILED, exit code 0:9")) is named


def test_a_job_that_was_cancelled_or_that_slurm_does_not_requeue_is_cancelled(asked: RunDir) -> None:
    answers = Answers(asked, node_state=CUT_OFF, requeue="echo requeue is disabled >&2; exit 1")
    assert answers.act(asked, SILENT, "RUNNING", says("running"))
    assert "scontrol requeue 7" in answers.called and "scancel 7" in answers.called
    answers.change(requeue="true")
    asked.cancelled.touch()
    assert answers.act(asked, SILENT, "RUNNING", says("running"))
    assert "requeue" not in answers.called and "scancel 7" in answers.called


@pytest.mark.parametrize("known", ["alive", "unknown"])
def test_without_evidence_of_a_lost_node_a_job_is_cancelled_with_reason(asked: RunDir, slurmd: int, known: str) -> None:
    answers = Answers(asked, port=slurmd, silent='"scontrol show node"' if known == "alive" else "nothing")
    evidence = "its slurmd answers, so the node is not lost"
    what = f"the driver of job 7 on {HOST} recorded nothing for too long"
    if known == "unknown":
        text = answers._stub.read_text()  # of this node alone Slurm gives no answer
        fails = 'node) echo "slurm_load_node error" >&2; exit 1; echo "'
        answers._stub.write_text(text.replace('node) echo "NodeName', fails))
        evidence = "unknown: "
        what = f"{HOST}, the job's first node, where its script and ranks 0-1 ran, has recorded nothing for too long"
    assert answers.act(asked, SILENT, "RUNNING", says("running"))
    assert "requeue" not in answers.called and "scancel 7" in answers.called
    said = read_json(asked.driver)
    assert (said["state"], said["exit_code"]) == ("failed", 1)
    assert what in said["gave_up"]
    assert evidence in said["gave_up"] and "Job 7 was cancelled" in said["gave_up"]
    assert "exclude" not in said["gave_up"], "nothing is known against the node"


@pytest.mark.parametrize("sign", [ENDED, SILENT])
@pytest.mark.parametrize("silent", ["scontrol*", "scancel*"])
def test_a_slurm_without_an_answer_keeps_the_job_followed(asked: RunDir, slurmd: int, sign: str, silent: str) -> None:
    """Also where only the cancelling fails: nothing is recorded that did not happen."""
    write_json(asked.driver, says("failed" if sign == ENDED else "running", host=HOST, beat=1))
    before = asked.driver.read_bytes()
    now = [1000.0]
    answers = Answers(asked, port=slurmd)
    job = SlurmJob(asked, answers.slurm, "7", lambda: now[0])
    job._overdue = DriverLiveness(asked, "7", lambda: now[0])
    assert job.poll() is None
    answers.change(silent=silent)
    for _ in range(2):
        now[0] += LIMITS_S[sign] + 1
        assert job.poll() is None
    assert asked.driver.read_bytes() == before
    answers.change(silent="nothing")
    now[0] += 1.0 + POLL_INTERVAL_S
    assert job.poll() == 1
    assert "scancel 7" in answers.called


def test_a_full_disk_does_not_end_the_command_that_follows_a_job(
    asked: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(liveness, "write_json", full)
    answers = Answers(asked, node_state=CUT_OFF)
    assert answers.act(asked, ENDED, "RUNNING", says("failed"))
    assert "scancel 7" in answers.called
    assert "cannot be written" in caplog.text and "Job 7 was cancelled" in caplog.text
    assert not answers.act(asked, SILENT, "RUNNING", says("running"))


def test_a_pending_job_is_cancelled_at_once_and_a_running_one_is_asked_for_a_checkpoint(run: RunDir) -> None:
    for state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD"):
        answers = Answers(run, job_state=state)
        SlurmJob(run, answers.slurm, "7").request_stop("interrupted")
        assert [line for line in answers.called.splitlines() if "scancel" in line] == ["scancel 7"], state
        assert run.cancelled.exists()
        run.cancelled.unlink()
    answers = Answers(run, job_state="RUNNING")
    SlurmJob(run, answers.slurm, "7").request_stop("interrupted")
    assert "scancel --signal=USR1 --batch 7" in answers.called.splitlines()
    assert "scancel 7" not in answers.called.splitlines()
    assert run.cancelled.exists(), "it is not requeued"


def test_a_slurm_that_does_not_answer_ends_nothing_and_is_reported_after_a_while(run: RunDir) -> None:
    now = [1000.0]
    answers = Answers(run)
    job = SlurmJob(run, answers.slurm, "7", lambda: now[0])
    assert (job.poll(), job.news()) == (None, "job 7 is running on ")
    answers.change(silent="scontrol*")
    now[0] += 5.0
    assert (job.poll(), job.news()) == (None, None)
    now[0] += UNANSWERED_S
    assert job.poll() is None
    said = job.news() or ""
    assert "Slurm has not answered for 60 s" in said and "still following the run" in said
    assert "Unable to contact slurm controller" in said
    assert job.news() is None
    now[0] += 100000.0
    assert job.poll() is None, "a controller that is down for a day does not end a job"
    job.request_stop("interrupted")
    assert "--signal=USR1" in answers.called, "it ran when Slurm last answered"
    answers.change(silent="nothing")
    now[0] += 5.0
    assert (job.poll(), job.news()) == (None, "job 7 is running on ")


def test_a_cancelled_job_is_waited_for_in_a_bounded_time(run: RunDir) -> None:
    """As where a node does not answer, or where scancel itself does not reach Slurm."""
    for silent, expected in (("nothing", []), ("scancel*", ["scancel 7"])):
        now = [1000.0]
        job = SlurmJob(run, Answers(run, silent=silent).slurm, "7", lambda now=now: now[0])
        assert job.poll() is None
        job.news()
        job.kill()
        notes = [said for said in [job.news()] if said]
        assert all("could not signal" in said and "Cancel it by hand: scancel 7" in said for said in notes)
        assert len(notes) == len(expected)
        now[0] += CANCEL_COMPLETES_S
        assert job.poll() is None
        job.kill()  # a second request does not start the time anew
        now[0] += 1.0 + POLL_INTERVAL_S
        assert job.poll() == 1


def test_a_job_that_is_gone_has_ended_as_its_driver_recorded(run: RunDir) -> None:
    """A driver that recorded nothing, or another job, gives no success."""
    for recorded, code in (
        (says("done"), 0),
        (says("stopped"), 0),
        (says("failed"), 1),
        (says("cancelled", exit_code=3), 3),
        (says("running"), 1),
        (says("done", job="8"), 1),
    ):
        write_json(run.driver, recorded)
        answers = Answers(run)
        answers._stub.write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n")
        assert SlurmJob(run, answers.slurm, "7").poll() == code, recorded


def test_a_call_that_fails_for_lack_of_slurm_is_no_end(run: RunDir) -> None:
    job = SlurmJob(run, Slurm([str(run.root / "nowhere")], "none"), "7")
    assert job.poll() is None
    assert job.end_reason().startswith("unknown")
    with pytest.raises(EnvironmentNotAble):
        SlurmJob.submit(run, Slurm([str(run.root / "nowhere")], "none"))


def test_a_job_that_only_waits_for_nodes_is_left_to_slurm(asked: RunDir) -> None:
    answers = Answers(asked)
    assert answers.act(asked, CLEANING, "COMPLETING", says("done"))
    assert answers.called == ""


def test_a_step_that_does_not_heed_its_end_is_killed(tmp_path: Path) -> None:
    """As srun where it reaches neither its tasks nor Slurm's controller: it stays a minute and more."""
    ready = tmp_path / "ready"
    found = srun.SrunStep(["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"])
    try:
        while not ready.exists():
            time.sleep(0.01)
        assert found.poll() is None
        found.end(within_s=0.5)
        deadline = time.monotonic() + 10
        while (code := found.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert code == 1
    finally:
        found._process.kill()
