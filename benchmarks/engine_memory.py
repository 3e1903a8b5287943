"""What an engine's own libraries weigh in a CPU rank, and whether `plan` tells the memory of whole real runs.

Real runs (`allranks run`, two ranks), each in processes of its own; measured is the most resident memory that a rank had
(``peak_memory_bytes`` of metrics.json). *Floors*: a model of a few thousand weights, so that what is left is the interpreter,
the libraries, and what an engine makes when it starts; `allranks.planning.memory.estimate` has its constants from here. *Checks*: models
that weigh something, against the estimate.

Run as: ``python -m benchmarks.engine_memory``; about 4 minutes on two cores. The result is `benchmarks/results/engine_memory.json`.
Exit code 0: every check is within 10 %; 1 otherwise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from allranks.planning.memory import fit, make_plan
from allranks.planning.memory.estimate import ESTIMATE_ERROR
from allranks.spec import parse_spec
from allranks.utils.machine import machine_facts
from allranks.utils.text import format_bytes
from benchmarks import machine
from benchmarks.programs import ROOT

RESULT = ROOT / "benchmarks" / "results" / "engine_memory.json"
PLAIN = "pytorch_ddp"
ENGINES = (PLAIN, "deepspeed_zero1", "hf_trainer")
STRATEGIES = (PLAIN, "zero1", "pytorch_zero3", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "hf_trainer")
NOISE = {"source": "builtin:noise", "eval_fraction": 0.0}
FLOORS: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"name": "mlp:16x2"}, "data": NOISE},
}
CHECKS: dict[str, dict[str, Any]] = {
    "mlp:1024x4, bfloat16": {"model": {"name": "mlp:1024x4", "dtype": "bfloat16"}, "data": NOISE},
    "mlp:1536x4, float32": {"model": {"name": "mlp:1536x4", "dtype": "float32"}, "data": NOISE},
    "mlp:2048x6, bfloat16": {"model": {"name": "mlp:2048x6", "dtype": "bfloat16"}, "data": NOISE},
}
TIMEOUT_S = 600


def spec_of(strategy: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Four steps, and nothing else that takes memory."""
    return {
        "name": "memory",
        **sections,
        "strategy": {"name": strategy},
        "train": {"micro_batch_size": 8, "max_steps": 4},
        "eval": {"at_end": False, "baseline": False},
        "checkpoint": {"mode": "none"},
        "cluster": {"procs_per_node": 2, "device": "cpu"},
    }


def measure(spec: dict[str, Any]) -> int:
    """The most memory that a rank of a real run had, in bytes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spec.yaml").write_text(json.dumps(spec))
        command = "import sys; from allranks.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", command, "run", "spec.yaml"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{spec['strategy']}: {done.stderr[-1500:]}")
        return json.loads(next(folder.rglob("metrics.json")).read_text())["peak_memory_bytes"]


def estimate(spec: dict[str, Any]) -> int:
    """What `plan` says of it, in bytes."""
    parsed, facts = parse_spec(spec), machine_facts()
    return fit(parsed, make_plan(parsed, facts), facts).needed_bytes


def floors() -> list[dict[str, Any]]:
    """By model and strategy: the peak, and how much more it is than under `PLAIN`."""
    rows = []
    for model, sections in FLOORS.items():
        plain = 0
        for strategy in STRATEGIES:
            peak = measure(spec_of(strategy, sections))
            plain = peak if strategy == PLAIN else plain
            rows.append({"model": model, "strategy": strategy, "peak_bytes": peak, "more_bytes": peak - plain})
            print(f"{model}: {strategy}: {format_bytes(peak)}, {(peak - plain) / 2**20:+.0f} MiB", flush=True)
    return rows


def checks() -> list[dict[str, Any]]:
    """By model and strategy: the estimate beside the peak."""
    rows = []
    for model, sections in CHECKS.items():
        for strategy in ENGINES:
            spec = spec_of(strategy, sections)
            estimated, peak = estimate(spec), measure(spec)
            row = {"model": model, "strategy": strategy, "estimated_bytes": estimated, "peak_bytes": peak}
            rows.append(row | {"error": round(estimated / peak - 1, 4)})
            print(
                f"{model}: {strategy}: {format_bytes(estimated)} of {format_bytes(peak)}, {estimated / peak - 1:+.1%}",
                flush=True,
            )
    return rows


def main() -> int:
    """Measure, tell, keep."""
    found = {"machine": machine.facts(), "ranks": 2, "floors": floors(), "checks": checks()}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(abs(row["error"]) <= ESTIMATE_ERROR for row in found["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
