"""A job that Slurm holds although its run folder says that it is over: what is to be seen, and when it is acted upon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from allranks.facts import machine_facts
from allranks.launch import giveup, step
from allranks.launch.overdue import CLEANING, ENDED, LIMIT_S, LOST, Overdue, sign_of
from allranks.launch.slurm import SlurmJob
from allranks.planning import make_plan
from allranks.rundir import RunDir, read_json, write_json
from allranks.slurm.commands import JobState, Slurm
from allranks.spec.load import parse_spec
from tests.conftest import tiny_spec


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs_of(1).mkdir(parents=True)
    run.hang(1).mkdir(parents=True)
    return run


def says(state: str, **more: Any) -> dict[str, Any]:
    return {"job": "7", "state": state, "attempt": 1, "restart": 0, "host": "n1", **more}


def fail(run: RunDir, **said: Any) -> None:
    write_json(run.agent_exit(1, "n2"), {"host": "n2", "node": 1, "failed": [], "refused": "", **said})


def test_what_a_waiting_job_is_said_to_wait_for(run: RunDir) -> None:
    """Slurm's reason, and its estimate of the start where it has one; once."""
    job = SlurmJob(run, Slurm([], "none"), "7")
    for state, said in (
        (JobState(state="PENDING", reason="Priority"), "job 7 waits: Priority"),
        (JobState(state="PENDING", reason="Priority", start="N/A"), None),
        (
            JobState(state="PENDING", reason="Resources", start="2026-03-02T10:14:02"),
            "job 7 waits: Resources, estimated start 2026-03-02T10:14:02",
        ),
        (JobState(state="RUNNING", nodes="n[1-2]"), "job 7 runs on n[1-2]"),
    ):
        job._state = state
        assert job.news() == said


def test_a_job_that_goes_on_is_not_overdue(run: RunDir) -> None:
    fail(run)
    assert sign_of(run, {}, "RUNNING") == ""
    assert sign_of(run, says("running"), "RUNNING") == ""
    assert sign_of(run, says("running"), "PENDING") == ""
    assert sign_of(run, says("requeued"), "COMPLETING") == ""
    assert sign_of(run, says("running"), "COMPLETING") == "", "Slurm may be sending it back to the queue"
    run.cancelled.touch()
    assert sign_of(run, says("running"), "COMPLETING") == CLEANING


@pytest.mark.parametrize("said", [{"failed": [{"rank": 1}]}, {"refused": "another run's store"}])
def test_a_driver_that_draws_no_conclusion_is_lost(run: RunDir, said: dict[str, Any]) -> None:
    fail(run, **said)
    assert sign_of(run, says("running"), "RUNNING") == LOST
    assert sign_of(run, says("failed"), "RUNNING") == ENDED
    assert sign_of(run, says("requeued"), "RUNNING") == ""


def test_a_hang_is_not_begun_anew_and_other_failures_are_left_to_slurm(run: RunDir) -> None:
    assert sign_of(run, says("failed"), "PENDING") == ""
    write_json(run.hang_report(1), {})
    assert sign_of(run, says("failed"), "PENDING") == ENDED
    assert sign_of(run, says("running"), "PENDING") == ""
    assert sign_of(run, says("running"), "RUNNING") == LOST


def test_what_lasts_for_too_long_is_told_and_each_change_counts_anew(run: RunDir) -> None:
    now = [0.0]
    look = Overdue(run, "7", lambda: now[0]).look
    write_json(run.driver, says("failed"))
    assert look("RUNNING") == ""
    now[0] = LIMIT_S[ENDED] - 1
    assert look("RUNNING") == ""
    assert look("COMPLETING") == ""
    now[0] += LIMIT_S[CLEANING] + 1
    assert look("COMPLETING") == CLEANING
    assert look("RUNNING") == ""
    now[0] += LIMIT_S[ENDED] + 1
    assert look("RUNNING") == ENDED
    write_json(run.driver, says("failed", restart=1))
    assert look("RUNNING") == ""


