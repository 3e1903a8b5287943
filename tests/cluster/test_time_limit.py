"""Slurm's own time limit: its signal, a checkpoint, back to the queue, and on to the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster.helpers import job_state
from tests.cluster.runs import Submitted, log_of, run, spec_in
from tests.dist.harness import step_events, until

STEPS = 300


@pytest.mark.full
def test_a_job_that_outlasts_its_time_limit_goes_on_bitwise(box: Box, shared: Path) -> None:
    """The limit is Slurm's smallest, a minute. A slow cable makes the training outlast it; the one that it is compared
    with has a fast cable and no limit. Slurm warns 45 s before the limit, or up to 30 s earlier."""
    spec = spec_in(
        shared,
        cluster={"nodes": 2},
        adapter={"type": "none"},
        train={"max_steps": STEPS, "lr": 1e-3},
        checkpoint={"mode": "full"},
    )
    done, first = run(shared, spec)
    assert done.returncode == 0, done.stdout + done.stderr + log_of(first)
    (shared / "runs").rename(shared / "first")
    spec["cluster"]["slurm"] = {"time": "1", "signal_s": 45}
    with injected(box, "slow-link", "n2", rate="6mbit"):
        job = Submitted(shared, spec)
        until(lambda: len(job.run.attempts()) > 1 or job.process.poll() is not None, limit_s=90)
    code, out = job.wait()
    said = log_of(job.run)
    assert code == 0, out + said
    assert "leaves the ranks almost no time" in out
    assert len(job.run.attempts()) > 1, said
    assert "the time limit is near: requeueing the job" in said
    assert "resuming after step" in said
    shown = box.run(["scontrol", "--oneliner", "show", "job", read_json(job.run.job)["job"]], cwd="/").stdout
    assert f"Restarts={len(job.run.attempts()) - 1} " in shown
    assert "TimeLimit=00:01:00" in shown
    losses = [(e["step"], e["loss"]) for e in step_events(RunDir(shared / "first" / first.name))]
    assert len(losses) == STEPS
    assert [(e["step"], e["loss"]) for e in step_events(job.run)] == losses


def test_a_stop_that_is_asked_before_the_ranks_are_there_ends_nothing(box: Box, shared: Path) -> None:
    """Batch script, driver, srun, agents and ranks each take a moment until they heed a signal; none may die of it."""
    cluster = {"nodes": 2, "slurm": {"time": "3", "signal_s": 106}}  # the least with which 3 min count as near
    job = Submitted(shared, spec_in(shared, cluster=cluster, train={"max_steps": 30}, checkpoint={"mode": "full"}))
    until(lambda: job.run.job.exists() and job_state(box, job.job()) == "RUNNING", limit_s=30)
    until(lambda: "batch script on" in log_of(job.run), limit_s=30)  # before, Slurm itself is still starting it
    for _ in range(60):  # seconds long, through all that starts; the second start is to be left in peace
        if "requeueing the job" in log_of(job.run):
            break
        box.run(["scancel", "--signal=USR1", "--batch", job.job()], cwd="/")
        time.sleep(0.05)
    code, out = job.wait()
    assert code == 0, out + log_of(job.run)
    assert job.run.attempts() == [1, 2]
    assert [e["step"] for e in step_events(job.run)] == list(range(1, 31))
