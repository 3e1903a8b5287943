"""Interfaces of different names, what the ranks then used, nodes that do not reach each other, and slow cables."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import inject
from allranks.rundir.files import read_json
from tests.cluster import runs
from tests.cluster.helpers import on
from tests.cluster.runs import OWN_INTERFACES as OWN

DEAF = ["rule", "ipproto", "tcp", "sport", "20000-32767", "blackhole"]
"""What a node answers from its rendezvous port is dropped, as by a firewall on it."""


@pytest.fixture
def spec(shared: Path) -> Path:
    runs.write(shared, runs.spec_in(shared, cluster={"nodes": 2}))
    return shared


def examined(shared: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], dict[str, str]]:
    done = runs.doctor(shared, "--json", *words)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    return done, document, runs.failed_checks(document["nodes"])


def test_each_node_gets_its_own_interface_and_its_ranks_use_it(box: Box, shared: Path) -> None:
    shown, folder = runs.succeeded(shared, runs.spec_in(shared, cluster={"nodes": 2}))
    runs.each_node_used_its_own_interface(folder, shown)
    assert "network n1: GLOO_SOCKET_IFNAME=eth0; expected: Socket" in runs.log_of(folder)


def test_the_doctor_compares_too(box: Box, spec: Path) -> None:
    done, document, _ = examined(spec, "--collectives")
    assert done.returncode == 0, done.stdout + done.stderr
    observed = {item["host"]: list(item["connections"]) for item in document["observed"]["observed"]}
    assert observed == {h: [i] for h, i in OWN.items()} and document["observed"]["findings"] == []
    advice = document["environment"]["n2"]["advice"]
    assert [(a["variable"], a["value"]) for a in advice] == [("GLOO_SOCKET_IFNAME", "eno1")]


def test_a_name_that_only_one_node_has_is_refused(box: Box, spec: Path) -> None:
    done, _, bad = examined(spec, "--set", "cluster.env.GLOO_SOCKET_IFNAME=eth0")
    assert done.returncode == 1 and bad == {"n2.ifname": "MISSING(GLOO_SOCKET_IFNAME=eth0)"}
    done, _, _ = examined(spec, "--set", "cluster.env.GLOO_SOCKET_IFNAME='eth0,eno1'")
    assert done.returncode == 0, done.stdout


@contextmanager
def ruled(box: Box, node: str, *rules: list[str]) -> Iterator[None]:
    """Rules or routes of `ip` on a node; Slurm's controller still reaches it."""
    for kind, *words in rules:
        on(box, node, "ip", kind, "add", *words)
    try:
        yield
    finally:
        for kind, *words in rules:
            on(box, node, "ip", kind, "del", *words)


def test_a_node_that_others_cannot_connect_to_is_named_with_the_direction(box: Box, spec: Path) -> None:
    with ruled(box, "n2", DEAF):
        done, document, bad = examined(spec, "--set", "cluster.nodes=3")
    assert done.returncode == 1 and bad == {"n2.reach": "UNREACHABLE(n1,n3)"}, done.stdout
    cure = runs.failed_checks(document["nodes"], "cure")["n2.reach"]
    address = next(node.address for node in box.plan.nodes if node.name == "n2")
    assert "0 of 2 nodes not reached from n2, 2 of 2 did not reach it" in cure
    assert re.search(rf"n1 -> n2 {address}:[23]\d{{4}} timed out .*attempts failed", cure), cure
    done, _, _ = examined(spec, "--set", "cluster.nodes=3")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("peers", [1, 2])
def test_a_firewall_between_nodes_is_refused_before_any_rank_waits(box: Box, spec: Path, peers: int) -> None:
    """What n3 sends to n1 is dropped: that link is cut, and n2 not to blame; or what it sends to both others: it is."""
    with ruled(box, "n3", *[["route", "blackhole", f"{node.address}/32"] for node in box.plan.nodes[:peers]]):
        done, document, bad = examined(spec, "--set", "cluster.nodes=3")
    alone = {"n3.reach": "UNREACHABLE(n1,n2)"}
    assert done.returncode == 1
    assert bad == (alone if peers == 2 else {"n1.reach": "UNREACHABLE(n3)", "n3.reach": "UNREACHABLE(n1)"}), done.stdout
    assert "firewall" in runs.failed_checks(document["nodes"], "cure")["n3.reach"]


def test_twelve_nodes_sample_their_peers(use_box: Callable[..., Box], spec: Path) -> None:
    """Beyond eight nodes each connects to some of the others; the node that is deaf is still the only one named."""
    box = use_box("test-reach", nodes=12)
    done, document, _ = examined(spec, "--set", "cluster.nodes=12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {c["found"] for n in document["nodes"] for c in n["checks"] if c["name"] == "reach"} == {"5/5"}
    with ruled(box, "n7", DEAF):
        done, _, bad = examined(spec, "--set", "cluster.nodes=12")
    assert done.returncode == 1 and list(bad) == ["n7.reach"], done.stdout


@pytest.mark.parametrize(("rate", "steps"), [("30mbit", 25), (None, 40)])
def test_a_slow_cable_is_named_no_rank_and_even_links_not(box: Box, shared: Path, rate: str | None, steps: int) -> None:
    model = {"name": "tiny:mistral", "config": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}}
    sections = {"adapter": {"type": "none"}, "train": {"max_steps": steps}, "strategy": {"name": "pytorch_ddp"}}
    if rate:
        inject(box, "slow-link", "n2", rate=rate)
    shown, run_dir = runs.succeeded(shared, runs.spec_in(shared, model=model, **sections))
    metrics = read_json(run_dir.metrics)
    links = metrics["links"]
    slow = {(k["host"], k["peer"]) for k in links if k["slow"] or k["lossy"]}
    assert ("the link from n" in shown) == (rate is not None) == bool(slow), links
    if rate:
        assert all("n2" in link for link in slow), links
        assert "is slow: " in shown
        assert metrics["own_time"] is None or metrics["own_time"]["stragglers"] == []
        assert "Links between nodes" in run_dir.report.read_text()
    else:
        assert {k["host"] for k in links} == {"n1", "n2", "n3"}, "the links themselves are known"
        assert sum(k["sent_bytes"] for k in links) > 10_000_000
