"""Whole runs through the Slurm of a box, or by hand on its nodes: a spec that is over in seconds, and verbs on it."""

import subprocess
from pathlib import Path
from typing import Any

import psutil
import yaml

from allranks.lab.cluster import Box
from allranks.planning import network_policy
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests import sampling, warm
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import ALLRANKS, step_events, until

LIMIT_S = 300
WAITS = "import time\nprint('READY', flush=True)\ntime.sleep(600)\n"


def spec_in(shared: Path, **sections: Any) -> dict[str, Any]:
    write_rows(shared / "rows.json", 80)
    cluster = {"launcher": "slurm", "nodes": 3, "procs_per_node": 1, "env": {"OMP_NUM_THREADS": "1"}}
    cluster |= sections.pop("cluster", {})
    sections.setdefault("eval", {"samples": 0})
    return tiny_spec(shared / "rows.json", shared, cluster=cluster, **sections)


def program_in(shared: Path, text: str, script: dict[str, Any] | None = None, **cluster: Any) -> dict[str, Any]:
    """The spec of a user's own program in a folder of its own, one rank on each of two nodes."""
    path = shared / "prog" / "own.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    base = {"launcher": "slurm", "nodes": 2, "procs_per_node": 1}
    script = {"path": str(path), **(script or {})}
    return {"name": "own", "script": script, "run_root": str(shared / "runs"), "cluster": base | cluster}


PREFIX: list[str] = []
"""A command that starts the verbs of a test, for example in a mount namespace of their own."""


def allranks(shared: Path, *args: str) -> subprocess.CompletedProcess[str]:
    if not PREFIX:
        return warm.allranks(*args, cwd=shared, timeout_s=LIMIT_S, anew=sampling.ALL)
    command = [*PREFIX, *ALLRANKS, *args]
    return subprocess.run(command, cwd=shared, capture_output=True, text=True, timeout=LIMIT_S)


def write(shared: Path, spec: dict[str, Any]) -> None:
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec))


def run(shared: Path, spec: dict[str, Any], *more: str) -> tuple[subprocess.CompletedProcess[str], RunDir]:
    write(shared, spec)
    done = allranks(shared, "run", "spec.yaml", *more)
    folders = sorted((shared / "runs").iterdir(), key=lambda p: p.stat().st_mtime) if (shared / "runs").is_dir() else []
    assert folders, done.stderr
    return done, RunDir(folders[-1])


def succeeded(shared: Path, spec: dict[str, Any], *more: str) -> tuple[str, RunDir]:
    """What a run that must succeed shows to the user, and its folder."""
    done, run_dir = run(shared, spec, *more)
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    return done.stdout, run_dir


