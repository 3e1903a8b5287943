"""Time from sbatch to the first training step: allranks beside a bare sbatch + srun + torchrun of the same worker.

``python -m benchmarks.launch_overhead --shared FOLDER [--nodes 3] [--pairs 5] [--json OUT]``. Needs a Slurm, or a
cluster in a box that is up; FOLDER is one that all nodes see. The bare script knows beforehand what allranks finds out on
the nodes: the first node's address, and a port that is free. Both train the same spec in a run folder of the same kind.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from allranks import api
from allranks.launch.slurm.job import SlurmJob
from allranks.nodes.slurm.commands import Slurm, find_slurm
from allranks.rundir.events import read_events
from allranks.rundir.files import write_json
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from benchmarks import machine

LIMIT_S = 180.0
PORT = 29876
BARE = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --output={log}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
ADDRESS=$(srun --nodes=1 --ntasks=1 --relative=0 hostname -I | cut -d' ' -f1)
srun --cpus-per-task=1 bash -c 'export GLOO_SOCKET_IFNAME=$(ip -o -4 addr show up | grep -v " lo " | head -n1 | cut -d" " -f2); \
exec {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 --node-rank=$SLURM_NODEID \
--master-addr='$ADDRESS' --master-port={port} -m allranks.launch.rank {run} 1'
"""


def spec(shared: Path, nodes: int, name: str) -> dict[str, Any]:
    """A training that is over in a moment: what is measured is the way to its first step."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 320,
    }
    return {
        "name": name,
        "model": {"name": "tiny:mistral", "config": small},
        "data": {"source": "builtin:instructions", "subset": 200, "max_length": 64, "eval_fraction": 0.0},
        "train": {"max_steps": 3},
        "checkpoint": {"mode": "none"},
        "cluster": {
            "launcher": "slurm",
            "nodes": nodes,
            "procs_per_node": 1,
            "cache": str(shared / "cache"),
            "env": {"OMP_NUM_THREADS": "1"},
        },
        "run_root": str(shared / "runs"),
    }


def first_event(run: RunDir, kind: str) -> float | None:
    """When rank 0 wrote its first event of a kind."""
    return next((e["time"] for e in read_events(run.events_of(0)) if e["event"] == kind), None)


def wait(slurm: Slurm, job: str, run: RunDir) -> dict[str, float]:
    """Until the job has left the queue; seconds since its submission at which things happened."""
    deadline = time.monotonic() + LIMIT_S
    while slurm.state(job).alive:
        if time.monotonic() > deadline:
            slurm.cancel(job)
            raise SystemExit(f"job {job} did not end in {LIMIT_S:.0f} s; look at {run.logs}")
        time.sleep(0.2)
    step = first_event(run, "step")
    if step is None:
        raise SystemExit(f"job {job} trained no step; look at {run.logs}")
    return {"rank_start": first_event(run, "start") or 0.0, "first_step": step}


def ours(slurm: Slurm, shared: Path, nodes: int) -> dict[str, float]:
    """allranks, its questions to the nodes included."""
    checked = parse_spec(spec(shared, nodes, "ours"))
    run, _ = api.prepare_run(checked)
    began = time.time()
    SlurmJob.submit(run, slurm)
    times = wait(slurm, msgspec.json.decode(run.job.read_bytes())["job"], run)
    return {name: at - began for name, at in times.items()}


def bare(slurm: Slurm, shared: Path, nodes: int) -> dict[str, float]:
    """The script that a careful person writes by hand."""
    checked = parse_spec(spec(shared, nodes, "bare"))
    run, _ = api.prepare_run(checked)
    run.logs_of(1).mkdir()
    write_json(run.logs_of(1) / "args.json", {})
    run.sbatch.write_text(
        BARE.format(
            nodes=nodes,
            log=run.logs / "slurm.log",
            python=shlex.quote(sys.executable),
            run=shlex.quote(str(run.root)),
            port=PORT,
        )
    )
    began = time.time()
    times = wait(slurm, slurm.submit(run.sbatch), run)
    return {name: at - began for name, at in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    slurm = find_slurm(args.shared)
    ours(slurm, args.shared, args.nodes)  # builds the data once, and warms the page cache, for both
    pairs = []
    for number in range(args.pairs):
        pair = {"ours": ours(slurm, args.shared, args.nodes), "bare": bare(slurm, args.shared, args.nodes)}
        pairs.append(pair)
        print(
            f"pair {number}: ours {pair['ours']['first_step']:.2f} s, bare {pair['bare']['first_step']:.2f} s",
            flush=True,
        )
    extra = [p["ours"]["first_step"] - p["bare"]["first_step"] for p in pairs]
    result = {
        "nodes": args.nodes,
        "extra_s": {"median": median(extra), "min": min(extra), "max": max(extra)},
        "pairs": pairs,
        "machine": machine.facts(),
    }
    print(
        f"allranks takes {median(extra):+.2f} s (from {min(extra):+.2f} to {max(extra):+.2f}) to the first step; the aim is at most +2 s"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
