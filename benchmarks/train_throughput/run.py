"""Runs the variants one after the other, over and over, and writes the comparison.

Run as: ``python -m benchmarks.train_throughput.run --alpaca alpaca.json [--repeats 5] [--only c,d,ci,e]``
Each repeat runs all variants once, in a rotated order, and measures the floor of a step. Then the same variants run few
steps with a large vocabulary, for their memory. Exit code 0: every variant has a number in every repeat; 1: some runs
failed, or the machine was never quiet.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import machine
from benchmarks.programs import ROOT, exit_on_sigterm, run
from benchmarks.train_throughput import ours
from benchmarks.train_throughput.compare import compared, rate, tables
from benchmarks.train_throughput.packing import isolated_rows
from benchmarks.train_throughput.variants import FLOOR, VARIANTS, rotated
from benchmarks.train_throughput.workload import ENV, LORA, MODEL, SEQ_LEN, WARMUP_STEPS, WORLD, Job, Workload, build

BASE_SEED = 42
DISTURBED = 0.1  # share of all cores that other programs used during a run, above which it is run again
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+")


def run_peer(name: str, job: Job) -> dict[str, Any]:
    """Start a peer under torchrun and read its record."""
    out, variant = job.folder / "record.json", VARIANTS[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    command += ["-m", f"benchmarks.train_throughput.{variant.program}", "--workload", str(job.workload.folder)]
    command += ["--useful-tokens", str(job.useful_tokens), "--packing", variant.packing, "--seed", str(job.seed)]
    command += ["--out", str(out), *variant.extra]
    run(command, job.folder / "run.log", job.timeout_s, ENV)
    return json.loads(out.read_text())


def typical_documents(workload: Workload) -> list[int]:
    """Return the lengths of documents of the packed row whose attention (sum of squares) is nearest to the mean row."""
    begins = [(np.flatnonzero(row["position_ids"] == 0), len(row["labels"])) for row in isolated_rows(workload)]
    rows = [np.diff(at, append=end) for at, end in begins]
    squares = np.array([int((lengths**2).sum()) for lengths in rows])
    return rows[int(np.abs(squares - squares.mean()).argmin())].tolist()


def run_floor(job: Job) -> dict[str, Any]:
    """Measure matrix products and attention of a step alone, with as many processes at a time as there are ranks."""
    out, meta = job.folder / "floor.json", job.workload.meta
    shapes = {
        "processes": WORLD, "tokens": SEQ_LEN, "length": SEQ_LEN, "hidden": MODEL["hidden_size"],
        "intermediate": MODEL["intermediate_size"], "layers": MODEL["num_hidden_layers"],
        "heads": MODEL["num_attention_heads"], "kv-heads": MODEL["num_key_value_heads"],
        "head-dim": MODEL["hidden_size"] // MODEL["num_attention_heads"], "vocabulary": meta["vocab"],
        "rank": LORA["r"], "documents": ",".join(map(str, typical_documents(job.workload))), "json": out,
    }  # fmt: skip
    words = [word for key, value in shapes.items() for word in (f"--{key}", str(value))]
    run([sys.executable, "-m", "benchmarks.step_floor", *words], job.folder / "run.log", job.timeout_s, ENV)
    found = json.loads(out.read_text())
    return {
        **{
            key: found[key]
            for key in ("parts", "product_flops", "products_s", "product_flops_per_s", "copy_bytes_per_s")
        },
        "tokens": SEQ_LEN,
        "tokens_per_s": {"wrapped": found["tokens_per_s"], "isolated": found["documents_tokens_per_s"]},
    }


def run_variant(name: str, job: Job, quiet_wait: float) -> dict[str, Any]:
    """One run of one variant, with the machine's disturbance while it ran; failures are results too."""
    waited = machine.wait_until_quiet(quiet_wait)
    clock = machine.CpuClock.now()
    result: dict[str, Any] = {"variant": name, "seed": job.seed, "waited_for_quiet_s": waited}
    try:
        if name == FLOOR:
            record = run_floor(job)
        elif VARIANTS[name].program:
            record = run_peer(name, job)
        else:
            record = ours.run_allranks(VARIANTS[name].packing, job)
    except (RuntimeError, OSError, LookupError, ValueError) as error:
        result["error"] = MACHINE_PATH.sub("", f"{type(error).__name__}: {error}")
    else:
        record.pop("useful_tokens_per_step", None)
        result["record"] = record
    return {**result, "wall_s": round(machine.CpuClock.now().wall - clock.wall, 1), "disturbed": clock.disturbance()}


