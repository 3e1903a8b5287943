"""Whole runs through the Slurm of a box: a spec that is over in seconds, and `allranks run` of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml

from allranks.planning import network_policy
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import ALLRANKS, step_events, until

LIMIT_S = 150


def spec_in(shared: Path, **sections: Any) -> dict[str, Any]:
    write_rows(shared / "rows.json", 80)
    cluster = {"launcher": "slurm", "nodes": 3, "procs_per_node": 1, "env": {"OMP_NUM_THREADS": "1"}} | sections.pop(
        "cluster", {}
    )
    sections.setdefault("eval", {"samples": 0})
    return tiny_spec(shared / "rows.json", shared, cluster=cluster, **sections)


def allranks(shared: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ALLRANKS, *args], cwd=shared, capture_output=True, text=True, timeout=LIMIT_S)


def run(shared: Path, spec: dict[str, Any], *more: str) -> tuple[subprocess.CompletedProcess[str], RunDir]:
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
    done = allranks(shared, "run", "spec.yaml", *more)
    folders = sorted((shared / "runs").iterdir(), key=lambda p: p.stat().st_mtime) if (shared / "runs").is_dir() else []
    assert folders, done.stderr
    return done, RunDir(folders[-1])


OWN_INTERFACES = {"n1": "eth0", "n2": "eno1"}


def each_node_used_its_own_interface(run: RunDir, shown: str) -> None:
    """What was decided for n1 and n2, and the connections that their ranks really had, in the files and in the
    terminal."""
    policy = network_policy.load_policy(run.network(1))
    assert policy is not None
    chosen = {node.host: {e.name: e.value for e in node.environment}["GLOO_SOCKET_IFNAME"] for node in policy.nodes}
    assert chosen == OWN_INTERFACES and all(e.reason for node in policy.nodes for e in node.environment)
    network = read_json(run.metrics)["network"]
    seen = {item["host"]: list(item["connections"]) for item in network["observed"]}
    assert seen == {host: [name] for host, name in OWN_INTERFACES.items()}
    assert network["ok"] and network["findings"] == [] and network["line"] == "interface eno1, eth0"
    assert "network" in shown and "interface eno1, eth0" in shown


def program_in(shared: Path, text: str, **cluster: Any) -> dict[str, Any]:
    """The spec of a user's own program, one rank per node."""
    (shared / "own.py").write_text(text)
    return {
        "name": "own",
        "script": {"path": str(shared / "own.py")},
        "run_root": str(shared / "runs"),
        "cluster": {"launcher": "slurm", "procs_per_node": 1, **cluster},
    }


def log_of(run_dir: RunDir) -> str:
    path = run_dir.logs / "slurm.log"
    return path.read_text() if path.exists() else ""


class Submitted:
    """A run that goes on while the test does something to it."""

    def __init__(self, shared: Path, spec: dict[str, Any]) -> None:
        (shared / "spec.yaml").write_text(yaml.safe_dump(spec))
        self.out = shared / "out.txt"
        self.process = subprocess.Popen(
            [*ALLRANKS, "run", "spec.yaml"],
            cwd=shared,
            stdout=self.out.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        until(lambda: (shared / "runs").is_dir() and any((shared / "runs").iterdir()))
        self.run = RunDir(next((shared / "runs").iterdir()))

    def until_step(self, step: int) -> None:
        until(
            lambda: any(e["step"] >= step for e in step_events(self.run)) or self.process.poll() is not None,
            limit_s=LIMIT_S,
        )
        assert self.process.poll() is None, self.out.read_text() + log_of(self.run)

    def ready(self, ranks: int) -> bool:
        """Return whether this many ranks of a program have printed READY."""
        assert self.process.poll() is None, self.out.read_text() + log_of(self.run)
        return sum("READY" in log.read_text() for log in self.run.rank_logs(1).values()) == ranks

    def job(self) -> str:
        return read_json(self.run.job)["job"]

    def wait(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        try:
            return self.process.wait(timeout=limit_s), self.out.read_text()
        finally:
            self.process.kill()