def test_what_another_job_said_does_not_count(run: RunDir) -> None:
    now = [0.0]
    other = Overdue(run, "8", lambda: now[0])
    write_json(run.driver, says("failed"))
    other.look("RUNNING")
    now[0] = 1000.0
    assert other.look("RUNNING") == ""
    assert other.driver() == {}


ANSWERS = """#!/bin/sh
echo "$@" >> {called}
case "$1 $2" in "scontrol show") echo "JobId=7 Restarts={restarts} Reason=None" ;; sinfo*) echo "down*" ;; esac
"""


@pytest.fixture
def asked(run: RunDir) -> RunDir:
    """A run with a spec and a plan."""
    cluster = {"launcher": "slurm", "nodes": 2, "procs_per_node": 2, "slurm": {"exclude": ["n9"], "max_requeues": 1}}
    spec = tiny_spec("builtin:instructions", run.root, cluster=cluster)
    run.spec.write_text(yaml.safe_dump(spec))
    write_json(run.plan, msgspec.to_builtins(make_plan(parse_spec(spec), machine_facts())))
    return run


def act(run: RunDir, sign: str, state: str, driver: dict[str, Any], restarts: int = 0) -> tuple[bool, str]:
    """What is done, and Slurm's commands that are called for it."""
    stub, called = run.root / "stub", run.root / "called"
    stub.write_text(ANSWERS.format(called=called, restarts=restarts))
    stub.chmod(0o755)
    over = giveup.act(sign, run, Slurm([str(stub)], "a stub"), "7", JobState(state=state), driver)
    return over, called.read_text() if called.exists() else ""


def test_a_first_node_that_is_cut_off_is_named_and_its_job_cancelled(asked: RunDir) -> None:
    over, called = act(asked, ENDED, "RUNNING", says("failed"))
    assert over and "scancel 7" in called and "requeue" not in called
    said = read_json(asked.driver)
    assert said["state"] == "failed"
    assert "n1, the job's first node, where its script and ranks 0-1 ran" in said["gave_up"]
    assert (
        "the node is down*, that is, it does not answer. Job 7 was" in said["gave_up"]
        and "--set 'cluster.slurm.exclude=[n9,n1]'" in said["gave_up"]
    )


def test_what_an_earlier_start_said_ends_no_later_one(asked: RunDir) -> None:
    """Slurm has begun the job anew, and its script has yet to write its first word."""
    assert act(asked, ENDED, "RUNNING", says("failed"), restarts=1)[0] is False
    assert "scancel" not in act(asked, LOST, "RUNNING", says("running"), restarts=1)[1]
    assert act(asked, ENDED, "PENDING", says("failed"), restarts=0)[0] is False
    assert act(asked, ENDED, "PENDING", says("failed"), restarts=1)[0]


def test_a_lost_first_node_is_left_out_while_the_job_may_go_back_to_the_queue(asked: RunDir) -> None:
    over, called = act(asked, LOST, "RUNNING", says("running"))
    assert not over and "scontrol requeue 7" in called and "ExcNodeList=n9,n1" in called
    assert read_json(asked.driver)["state"] == "requeued"
    over, called = act(asked, LOST, "RUNNING", says("running", restart=1), restarts=1)
    assert over and "scancel 7" in called
    assert read_json(asked.driver)["state"] == "failed"


def test_a_job_that_only_waits_for_nodes_is_left_to_slurm(asked: RunDir) -> None:
    assert act(asked, CLEANING, "COMPLETING", says("done")) == (True, "")


def test_a_step_that_does_not_heed_its_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As srun where it reaches neither its tasks nor Slurm's controller: it stays a minute and more."""
    monkeypatch.setattr(step, "END_S", 0.5)
    ready = tmp_path / "ready"
    found = step.AgentsStep(["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"])
    try:
        while not ready.exists():
            time.sleep(0.01)
        assert found.poll() is None
        found.end()
        deadline = time.monotonic() + 10
        while (code := found.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert code == 1
    finally:
        found._process.kill()