def run_undisturbed(name: str, job: Job, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of one variant until one was disturbed little by others; only that one counts, the rest stay in the file.

    What is looked at is the CPU time of other programs, never how fast the run was.
    """
    runs: list[dict[str, Any]] = []
    for attempt in range(1 + args.retries):
        folder = job.folder / f"attempt-{attempt}"
        folder.mkdir()
        result = run_variant(name, replace(job, folder=folder), args.quiet_wait)
        quiet = result["disturbed"]["others_share"] <= DISTURBED or args.accept_disturbed
        runs.append({**result, "counts": quiet and "record" in result})
        if quiet or "error" in result:
            break
    return runs


def document(runs: list[Any], memory_runs: list[Any], workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, for the results folder."""
    settings = ("repeats", "useful_tokens", "memory_repeats", "memory_tokens", "memory_vocabulary", "accept_disturbed")
    return {
        "benchmark": "train_throughput",
        "machine": machine.facts(),
        "workload": {k: v for k, v in workload.meta.items() if k != "key"},
        "settings": {
            **{name: getattr(args, name) for name in settings},
            "ranks": WORLD,
            "seq_len": SEQ_LEN,
            "warmup_steps": WARMUP_STEPS,
            "threads_per_rank": 1,
        },
        **compared(runs, memory_runs),
        "runs": runs,
        "memory_runs": memory_runs,
    }


def written(found: dict[str, Any]) -> str:
    """Return the document as JSON, with each run on a line."""
    text = json.dumps({**found, "runs": "<runs>", "memory_runs": "<memory_runs>"}, indent=1)
    for name in ("runs", "memory_runs"):
        text = text.replace(f'"<{name}>"', "[\n" + ",\n".join(json.dumps(r) for r in found[name]) + "\n]")
    return text + "\n"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpaca", type=Path, required=True, help="JSON list of instruction, input, output")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--useful-tokens", type=int, default=40_960, help="non-pad tokens a run trains, over all ranks")
    parser.add_argument("--memory-repeats", type=int, default=1, help="of the runs with a large vocabulary; 0: none")
    parser.add_argument("--memory-vocabulary", type=int, default=32_000)
    parser.add_argument("--memory-tokens", type=int, default=8_192, help="non-pad tokens that such a run trains")
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, in the order of the first repeat")
    parser.add_argument("--without-floor", action="store_true", help="do not measure the floor of a step")
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
    workload = build(args.alpaca, args.work / "workload")
    runs: list[dict[str, Any]] = []
    memory_runs: list[dict[str, Any]] = []

    def run_all(names: list[str], repeats: int, trained: Workload, tokens: int, into: list[dict[str, Any]]) -> None:
        for repeat in range(repeats):
            for name in rotated(names, repeat, repeats):
                folder = Path(mkdtemp(prefix=f"{name}-{repeat}-", dir=args.work))
                job = Job(trained, tokens, BASE_SEED + repeat, folder, args.timeout)
                for result in run_undisturbed(name, job, args):
                    into.append({"repeat": repeat, **result})
                    console.print(f"repeat {repeat} {name}: {outcome(result)}", markup=False, highlight=False)
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(written(document(runs, memory_runs, workload, args)))

    names = [*args.only, *([] if args.without_floor else [FLOOR])]
    run_all(names, args.repeats, workload, args.useful_tokens, runs)
    if args.memory_repeats:
        large = build(args.alpaca, args.work / f"workload{args.memory_vocabulary}", args.memory_vocabulary)
        run_all(args.only, args.memory_repeats, large, args.memory_tokens, memory_runs)
    Console(width=240).print(tables(document(runs, memory_runs, workload, args)), markup=False, highlight=False)
    count = sum(r["counts"] for r in [*runs, *memory_runs])
    return int(count < args.repeats * len(names) + args.memory_repeats * len(args.only))


def outcome(result: dict[str, Any]) -> str:
    """Return what came of a run, in one line."""
    if "error" in result:
        said = result["error"]
    elif result["variant"] == FLOOR:
        said = f"{result['record']['tokens_per_s']['wrapped']:,.0f} tokens/s/rank"
    else:
        grown = result["record"]["grown_bytes"] or 0
        said = f"{rate(result):,.0f} tokens/s/rank, {grown / 2**20:.0f} MiB"
    return f"{said} in {result['wall_s']} s {result['disturbed']}{'' if result['counts'] else ' (does not count)'}"


if __name__ == "__main__":
    sys.exit(main())
