"""A job that Slurm holds although its run folder says that it is over: what is to be seen, and when it is acted upon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.launch.overdue import CLEANING, ENDED, LIMIT_S, LOST, Overdue, sign_of
from allranks.rundir import RunDir, write_json


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


def test_a_job_that_goes_on_is_not_overdue(run: RunDir) -> None:
    fail(run)
    assert sign_of(run, {}, "RUNNING") == ""
    assert sign_of(run, says("running"), "RUNNING") == ""
    assert sign_of(run, says("running"), "PENDING") == ""
    assert sign_of(run, says("requeued"), "COMPLETING") == ""


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
