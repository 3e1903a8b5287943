"""Runs the variants one after the other, over and over, and writes the comparison.

Run as: ``python -m benchmarks.train_throughput.run --alpaca alpaca.json [--repeats 5] [--only a,b,t,c,k,p,q,x,d,e]``
Exit code 0: every variant has a number in every repeat; 1: some runs failed, or the machine was never quiet enough.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.programs import ROOT, exit_on_sigterm, run
from benchmarks.train_throughput import ours
from benchmarks.train_throughput.workload import ENV, SEQ_LEN, WARMUP_STEPS, WORLD, Job, Workload, build

VARIANTS = {
    "a": "HF Trainer, padded",
    "b": "TRL, packed, as it comes",
    "t": "TRL, packed, no checkpointing",
    "c": "bare DDP, packed",
    "k": "bare DDP, packed, compiled blocks",
    "p": "HF Trainer, packed",
    "q": "HF Trainer, packed, isolated",
    "x": "Accelerate, packed",
    "d": "allranks, wrapped",
    "e": "allranks, isolated",
}
PEERS = {
    "a": "peer_hf_trainer",
    "b": "peer_trl",
    "t": "peer_trl",
    "c": "peer_bare_ddp",
    "k": "peer_bare_ddp",
    "p": "peer_hf_trainer",
    "q": "peer_hf_trainer",
    "x": "peer_accelerate",
}
EXTRA = {
    "b": ["--trl-checkpointing"],
    "k": ["--compile"],
    "p": ["--packing", "wrapped"],
    "q": ["--packing", "isolated"],
}  # SFTTrainer's own default; "t" is TRL with it turned off
PACKING = {"d": "wrapped", "e": "isolated"}
PAIRS = [f"{x}/{y}" for x in "de" for y in "cktpqxba"] + ["e/d", "c/t", "c/b", "c/a", "k/c"]
AIMS = {"d/c": 1.2, "e/c": 1.2, "d/b": 1.4, "d/a": 2.5}
BASE_SEED = 42
DISTURBED = 0.1  # share of all cores that other programs used during a run, above which it is run again


def run_peer(variant: str, job: Job) -> dict[str, Any]:
    """Start a peer under torchrun and read its record."""
    out = job.folder / "record.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command += ["-m", f"benchmarks.train_throughput.{PEERS[variant]}", "--workload", str(job.workload.folder)]
    command += [
        "--useful-tokens",
        str(job.useful_tokens),
        "--seed",
        str(job.seed),
        "--out",
        str(out),
        *EXTRA.get(variant, []),
    ]
    run(command, job.folder / "run.log", job.timeout_s, ENV)
    return json.loads(out.read_text())


def run_variant(variant: str, job: Job, quiet_wait: float) -> dict[str, Any]:
    """One run of one variant, with the machine's disturbance while it ran; failures are results too."""
    waited = machine.wait_until_quiet(quiet_wait)
    clock = machine.CpuClock.now()
    result: dict[str, Any] = {"variant": variant, "seed": job.seed, "waited_for_quiet_s": waited}
    try:
        record = run_peer(variant, job) if variant in PEERS else ours.run_allranks(PACKING[variant], job)
    except (RuntimeError, OSError, LookupError, ValueError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    else:
        record.pop("useful_tokens_per_step")
        result["record"] = record
    return {**result, "wall_s": round(machine.CpuClock.now().wall - clock.wall, 1), "disturbed": clock.disturbance()}


def run_undisturbed(variant: str, job: Job, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of one variant until one was disturbed little by others; only that one counts, the rest stay in the file.

    What is looked at is the CPU time of other programs, never how fast the run was.
    """
    runs: list[dict[str, Any]] = []
    for attempt in range(1 + args.retries):
        folder = job.folder / f"attempt-{attempt}"
        folder.mkdir()
        result = run_variant(variant, replace(job, folder=folder), args.quiet_wait)
        quiet = result["disturbed"]["others_share"] <= DISTURBED or args.accept_disturbed
        runs.append({**result, "counts": quiet and "record" in result})
        if quiet or "error" in result:
            break
    return runs


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def rate(result: dict[str, Any]) -> float:
    """Useful tokens per second and rank over all steps after warm-up."""
    return result["record"]["tokens_per_s_per_rank"]["total"]


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Per variant: throughput three ways, held-out loss, how many runs."""
    summary = {}
    for variant, what in VARIANTS.items():
        records = [r["record"] for r in results if r["variant"] == variant and r["counts"]]
        if records:
            rates = [r["tokens_per_s_per_rank"] for r in records]
            summary[variant] = {
                "what": what,
                "runs": len(records),
                "tokens_per_s_per_rank": spread([r["total"] for r in rates]),
                "tokens_per_s_per_rank_median_step": spread([r["median"] for r in rates]),
                "tokens_per_s_per_rank_with_warmup": spread([r["with_warmup"] for r in rates]),
                "grown_mib": spread([r["grown_bytes"] / 2**20 for r in records if r.get("grown_bytes")] or [0.0]),
                "heldout_loss": spread([r["heldout_loss"] for r in records]),
                "useful_tokens": records[0]["useful_tokens"],
                "steps": records[0]["steps"],
            }
    return summary


def ratios(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Throughput ratios within one repeat, where the runs stood next to each other in time; median and spread."""
    rates = {(r["variant"], r["repeat"]): rate(r) for r in results if r["counts"]}
    repeats = sorted({repeat for _, repeat in rates})
    found = {}
    for pair in PAIRS:
        top, bottom = pair.split("/")
        values = [rates[top, i] / rates[bottom, i] for i in repeats if (top, i) in rates and (bottom, i) in rates]
        if values:
            found[pair] = {"per_repeat": [round(v, 4) for v in values], **spread(values)}
    return found


def aims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The aims that can be judged from these runs."""
    return [
        {"ratio": pair, "aim": aim, "median": found[pair]["median"], "met": found[pair]["median"] >= aim}
        for pair, aim in AIMS.items()
        if pair in found
    ]


def document(results: list[dict[str, Any]], workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, for the results folder."""
    found = ratios(results)
    return {
        "benchmark": "train_throughput",
        "machine": machine.facts(),
        "workload": {k: v for k, v in workload.meta.items() if k != "key"},
        "settings": {
            "repeats": args.repeats,
            "useful_tokens": args.useful_tokens,
            "ranks": WORLD,
            "seq_len": SEQ_LEN,
            "warmup_steps": WARMUP_STEPS,
            "threads_per_rank": 1,
        },
        "summary": summarize(results),
        "ratios": found,
        "aims": aims(found),
        "runs": results,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Two tables: throughput and loss by variant; ratios."""
    table = Table(title="useful tokens per second and rank, after warm-up; held-out loss")
    for column in ("", "variant", "median", "min", "max", "loss", "range", "steps", "runs"):
        table.add_column(column, justify="left" if column in ("", "variant") else "right")
    for variant, row in result["summary"].items():
        speed, loss = row["tokens_per_s_per_rank"], row["heldout_loss"]
        table.add_row(
            variant,
            row["what"],
            *(f"{speed[k]:,.0f}" for k in ("median", "min", "max")),
            f"{loss['median']:.4f}",
            f"{loss['max'] - loss['min']:.4f}",
            str(row["steps"]),
            str(row["runs"]),
        )
    console.print(table)
    table = Table(title="ratios within a repeat")
    for column in ("ratio", "median", "min", "max", "aim"):
        table.add_column(column, justify="right")
    for pair, row in result["ratios"].items():
        table.add_row(pair, *(f"{row[k]:.3f}" for k in ("median", "min", "max")), str(AIMS.get(pair, "")))
    console.print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpaca", type=Path, required=True, help="JSON list of instruction, input, output")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--useful-tokens", type=int, default=65_536, help="non-pad tokens a run trains, over all ranks")
    parser.add_argument(
        "--vocabulary", type=int, default=0, help="vocabulary size of the model; 0: that of the tokenizer"
    )
    parser.add_argument(
        "--memory", action="store_true", help="also sample the memory of allranks' ranks; costs them some time"
    )
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, in the order they run")
    here = ROOT / "benchmarks"
    parser.add_argument("--json", type=Path, default=here / "results" / "train_throughput.json")
    parser.add_argument("--work", type=Path, default=here / "work", help="for the workload, logs and run folders")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a run may take")
    parser.add_argument("--quiet-wait", type=float, default=120, help="seconds to wait for a quiet machine, at most")
    parser.add_argument("--retries", type=int, default=3, help="further runs when others took over 10 %% of the CPU")
    parser.add_argument("--accept-disturbed", action="store_true", help="count runs however busy the machine was")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(VARIANTS):
        parser.error(f"--only: no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    return args


def main() -> int:
    """Build, run, write, show."""
    args = arguments()
    exit_on_sigterm()
    console = Console(stderr=True)
    args.work.mkdir(parents=True, exist_ok=True)
    args.work = args.work.resolve()
    workload = build(args.alpaca, args.work / f"workload{args.vocabulary or ''}", args.vocabulary)
    results: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        for variant in args.only:
            folder = Path(mkdtemp(prefix=f"{variant}-{repeat}-", dir=args.work))
            job = Job(workload, args.useful_tokens, BASE_SEED + repeat, folder, args.timeout, args.memory)
            for result in run_undisturbed(variant, job, args):
                results.append({"repeat": repeat, **result})
                outcome = f"{rate(result):,.0f} tokens/s/rank" if "record" in result else result["error"]
                note = "" if result["counts"] else " (does not count)"
                line = f"repeat {repeat} {variant}: {outcome} {result['disturbed']}{note}"
                console.print(line, markup=False, highlight=False)
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document(results, workload, args), indent=1) + "\n")
    show(document(results, workload, args), Console())
    counted = sum(r["counts"] for r in results)
    return int(counted < args.repeats * len(args.only))


if __name__ == "__main__":
    sys.exit(main())
