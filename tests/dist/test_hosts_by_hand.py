"""Two agents that are started by hand on one host, by the commands that `run` prints."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.dist.harness import ALLRANKS, until

# Rank 0 ends well before rank 1 fails: else its agent may be told of the failure first, and ends with 1, too.
PROGRAM = "import os, sys, time\nif os.environ['RANK'] == '1':\n    time.sleep(2)\n    sys.exit(3)\n"


@contextmanager
def started(
    folder: Path, before: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]], Path]]:
    """The command `run`, the agents that were started by what it printed, and its output. `before` goes before each of
    them."""
    (folder / "own.py").write_text(PROGRAM)
    cluster = {"launcher": "hosts", "nodes": 2, "hosts": ["127.0.0.1"] * 2, "procs_per_node": 1, "device": "cpu"}
    spec = {"name": "h", "script": {"path": "own.py"}, "cluster": cluster, "run_root": "runs"}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    out = folder / "out"
    launcher = subprocess.Popen(
        [*ALLRANKS, "run", "spec.yaml"], cwd=folder, stdout=out.open("w"), stderr=subprocess.STDOUT
    )
    agents: list[subprocess.Popen[bytes]] = []
    try:
        until(lambda: "  node 1:  " in out.read_text() or launcher.poll() is not None, limit_s=30)
        commands = [line.split(":  ", 1)[1] for line in out.read_text().splitlines() if line.startswith("  node ")]
        agents += [
            subprocess.Popen(["bash", "-c", before + command], stderr=subprocess.DEVNULL) for command in commands
        ]
        yield launcher, agents, out
    finally:
        for process in (launcher, *agents):
            process.kill()


def test_each_agent_of_one_host_leaves_its_own_record(tmp_path: Path) -> None:
    with started(tmp_path) as (launcher, agents, out):
        assert launcher.wait(timeout=60) == 1, out.read_text()
        assert sorted(agent.wait(timeout=20) for agent in agents) == [0, 1]
        assert "rank 1 on " in out.read_text(), out.read_text()
        run = RunDir(next((tmp_path / "runs").iterdir()))
        records = sorted((read_json(path) for path in run.logs_of(1).glob("*.exit.json")), key=lambda one: one["node"])
        assert [(one["node"], [end["rank"] for end in one["failed"]]) for one in records] == [(0, []), (1, [1])]


def test_hosts_are_examined_before_the_ranks_start(tmp_path: Path) -> None:
    with started(tmp_path, "ulimit -n 512; ") as (launcher, agents, out):
        assert launcher.wait(timeout=60) == 3, out.read_text()
        assert [agent.wait(timeout=20) for agent in agents] == [1, 1]
        assert "127.0.0.1: files: ulimit -n 65536" in " ".join(out.read_text().split()), out.read_text()
        run = RunDir(next((tmp_path / "runs").iterdir()))
        assert "files=FEW(512)" in run.preflight_text.read_text()
        assert not run.rank_logs(1)
