"""How long preflight takes for 1, 4 and 16 nodes, in turns, on one allocation of a cluster in a box (or a real Slurm).

``python -m benchmarks.preflight_nodes --shared FOLDER [--nodes 1,4,16] [--repeats 5] [--json OUT]``. Needs a Slurm with as
many nodes, or such a box that is up; FOLDER is one that all nodes see. What is timed is what the job's first node does
before ranks start: the questions to all nodes (one srun), who reaches whom (another), and the verdicts. In a box all nodes
share the cores of one machine, which real ones do not: there the growth is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from allranks.nodes.preflight.runner import TargetNodes, failure_lines, run_preflight
from allranks.nodes.slurm.allocations import allocate_nodes
from allranks.nodes.slurm.commands import find_slurm
from allranks.planning.planner import make_plan
from allranks.spec import parse_spec
from allranks.spec.records import RunSpec
from allranks.utils.machine import machine_facts
from benchmarks import machine

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ("total_s", "probe_s", "reach_s")


def spec_of(shared: Path, nodes: int) -> RunSpec:
    """A small training; preflight asks the same of its nodes as of a large one's."""
    return parse_spec(
        {
            "model": {"name": "tiny:mistral"},
            "data": {"source": "builtin:instructions"},
            "cluster": {"launcher": "slurm", "nodes": nodes, "procs_per_node": 1, "cache": str(shared / "cache")},
            "run_root": str(shared / "runs"),
        }
    )


def once(where: TargetNodes, shared: Path, nodes: int) -> dict[str, float]:
    """Preflight of the first `nodes` nodes; seconds."""
    spec = spec_of(shared, nodes)
    plan = make_plan(spec, machine_facts())
    some = msgspec.structs.replace(where, hosts=where.hosts[:nodes])
    began = time.perf_counter()
    found = run_preflight(some, spec, plan, shared, imports=False)
    total = time.perf_counter() - began
    if not found.may_run or len(found.reports) != nodes:
        raise SystemExit(f"preflight of {nodes} nodes failed: {'; '.join(failure_lines(found.reports))}")
    return {"total_s": round(total, 3), "probe_s": found.probe_s, "reach_s": found.reach_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--nodes", default="1,4,16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "preflight_nodes.json")
    args = parser.parse_args()
    counts = [int(word) for word in args.nodes.split(",")]
    slurm = find_slurm(args.shared)
    runs: dict[int, list[dict[str, float]]] = {nodes: [] for nodes in counts}
    clock = machine.CpuClock.now()
    with allocate_nodes(slurm, spec_of(args.shared, max(counts)).cluster, minutes=30) as job:
        where = TargetNodes(prefix=slurm.prefix, hosts=list(job.nodes), slurm_job=job.job_id, job_id=job.job_id, cpus=1)
        once(where, args.shared, max(counts))  # warms the page cache
        for number in range(args.repeats):
            for nodes in counts:
                runs[nodes].append(once(where, args.shared, nodes))
                print(f"repeat {number}: {nodes} nodes {runs[nodes][-1]['total_s']:.2f} s", flush=True)
    found: dict[str, Any] = {}
    for nodes, rows in runs.items():
        columns = {name: [row[name] for row in rows] for name in FIGURES}
        found[str(nodes)] = {n: {"median": median(v), "min": min(v), "max": max(v)} for n, v in columns.items()}
        line = found[str(nodes)]["total_s"]
        print(f"{nodes} nodes: {line['median']:.2f} s ({line['min']:.2f} to {line['max']:.2f})")
    result = {
        "benchmark": "preflight_nodes",
        "slurm": slurm.label.partition(" '")[0],
        "nodes_share_one_machine": bool(slurm.prefix),
        "repeats": args.repeats,
        "by_nodes": found,
        "runs": {str(nodes): rows for nodes, rows in runs.items()},
        "steal_share": clock.disturbance()["steal_share"],
        "machine": machine.facts(),
    }
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
