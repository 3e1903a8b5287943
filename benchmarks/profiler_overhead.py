"""What ``observe.profile`` costs outside its window, and within it: the same training with and without, in turns.

``python -m benchmarks.profiler_overhead [--pairs 5] [--steps 120] [--json benchmarks/results/profiler_overhead.json]``.
Two gloo ranks train a tiny model. Compared is the median step time of steps before the window (after warm-up) and after
it; ratios are formed within a pair, whose order alternates. The exit code is 1 if the median ratio is above 1.05.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from allranks import api
from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from benchmarks import machine

LIMIT = 1.05
WARM_UP = 5
WINDOW = {"wait": 40, "warmup": 2, "active": 3}


def spec(folder: Path, steps: int, profile: dict[str, int] | None) -> dict[str, Any]:
    """A training whose steps take some tens of milliseconds."""
    model = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    return {
        "name": "profiled" if profile else "plain",
        "model": {"name": "tiny:mistral", "config": model},
        "data": {"source": "builtin:instructions", "subset": 800, "max_length": 128, "eval_fraction": 0.0},
        "train": {"max_steps": steps, "micro_batch_size": 2},
        "checkpoint": {"mode": "none"},
        "observe": {"profile": profile},
        "cluster": {"cache": str(folder / "cache"), "procs_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}},
        "run_root": str(folder / "runs"),
    }


def measure(folder: Path, steps: int, profile: dict[str, int] | None) -> dict[str, float]:
    """Median step times in seconds of rank 0, by where the step lies."""
    result = api.run(spec(folder, steps, profile))
    if result.exit_code:
        raise SystemExit(f"the run failed: {result.message}")
    run = RunDir(Path(result.folder))
    if len(run.traced_ranks()) != (2 if profile else 0):
        raise SystemExit(f"{run.root} has {len(run.traced_ranks())} traces")
    times = {e["step"]: e["step_time_s"] for e in read_events(run.events_of(0)) if e["event"] == "step"}
    first = WINDOW["wait"] + WINDOW["warmup"]
    last = first + WINDOW["active"]
    places = {
        "before": range(WARM_UP + 1, WINDOW["wait"] + 1),
        "within": range(first + 1, last + 1),
        "after": range(last + 1, steps + 1),
    }
    return {place: median(times[s] for s in at) for place, at in places.items()} | {
        "outside": median(times[s] for place in ("before", "after") for s in places[place])
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure(folder, args.steps, None)  # builds the data for all
        for number in range(args.pairs):
            clock = machine.CpuClock.now()
            order = [WINDOW, None] if number % 2 else [None, WINDOW]
            took = {"profiled" if p else "plain": measure(folder, args.steps, p) for p in order}
            ratio = {place: took["profiled"][place] / took["plain"][place] for place in took["plain"]}
            pairs.append({"step_time_s": took, "ratio": ratio, "disturbed": clock.disturbance()})
            print(f"pair {number}: outside {ratio['outside']:.3f}, within {ratio['within']:.2f}", flush=True)
    ratios = {
        place: {
            "median": median(p["ratio"][place] for p in pairs),
            "min": min(p["ratio"][place] for p in pairs),
            "max": max(p["ratio"][place] for p in pairs),
        }
        for place in pairs[0]["ratio"]
    }
    outside = ratios["outside"]
    print(
        f"step time with a profiler over that without: {outside['median']:.3f} outside its window "
        f"({outside['min']:.3f} to {outside['max']:.3f}), {ratios['within']['median']:.2f} within; the aim is at most {LIMIT}"
    )
    if args.json:
        result = {"window": WINDOW, "steps": args.steps, "ratio": ratios, "pairs": pairs, "machine": machine.facts()}
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(outside["median"] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
