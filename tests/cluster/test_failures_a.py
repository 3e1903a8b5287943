"""Failures of the field notes on a real Slurm that no other test makes: another version on one node, a firewall between
nodes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import injected
from tests.cluster.helpers import on
from tests.cluster.runs import allranks, spec_in


@pytest.fixture
def spec(shared: Path) -> Path:
    (shared / "spec.yaml").write_text(yaml.safe_dump(spec_in(shared)))
    return shared


def test_a_version_that_differs_on_one_node_is_refused_by_name(box: Box, spec: Path) -> None:
    """n3 has another safetensors: its record says so, as after a `pip install` on that node alone."""
    record = Path(str(importlib.metadata.distribution("safetensors").locate_file("."))) / (
        f"safetensors-{importlib.metadata.version('safetensors')}.dist-info"
    )
    with injected(box, "hide-folder", "n3", path=str(record)):
        on(
            box,
            "n3",
            "sh",
            "-c",
            f"printf 'Metadata-Version: 2.1\\nName: safetensors\\nVersion: 0.0.1\\n' > '{record}/METADATA'",
        )
        done = allranks(spec, "doctor", "spec.yaml", "--no-imports")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "n3 proj=ok pkgs=VERSION(safetensors 0.0.1" in done.stdout, done.stdout
    assert "n3: pkgs:" in done.stdout and f"safetensors=={importlib.metadata.version('safetensors')}" in done.stdout
    assert "n1 proj=ok pkgs=ok" in done.stdout and "n2 proj=ok pkgs=ok" in done.stdout


@contextmanager
def walled_off(box: Box, node: str, peers: list[str]) -> Iterator[None]:
    """What the node sends to these addresses is dropped, as between two nodes by a firewall; Slurm's controller still
    reaches it."""
    for peer in peers:
        on(box, node, "ip", "route", "add", "blackhole", f"{peer}/32")
    try:
        yield
    finally:
        for peer in peers:
            on(box, node, "ip", "route", "del", "blackhole", f"{peer}/32")


def test_a_firewall_between_nodes_is_refused_before_any_rank_waits(box: Box, spec: Path) -> None:
    addresses = [node.address for node in box.plan.nodes[:2]]
    with walled_off(box, "n3", addresses):
        done = allranks(spec, "doctor", "spec.yaml", "--no-imports")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reach=UNREACHABLE(n1,n2)" in done.stdout, done.stdout
    assert "n3: reach:" in done.stdout and "firewall" in done.stdout
