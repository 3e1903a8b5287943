"""A slow cable of a node is named from the kernel's counters, and neither a rank nor another link for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.lab.cluster import Box
from allranks.lab.cluster.faults import inject
from allranks.rundir.files import read_json
from tests.cluster.runs import log_of, run, spec_in

pytestmark = pytest.mark.full


def spec(shared: Path, steps: int) -> dict[str, Any]:
    config = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    return spec_in(
        shared,
        model={"name": "tiny:mistral", "config": config},
        adapter={"type": "none"},
        train={"max_steps": steps},
        strategy={"name": "pytorch_ddp"},
    )


def test_a_slow_cable_is_named_and_no_rank(box: Box, shared: Path) -> None:
    inject(box, "slow-link", "n2", rate="30mbit")
    done, run_dir = run(shared, spec(shared, 25))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    metrics = read_json(run_dir.metrics)
    slow = {(k["host"], k["peer"]) for k in metrics["links"] if k["slow"] or k["lossy"]}
    assert slow, metrics["links"]
    assert all("n2" in link for link in slow), metrics["links"]
    assert "is slow: " in done.stdout and "the link from n" in done.stdout
    assert metrics["own_time"] is None or metrics["own_time"]["stragglers"] == []
    assert "Links between nodes" in run_dir.report.read_text()


def test_even_links_are_not_named(box: Box, shared: Path) -> None:
    done, run_dir = run(shared, spec(shared, 40))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    links = read_json(run_dir.metrics)["links"]
    assert {k["host"] for k in links} == {"n1", "n2", "n3"}, "the links themselves are known"
    assert sum(k["sent_bytes"] for k in links) > 10_000_000
    assert not any(k["slow"] or k["lossy"] for k in links), links
    assert "the link from" not in done.stdout
