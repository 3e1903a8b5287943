"""Public programs run unchanged under Slurm on two and three nodes; a killed rank of one is named with its host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.lab.cluster import Box
from allranks.rundir.files import read_json
from tests.cluster.runs import allranks, log_of, run
from tests.dist.public_programs import lay_out, plant

pytestmark = pytest.mark.full


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("name", ["nanogpt", "ddp", "alpaca"])
def test_it_runs_unchanged_on_several_nodes(box: Box, shared: Path, name: str, nodes: int) -> None:
    spec = {**lay_out(name, shared / "programs"), "run_root": str(shared / "runs")}
    spec["cluster"] = {"launcher": "slurm", "nodes": nodes, "procs_per_node": 1}
    if name == "nanogpt":  # it requires a multiple of the ranks
        spec["script"]["args"].append(f"--gradient_accumulation_steps={nodes}")
    done, run_dir = run(shared, spec)
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    metrics = read_json(run_dir.metrics)
    assert (metrics["status"], metrics["world_size"], metrics["nodes"]) == ("succeeded", nodes, nodes)
    assert metrics["steps"] == {"nanogpt": 40, "alpaca": 20}.get(name)
    logs = run_dir.rank_logs(1)
    assert len({path.name.partition(".")[0] for path in logs.values()}) == nodes  # one log a node
    assert json.loads(allranks(shared, "diagnose", "--json", str(run_dir.root)).stdout)["findings"] == []


def test_a_killed_rank_of_a_program_is_named_with_its_host(box: Box, shared: Path) -> None:
    spec = {**lay_out("nanogpt", shared / "programs"), "run_root": str(shared / "runs")}
    spec["cluster"] = {"launcher": "slurm", "nodes": 2, "procs_per_node": 1}
    plant(shared / "programs", "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    done, run_dir = run(shared, spec)
    assert done.returncode == 1
    assert "rank 1 on n2 failed: ended by SIGKILL, but not by the kernel's out-of-memory killer" in done.stderr
    (first, *_) = json.loads(allranks(shared, "diagnose", "--json", str(run_dir.root)).stdout)["findings"]
    assert (first["id"], first["rank"], first["host"]) == ("rank_died", 1, "n2")
