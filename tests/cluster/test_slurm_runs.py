"""Whole runs through a real Slurm, also to its own time limit: a checkpoint, back to the queue, and on to the end."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import inject, injected
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster import runs
from tests.cluster.helpers import job_state, queue, records_of
from tests.cluster.runs import LIMIT_S, WAITS, Submitted, allranks, log_of, program_in, rank_texts, spec_in, succeeded
from tests.conftest import REPO
from tests.dist.harness import ALLRANKS, equal, step_events, until, weights_of

STEPS = 300
TALKS = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(20):
    dist.barrier()
    time.sleep(0.2)
dist.destroy_process_group()
"""
SWEPT = """
import pathlib, signal, sys, time, allranks, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("gloo")
print("READY", flush=True)
while not pathlib.Path(__file__).with_name("go").exists():
    time.sleep(0.1)
for step in range(1, 6):
    dist.barrier()
    assert sys.argv[1] != "raises" or step < 3, "no such layer"
    allranks.report(step=step, loss=float("nan") if sys.argv[1] == "nan" and step == 4 else 2 / step)
time.sleep(600 if sys.argv[1] == "nan" else 0)
dist.destroy_process_group()
"""


def test_three_nodes_with_differing_interfaces_and_names_on_loopback(box: Box, shared: Path) -> None:
    """n2's interface is called otherwise, and n1 thinks that its own name is 127.0.1.1."""
    inject(box, "loopback-hosts", node="n1")
    shown, run_dir = succeeded(shared, spec_in(shared, cluster={"procs_per_node": 2}, train={"max_steps": 8}))
    metrics = read_json(run_dir.metrics)
    assert (metrics["world_size"], metrics["nodes"], metrics["steps"]) == (6, 3, 8)
    assert metrics["sync_proof"]["data_disjoint"]
    said = log_of(run_dir)
    for words in ("n2 proj=ok pkgs=ok", "node 0 = n1 eth0", "node 1 = n2 eno1", "ranks 4-5", "rendezvous on node 0"):
        assert words in said, said
    logs = run_dir.rank_logs(1)
    assert sorted(p.name.split(".")[0] for p in logs.values()) == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert "[RANK 5] WORLD_SIZE=6 n3" in logs[5].read_text()
    assert sorted(p.stem for p in run_dir.telemetry.glob("*.jsonl")) == ["n1", "n2", "n3"]
    assert "running on n[1-3]" in shown
    assert run_dir.report.exists()


def test_a_killed_rank_on_another_node_is_named(box: Box, shared: Path) -> None:
    job = Submitted(shared, program_in(shared, WAITS))
    job.until_ready()
    inject(box, "kill-rank", rank="1")
    out = job.ends(1, 60)
    assert "rank 1 on n2" in out and "SIGKILL" in out, out + log_of(job.run)
    until(lambda: not queue(box), limit_s=30)


def test_ctrl_c_cancels_the_job(box: Box, shared: Path) -> None:
    """What a training saves then: test_preemption.py."""
    job = Submitted(shared, program_in(shared, WAITS))
    job.until_ready()
    job.process.send_signal(signal.SIGINT)
    out = job.ends(1, 60)
    assert "interrupted" in out or "cancelled" in out, out
    until(lambda: not queue(box), limit_s=30)


