"""Hangs of a job of three nodes, of any cause: the report names rank, host and line soon after the limit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.diagnose import diagnose
from allranks.api import running
from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import inject
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.cluster.helpers import job_state, queue
from tests.cluster.runs import Submitted, hosts_of, log_of, run, spec_in
from tests.conftest import REPO
from tests.dist.harness import until

WITHIN_S = 30  # promised: from the limit to the report


def spec(shared: Path, steps: int, **env: str) -> dict[str, Any]:
    cluster = {"env": {"OMP_NUM_THREADS": "1", **env}, "restarts": {"max": 0}}  # the report, not what follows it
    return spec_in(
        shared, cluster=cluster, train={"max_steps": steps}, strategy={"name": "pytorch_ddp"}, observe={"hang_s": 5}
    )


def the_report(run_dir: RunDir, out: str) -> dict[str, Any]:
    found = read_json(run_dir.hang_report(1))
    assert found is not None, out + log_of(run_dir)
    print(found["sentence"], round(found["judged"] - found["alarm"]["since"], 2))
    assert 0 < found["judged"] - (found["alarm"]["since"] + found["alarm"]["limit_s"]) < WITHIN_S
    assert [e["host"] for e in [read_json(run_dir.hang_node(1, n)) for n in range(3)]] == ["n1", "n2", "n3"]
    return found


def test_a_rank_that_stands_still_on_another_node_is_named_with_its_line(box: Box, shared: Path) -> None:
    path = os.pathsep.join([str(REPO / "tests" / "dist" / "stuck"), str(REPO / "src")])
    done, run_dir = run(shared, spec(shared, 40, PYTHONPATH=path, STUCK="sleep_forever:2:6"))
    assert done.returncode == 1, done.stdout + done.stderr + log_of(run_dir)
    report = the_report(run_dir, done.stdout + done.stderr)
    (stalled,) = report["stalled"]
    assert (stalled["rank"], stalled["host"]) == (2, "n3")
    assert "stuck/sitecustomize.py" in stalled["where"]
    assert "in sleep_forever" in stalled["where"]
    assert [w["rank"] for w in report["waiting"]] == [0, 1]
    assert "rank 2 on n3" in done.stderr
    assert not queue(box)
    first = diagnose([run_dir.root]).findings[0]
    assert (first.rank, first.host) == (2, "n3")


def test_a_stopped_process_is_named_by_its_state(box: Box, shared: Path) -> None:
    job = Submitted(shared, spec(shared, 1000000))
    job.until_step(8)
    inject(box, "kill-rank", rank="1", signal="STOP")
    out = job.ends(1, 90)
    assert [(f["rank"], f["host"]) for f in the_report(job.run, out)["stalled"]] == [(1, "n2")]
    assert "stopped by a signal" in out
    assert not queue(box)


@pytest.mark.parametrize(("fault", "node"), [("cut-link", "n2"), ("interface-down", "n3")])
def test_a_node_without_network_is_named(use_box: Callable[..., Box], shared: Path, fault: str, node: str) -> None:
    box, job = on_three_nodes(use_box, shared, slurm={"max_requeues": 0})
    inject(box, fault, node=node)
    _, out = job.wait(120)
    report = the_report(job.run, out)
    assert [f["host"] for f in report["stalled"]] == [node], report["sentence"]
    assert "network" in report["sentence"]


def the_first_node_is_named_and_the_job_cancelled(box: Box, job: Submitted, out: str, why: str) -> None:
    assert f"n1, the job's first node, where its script and rank 0 ran, has {why}" in out
    assert f"Job {job.job()} was cancelled" in out and "--set 'cluster.slurm.exclude=[n1]'" in out
    assert job_state(box, job.job()) in ("COMPLETING", "CANCELLED")  # the first, until Slurm gives the node up
    assert diagnose([job.run.root]).findings[0].host == "n1"


@pytest.mark.parametrize(("fault", "slurmd_timeout_s"), [("cut-link", 300), ("interface-down", 20)])
def test_a_first_node_without_network_ends_the_run_and_the_job(
    use_box: Callable[..., Box], shared: Path, fault: str, slurmd_timeout_s: int
) -> None:
    """Slurm gives the node up after minutes only, so that the job is cancelled; or it ends the job with its node."""
    box, job = on_three_nodes(use_box, shared, slurmd_timeout_s, slurm={"max_requeues": 0})
    inject(box, fault, node="n1")
    out = job.ends(1, 180)
    report = the_report(job.run, out)
    assert [(f["rank"], f["host"]) for f in report["stalled"]] == [(0, "n1")], report["sentence"]
    assert "the network of n1" in out, out
    if fault == "cut-link":
        the_first_node_is_named_and_the_job_cancelled(box, job, out, "finished, but Slurm has not noticed")
    until(lambda: not running(job.run), 40)  # Slurm kills 30 s after the cancellation


def test_a_first_node_that_is_lost_with_its_folder_ends_the_run_too(use_box: Callable[..., Box], shared: Path) -> None:
    """It sees the run folder no more, as where that comes over the network: its driver is silent, and that decides."""
    box, job = on_three_nodes(use_box, shared, 600, slurm={"max_requeues": 0})
    inject(box, "cut-link", node="n1")
    inject(box, "hide-folder", node="n1", path=str(shared))
    out = job.ends(1, 260)
    # The driver was on that node, so nobody judged; the other agents ended their ranks, and kept what they found.
    assert not job.run.hang_report(1).exists()
    evidence = [read_json(job.run.hang_node(1, node)) for node in (1, 2)]
    assert [(e["host"], e["meets"]) for e in evidence] == [("n2", False), ("n3", False)]
    reasons = [read_json(job.run.agent_exit(1, host))["reason"] for host in ("n2", "n3")]
    assert all("made no progress" in reason for reason in reasons), reasons
    assert "it does not answer on the network" in out
    the_first_node_is_named_and_the_job_cancelled(box, job, out, "recorded nothing for too long")
    assert read_json(job.run.driver)["state"] == "failed"


@pytest.mark.full
@pytest.mark.timeout(500)
def test_a_lost_first_node_is_left_out_when_the_job_is_requeued(use_box: Callable[..., Box], shared: Path) -> None:
    box, job = on_three_nodes(use_box, shared, 120, nodes=2, steps=40)
    inject(box, "cut-link", node="n1")
    inject(box, "hide-folder", node="n1", path=str(shared))
    out = job.ends(0, 400)
    assert job.run.attempts() == [1, 2] and "requeued without n1" in " ".join(out.split())
    assert hosts_of(job.run, 2) == {"n2", "n3"}


def on_three_nodes(
    use_box: Callable[..., Box],
    shared: Path,
    slurmd_timeout_s: int | None = None,
    *,
    nodes: int = 3,
    steps: int = 1000000,
    slurm: dict[str, Any] | None = None,
) -> tuple[Box, Submitted]:
    """A run that has come to its eighth step, in a box of its own: Slurm does not trust a node that was cut off."""
    box = use_box("first", conf=(f"SlurmdTimeout={slurmd_timeout_s}",) if slurmd_timeout_s else ())
    wanted = spec(shared, steps)
    wanted["cluster"] |= {"nodes": nodes, "slurm": slurm or {}}
    job = Submitted(shared, wanted)
    job.until_step(8)
    return box, job
