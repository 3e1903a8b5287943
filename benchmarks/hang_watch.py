"""What watching for hangs costs: the same training with ``observe.hang_s`` on and off, in turns.

``python -m benchmarks.hang_watch [--pairs 5] [--steps 150] [--json benchmarks/results/hang_watch.json]``. Two gloo ranks train
a tiny model. Compared are tokens per second after warm-up; ratios are formed within a pair, whose order alternates. The
exit code is 1 if watching takes more than 3 % by the median.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from allranks import api
from benchmarks import machine

LEAST = 0.97


def spec(folder: Path, steps: int, hang_s: float | None) -> dict[str, Any]:
    """Steps of some milliseconds: watching costs the same for each, so short ones show it most."""
    model = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    return {
        "name": "watched" if hang_s else "plain",
        "model": {"name": "tiny:mistral", "config": model},
        "data": {"source": "builtin:instructions", "subset": 800, "max_length": 128, "eval_fraction": 0.0},
        "train": {"max_steps": steps, "micro_batch_size": 2, "grad_accum": 4},
        "checkpoint": {"mode": "none"},
        "observe": {"hang_s": hang_s},
        "cluster": {"cache": str(folder / "cache"), "procs_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}},
        "run_root": str(folder / "runs"),
    }


def measure(folder: Path, steps: int, hang_s: float | None) -> float:
    """Real tokens per second over both ranks, after warm-up."""
    result = api.run(spec(folder, steps, hang_s))
    if result.exit_code:
        raise SystemExit(f"the run failed: {result.message}")
    return result.metrics["tokens_per_s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(folder, 6, None)  # builds the data for all
        for number in range(args.pairs):
            clock = machine.CpuClock.now()
            order: list[float | None] = [30.0, None] if number % 2 else [None, 30.0]
            took = {"watched" if h else "plain": measure(folder, args.steps, h) for h in order}
            ratio = took["watched"] / took["plain"]
            pairs.append({"tokens_per_s": took, "ratio": ratio, "disturbed": clock.disturbance()})
            print(f"pair {number}: {ratio:.3f}", flush=True)
    ratios = [p["ratio"] for p in pairs]
    print(
        f"tokens/s watched over plain: median {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), the aim is at least {LEAST}"
    )
    if args.json:
        found = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
        result = {"steps": args.steps, "ratio": found, "pairs": pairs, "machine": machine.facts()}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(median(ratios) < LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