def test_a_sweep_is_an_array_that_is_cancelled_then_continued_and_repeats_nothing(box: Box, shared: Path) -> None:
    runs.write(shared, program_in(shared, SWEPT))
    command = ["sweep", "spec.yaml", "--grid", "script.args=[good],[raises],[nan]", "--json"]
    first = subprocess.Popen([*ALLRANKS, *command, "--at-once", "1"], cwd=shared, stdout=subprocess.PIPE, text=True)
    logs = "runs/*/p1-*/logs/attempt-1/*.rank?.log"
    until(lambda: sum("READY" in path.read_text() for path in shared.glob(logs)) == 2, LIMIT_S)
    for _ in range(2):  # the second one kills the ranks, which ignore SIGTERM, and the command that runs the point
        first.send_signal(signal.SIGINT)
        time.sleep(1)
    document = json.loads(first.communicate(timeout=LIMIT_S)[0])
    assert [point["status"] for point in document["points"]] == ["stopped", "open", "open"] and first.returncode == 1
    assert not queue(box)
    (shared / "prog" / "go").touch()
    done = allranks(shared, *command)
    good, raises, nan = json.loads(done.stdout)["points"]
    assert [one["status"] for one in (good, raises, nan)] == ["succeeded", "failed", "diverged"], done.stderr
    assert (good["train_loss"], done.returncode) == (2 / 5, 1)
    # Both ranks raise; the one that ended first is named.
    assert re.match(r"rank [01] on n[12] failed: AssertionError: no such layer", raises["message"])
    assert "step 4" in nan["message"]
    again = allranks(shared, "sweep", document["folder"], "--json")
    assert again.stdout == done.stdout, "the names of the runs have their times"


def test_a_job_that_outlasts_its_time_limit_goes_on_bitwise(box: Box, shared: Path) -> None:
    """The limit is Slurm's smallest, a minute. A slow cable makes the training outlast it; the one that it is compared
    with has a fast cable and no limit. Slurm warns 30 s before the limit, or up to a minute earlier: on a
    loaded machine some starts end before the first step."""
    train = {"max_steps": STEPS, "lr": 1e-3}
    spec = spec_in(shared, cluster={"nodes": 2}, adapter={"type": "none"}, train=train, checkpoint={"mode": "full"})
    _, first = succeeded(shared, spec)
    (shared / "runs").rename(shared / "first")
    spec["cluster"]["slurm"] = {"time": "1", "signal_s": 30, "max_requeues": 12}
    with injected(box, "slow-link", "n2", rate="6mbit"):
        job = Submitted(shared, spec)
        until(lambda: len(job.run.attempts()) > 1 or job.process.poll() is not None, limit_s=90)
    out, said = job.ends(0), log_of(job.run)
    assert "leaves the ranks almost no time" in out
    assert len(job.run.attempts()) > 1, said
    assert "the time limit is near: requeueing the job" in said and "resuming after step" in said
    shown = records_of(box, job.job())
    assert (shown["Restarts"], shown["TimeLimit"]) == (str(len(job.run.attempts()) - 1), "00:01:00")
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
    job.ends(0)
    assert len(job.run.attempts()) > 1  # more where a loaded machine reaches the limit itself
    assert [e["step"] for e in step_events(job.run)] == list(range(1, 31))


def test_a_killed_rank_is_started_again_within_the_job(box: Box, shared: Path) -> None:
    cluster = {"nodes": 2, "restarts": {"max": 1}}
    spec = spec_in(shared, cluster=cluster, train={"max_steps": 60}, checkpoint={"mode": "full", "every": 5})
    whole_done, whole = runs.run(shared, {**spec, "name": "whole"})
    assert whole_done.returncode == 0, whole_done.stderr + log_of(whole)
    (shared / "runs").rename(shared / "first")
    job = Submitted(shared, spec)
    job.until_step(12)
    inject(box, "kill-rank", rank="1")
    code, out = job.wait()
    assert code == 0, out + log_of(job.run)
    assert job.run.attempts() == [1, 2] and "restart  after step" in out and "rank 1 on n2" in out
    assert read_json(job.run.driver)["restart"] == 0  # the same start of the job, in the same allocation
    folders = (RunDir(shared / "first" / whole.name), job.run)
    first, again = ({e["step"]: e["loss"] for e in step_events(r)} for r in folders)
    assert first == again


