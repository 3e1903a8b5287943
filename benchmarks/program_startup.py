"""Wall time of a user's own program under ``allranks run`` (``script:``) beside the same program under torchrun.

``python -m benchmarks.program_startup [--pairs 10] [--ranks 2] [--json OUT]``. The program joins a gloo group, all-reduces once and
leaves. Both sides run in turns, on this machine, with one thread per rank. What allranks adds is its command, its checks, its
agent, the summary and the report.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from allranks.rundir.events import read_events
from allranks.rundir.paths import RunDir
from benchmarks import machine, programs

PROGRAM = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert int(x) == dist.get_world_size()
dist.destroy_process_group()
"""
TIMEOUT_S = 120.0
ENV = {"OMP_NUM_THREADS": "1"}
LIMIT_S = 1.0


def ours(folder: Path, ranks: int) -> dict[str, float]:
    """One run of allranks: the wall time, and when ranks began and ended in it."""
    root = folder / f"runs-{time.monotonic_ns()}"
    spec = folder / "spec.yaml"
    spec.write_text(
        f"name: b\nscript: {{path: {folder / 'program.py'}}}\ncluster: {{procs_per_node: {ranks}}}\nrun_root: {root}\n"
    )
    began = time.time()
    wall = programs.run([sys.executable, "-m", "allranks", "run", str(spec)], folder / "log", TIMEOUT_S, ENV)
    (run,) = (RunDir(path) for path in root.iterdir())
    events = [e for rank in range(ranks) for e in read_events(run.events_of(rank))]
    starts = [e["time"] for e in events if e["event"] == "start"]
    ends = [e["time"] for e in events if e["event"] == "phase"]
    return {
        "wall_s": wall,
        "to_rank_start_s": max(starts) - began,
        "program_s": max(ends) - min(starts),
        "after_program_s": began + wall - max(ends),
    }


def theirs(folder: Path, ranks: int) -> dict[str, float]:
    """One run of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return {"wall_s": programs.run([*command, str(folder / "program.py")], folder / "log", TIMEOUT_S, ENV)}


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {name: round(f(values), 3) for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    programs.exit_on_sigterm()
    pairs: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        for start in (ours, theirs):  # warms the page cache for both
            start(folder, args.ranks)
        clock = machine.CpuClock.now()
        for number in range(args.pairs):
            first, second = (ours, theirs) if number % 2 else (theirs, ours)
            one, two = first(folder, args.ranks), second(folder, args.ranks)
            pair = {"allranks": one if first is ours else two, "torchrun": two if first is ours else one}
            pairs.append(pair)
            print(
                f"allranks {pair['allranks']['wall_s']:.2f} s, torchrun {pair['torchrun']['wall_s']:.2f} s", flush=True
            )
    extra = [p["allranks"]["wall_s"] - p["torchrun"]["wall_s"] for p in pairs]
    parts = {name: spread([p["allranks"][name] for p in pairs]) for name in pairs[0]["allranks"]}
    result = {
        "benchmark": "program_startup",
        "ranks": args.ranks,
        "extra_s": spread(extra),
        "allranks": parts,
        "torchrun": {"wall_s": spread([p["torchrun"]["wall_s"] for p in pairs])},
        "pairs": pairs,
        "disturbed": clock.disturbance(),
        "load": os.getloadavg()[0],
        "machine": machine.facts(),
    }
    print(json.dumps({k: result[k] for k in ("extra_s", "allranks", "torchrun", "disturbed")}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["extra_s"]["median"] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
