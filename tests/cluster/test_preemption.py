"""Preemption, `scancel`, and a Slurm that refuses to requeue or to update jobs. Everything is done by a real Slurm."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import Box, BoxOptions, down, up
from allranks.lab.cluster.faults import heal, inject
from allranks.lab.cluster.plan import BoxPaths
from allranks.nodes.slurm.endpoints import NAME_VARIABLE
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster.conftest import end_jobs
from tests.cluster.helpers import submit, wait_for
from tests.cluster.runs import Submitted, log_of, spec_in
from tests.dist.harness import step_events

STEPS = 300
GRACE_S, KILL_WAIT_S = 20, 20
LOW = "Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP DefMemPerCPU=100"
CONF = (
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    f"KillWait={KILL_WAIT_S}",
    f"PartitionName=grace {LOW} PreemptMode=REQUEUE GraceTime={GRACE_S}",
    f"PartitionName=nograce {LOW} PreemptMode=REQUEUE",
    f"PartitionName=cancel {LOW} PreemptMode=CANCEL GraceTime={GRACE_S}",
    f"PartitionName=high {LOW.replace('=10 ', '=100 ')} PreemptMode=OFF",
)
NO_UPDATES = """
function slurm_job_submit(job_desc, part_list, submit_uid)
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    if job_rec.name == "fixed" then
        slurm.log_user("jobs are not updated here")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""
# Lives on after SIGTERM, and writes down for how long.
STUBBORN = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
print("READY", flush=True)
while not told or time.monotonic() - told[0] < float(sys.argv[1]):
    time.sleep(0.1)
print("LIVED ON", flush=True)
"""


@pytest.fixture(scope="module")
def preempting_box() -> Iterator[Box]:
    """Jobs in partition high preempt those of the others, each of which does it otherwise. One node is spare."""
    made = up(BoxOptions(name=f"preempt-{os.getpid()}", nodes=3, conf=CONF))
    before = os.environ.get(NAME_VARIABLE)
    os.environ[NAME_VARIABLE] = made.name
    yield made
    down(made.name)
    os.environ.pop(NAME_VARIABLE)
    if before is not None:
        os.environ[NAME_VARIABLE] = before


@pytest.fixture
def box(preempting_box: Box) -> Iterator[Box]:
    """The same for each test: no fault and no job is left of the one before."""
    yield preempting_box
    heal(preempting_box)
    preempting_box.run(["scancel", "--full", f"--user={preempting_box.plan.user}"], cwd="/")
    end_jobs(preempting_box)


def training(shared: Path, name: str = "t", every: int | None = None, steps: int = STEPS, **slurm: Any) -> Submitted:
    spec = spec_in(
        shared,
        cluster={"nodes": 2, "slurm": slurm},
        train={"max_steps": steps, "lr": 1e-3},
        checkpoint={"mode": "full", "every": every},
    )
    return Submitted(shared, {**spec, "name": name})


def preempt(box: Box, shared: Path, seconds: int = 3) -> str:
    """Submit a job that needs the nodes of all others."""
    return submit(box, shared, f"sleep {seconds}\n", "--partition=high", "--nodes=3", "--exclusive")


def of_slurm(box: Box, job: str) -> dict[str, str]:
    shown = box.run(["scontrol", "--oneliner", "show", "job", job], cwd="/").stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def starts(run: RunDir) -> list[dict[str, Any]]:
    return [e for e in read_events(run.events_of(0)) if e["event"] == "start"]


def assert_resumed_once(box: Box, job: Submitted, at_least: int) -> None:
    """Two attempts, of which the second continued from a checkpoint, and no step is missing or done twice."""
    code, out = job.wait()
    said = out + log_of(job.run)
    assert code == 0, said
    assert job.run.attempts() == [1, 2], said
    assert of_slurm(box, job.job())["Restarts"] == "1"
    first, second = starts(job.run)
    assert first["resumed_from"] is None and second["resumed_from"] >= at_least
    assert [e["step"] for e in step_events(job.run)] == list(range(1, STEPS + 1))
    assert read_json(job.run.metrics)["status"] == "succeeded"


@pytest.mark.parametrize("partition", ["grace", "cancel"])
def test_a_preempted_training_saves_in_its_grace_time_and_continues(box: Box, shared: Path, partition: str) -> None:
    """With GraceTime Slurm signals the job's steps and not its script, so that only Slurm can say why ranks have
    stopped.

    PreemptMode=CANCEL would end the job for good; it is requeued by its own driver (`max_requeues`) before.
    """
    job = training(shared, partition=partition)
    job.until_step(10)
    high = preempt(box, shared)
    # Well before the grace time and KillWait are over: nothing waits for a kill.
    wait_for(lambda: of_slurm(box, high)["JobState"] in ("RUNNING", "COMPLETED"), GRACE_S * 0.7, "the preempting job")
    saved = job.run.checkpoint_steps()
    assert_resumed_once(box, job, at_least=10)
    assert saved and starts(job.run)[1]["resumed_from"] == saved[-1]
    assert "the job was preempted: requeueing the job" in log_of(job.run)


def test_a_training_that_is_preempted_at_once_continues_from_its_last_checkpoint(box: Box, shared: Path) -> None:
    job = training(shared, partition="nograce", every=10)
    job.until_step(25)
    preempt(box, shared)
    assert_resumed_once(box, job, at_least=20)


def test_a_preempted_training_that_may_not_be_requeued_ends_and_says_so(box: Box, shared: Path) -> None:
    job = training(shared, partition="cancel", max_requeues=0)
    job.until_step(10)
    preempt(box, shared)
    code, out = job.wait()
    assert code == 1, out + log_of(job.run)
    assert "(the job was preempted)" in out and f"allranks resume {job.run.name}" in out, out
    assert len(job.run.checkpoint_steps()) == 1 and job.run.attempts() == [1]
    assert of_slurm(box, job.job())["Restarts"] == "0"


def test_scancel_ends_a_training_with_a_checkpoint(box: Box, shared: Path) -> None:
    job = training(shared)
    job.until_step(10)
    box.run(["scancel", job.job()], cwd="/")
    code, out = job.wait(KILL_WAIT_S + 20)
    assert code == 1, out
    (step,) = job.run.checkpoint_steps()
    assert f"stopped after step {step} (the job was cancelled)" in out, out + log_of(job.run)
    shown = of_slurm(box, job.job())
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0")
    assert job.run.attempts() == [1]


def test_after_scancel_the_ranks_of_all_nodes_have_their_kill_wait(box: Box, shared: Path) -> None:
    """srun and the agents get SIGTERM too. None of them may take the time for a checkpoint away from the ranks."""
    (shared / "own.py").write_text(STUBBORN)
    spec = {
        "name": "own",
        "script": {"path": str(shared / "own.py"), "args": [str(KILL_WAIT_S * 0.6)]},
        "run_root": str(shared / "runs"),
        "cluster": {"launcher": "slurm", "nodes": 2, "procs_per_node": 1},
    }
    job = Submitted(shared, spec)

    def logs() -> list[str]:
        return [path.read_text() for path in job.run.rank_logs(1).values()]

    wait_for(lambda: len(logs()) == 2 and all("READY" in text for text in logs()), 60, "the start of the ranks")
    box.run(["scancel", job.job()], cwd="/")
    code, out = job.wait(KILL_WAIT_S + 30)
    assert code == 1 and "was cancelled)" in out, out
    assert all("LIVED ON" in text for text in logs()), logs()


def test_where_slurm_refuses_to_requeue_a_time_limit_ends_the_run_resumably(box: Box, shared: Path) -> None:
    """The limit is Slurm's smallest, a minute, of which the warning comes up to 30 s early."""
    job = training(shared, steps=100_000, partition="main", time="1", signal_s=45, extra=["--no-requeue"])
    began = time.monotonic()
    code, out = job.wait()
    assert code == 1, out + log_of(job.run)
    assert time.monotonic() - began < 90
    assert "the time limit is near; the job was not requeued: Slurm refused the requeue" in out, out + log_of(job.run)
    assert f"allranks resume {job.run.name}" in out
    assert len(job.run.checkpoint_steps()) == 1 and job.run.attempts() == [1]
    assert read_json(job.run.driver)["state"] == "stopped"


