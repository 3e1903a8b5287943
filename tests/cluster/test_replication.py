"""FSDP2 on two nodes of two ranks: with a copy of the weights on each node (HSDP), fewer bytes cross between them, as the model says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from allranks.lab.cluster import Box
from allranks.planning.memory.estimate import model_of
from allranks.planning.memory.model_config import find_config
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import read_json
from allranks.spec import load_spec
from allranks.spec.strategies import strategy_info
from tests.cluster.runs import allranks, log_of, run, spec_in
from tests.dist.harness import step_events

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
CONFIG = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 320}


class SentBytes:
    """What a node has sent over its network, sampled while a run goes on."""

    def __init__(self, pid: int) -> None:
        self._file, self._over = Path(f"/proc/{pid}/net/dev"), threading.Event()
        self.samples: list[tuple[float, int]] = []

    @contextmanager
    def sampled(self) -> Iterator[None]:
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            lines = [line.split(":") for line in self._file.read_text().splitlines()[2:]]
            sent = sum(int(rest.split()[8]) for name, rest in lines if name.strip() != "lo")
            self.samples.append((time.time(), sent))

    def per_step(self, ends: list[float]) -> float:
        """Return the slope of the bytes over the steps, whose ends are given."""
        times, sent = zip(*self.samples, strict=True)
        return float(np.polyfit(np.arange(len(ends)), np.interp(ends, times, sent), 1)[0])


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


def predicted(shared: Path, plan: LaunchPlan) -> int:
    asked = load_spec(shared / "spec.yaml")
    config, sends = find_config(asked).config, strategy_info(plan.strategy).node_sends
    assert config is not None and sends is not None
    return sends(model_of(asked, plan, config), plan.strategy_options, 2, 2)


def test_bytes_between_nodes_are_those_of_the_model(box: Box, shared: Path) -> None:
    found = {}
    for asked in ("auto", "none"):
        node = SentBytes(box.inits()["n1"])
        with node.sampled():
            done, run_dir = run(shared, {**spec(shared, 24, replicate=asked), "checkpoint": {"every": 1000}})
        assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
        plan = msgspec.json.decode(run_dir.plan.read_bytes(), type=LaunchPlan)
        assert plan.strategy_options["replicate"] == {"auto": "nodes", "none": "none"}[asked]
        ends = [e["time"] for e in step_events(run_dir)][2:-1]
        sent, due = node.per_step(ends), predicted(shared, plan)
        found[asked] = (sent, due)
    print("sent and predicted bytes per node and step:", found)
    for sent, due in found.values():
        assert 0.95 * due <= sent <= 1.1 * due, found  # headers, heartbeats and acknowledgements are counted, too
    assert found["none"][0] > 4 * found["auto"][0], found


def test_every_strategy_gate_holds_and_a_resume_is_bitwise(box: Box, shared: Path) -> None:
    done, whole = run(shared, spec(shared, 8))
    assert done.returncode == 0, done.stdout + done.stderr + log_of(whole)
    assert (
        "every node holds a copy of the weights, sharded over its 2 ranks (HSDP)"
        in allranks(shared, "plan", "spec.yaml").stdout
    )
    losses = [e["loss"] for e in step_events(whole)]
    done, run_dir = run(shared, {**spec(shared, 4), "name": "part"})
    assert done.returncode == 0, done.stdout + done.stderr + log_of(run_dir)
    (manifest,) = (read_json(p / "manifest.json") for p in run_dir.checkpoints.glob("step-*"))
    assert manifest["shard_ranks"] == 2
    more = ("--run-root", str(shared / "runs"), "--set", "train.max_steps=8")
    refused = allranks(shared, "resume", run_dir.name, *more, "--set", "strategy.replicate=none")
    assert refused.returncode == 2 and "sharded over 2 ranks, the plan shards them over 4" in refused.stderr, (
        refused.stderr
    )
    again = allranks(shared, "resume", run_dir.name, *more)
    assert again.returncode == 0, again.stdout + again.stderr + log_of(run_dir)
    assert [e["loss"] for e in step_events(run_dir)] == losses
    inexact = ("--allow-inexact", "--set", "strategy.replicate=none", "--set", "train.max_steps=10")
    plain = allranks(shared, "resume", whole.name, "--run-root", str(shared / "runs"), *inexact)
    assert plain.returncode == 0, plain.stdout + plain.stderr + log_of(whole)
    compared = allranks(
        shared, "compare", "spec.yaml", "--strategies", "pytorch_zero2,pytorch_zero3", "--repeats", "1", "--json"
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr
    rows = json.loads(compared.stdout)["rows"]
    assert len(rows) == 2 and all(row["gates"]["parity"] and not row["reasons"] for row in rows), rows
