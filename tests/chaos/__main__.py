"""Run trials: ``python -m tests.chaos [--shard I/N] [--seeds 1-200] [--launcher local]``, or add up their results.

Results are JSON lines in ``.chaos``, one file per shard; a seed that has one there is not run again. ``--summary``
writes the totals to ``benchmarks/results/chaos.json``.
"""

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
from benchmarks.machine import facts

from tests.chaos.harness import Cluster, cluster, run_trial, undisturbed_weights
from tests.chaos.trials import SEEDS, Result, totals, trial
from tests.conftest import REPO

TABLE = REPO / "benchmarks" / "results" / "chaos.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.chaos")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th seed, beginning with the I-th")
    parser.add_argument("--seeds", default=f"1-{SEEDS}", metavar="A-B")
    parser.add_argument("--launcher", default="", choices=("", "local", "slurm"), help="only trials that use it")
    parser.add_argument("--results", type=Path, default=REPO / ".chaos")
    parser.add_argument("--summary", action="store_true", help="run nothing; write the totals")
    args = parser.parse_args()
    args.results.mkdir(exist_ok=True)
    if args.summary:
        summarize(args.results)
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the trial under way is cleaned up
    (index, count), (first, last) = (map(int, args.shard.split("/")), map(int, args.seeds.split("-")))
    done = {one.seed for one in read_results(args.results)}
    seeds = [seed for seed in range(first, last + 1) if seed % count == index % count and seed not in done]
    chosen = [one for one in map(trial, seeds) if args.launcher in ("", one.case.launcher)]
    with ExitStack() as stack:
        box = stack.enter_context(cluster()) if any(one.case.launcher == "slurm" for one in chosen) else None
        for one in chosen:
            weights = reference(args.results, one.strategy, one.case.launcher, box)
            result = run_trial(one, weights, box)
            with (args.results / f"{index}-of-{count}.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
            mark = "ok  " if result.ok else "FAIL"
            said = f"{result.outcome}, culprit named: {result.named}, {result.seconds} s, recovery {result.recovery_s}"
            print(f"{mark} {one.seed:3} {result.launcher} {one.strategy}: {'; '.join(one.faults)}", flush=True)
            print(f"         {said}; {'; '.join(result.reasons)}", flush=True)


def reference(folder: Path, strategy: str, launcher: str, box: Cluster | None) -> str:
    """The digest of an undisturbed run's final weights, from an earlier shard or measured now."""
    file = folder / f"weights-{launcher}-{strategy}"
    if not file.exists():
        file.write_text(undisturbed_weights(strategy, launcher, box if launcher == "slurm" else None))
    return file.read_text()


def read_results(folder: Path) -> list[Result]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    return sorted((msgspec.json.decode(line, type=Result) for line in lines), key=lambda one: one.seed)


def summarize(folder: Path) -> None:
    results = read_results(folder)
    parts = {name: [one for one in results if one.launcher == name] for name in ("local", "slurm")}
    table = {"machine": facts(), **totals(results)}
    table["launchers"] = {name: totals(part) for name, part in parts.items() if part}
    table["not_ok"] = [msgspec.to_builtins(one) for one in results if not one.ok]
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(totals(results), indent=1))


if __name__ == "__main__":
    main()