def test_a_spare_node_takes_the_place_of_a_lost_one_within_the_job(box: Box, shared: Path) -> None:
    cluster = {"nodes": 2, "spares": 1, "restarts": {"max": 1}}
    spec = spec_in(shared, cluster=cluster, train={"max_steps": 60}, checkpoint={"mode": "full", "every": 5})
    job = Submitted(shared, spec)
    job.until_step(12)
    inject(box, "kill-node", node="n2")
    out = " ".join(job.ends(0).split())
    assert "without n2 (it does not answer" in out and "replaced by spare n3" in out, out
    assert runs.hosts_of(job.run, 2) == {"n1", "n3"}
    assert read_json(job.run.driver)["restart"] == 0, "in the same allocation"
    here = {"launcher": "local", "nodes": 1, "procs_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}}
    _, whole = succeeded(shared, {**spec, "cluster": here})
    assert equal(weights_of(job.run, 60), weights_of(whole, 60))


def test_hostile_values_reach_slurm_as_values(box: Box, shared: Path) -> None:
    hostile = "a'; touch pwned; '"
    program = "import os\nprint(os.environ['HOSTILE'])\n"
    spec = program_in(shared, program, env={"HOSTILE": hostile}, slurm={"extra": [f"--comment={hostile}"]})
    _, run_dir = succeeded(shared, spec)
    assert all(hostile in text for text in rank_texts(run_dir))
    assert list(shared.rglob("pwned")) == []


def test_nodes_started_by_hand(box: Box, shared: Path) -> None:
    spec = yaml.safe_load((REPO / "examples" / "seeds" / "001" / "two-nodes-by-hand-tiny.yaml").read_text())
    spec["cluster"] |= {"hosts": [n.address for n in box.plan.nodes[:2]], "cache": f"{shared}/cache"}
    launcher = runs.ByHand(box, shared, {**spec, "run_root": "runs"})
    launcher.start(0)
    launcher.start(1)
    code, out = launcher.result()
    assert code == 0 and "2 of 2 nodes have joined" in out, out
    metrics = read_json(launcher.run.metrics)
    assert (metrics["world_size"], metrics["nodes"], metrics["strategy"]) == (2, 2, "pytorch_zero3")
    assert launcher.run.checkpoint_steps() == [2, 4]


@pytest.mark.parametrize(
    ("slurmd_timeout_s", "what"), [(40, "program"), (40, "training"), (5, "training")],
    ids=["program", "before-slurm-notices", "after-slurm-requeued-it"],
)  # fmt: skip
def test_a_killed_node_sends_the_job_back_to_the_queue_and_it_goes_on(
    shared: Path, use_box: Callable[..., Box], slurmd_timeout_s: int, what: str
) -> None:
    """The driver needs about 30 s to requeue the job; Slurm requeues it itself when SlurmdTimeout has passed."""
    box = use_box("killed", nodes=3, conf=(f"SlurmdTimeout={slurmd_timeout_s}",))
    checkpoint = {"mode": "full", "every": 25, "keep": 2}
    spec = spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 200}, checkpoint=checkpoint)
    if what == "program":  # it waits in its first attempt alone
        own = WAITS.replace("600", "600 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
        spec = program_in(shared, f"import os\n{own}", restarts={"max": 1})
    job = Submitted(shared, spec)
    job.until_step(30) if what == "training" else job.until_ready()
    inject(box, "kill-node", node="n2")
    job.ends(0)
    assert len(job.run.attempts()) >= 2 and "n2" not in runs.hosts_of(job.run, job.run.attempts()[-1])
    assert "node n2: " in read_json(job.run.restarts)[0]["message"], "nobody says why the job has started again"
    assert records_of(box, job.job())["ExcNodeList"] == "n2" or slurmd_timeout_s == 5, "only the driver excludes it"
    if what == "training":
        assert "resuming after step" in log_of(job.run) and read_json(job.run.metrics)["steps"] == 200


def test_a_restarted_controller_and_two_jobs_at_once_do_no_harm(box: Box, shared: Path) -> None:
    spec = spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 300})
    (shared / "a").mkdir()
    (shared / "b").mkdir()
    jobs = [Submitted(shared / name, {**spec, "run_root": str(shared / name / "runs")}) for name in ("a", "b")]
    jobs[0].until_step(3)
    inject(box, "restart-slurmctld")
    for job in jobs:
        job.ends(0)
        assert read_json(job.run.metrics)["sync_proof"]["world_size"] == 2
    ports = [read_json(job.run.rendezvous(1))["port"] for job in jobs]
    assert ports[0] != ports[1]


