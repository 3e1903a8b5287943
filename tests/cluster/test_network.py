"""The network's variables on real nodes whose interfaces have different names, and what the ranks then really used."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import Box
from allranks.nodes.slurm.endpoints import NAME_VARIABLE
from tests.cluster.helpers import on
from tests.cluster.runs import OWN_INTERFACES as OWN
from tests.cluster.runs import allranks, each_node_used_its_own_interface, log_of, run, spec_in


def doctor(shared: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = allranks(shared, "doctor", "spec.yaml", "--no-imports", "--json", *words)
    return done, json.loads(done.stdout or "{}")


def test_each_node_gets_its_own_interface_and_its_ranks_use_it(box: Box, shared: Path) -> None:
    done, folder = run(shared, spec_in(shared, cluster={"nodes": 2}))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(folder)
    each_node_used_its_own_interface(folder, done.stdout)
    assert "network n1: GLOO_SOCKET_IFNAME=eth0; expected: Socket" in log_of(folder)


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


def failed_checks(document: dict[str, Any]) -> dict[str, str]:
    return {f"{n['host']}.{c['name']}": c["found"] for n in document["nodes"] for c in n["checks"] if not c["ok"]}


def test_a_node_that_others_cannot_connect_to_is_named_with_the_direction(box: Box, shared: Path) -> None:
    """n2 connects to others, but what it answers from its rendezvous port is dropped, as by a firewall on n2."""
    run_spec(shared)
    rule = ["ipproto", "tcp", "sport", "20000-32767", "blackhole"]
    on(box, "n2", "ip", "rule", "add", *rule)
    try:
        done, document = doctor(shared, "--set", "cluster.nodes=3")
    finally:
        on(box, "n2", "ip", "rule", "del", *rule)
    assert done.returncode == 1 and failed_checks(document) == {"n2.reach": "UNREACHABLE(n1,n3)"}, done.stdout
    (cure,) = [c["cure"] for n in document["nodes"] for c in n["checks"] if c["name"] == "reach" and not c["ok"]]
    address = next(node.address for node in box.plan.nodes if node.name == "n2")
    assert "0 of 2 nodes not reached from n2, 2 of 2 did not reach it" in cure
    assert re.search(rf"n1 -> n2 {address}:[23]\d{{4}} timed out .*attempts failed", cure), cure
    done, _ = doctor(shared, "--set", "cluster.nodes=3")
    assert done.returncode == 0, done.stdout


def test_one_cut_link_blames_its_ends_and_not_the_third_node(box: Box, shared: Path) -> None:
    run_spec(shared)
    first = next(node.address for node in box.plan.nodes if node.name == "n1")
    on(box, "n3", "ip", "route", "add", "blackhole", f"{first}/32")
    try:
        done, document = doctor(shared, "--set", "cluster.nodes=3")
    finally:
        on(box, "n3", "ip", "route", "del", "blackhole", f"{first}/32")
    assert done.returncode == 1
    assert failed_checks(document) == {"n1.reach": "UNREACHABLE(n3)", "n3.reach": "UNREACHABLE(n1)"}, done.stdout


@pytest.mark.full
def test_twelve_nodes_sample_their_peers(make_box: Callable[..., Box], shared: Path, monkeypatch: Any) -> None:
    """Beyond eight nodes each connects to some of the others; the node that is deaf is still the only one named."""
    box = make_box(f"test-reach-{os.getpid()}", nodes=12)
    monkeypatch.setenv(NAME_VARIABLE, box.name)
    run_spec(shared)
    done, document = doctor(shared, "--set", "cluster.nodes=12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {c["found"] for n in document["nodes"] for c in n["checks"] if c["name"] == "reach"} == {"5/5"}
    on(box, "n7", "ip", "rule", "add", "ipproto", "tcp", "sport", "20000-32767", "blackhole")
    done, document = doctor(shared, "--set", "cluster.nodes=12")
    assert done.returncode == 1 and list(failed_checks(document)) == ["n7.reach"], done.stdout