def doctor(shared: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``allranks doctor spec.yaml WORDS``, without imports unless they are wanted."""
    return allranks(shared, "doctor", "spec.yaml", *([] if "--imports" in words else ["--no-imports"]), *words)


def failed_checks(nodes: list[dict[str, Any]], of: str = "found") -> dict[str, str]:
    """``host.check`` to what was found, of all that failed."""
    return {f"{node['host']}.{c['name']}": c[of] for node in nodes for c in node["checks"] if not c["ok"]}


OWN_INTERFACES = {"n1": "eth0", "n2": "eno1"}


def each_node_used_its_own_interface(run: RunDir, shown: str) -> None:
    """What was decided for n1 and n2, and the connections that their ranks had, in files and in the terminal."""
    policy = network_policy.load_policy(run.network(1))
    assert policy is not None
    chosen = {node.host: {e.name: e.value for e in node.environment}["GLOO_SOCKET_IFNAME"] for node in policy.nodes}
    assert chosen == OWN_INTERFACES and all(e.reason for node in policy.nodes for e in node.environment)
    network = read_json(run.metrics)["network"]
    seen = {item["host"]: list(item["connections"]) for item in network["observed"]}
    assert seen == {host: [name] for host, name in OWN_INTERFACES.items()}
    assert network["ok"] and network["findings"] == [] and network["line"] == "interface eno1, eth0"
    assert "network" in shown and "interface eno1, eth0" in shown


def log_of(run_dir: RunDir) -> str:
    path = run_dir.logs / "slurm.log"
    return path.read_text() if path.exists() else ""


def rank_texts(run_dir: RunDir) -> list[str]:
    return [path.read_text() for path in run_dir.rank_logs(1).values()]


def hosts_of(run_dir: RunDir, attempt: int) -> set[str]:
    return {path.name.split(".")[0] for path in run_dir.rank_logs(attempt).values()}


class Submitted:
    """A run that goes on while the test does something to it."""

    def __init__(self, shared: Path, spec: dict[str, Any]) -> None:
        write(shared, spec)
        self.out = shared / "out.txt"
        how = {"kind": "light", "anew": sampling.ALL, "cwd": shared, "session": True}
        self.process = warm.start_verb(["run", "spec.yaml"], self.out, **how)
        until(lambda: (shared / "runs").is_dir() and any((shared / "runs").iterdir()))
        self.run = RunDir(next((shared / "runs").iterdir()))

    def until_step(self, step: int) -> None:
        self._until(lambda: any(e["step"] >= step for e in step_events(self.run)))

    def until_ready(self, text: str = "READY") -> None:
        """Until both ranks of a program have printed this."""
        self._until(lambda: [text in said for said in rank_texts(self.run)] == [True, True])

    def _until(self, condition: Any) -> None:
        until(lambda: condition() or self.process.poll() is not None, limit_s=LIMIT_S)
        assert self.process.poll() is None, self.out.read_text() + log_of(self.run)

    def job(self) -> str:
        return read_json(self.run.job)["job"]

    def wait(self, limit_s: float = LIMIT_S) -> tuple[int, str]:
        try:
            return self.process.wait(timeout=limit_s), self.out.read_text()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over in {limit_s} s:\n{self.out.read_text()}{log_of(self.run)}") from None
        finally:
            self.process.kill()

    def ends(self, code: int, limit_s: float = LIMIT_S) -> str:
        """What a run that must end with this code has shown."""
        found, out = self.wait(limit_s)
        assert found == code, out + log_of(self.run)
        return out


class ByHand:
    """A verb of a spec with `launcher: hosts`, and the agents that are started on nodes by the commands it prints."""

    def __init__(self, box: Box, shared: Path, spec: Any, verb: str = "run", *words: str, on: str | None = None):
        """Start the verb on the login side, or on a node."""
        self.box, self.shared, name = box, shared, spec["name"]
        self.out = self.said = shared / f"{name}.out"
        (shared / f"{name}.yaml").write_text(yaml.safe_dump(spec))
        prefix = box.node_prefix(on, str(shared)) if on else box.command_prefix(str(shared))
        if verb == "doctor":  # standard output is its report
            self.said = shared / f"{name}.err"
        output = {"stdout": self.out.open("a"), "stderr": self.said.open("a")}
        self.process = subprocess.Popen([*prefix, *ALLRANKS, verb, f"{name}.yaml", *words], cwd=shared, **output)
        self.agents: list[subprocess.Popen[bytes]] = []
        count = spec["cluster"]["nodes"]
        until(lambda: self.said.read_text().count("  node ") == count or self.process.poll() is not None, limit_s=30)
        if verb == "run":
            self.run = RunDir(next(Path(shared, spec["run_root"]).iterdir()))

    def command(self, number: int) -> str:
        line = next(text for text in self.said.read_text().splitlines() if text.startswith(f"  node {number}:  "))
        return line.split(":  ", 1)[1]

    def start(self, number: int, node: str | None = None) -> None:
        prefix = self.box.node_prefix(node or f"n{number + 1}", str(self.shared))
        command = [*prefix, "bash", "-c", self.command(number)]
        self.agents.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def wait(self) -> int:
        return self.process.wait(timeout=LIMIT_S)

    def result(self, agent_code: int = 0) -> tuple[int, str]:
        """The code and the output of the verb; its agents must end with a code of their own."""
        try:
            code = self.wait()
            assert [agent.wait(timeout=20) for agent in self.agents] == [agent_code] * len(self.agents)
            return code, self.out.read_text()
        finally:
            for process in (self.process, *self.agents):
                process.kill()

    def end(self) -> None:
        """Kill everything; an agent, whose nsenter is killed here, ends by itself and writes its record."""
        for process in (self.process, *self.agents):
            process.kill()
            process.wait()
        root = str(self.run.root)
        until(lambda: not any(root in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])))
