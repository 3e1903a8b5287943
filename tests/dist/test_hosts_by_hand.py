"""Two agents that are started by hand on one host, by the commands that `run` prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.dist.harness import ALLRANKS, until

PROGRAM = "import os, sys, time\ntime.sleep(0.5)\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n"


def test_each_agent_of_one_host_leaves_its_own_record(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PROGRAM)
    cluster = {"launcher": "hosts", "nodes": 2, "hosts": ["127.0.0.1"] * 2, "procs_per_node": 1, "device": "cpu"}
    spec = {"name": "h", "script": {"path": "own.py"}, "cluster": cluster, "run_root": "runs"}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    out = tmp_path / "out"
    launcher = subprocess.Popen(
        [*ALLRANKS, "run", "spec.yaml"], cwd=tmp_path, stdout=out.open("w"), stderr=subprocess.STDOUT
    )
    agents: list[subprocess.Popen[bytes]] = []
    try:
        until(lambda: "  node 1:  " in out.read_text() or launcher.poll() is not None, limit_s=30)
        commands = [line.split(":  ", 1)[1] for line in out.read_text().splitlines() if line.startswith("  node ")]
        agents = [subprocess.Popen(["bash", "-c", command], stderr=subprocess.DEVNULL) for command in commands]
        assert launcher.wait(timeout=60) == 1, out.read_text()
        assert sorted(agent.wait(timeout=20) for agent in agents) == [0, 1]
        assert "rank 1 on " in out.read_text(), out.read_text()
        run = RunDir(next((tmp_path / "runs").iterdir()))
        records = sorted((read_json(path) for path in run.logs_of(1).glob("*.exit.json")), key=lambda one: one["node"])
        assert [(one["node"], [end["rank"] for end in one["failed"]]) for one in records] == [(0, []), (1, [1])]
    finally:
        for process in (launcher, *agents):
            process.kill()
