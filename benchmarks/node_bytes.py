"""Bytes between nodes under FSDP2 with a copy of the weights on each node (HSDP) and without, counted on interfaces.

``python -m benchmarks.node_bytes [--strategies pytorch_zero3,pytorch_zero2] [--steps 24] [--json OUT]``. Starts a
cluster in a box of two nodes (a real Slurm, one network namespace per node; it needs what ``allranks cluster up``
needs), trains on two ranks per node, and takes it down again. Of each run: the bytes that each node sent to the other
per optimizer step (the slope over the steps), and what ``node_sends``, the model of ``allranks plan``, expects. Then
``allranks compare`` computes how far each strategy, with its copies on nodes, is from one process (parity), and a
resumed run is compared with an unbroken one.

Exit code 1: a count is not within 0.95 to 1.10 of what is expected, copies save less than `SAVES_AT_LEAST`, losses with
and without copies differ by more than `LOSS_TOLERANCE`, parity fails, or resumed losses are not bitwise those of the
unbroken run. Seconds are not measured: all nodes share one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from allranks import api
from allranks.analysis.metrics import without_repeated_steps
from allranks.errors import AllranksError
from allranks.experiments.compare import compare, comparison_request
from allranks.lab.cluster import Box, BoxOptions, down, up
from allranks.nodes.slurm.endpoints import NAME_VARIABLE
from allranks.planning.memory.estimate import model_of
from allranks.planning.memory.model_config import find_config
from allranks.planning.records import LaunchPlan
from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec, parse_spec
from allranks.spec.strategies import strategy_info
from benchmarks import machine
from benchmarks.programs import ROOT

NODES, RANKS_PER_NODE, ACCUMULATION = 2, 2, 2
CONFIG = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 320}
LOWEST, HIGHEST = 0.95, 1.10  # headers, heartbeats and acknowledgements are counted, too
SAVES_AT_LEAST = 4.0
LOSS_TOLERANCE = 1e-5  # of float32 sums in another order
REPLICATE = ("nodes", "none")


class SentBytes:
    """What a node has sent over its network interfaces, sampled while a run goes on.

    Args:
        pid: a process in the node's network namespace.
    """

    def __init__(self, pid: int) -> None:
        self._file, self._over = Path(f"/proc/{pid}/net/dev"), threading.Event()
        self.samples: list[tuple[float, int]] = []

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Read the counters about twenty times a second."""
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


