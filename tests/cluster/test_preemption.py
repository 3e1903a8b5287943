"""Preemption, `scancel`, and a Slurm that refuses to requeue or to update jobs. Everything is done by a real Slurm."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.lab.cluster import Box, BoxOptions
from allranks.lab.cluster.faults import inject
from allranks.lab.cluster.plan import BoxPaths
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests import sampling
from tests.cluster.conftest import selected, tidy
from tests.cluster.helpers import records_of, submit, wait_for
from tests.cluster.runs import Submitted, hosts_of, log_of, program_in, rank_texts, spec_in
from tests.conftest import REPO
from tests.dist.harness import STUCK, step_events

STEPS = 300 if sampling.ALL else 150
SLOW = {  # one rank alone would be done before the other job is there
    "PYTHONPATH": os.pathsep.join([str(STUCK), str(REPO / "src")]), "STUCK": "sleep_a_while:0:-1", "STUCK_S": "0.1",
}  # fmt: skip
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
    with selected(BoxOptions(name=f"preempt-{os.getpid()}", nodes=3, conf=CONF)) as made:
        yield made


@pytest.fixture
def box(preempting_box: Box) -> Iterator[Box]:
    """The same for each test: no fault and no job is left of the one before."""
    yield preempting_box
    tidy(preempting_box)


def training(
    shared: Path, name: str = "t", every: int | None = None, steps: int = STEPS, nodes: int = 2, **slurm: Any
) -> Submitted:
    train, checkpoint = {"max_steps": steps, "lr": 1e-3}, {"mode": "full", "every": every}
    cluster = {"nodes": nodes, "slurm": slurm, "env": {"OMP_NUM_THREADS": "1", **(SLOW if nodes == 1 else {})}}
    return Submitted(shared, {**spec_in(shared, cluster=cluster, train=train, checkpoint=checkpoint), "name": name})


def preempt(box: Box, shared: Path, seconds: int = 3) -> str:
    """Submit a job that needs the nodes of all others."""
    return submit(box, shared, f"sleep {seconds}\n", "--partition=high", "--nodes=3", "--exclusive")


def starts(run: RunDir) -> list[dict[str, Any]]:
    return [e for e in read_events(run.events_of(0)) if e["event"] == "start"]


def assert_resumed_once(box: Box, job: Submitted, at_least: int) -> None:
    """Two attempts, of which the second continued from a checkpoint, and no step is missing or done twice."""
    job.ends(0)
    assert job.run.attempts() == [1, 2], log_of(job.run)
    assert records_of(box, job.job())["Restarts"] == "1"
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
    job = training(shared, partition=partition, nodes=2 if sampling.ALL else 1)
    job.until_step(10)
    high = preempt(box, shared)
    # Well before the grace time and KillWait are over: nothing waits for a kill.
    wait_for(lambda: records_of(box, high)["JobState"] in ("RUNNING", "COMPLETED"), GRACE_S * 0.7, "the preempting job")
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
    out = job.ends(1)
    assert "(the job was preempted)" in out and f"allranks resume {job.run.name}" in out, out
    assert len(job.run.checkpoint_steps()) == 1 and job.run.attempts() == [1]
    assert records_of(box, job.job())["Restarts"] == "0"


def test_scancel_ends_a_training_with_a_checkpoint(box: Box, shared: Path) -> None:
    job = training(shared)
    job.until_step(10)
    box.run(["scancel", job.job()], cwd="/")
    out = job.ends(1, KILL_WAIT_S + 20)
    (step,) = job.run.checkpoint_steps()
    assert f"stopped after step {step} (the job was cancelled)" in out, out + log_of(job.run)
    shown = records_of(box, job.job())
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0")
    assert job.run.attempts() == [1]


def test_after_scancel_the_ranks_of_all_nodes_have_their_kill_wait(box: Box, shared: Path) -> None:
    """srun and the agents get SIGTERM too. None of them may take the time for a checkpoint away from the ranks."""
    job = Submitted(shared, program_in(shared, STUBBORN, {"args": [str(KILL_WAIT_S * 0.6)]}))
    job.until_ready()
    box.run(["scancel", job.job()], cwd="/")
    out = job.ends(1, KILL_WAIT_S + 30)
    assert "was cancelled)" in out, out
    assert all("LIVED ON" in text for text in rank_texts(job.run)), rank_texts(job.run)


def test_where_slurm_refuses_to_requeue_a_time_limit_ends_the_run_resumably(box: Box, shared: Path) -> None:
    """The limit is Slurm's smallest, a minute, of which the warning comes up to 30 s early."""
    job = training(shared, steps=100_000, partition="main", time="1", signal_s=45, extra=["--no-requeue"])
    began = time.monotonic()
    out = job.ends(1)
    assert time.monotonic() - began < 90
    assert "the time limit is near; the job was not requeued: Slurm refused the requeue" in out, out + log_of(job.run)
    assert f"allranks resume {job.run.name}" in out
    assert len(job.run.checkpoint_steps()) == 1 and job.run.attempts() == [1]
    assert read_json(job.run.driver)["state"] == "stopped"


def test_where_slurm_refuses_the_update_the_job_is_requeued_and_the_log_says_so(box: Box, shared: Path) -> None:
    """A site's job_submit plugin may refuse the `scontrol update` that leaves the node out; it is DOWN anyhow."""
    conf = BoxPaths(Path(box.plan.folder)).etc
    (conf / "job_submit.lua").write_text(NO_UPDATES)
    with (conf / "slurm.conf").open("a") as file:
        file.write("JobSubmitPlugins=lua\n")
    assert box.run(["scontrol", "reconfigure"], cwd="/").returncode == 0
    job = training(shared, "fixed", every=10, partition="main", extra=["--no-kill"])
    job.until_step(25)
    inject(box, "kill-node", node="n2")
    said = job.ends(0) + log_of(job.run)
    assert "Slurm does not exclude n2 from the next start: " in said
    assert job.run.attempts() == [1, 2]
    (lost,) = read_json(job.run.metrics)["restarts"]
    assert (lost["host"], lost["cause"]) == ("n2", "infrastructure") and "requeued without n2" in " ".join(said.split())
    assert hosts_of(job.run, 2) == {"n1", "n3"}


def test_where_slurm_refuses_to_requeue_a_lost_node_ends_the_run_resumably(box: Box, shared: Path) -> None:
    job = training(shared, every=10, partition="main", extra=["--no-kill", "--no-requeue"])
    job.until_step(25)
    inject(box, "kill-node", node="n2")
    out = job.ends(1)
    assert "job was not requeued: Slurm refused the requeue" in " ".join(out.split()), out
    assert "n2" in out and f"allranks resume {job.run.name}" in out, out
    assert job.run.attempts() == [1] and job.run.checkpoint_steps()
    assert diagnose([job.run.root]).findings[0].host == "n2", "whatever the other node's rank says of losing it"
    assert records_of(box, job.job()).get("Restarts", "0") == "0"
