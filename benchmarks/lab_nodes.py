"""The lab on 3 and on 5 nodes, two ranks each: time per epoch, in turns, on a cluster in a box or a real Slurm.

``python -m benchmarks.lab_nodes --shared FOLDER [--nodes 3,5] [--repeats 5] [--json OUT]``. Needs a Slurm with as many
nodes, or such a box that is up; FOLDER is one that all nodes see. On real nodes the time falls with their number. In a box
all of them share the cores of one machine: there the figure tells what more ranks cost, not what more machines gain.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from allranks import api
from allranks.nodes.slurm.commands import find_slurm
from benchmarks import machine

ROOT = Path(__file__).resolve().parents[1]
KEPT = (
    "world_size",
    "steps",
    "epoch_s",
    "wall_time_s",
    "accuracy",
    "eval_loss",
    "tokens_per_s",
    "tokens_per_s_per_rank",
)


def once(shared: Path, nodes: int, subset: int) -> dict[str, Any]:
    """One run of the example; what its metrics.json says."""
    clock = machine.CpuClock.now()
    sets = [
        f"name=lab-{nodes}",
        f"cluster.nodes={nodes}",
        f"data.subset={subset}",
        f"run_root={shared}/runs",
        f"cluster.cache={shared}/cache",
        "cluster.env.OMP_NUM_THREADS='1'",
    ]
    result = api.run(ROOT / "examples" / "lab-bert-agnews-slurm.yaml", sets)
    if result.exit_code:
        raise SystemExit(f"the run on {nodes} nodes failed: {result.message}")
    step = result.metrics["step_time_s"]
    return {
        **{name: result.metrics[name] for name in KEPT},
        "step_time_median_s": step["median"],
        "steal_share": clock.disturbance()["steal_share"],
    }


def summary(runs: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Median and range of the time per epoch, and its ratio to the fewest nodes', formed within each repeat."""
    fewest = min(runs)
    found = {}
    for nodes, rows in runs.items():
        times = [row["epoch_s"] for row in rows]
        ratios = [row["epoch_s"] / base["epoch_s"] for row, base in zip(rows, runs[fewest], strict=True)]
        found[str(nodes)] = {
            "epoch_s": {"median": median(times), "min": min(times), "max": max(times)},
            "to_fewest": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--nodes", default="3,5")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--subset", type=int, default=2000, help="rows of news")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "lab_nodes.json")
    args = parser.parse_args()
    counts = [int(word) for word in args.nodes.split(",")]
    label = find_slurm(args.shared).label
    once(args.shared, min(counts), args.subset)  # builds the data once, and warms the page cache, for all
    runs: dict[int, list[dict[str, Any]]] = {nodes: [] for nodes in counts}
    for number in range(args.repeats):
        for nodes in counts:
            runs[nodes].append(once(args.shared, nodes, args.subset))
            print(f"repeat {number}: {nodes} nodes {runs[nodes][-1]['epoch_s']:.2f} s an epoch", flush=True)
    found = summary(runs)
    for nodes, row in found.items():
        print(
            f"{nodes} nodes: {row['epoch_s']['median']:.2f} s an epoch ({row['epoch_s']['min']:.2f} to {row['epoch_s']['max']:.2f})"
            f", {row['to_fewest']['median']:.2f} times that of {min(counts)} nodes"
        )
    result = {
        "benchmark": "lab_nodes",
        "what": "time per epoch of examples/lab-bert-agnews-slurm.yaml, two ranks a node, runs in turns",
        "slurm": label.partition(" '")[0],
        "nodes_share_one_machine": "box" in label,
        "subset": args.subset,
        "repeats": args.repeats,
        "by_nodes": found,
        "runs": {str(nodes): rows for nodes, rows in runs.items()},
        "machine": machine.facts(),
    }
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
