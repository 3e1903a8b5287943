"""Whole runs through a real Slurm in the box."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import inject
from allranks.lab.cluster.plan import HiddenFolder
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster.conftest import end_jobs
from tests.cluster.runs import (
    LIMIT_S,
    Submitted,
    allranks,
    each_node_used_its_own_interface,
    log_of,
    program_in,
    run,
    spec_in,
)
from tests.conftest import REPO
from tests.dist.harness import ALLRANKS, step_events, until

WAITS = "import time\nprint('READY', flush=True)\ntime.sleep(600)\n"


def test_three_nodes_with_differing_interfaces_and_names_on_loopback(box: Box, shared: Path) -> None:
    """n2's interface is called otherwise, and n1 thinks that its own name is 127.0.1.1: the habits of hand-made scripts
    fail here."""
    inject(box, "loopback-hosts", node="n1")
    done, run_dir = run(shared, spec_in(shared, cluster={"procs_per_node": 2}, train={"max_steps": 8}))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
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
    assert "running on n[1-3]" in done.stdout
    assert run_dir.report.exists()


def test_a_killed_rank_on_another_node_is_named(box: Box, shared: Path) -> None:
    job = Submitted(shared, program_in(shared, WAITS, nodes=2))
    until(lambda: job.ready(2), limit_s=LIMIT_S)
    inject(box, "kill-rank", rank="1")
    code, out = job.wait(60)
    assert code == 1
    assert "rank 1 on n2" in out, out + log_of(job.run)
    assert "SIGKILL" in out
    end_jobs(box)


def test_ctrl_c_cancels_the_job(box: Box, shared: Path) -> None:
    """What a training saves then: test_preemption.py."""
    job = Submitted(shared, program_in(shared, WAITS, nodes=2))
    until(lambda: job.ready(2), limit_s=LIMIT_S)
    job.process.send_signal(signal.SIGINT)
    code, out = job.wait(60)
    assert code == 1 and ("interrupted" in out or "cancelled" in out), out
    until(lambda: box.run(["squeue", "--noheader"], cwd="/").stdout.strip() == "", limit_s=30)


def test_the_time_limit_leads_to_a_requeue_and_an_exact_continuation(box: Box, shared: Path) -> None:
    """The signal before the limit is sent by hand (Slurm's own comes up to a minute early); the rest is Slurm's."""
    limit = {"slurm": {"time": "3", "signal_s": 106}}  # the least with which 3 min count as near
    spec = spec_in(shared, cluster=limit, train={"max_steps": 120}, checkpoint={"mode": "full"})
    whole_done, whole = run(shared, {**spec, "name": "whole"})
    assert whole_done.returncode == 0, whole_done.stderr + log_of(whole)
    (shared / "runs").rename(shared / "first")
    job = Submitted(shared, spec)
    job.until_step(5)
    box.run(["scancel", "--signal=USR1", "--batch", job.job()], cwd="/")
    code, out = job.wait()
    assert code == 0, out + log_of(job.run)
    assert job.run.attempts() == [1, 2]
    assert "requeueing the job" in log_of(job.run)
    assert "resuming after step" in log_of(job.run)
    first = RunDir(shared / "first" / whole.name)
    assert [(e["step"], e["loss"]) for e in step_events(first)] == [
        (e["step"], e["loss"]) for e in step_events(job.run)
    ]


def test_a_port_that_is_taken_is_left_to_its_owner(box: Box, shared: Path) -> None:
    holder = "import socket,time; s=socket.socket(); s.bind(('0.0.0.0', 23999)); s.listen(); time.sleep(60)"
    held = subprocess.Popen([*box.node_prefix("n1", str(shared)), sys.executable, "-c", holder])
    try:
        time.sleep(1)
        spec = spec_in(shared, cluster={"nodes": 2, "rendezvous": {"port": 23999}}, train={"max_steps": 2})
        done, run_dir = run(shared, spec)
        assert done.returncode == 3, done.stdout + done.stderr + log_of(run_dir)
        assert "23999" in done.stderr and "port" in done.stderr, done.stderr
    finally:
        held.kill()


def test_refusals_are_said_before_anything_runs(box: Box, shared: Path) -> None:
    done, run_dir = run(shared, spec_in(shared, cluster={"slurm": {"partition": "nosuch"}}))
    assert done.returncode == 2
    assert "nosuch" in done.stderr or "invalid partition" in done.stderr
    assert "sinfo" in done.stderr
    assert not run_dir.rank_logs(1)


def test_a_run_folder_that_not_all_nodes_see_is_refused_by_name(
    shared: Path, make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make_box(f"blind-{os.getpid()}", nodes=2, hidden=(HiddenFolder(path=str(shared), nodes=("n2",)),))
    monkeypatch.setenv("ALLRANKS_BOX", box.name)
    done, run_dir = run(shared, spec_in(shared, cluster={"nodes": 2}))
    assert done.returncode == 3, done.stdout + done.stderr + log_of(run_dir)
    assert "n2" in done.stderr


def test_hostile_values_reach_slurm_as_values(box: Box, shared: Path) -> None:
    spec = spec_in(
        shared,
        cluster={
            "nodes": 1,
            "env": {"HOSTILE": "a'; touch pwned; '"},
            "slurm": {"extra": ["--comment=a'; touch pwned"]},
        },
        train={"max_steps": 1},
    )
    done, run_dir = run(shared, spec)
    assert done.returncode == 0, done.stderr + log_of(run_dir)
    assert list(shared.rglob("pwned")) == []


def test_a_users_own_torchrun_program(box: Box, shared: Path) -> None:
    (shared / "own.py").write_text(
        "import sys, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nx = "
        "torch.ones(1)\ndist.all_reduce(x)\n"
        "print('sum', int(x), 'args', sys.argv[1:], flush=True)\ndist.destroy_process_group()\n"
    )
    spec = {
        "name": "own", "script": {"path": str(shared / "own.py"), "args": ["--x", "a b"]}, "run_root": str(shared / "runs"),
        "cluster": {"launcher": "slurm", "nodes": 2, "procs_per_node": 1},
    }  # fmt: skip
    done, run_dir = run(shared, spec)
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    for path in run_dir.rank_logs(1).values():
        assert "sum 2 args ['--x', 'a b']" in path.read_text()


def test_nodes_started_by_hand(box: Box, shared: Path) -> None:
    places = box.plan.nodes
    spec = yaml.safe_load((REPO / "examples" / "seeds" / "001" / "two-nodes-by-hand-tiny.yaml").read_text())
    spec["cluster"] |= {"hosts": [n.address for n in places[:2]], "cache": f"{shared}/cache"}
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    out = shared / "out.txt"
    prefix = box.command_prefix(str(shared))  # the nodes must reach the machine of the command
    launcher = subprocess.Popen(
        [*prefix, *ALLRANKS, "run", "spec.yaml"], cwd=shared, stdout=out.open("w"), stderr=subprocess.STDOUT
    )
    try:
        until(lambda: "  node 1:  " in out.read_text(), limit_s=30)
        commands = [line.split(":  ", 1)[1] for line in out.read_text().splitlines() if line.startswith("  node ")]
        assert len(commands) == 2
        agents = [
            subprocess.Popen([*box.node_prefix(f"n{i + 1}", str(shared)), "bash", "-c", c])
            for i, c in enumerate(commands)
        ]
        assert launcher.wait(timeout=LIMIT_S) == 0, out.read_text()
        assert [a.wait(timeout=20) for a in agents] == [0, 0]
        assert "2 of 2 nodes have joined" in out.read_text()
        run_dir = RunDir(next((shared / "runs").iterdir()))
        metrics = read_json(run_dir.metrics)
        assert (metrics["world_size"], metrics["nodes"], metrics["strategy"]) == (2, 2, "pytorch_zero3")
        assert run_dir.checkpoint_steps() == [2, 4]
    finally:
        launcher.kill()


def test_plan_and_dry_run_show_the_batch_script(shared: Path) -> None:
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec_in(shared)))
    done = allranks(shared, "plan", "spec.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=3" in json.loads(done.stdout)["batch_script"]
    assert not (shared / "runs").exists()


@pytest.mark.parametrize("slurmd_timeout_s", [40, 5], ids=["before-slurm-notices", "after-slurm-requeued-it"])
def test_a_killed_node_sends_the_job_back_to_the_queue_and_it_goes_on(
    shared: Path, make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch, slurmd_timeout_s: int
) -> None:
    """The driver needs about 30 s to requeue the job; Slurm requeues it itself when SlurmdTimeout has passed."""
    box = make_box(f"killed-{os.getpid()}", nodes=3, conf=(f"SlurmdTimeout={slurmd_timeout_s}",))
    monkeypatch.setenv("ALLRANKS_BOX", box.name)
    spec = spec_in(
        shared, cluster={"nodes": 2}, train={"max_steps": 200}, checkpoint={"mode": "full", "every": 25, "keep": 2}
    )
    job = Submitted(shared, spec)
    job.until_step(30)
    inject(box, "kill-node", node="n2")
    code, out = job.wait(LIMIT_S)
    assert code == 0, out + log_of(job.run)
    assert "resuming after step" in log_of(job.run)
    assert len(job.run.attempts()) >= 2
    hosts = {p.name.split(".")[0] for p in job.run.rank_logs(job.run.attempts()[-1]).values()}
    assert "n2" not in hosts
    shown = box.run(["scontrol", "--oneliner", "show", "job", job.job()], cwd="/").stdout
    assert "ExcNodeList=n2 " in shown or slurmd_timeout_s == 5, "only the driver excludes it"
    assert read_json(job.run.metrics)["steps"] == 200


def test_a_restarted_controller_and_two_jobs_at_once_do_no_harm(box: Box, shared: Path) -> None:
    spec = spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 300})
    (shared / "a").mkdir()
    (shared / "b").mkdir()
    jobs = [Submitted(shared / name, {**spec, "run_root": str(shared / name / "runs")}) for name in ("a", "b")]
    jobs[0].until_step(3)
    inject(box, "restart-slurmctld")
    results = [job.wait() for job in jobs]
    for job, (code, out) in zip(jobs, results, strict=True):
        assert code == 0, out + log_of(job.run)
        assert read_json(job.run.metrics)["sync_proof"]["world_size"] == 2
    ports = [read_json(job.run.rendezvous(1))["port"] for job in jobs]
    assert ports[0] != ports[1]


def test_cancel_and_detach(box: Box, shared: Path) -> None:
    spec = program_in(shared, WAITS, nodes=2)
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    started = json.loads(allranks(shared, "run", "spec.yaml", "--detach", "--json").stdout)
    run_dir = RunDir(Path(started["folder"]))
    until(lambda: ["READY" in log.read_text() for log in run_dir.rank_logs(1).values()] == [True] * 2, limit_s=LIMIT_S)
    (row,) = json.loads(allranks(shared, "runs", "--json").stdout)
    assert row["status"] == "running"
    done = allranks(shared, "cancel", started["run"])
    assert done.returncode == 0, done.stderr
    until(lambda: box.run(["squeue", "--noheader"], cwd="/").stdout.strip() == "", limit_s=60)
    assert allranks(shared, "cancel", started["run"]).returncode == 2


def test_a_node_that_sees_neither_project_nor_data_gets_them(
    shared: Path, make_box: Callable[..., Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own program and a module beside it are hidden from n2; a bundle brings them there, and they go
    again."""
    (shared / "project").mkdir()
    (shared / "project" / "pyproject.toml").write_text("")
    (shared / "project" / "helper.py").write_text("WORD = 'from the helper'\n")
    (shared / "project" / "own.py").write_text(
        "import torch.distributed as dist\nfrom helper import "
        "WORD\ndist.init_process_group('gloo')\ndist.barrier()\nprint(WORD, __file__, flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    box = make_box(f"lacks-{os.getpid()}", nodes=2, hidden=(HiddenFolder(path=str(shared / "project"), nodes=("n2",)),))
    monkeypatch.setenv("ALLRANKS_BOX", box.name)
    spec = {
        "name": "own", "script": {"path": str(shared / "project" / "own.py")}, "run_root": str(shared / "runs"),
        "cluster": {"launcher": "slurm", "nodes": 2, "procs_per_node": 1, "cache": str(shared / "cache"), "stage": "auto"},
    }  # fmt: skip
    done, run_dir = run(shared, spec)
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    first, second = (path.read_text() for path in run_dir.rank_logs(1).values())
    assert f"from the helper {shared / 'project'}" in first
    assert "from the helper" in second
    assert str(shared) not in second.split("from the helper", 1)[1]
    assert "staging for n2" in log_of(run_dir)
    assert read_json(run_dir.stage)["nodes"]
    assert (
        box.run(["sh", "-c", "ls -d /tmp/allranks-*/* 2>/dev/null | wc -l"], node="n2", cwd="/").stdout.strip() == "0"
    )
    never, _ = run(shared, {**spec, "cluster": {**spec["cluster"], "stage": "never"}})
    assert never.returncode == 3
    assert "n2" in never.stderr


def test_inside_an_allocation_no_new_job_is_submitted(box: Box, shared: Path) -> None:
    """Each node gets its own interface there, and its ranks use it."""
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec_in(shared, cluster={"nodes": 2}, train={"max_steps": 3})))
    done = box.run(["salloc", "--nodes=2", *ALLRANKS, "run", "spec.yaml"], cwd=str(shared), timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = RunDir(next((shared / "runs").iterdir()))
    assert "running in allocation" in done.stdout
    assert not run_dir.job.exists()
    assert read_json(run_dir.metrics)["sync_proof"]["world_size"] == 2
    each_node_used_its_own_interface(run_dir, done.stdout)
    end_jobs(box)