def test_where_slurm_refuses_the_update_the_job_goes_back_to_the_queue_and_the_log_says_so(
    box: Box, shared: Path
) -> None:
    """A requeue without the lost node needs `scontrol update`, which a site's job_submit plugin may refuse; the node is
    DOWN anyhow."""
    conf = BoxPaths(Path(box.plan.folder)).etc
    (conf / "job_submit.lua").write_text(NO_UPDATES)
    with (conf / "slurm.conf").open("a") as file:
        file.write("JobSubmitPlugins=lua\n")
    assert box.run(["scontrol", "reconfigure"], cwd="/").returncode == 0
    job = training(shared, "fixed", every=10, partition="main", extra=["--no-kill"])
    job.until_step(25)
    inject(box, "kill-node", node="n2")
    code, out = job.wait()
    said = out + log_of(job.run)
    assert code == 0, said
    assert "Slurm does not exclude n2 from the next start: " in said
    assert job.run.attempts() == [1, 2]
    assert {path.name.split(".")[0] for path in job.run.rank_logs(2).values()} == {"n1", "n3"}


def test_where_slurm_refuses_to_requeue_a_lost_node_ends_the_run_resumably(box: Box, shared: Path) -> None:
    job = training(shared, every=10, partition="main", extra=["--no-kill", "--no-requeue"])
    job.until_step(25)
    inject(box, "kill-node", node="n2")
    code, out = job.wait()
    said = out + log_of(job.run)
    assert code == 1, said
    assert "job was not requeued: Slurm refused the requeue" in " ".join(out.split()), said
    assert "n2" in out and f"allranks resume {job.run.name}" in out, said
    assert job.run.attempts() == [1] and job.run.checkpoint_steps()
    assert of_slurm(box, job.job()).get("Restarts", "0") == "0"
