"""Whether slow ranks are named, and no others: loaded and idle machine, with and without a rank that is really slow.

``python -m benchmarks.slow_ranks [--runs 8] [--steps 120] [--json benchmarks/results/slow_ranks.json]``. Two gloo ranks train a
tiny model while 0 to 3 other processes use the CPU. Counted are runs that name a rank that is not slow, and planted slow ranks
(a sleep or CPU work in data, backward pass or optimizer of rank 1) that are not named.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allranks import api
from benchmarks import machine

PLANTS = Path(__file__).parents[1] / "tests" / "dist" / "stuck"
KINDS = {
    "sleep_a_while": "own_s",
    "burn_a_while": "own_s",
    "slow_backward": "own_backward_s",
    "burning_backward": "own_backward_s",
    "slow_optimizer": "own_optimizer_s",
    "burning_optimizer": "own_optimizer_s",
}
LIMIT_S = 120


@contextmanager
def other_processes(count: int) -> Iterator[None]:
    """Run busy loops beside the runs; they end by themselves after `LIMIT_S`."""
    loop = f"import time\nend = time.monotonic() + {LIMIT_S}\nwhile time.monotonic() < end: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


def spec(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "name": "pace",
        "model": {"name": "tiny:mistral", "config": {"hidden_size": 64, "intermediate_size": 128}},
        "data": {"source": "builtin:instructions", "subset": 400, "max_length": 128, "eval_fraction": 0.0},
        "train": {"max_steps": steps, "micro_batch_size": 2},
        "checkpoint": {"mode": "none"},
        "eval": {"at_end": False},
        "cluster": {"cache": str(folder / "cache"), "procs_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}},
        "run_root": str(folder / "runs"),
    }


class Said:
    """What the command says while the run goes on."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None:
        self.lines.append(text)


def measure(folder: Path, steps: int, others: int, plant: str | None) -> dict[str, Any]:
    """Run once; return who was named, in what, and what was said of the machine."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PLANTS), os.environ.get("PYTHONPATH", "")])
    os.environ["STUCK"] = f"{plant}:1:-1" if plant else ""
    os.environ["STUCK_S"] = "0.1"
    listener = Said()
    with other_processes(others):
        result = api.run(spec(folder, steps), observer=listener)
    if result.exit_code:
        raise SystemExit(f"the run failed: {result.message}")
    own = result.metrics["own_time"]
    named = {r["rank"]: r["slow_in"] for r in own["ranks"] if r["slow"]} if own else {}
    during = [line for line in listener.lines if "is slow" in line or "overloaded" in line]
    return {"others": others, "plant": plant, "named": named, "said": during}


def wrong(row: dict[str, Any]) -> bool:
    """Return whether a rank was named that is not slow, at the end or during the run."""
    slow = {1} if row["plant"] else set()
    ranks = set(row["named"]) | {int(t.split()[1]) for t in row["said"] if t.startswith("rank ")}
    return bool(ranks - slow)


def missed(row: dict[str, Any]) -> bool:
    """Return whether the planted slow rank was not named in the part in which it is slow."""
    return row["plant"] is not None and KINDS[row["plant"]] not in row["named"].get(1, ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=8, help="runs without a slow rank, on a loaded machine")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plants", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [(1 + i % 3, None, args.steps) for i in range(args.runs)]
    cases += [(n, p, 40) for p, n in itertools.product(filter(None, args.plants.split(",")), (0, 2))]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for others, plant, steps in cases:
            rows.append(measure(Path(name), steps, others, plant))
            print(json.dumps(rows[-1]), flush=True)
    found = {
        "machine": machine.facts(),
        "loaded_runs": args.runs,
        "wrongly_named": sum(map(wrong, rows)),
        "planted": sum(r["plant"] is not None for r in rows),
        "missed": sum(map(missed, rows)),
        "rows": rows,
    }
    print({k: v for k, v in found.items() if k != "rows"})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["wrongly_named"] + found["missed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
