"""`doctor` and `run` with `launcher: hosts`: every host on which the printed command was really started is examined,
and the others are named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from tests.conftest import write_rows
from tests.dist.harness import ALLRANKS, until


def spec_of(shared: Path, hosts: list[str]) -> Path:
    (shared / "data").mkdir()
    write_rows(shared / "data" / "rows.json", 40)
    cluster = {"launcher": "hosts", "nodes": len(hosts), "hosts": hosts, "procs_per_node": 1, "device": "cpu"}
    spec = {
        "name": "by-hand",
        "model": {"name": "tiny:mistral"},
        "data": {"source": str(shared / "data" / "rows.json")},
        "cluster": cluster,
        "run_root": str(shared / "runs"),
    }
    path = shared / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


class ByHand:
    """A verb on the login node of a box, and the agents that are started on nodes by the commands that it prints."""

    def __init__(self, box: Box, shared: Path, verb: str, spec: Path, *words: str) -> None:
        self.box, self.shared, self.said, self.out = box, shared, shared / "said", shared / "out"
        if verb == "run":
            self.said = self.out
        command = [*box.command_prefix(str(shared)), *ALLRANKS, verb, str(spec), *words]
        self.process = subprocess.Popen(command, cwd=shared, stdout=self.out.open("w"), stderr=self.said.open("w"))
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, count: int, *nodes: str) -> None:
        until(lambda: self.said.read_text().count("  node ") == count or self.process.poll() is not None, limit_s=30)
        lines = [line for line in self.said.read_text().splitlines() if line.startswith("  node ")]
        assert len(lines) == count, self.said.read_text()
        commands = dict(line.strip().split(":  ", 1) for line in lines)
        for number, node in enumerate(nodes):
            prefix = self.box.node_prefix(node, str(self.shared))
            self.agents.append(
                subprocess.Popen([*prefix, "bash", "-c", commands[f"node {number}"]], stderr=subprocess.DEVNULL)
            )

    def result(self, agent_code: int = 0) -> tuple[int, str]:
        try:
            code = self.process.wait(timeout=60)
            assert [agent.wait(timeout=20) for agent in self.agents] == [agent_code] * len(self.agents)
            return code, self.out.read_text()
        finally:
            for process in (self.process, *self.agents):
                process.kill()


def failed(document: dict[str, Any]) -> dict[str, str]:
    return {f"{n['host']}.{c['name']}": c["found"] for n in document["nodes"] for c in n["checks"] if not c["ok"]}


def test_every_host_with_an_agent_is_examined_and_the_one_without_is_named(box: Box, shared: Path) -> None:
    spec = spec_of(shared, ["n1", "n2", "n3"])
    with (
        injected(box, "hide-folder", "n2", path=str(shared / "data")),
        injected(box, "wrong-clock", "n1", seconds="90"),
    ):
        doctor = ByHand(box, shared, "doctor", spec, "--no-imports", "--json", "--wait-s", "10")
        doctor.start(3, "n1", "n2")
        code, out = doctor.result()
    document = json.loads(out)
    assert code == 1 and not document["ok"] and not document["starts"]
    found = failed(document)
    assert found.pop("n1.clock").startswith(("WRONG(+90", "WRONG(+89"))
    assert found == {"n2.data": f"MISSING({shared}/data/rows.json)", "n3.probe": "NO-ANSWER"}, found
    (cure,) = (c["cure"] for n in document["nodes"] for c in n["checks"] if c["name"] == "probe")
    assert "start its command there" in cure and "--node 2 --name n3" in cure
    assert "2 of 3 nodes have joined; waiting for n3" in doctor.said.read_text()
    lines = {n["host"]: {c["name"]: c["found"] for c in n["checks"]} for n in document["nodes"]}
    assert lines["n1"]["net"].startswith("eth0/") and lines["n2"]["net"].startswith("eno1/")
    assert lines["n1"]["reach"] == lines["n2"]["reach"] == "1/1" and lines["n2"]["run"].startswith("rw,")
    assert not list(shared.glob(".allranks-doctor-*")), "nothing is left behind"


@pytest.mark.full
def test_run_refuses_the_hosts_that_doctor_names(box: Box, shared: Path) -> None:
    spec = spec_of(shared, ["n1", "n2", "n3"])
    with (
        injected(box, "hide-folder", "n2", path=str(shared / "data")),
        injected(box, "wrong-clock", "n1", seconds="90"),
    ):
        run = ByHand(box, shared, "run", spec)
        run.start(3, "n1", "n2", "n3")
        code, out = run.result(agent_code=1)
    said = " ".join(out.split())
    assert code == 3 and "n1: clock: " in said and "n2: data: " in said and "n3: " not in said, out
    assert not list(shared.glob("runs/*/logs/*/rank*.log"))


@pytest.mark.full
def test_hosts_that_are_well_and_two_names_of_one_machine(box: Box, shared: Path) -> None:
    spec = spec_of(shared, ["n1", "n2", box.plan.nodes[1].address])
    doctor = ByHand(box, shared, "doctor", spec, "--no-imports", "--wait-s", "60")
    doctor.start(3, "n1", "n2", "n2")
    code, out = doctor.result()
    assert code == 0, out + doctor.said.read_text()
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" OK")] == ["n1", "n2"]
    assert f"{box.plan.nodes[1].address} is the same machine as n2, and was examined once" in out
    assert "network 10." in out


@pytest.mark.full
def test_a_host_that_does_not_share_the_run_root_says_so(box: Box, shared: Path) -> None:
    spec = spec_of(shared, ["n1", "n2"])
    with injected(box, "hide-folder", "n2", path=str(shared)):
        doctor = ByHand(box, shared, "doctor", spec, "--no-imports", "--json", "--wait-s", "10")
        until(lambda: doctor.said.read_text().count("  node ") == 2, limit_s=30)
        command = doctor.said.read_text().splitlines()[2].split(":  ", 1)[1]
        on_n2 = box.run(["bash", "-c", command], node="n2", cwd="/")
        assert on_n2.returncode == 1 and "run_root is not a folder that all hosts share" in on_n2.stderr, on_n2.stderr
        code, out = doctor.result()
    assert code == 1 and failed(json.loads(out)) == {f"{host}.probe": "NO-ANSWER" for host in ("n1", "n2")}
