"""FSDP2 with a copy of the weights on each of two nodes (HSDP): fewer bytes cross, as the model says."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.node_bytes import CONFIG, HIGHEST, LOWEST, SAVES_AT_LEAST, SentBytes, expected_bytes

from allranks.lab.cluster import Box
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import read_json
from allranks.spec import load_spec
from tests.cluster.runs import allranks, log_of, spec_in, succeeded
from tests.dist.harness import step_events

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def spec(shared: Path, steps: int, **options: Any) -> dict[str, Any]:
    return spec_in(
        shared,
        model={"name": "tiny:mistral", "config": CONFIG},
        adapter={"type": "none"},
        train={"max_steps": steps, "grad_accum": 2, "micro_batch_size": 1, "schedule": "constant"},
        checkpoint={"mode": "full", "every": 4},
        strategy={"name": "pytorch_zero3", **options},
        cluster={"nodes": 2, "procs_per_node": 2, "device": "cpu", "device_memory_gib": 4},
    )


def test_bytes_between_nodes_are_those_of_the_model(box: Box, shared: Path) -> None:
    found = {}
    for asked in ("auto", "none"):
        node = SentBytes(box.inits()["n1"])
        with node.sampled():
            _, run_dir = succeeded(shared, {**spec(shared, 24, replicate=asked), "checkpoint": {"every": 1000}})
        plan = msgspec.json.decode(run_dir.plan.read_bytes(), type=LaunchPlan)
        assert plan.strategy_options["replicate"] == {"auto": "nodes", "none": "none"}[asked]
        ends = [e["time"] for e in step_events(run_dir)][2:-1]
        sent, due = node.per_step(ends), expected_bytes(load_spec(shared / "spec.yaml"), plan)
        found[asked] = (sent, due)
    print("sent and predicted bytes per node and step:", found)
    for sent, due in found.values():
        assert LOWEST * due <= sent <= HIGHEST * due, found
    assert found["none"][0] > SAVES_AT_LEAST * found["auto"][0], found


def test_every_strategy_gate_holds_and_a_resume_is_bitwise(box: Box, shared: Path) -> None:
    _, whole = succeeded(shared, spec(shared, 8))
    shown = allranks(shared, "plan", "spec.yaml").stdout
    assert "every node holds a copy of the weights, sharded over its 2 ranks (HSDP)" in shown
    losses = [e["loss"] for e in step_events(whole)]
    _, run_dir = succeeded(shared, {**spec(shared, 4), "name": "part"})
    (manifest,) = (read_json(p / "manifest.json") for p in run_dir.checkpoints.glob("step-*"))
    assert manifest["shard_ranks"] == 2
    more = ("--run-root", str(shared / "runs"), "--set", "train.max_steps=8")
    refused = allranks(shared, "resume", run_dir.name, *more, "--set", "strategy.replicate=none")
    assert refused.returncode == 2, refused.stderr
    assert "sharded over 2 ranks, the plan shards them over 4" in refused.stderr
    again = allranks(shared, "resume", run_dir.name, *more)
    assert again.returncode == 0, again.stdout + again.stderr + log_of(run_dir)
    assert [e["loss"] for e in step_events(run_dir)] == losses
    inexact = ("--allow-inexact", "--set", "strategy.replicate=none", "--set", "train.max_steps=10")
    plain = allranks(shared, "resume", whole.name, "--run-root", str(shared / "runs"), *inexact)
    assert plain.returncode == 0, plain.stdout + plain.stderr + log_of(whole)
    both = ("--strategies", "pytorch_zero2,pytorch_zero3", "--repeats", "1", "--json")
    compared = allranks(shared, "compare", "spec.yaml", *both)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    rows = json.loads(compared.stdout)["rows"]
    assert len(rows) == 2 and all(row["gates"]["parity"] and not row["reasons"] for row in rows), rows
