"""The network's variables on real nodes whose interfaces have different names, and what the ranks then really used."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from allranks.fabric import report
from allranks.rundir import read_json
from allranks.testcluster import Box
from tests.cluster.runs import allranks, log_of, run, spec_in

OWN = {"n1": "eth0", "n2": "eno1"}


def doctor(shared: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = allranks(shared, "doctor", "spec.yaml", "--no-imports", "--json", *words)
    return done, json.loads(done.stdout or "{}")


def test_each_node_gets_its_own_interface_and_its_ranks_use_it(box: Box, shared: Path) -> None:
    done, folder = run(shared, spec_in(shared, cluster={"nodes": 2}))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(folder)
    policy = report.load(folder.network(1))
    assert policy is not None
    chosen = {node.host: {e.name: e.value for e in node.environment}["GLOO_SOCKET_IFNAME"] for node in policy.nodes}
    assert chosen == OWN and all(e.reason for node in policy.nodes for e in node.environment)
    network = read_json(folder.metrics)["network"]
    assert {item["host"]: list(item["connections"]) for item in network["observed"]} == {h: [i] for h, i in OWN.items()}
    assert network["ok"] and network["findings"] == [] and network["line"] == "interface eno1, eth0"
    assert "network n1: GLOO_SOCKET_IFNAME=eth0; expected: Socket" in log_of(folder)
    assert "network" in done.stdout and "interface eno1, eth0" in done.stdout


def test_the_doctor_compares_too(box: Box, shared: Path) -> None:
    run_spec(shared)
    done, document = doctor(shared, "--collectives")
    assert done.returncode == 0, done.stdout + done.stderr
    observed = {item["host"]: list(item["connections"]) for item in document["observed"]["observed"]}
    assert observed == {h: [i] for h, i in OWN.items()} and document["observed"]["findings"] == []
    advice = document["environment"]["n2"]["advice"]
    assert [(a["variable"], a["value"]) for a in advice] == [("GLOO_SOCKET_IFNAME", "eno1")]


def run_spec(shared: Path) -> None:
    import yaml

    (shared / "spec.yaml").write_text(yaml.safe_dump(spec_in(shared, cluster={"nodes": 2})))


def test_a_name_that_only_one_node_has_is_refused(box: Box, shared: Path) -> None:
    run_spec(shared)
    done, document = doctor(shared, "--set", "cluster.env.GLOO_SOCKET_IFNAME=eth0")
    bad = {f"{n['host']}.{c['name']}": c["found"] for n in document["nodes"] for c in n["checks"] if not c["ok"]}
    assert done.returncode == 1 and bad == {"n2.ifname": "MISSING(GLOO_SOCKET_IFNAME=eth0)"}
    done, document = doctor(shared, "--set", "cluster.env.GLOO_SOCKET_IFNAME='eth0,eno1'")
    assert done.returncode == 0, done.stdout