def spec_of(folder: Path, strategy: str, steps: int, **options: Any) -> dict[str, Any]:
    """A small model, all weights trained, on two nodes of two ranks; `options` are the strategy's."""
    return {
        "name": "node-bytes",
        "model": {"name": "tiny:mistral", "config": CONFIG},
        "data": {"source": "builtin:instructions", "subset": 80, "max_length": 64, "eval_fraction": 0.0},
        "train": {
            "max_steps": steps, "grad_accum": ACCUMULATION, "micro_batch_size": 1, "schedule": "constant", "lr": 1e-3,
        },
        "eval": {"at_end": False},
        "checkpoint": {"mode": "full", "every": 1000},
        "strategy": {"name": strategy, **options},
        "cluster": {
            "launcher": "slurm",
            "nodes": NODES,
            "procs_per_node": RANKS_PER_NODE,
            "device": "cpu",
            "device_memory_gib": 4,
            "cache": str(folder / "cache"),
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "run_root": str(folder / "runs"),
    }  # fmt: skip


def expected_bytes(asked: RunSpec, plan: LaunchPlan) -> int:
    """What the communication model says a node sends per optimizer step."""
    config, sends = find_config(asked).config, strategy_info(plan.strategy).node_sends
    assert config is not None and sends is not None
    return sends(model_of(asked, plan, config), plan.strategy_options, NODES, ACCUMULATION)


def step_events(run: RunDir) -> list[dict[str, Any]]:
    return [e for e in without_repeated_steps(list(read_events(run.events_of(0)))) if e["event"] == "step"]


def trained(spec: dict[str, Any]) -> RunDir:
    """Run a spec to its end."""
    result = api.run(spec)
    if result.exit_code:
        raise SystemExit(f"the run failed: {result.message}")
    return RunDir(Path(result.folder))


def counted(box: Box, spec: dict[str, Any]) -> tuple[dict[str, Any], RunDir]:
    """Run a spec while the bytes that each node sends are counted."""
    counters = {name: SentBytes(pid) for name, pid in box.inits().items() if name in box.node_names}
    with ExitStack() as stack:
        for counter in counters.values():
            stack.enter_context(counter.sampled())
        run = trained(spec)
    plan = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
    ends = [e["time"] for e in step_events(run)][2:-1]
    expected = expected_bytes(parse_spec(spec), plan)
    sent = {name: counter.per_step(ends) for name, counter in sorted(counters.items())}
    return {
        "replicate": plan.strategy_options["replicate"],
        "why": plan.replication,
        "shard_ranks": plan.shard_ranks,
        "steps_counted": len(ends),
        "sent_bytes_per_step": {name: round(value) for name, value in sent.items()},
        "expected_bytes_per_step": expected,
        "sent_to_expected": {name: round(value / expected, 4) for name, value in sent.items()},
    }, run


def bytes_of(box: Box, folder: Path, strategy: str, steps: int) -> dict[str, Any]:
    """Count the bytes with and without copies on nodes; the losses of both, which differ in the order of sums only."""
    found, losses = {}, {}
    for value in REPLICATE:
        spec = spec_of(folder, strategy, steps, replicate=value)
        found[value], run = counted(box, spec)
        losses[value] = [e["loss"] for e in step_events(run)]
        print(f"{strategy}, replicate {value}: {json.dumps(found[value])}", flush=True)
    pairs = list(zip(losses["nodes"], losses["none"], strict=True))
    sent = {value: max(row["sent_bytes_per_step"].values()) for value, row in found.items()}
    expected = {value: row["expected_bytes_per_step"] for value, row in found.items()}
    return {
        "by_replicate": found,
        "saved": {
            "sent": round(sent["none"] / sent["nodes"], 3),
            "expected": round(expected["none"] / expected["nodes"], 3),
        },
        "largest_relative_loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "resumed_bitwise": resumed_losses(folder, strategy, steps) == losses["nodes"],
    }


def resumed_losses(folder: Path, strategy: str, steps: int) -> list[float]:
    """Train half of the steps with copies on nodes, and resume for the other half."""
    run = trained(spec_of(folder, strategy, steps // 2, replicate="nodes"))
    result = api.resume(run.name, sets=[f"train.max_steps={steps}"], run_root=folder / "runs")
    if result.exit_code:
        raise SystemExit(f"the resumed run failed: {result.message}")
    return [e["loss"] for e in step_events(run)]


def parity_of(folder: Path, strategies: list[str]) -> list[dict[str, Any]]:
    """Compare the strategies, with copies on nodes, with one process."""
    spec = parse_spec({**spec_of(folder, strategies[0], 10, replicate="nodes"), "checkpoint": {"mode": "none"}})
    done = compare(spec, comparison_request(spec, strategies, repeats=1), api.NullObserver())
    limits = done.document()["setting"]["limits"]
    return [
        {
            "strategy": row.strategy,
            "replicate": "nodes",
            "parity": row.gates.parity,
            "mechanism": row.gates.mechanism,
            "equal_work": row.gates.equal_work,
            "parity_errors": row.parity_errors,
            "limits": {kind: limit["error"] for kind, limit in limits.items()},
            "reasons": row.reasons,
        }
        for row in done.rows
    ]


def problems_of(found: dict[str, Any]) -> list[str]:
    """Return what is not as it should be."""
    problems = [f"not complete: {found['failed']}"] if "failed" in found else []
    for strategy, row in found["strategies"].items():
        for value, count in row["by_replicate"].items():
            for node, ratio in count["sent_to_expected"].items():
                if not LOWEST <= ratio <= HIGHEST:
                    problems.append(f"{strategy}, replicate {value}: {node} sent {ratio:.2f} of what is expected")
        if row["saved"]["sent"] < SAVES_AT_LEAST:
            problems.append(f"{strategy}: copies save {row['saved']['sent']:.1f}, expected {SAVES_AT_LEAST:g} at least")
        if (most := row["largest_relative_loss_difference"]) > LOSS_TOLERANCE:
            problems.append(f"{strategy}: losses with and without copies differ by up to {most:.1e}")
        if not row["resumed_bitwise"]:
            problems.append(f"{strategy}: the losses of the resumed run differ from those of the unbroken one")
    failed = [row for row in found["parity"] if not row["parity"]]
    return [*problems, *(f"{row['strategy']}: parity failed: {'; '.join(row['reasons'])}" for row in failed)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="pytorch_zero3,pytorch_zero2")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "node_bytes.json")
    args = parser.parse_args()
    names = args.strategies.split(",")
    clock = machine.CpuClock.now()
    found: dict[str, Any] = {
        "benchmark": "node_bytes",
        "what": "bytes that a node sends to the other per optimizer step under FSDP2, with a copy of the weights on "
        "each node (replicate: nodes, HSDP) and without, counted on the interfaces of a cluster in a box",
        "workload": {
            "model": CONFIG,
            "nodes": NODES,
            "ranks_per_node": RANKS_PER_NODE,
            "grad_accum": ACCUMULATION,
            "steps": args.steps,
            "dtype": "float32",
            "backend": "gloo",
        },
        "machine": machine.facts(),
        "strategies": {},
        "parity": [],
    }
    box = up(BoxOptions(name=f"bytes-{os.getpid()}", nodes=NODES))
    os.environ[NAME_VARIABLE] = box.name
    try:
        with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="node-bytes-") as name:  # each node has its own /tmp
            folder = Path(name)
            folder.chmod(0o755)
            for one in names:
                found["strategies"][one] = bytes_of(box, folder, one, args.steps)
            found["parity"] = parity_of(folder, names)
    except (AllranksError, SystemExit) as error:  # what was measured is kept, and the file says that it is not all
        found["failed"] = str(error)
    finally:
        down(box.name)
        found["problems"] = problems_of(found)
        found["disturbed"] = clock.disturbance()
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["parity"], indent=1))
    for one, row in found["strategies"].items():
        print(f"{one}: {row['saved']}")
    print("\n".join(found["problems"]) or "all as expected")
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