def test_cancel_and_detach(box: Box, shared: Path) -> None:
    runs.write(shared, program_in(shared, WAITS))
    started = json.loads(allranks(shared, "run", "spec.yaml", "--detach", "--json").stdout)
    run_dir = RunDir(Path(started["folder"]))
    until(lambda: ["READY" in text for text in rank_texts(run_dir)] == [True] * 2, limit_s=LIMIT_S)
    (row,) = json.loads(allranks(shared, "runs", "--json").stdout)
    assert row["status"] == "running"
    done = allranks(shared, "cancel", started["run"])
    assert done.returncode == 0, done.stderr
    until(lambda: not queue(box), limit_s=60)
    assert allranks(shared, "cancel", started["run"]).returncode == 2


def test_a_job_saves_on_request_and_goes_on(box: Box, shared: Path) -> None:
    job = Submitted(shared, spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 100_000}))
    job.until_step(2)
    done = allranks(shared, "checkpoint", job.run.name)
    assert done.returncode == 0, done.stderr
    step = job.run.checkpoint_steps()[-1]
    assert f"full checkpoint of step {step} in {job.run.checkpoint(step)}" in done.stdout
    job.until_step(step + 2)
    assert allranks(shared, "cancel", job.run.name).returncode == 0
    job.ends(1)
    assert allranks(shared, "checkpoint", job.run.name).returncode == 2


def test_a_node_that_sees_neither_project_nor_data_gets_them(box: Box, shared: Path) -> None:
    """A program and a module beside it are hidden from n2; a bundle brings them there, and they go again."""
    program = (
        "import torch.distributed as dist\nfrom helper import WORD\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "print(WORD, __file__, flush=True)\ndist.destroy_process_group()\n"
    )
    spec = program_in(shared, program, cache=str(shared / "cache"), stage="auto")
    (shared / "prog" / "pyproject.toml").write_text("")
    (shared / "prog" / "helper.py").write_text("WORD = 'from the helper'\n")
    with injected(box, "hide-folder", "n2", path=str(shared / "prog")):
        _, run_dir = succeeded(shared, spec)
        never, _ = runs.run(shared, {**spec, "cluster": {**spec["cluster"], "stage": "never"}})
        assert never.returncode == 3 and "n2" in never.stderr
    first, second = rank_texts(run_dir)
    assert f"from the helper {shared / 'prog'}" in first
    assert "from the helper" in second and str(shared) not in second.split("from the helper", 1)[1]
    assert "staging for n2" in log_of(run_dir)
    assert read_json(run_dir.stage)["nodes"]
    left = box.run(["sh", "-c", "ls -d /tmp/allranks-*/* 2>/dev/null | wc -l"], node="n2", cwd="/").stdout
    assert left.strip() == "0"


def test_inside_an_allocation_no_new_job_is_submitted(box: Box, shared: Path) -> None:
    """Each node gets its own interface there, and its ranks use it."""
    runs.write(shared, program_in(shared, TALKS))
    done = box.run(["salloc", "--nodes=2", *ALLRANKS, "run", "spec.yaml"], cwd=str(shared), timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = RunDir(next((shared / "runs").iterdir()))
    assert "running in allocation" in done.stdout
    assert not run_dir.job.exists()
    assert read_json(run_dir.metrics)["world_size"] == 2
    runs.each_node_used_its_own_interface(run_dir, done.stdout)
    until(lambda: not queue(box), limit_s=30)
