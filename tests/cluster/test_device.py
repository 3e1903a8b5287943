"""`plan` from a machine without GPUs, for a Slurm whose nodes announce two GPUs each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from allranks.lab.cluster import Box
from allranks.nodes.slurm.answers import JobInfo, NodeInfo
from allranks.nodes.slurm.commands import Slurm
from allranks.utils.machine import visible_gpus
from tests.cluster.helpers import submit, wait_state
from tests.cluster.runs import allranks
from tests.conftest import tiny_spec


def planned(shared: Path, **slurm: Any) -> tuple[dict[str, Any], str]:
    """The plan of a spec as JSON, and as text."""
    spec = tiny_spec("builtin:instructions", shared, cluster={"launcher": "slurm", "nodes": 2, "slurm": slurm})
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    shown = allranks(shared, "plan", "spec.yaml", "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout), allranks(shared, "plan", "spec.yaml").stdout


def test_a_gpu_partition_without_gpus_asked_for_is_resolved_on_the_node(box: Box, shared: Path) -> None:
    plan, text = planned(shared, partition="gpu")
    assert (plan["device"], plan["backend"], plan["device_source"]) == ("cpu", "gloo", "resolved on the node")
    assert "the partition gpu has 2 GPUs per node, but the spec requests none: set cluster.slurm.gpus_per_node" in text
    assert "the default partition has 2 GPUs per node" in planned(shared)[0]["device_reason"]


def test_gpus_asked_for_are_planned_from_a_machine_without_gpus(box: Box, shared: Path) -> None:
    assert not visible_gpus(), "this test is about a login node without GPUs"
    for slurm in ({"gpus_per_node": 2}, {"gres": "gpu:2"}, {"extra": ["--gpus-per-node=2"]}, {"exclusive": True}):
        plan, _ = planned(shared, partition="gpu", **slurm)
        assert (plan["device"], plan["backend"], plan["world_size"]) == ("cuda", "nccl", 4), slurm


def test_jobs_and_nodes_are_read_from_the_real_commands(box: Box, shared: Path) -> None:
    slurm = Slurm(box.command_prefix("/"), "a box")
    script = "trap '' TERM; sleep 60 & wait; wait"
    job = submit(box, shared, script, "--nodes=2", "--time=10", "--job-name=a JobState=FAILED b", "--no-requeue")
    wait_state(box, job, "RUNNING", timeout_s=30)
    found = slurm.try_job(job)
    assert isinstance(found, JobInfo)
    assert (found.job, found.state, found.time_limit_s) == (job, "RUNNING", 600)
    assert found.nodes and found.start_time and found.end_time
    assert found.end_time - found.start_time == 600
    node = slurm.try_node(box.node_names[0])
    assert isinstance(node, NodeInfo) and node.responding
    slurm.cancel(job)
    wait_state(box, job, "CANCELLED", timeout_s=60)
    assert slurm.end_reason(job).startswith("CANCELLED")
    assert slurm.try_job("999999") is None and slurm.try_node("nowhere") is None
    assert slurm.partition_gpus("gpu") == 2 and slurm.partition_gpus("nowhere") is None
