"""Variants (d) and (e): ``allranks run`` on the shared workload, and its run folder read as a peer's record.

The spec takes the workload's training rows with the Alpaca template, which gives the workload's very tokens, and its
held-out rows as evaluation set. allranks shuffles rows and sequences by its own seed, so the order differs from the
peers'. The held-out loss that counts is computed here from the saved adapter with the peers' own function; the loss
that allranks reports stands beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.programs import console_script, run
from benchmarks.train_throughput import memory
from benchmarks.train_throughput.measure import refuse_if_unsound, throughput
from benchmarks.train_throughput.packing import steps_for
from benchmarks.train_throughput.workload import (
    CLIP_NORM,
    ENV,
    LEARNING_RATE,
    LORA,
    SEQ_LEN,
    WEIGHT_DECAY,
    WORLD,
    Job,
    Workload,
)


def spec(workload: Workload, packing: str, steps: int, seed: int, run_root: Path) -> dict[str, Any]:
    """The same training as the peers', said in allranks' spec. What is observed stays at its defaults."""
    return {
        "name": f"bench-{packing}",
        "model": {"name": str(workload.model_path), "dtype": "float32", "attention": "sdpa"},
        "data": {
            "source": str(workload.folder / "train.json"),
            "template": "alpaca",
            "max_length": SEQ_LEN,
            "packing": packing,
            "mask_prompt": False,
            "eval_fraction": 0.0,
        },
        "adapter": {
            "type": "lora",
            "r": LORA["r"],
            "alpha": LORA["lora_alpha"],
            "dropout": LORA["lora_dropout"],
            "targets": LORA["target_modules"],
        },
        "strategy": {"name": "pytorch_ddp"},
        "train": {
            "max_steps": steps,
            "micro_batch_size": 1,
            "grad_accum": 1,
            "lr": LEARNING_RATE,
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": CLIP_NORM,
            "seed": seed,
        },
        "eval": {"source": str(workload.folder / "heldout.json"), "subset": None, "at_end": True, "samples": 0},
        "checkpoint": {"mode": "weights_only", "at_end": True},
        "cluster": {"launcher": "local", "procs_per_node": WORLD, "device": "cpu", "env": {"OMP_NUM_THREADS": "1"}},
        "observe": {"log_every": 1},
        "run_root": str(run_root),
    }


def run_allranks(packing: str, job: Job) -> dict[str, Any]:
    """Write the spec, run it with the installed console script, and read the run folder."""
    runs = job.folder / "runs"
    spec_file = job.folder / "spec.yaml"
    steps = steps_for(job.workload, packing, job.useful_tokens)
    spec_file.write_text(yaml.safe_dump(spec(job.workload, packing, steps, job.seed, runs), sort_keys=False))
    with memory.RankWatch(runs) as watch:
        run([console_script(), "run", str(spec_file)], job.folder / "run.log", job.timeout_s, ENV)
    (run_folder,) = (p for p in runs.iterdir() if (p / "metrics.json").exists())
    return {**read_run(run_folder, job), "grown_bytes": watch.grown_bytes(run_folder / "events" / "rank0.jsonl")}


def read_run(run_folder: Path, job: Job) -> dict[str, Any]:
    """A run folder as a record like the peers'."""
    metrics = json.loads((run_folder / "metrics.json").read_text())
    ranks = [_rank_steps(path) for path in sorted((run_folder / "events").glob("rank*.jsonl"))]
    rates = [throughput(tokens, seconds) for tokens, seconds in ranks]
    proof = metrics["sync_proof"]
    record = {
        "steps": len(ranks[0][1]),
        "per_step_s": [round(s, 6) for s in ranks[0][1]],
        "useful_tokens_per_step": [tokens for tokens, _ in ranks],
        "useful_tokens": sum(sum(tokens) for tokens, _ in ranks),
        "tokens_per_s_per_rank": {k: round(float(np.mean([r[k] for r in rates])), 2) for k in rates[0]},
        "heldout_loss": _adapter_loss(run_folder, job),
        "world_size_verified": proof["world_size"],
        "weights_equal_across_ranks": proof["weights_equal"],
        "data_differs_across_ranks": proof["data_disjoint"],
        "reported": {k: metrics.get(k) for k in ("eval_loss", "tokens_per_s_per_rank", "tokens_real", "step_time_s")},
        "variant": f"allranks_{metrics.get('strategy')}",
    }
    refuse_if_unsound(record)
    return record


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        yield from map(json.loads, lines)


def _rank_steps(path: Path) -> tuple[list[int], list[float]]:
    """Useful tokens and wall seconds of each step of one rank.

    allranks measures ``step_time_s`` as the peers are measured, from the end of one step to the end of the next.
    """
    steps = [event for event in _events(path) if event["event"] == "step"]
    if any(event.get("steps", 1) != 1 for event in steps):
        raise ValueError(f"{path.name}: events of more than one step; log_every must be 1")
    return [int(event["tokens"]) for event in steps], [float(event["step_time_s"]) for event in steps]


def _adapter_loss(run_folder: Path, job: Job) -> float:
    """Evaluate the last checkpoint in a process of its own."""
    checkpoints = sorted((run_folder / "checkpoints").glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
    out = job.folder / "evaluate.json"
    command = [sys.executable, "-m", "benchmarks.train_throughput.evaluate", "--workload", str(job.workload.folder)]
    command += ["--adapter", str(checkpoints[-1]), "--out", str(out)]
    run(command, job.folder / "evaluate.log", job.timeout_s, ENV)
    return json.loads(out.read_text())["heldout_loss"]
