"""Every hand-written strategy beside its torch twin: tokens per second in turns, and the memory of all strategies.

``python -m benchmarks.strategies [--rounds 7] [--steps 10] [--forms plain,accum4,lora] [--json benchmarks/results/strategies.json]``.
Two gloo ranks, one launch. Ratios are formed within a round, whose order alternates. The exit code is 1 if a median
ratio is below 0.95, if persistent memory is not what theory says, or if zero3 peaks no lower than zero2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from allranks.spec.strategies import REGISTRY
from benchmarks import machine, programs

AIM = 0.95
PAIRS = ["bucket_ddp_async:pytorch_ddp", "zero1:pytorch_zero1", "zero2:pytorch_zero2", "zero3:pytorch_zero3"]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"accum": 1, "lora": False},
    "accum4": {"accum": 4, "lora": False},
    "lora": {"accum": 1, "lora": True},
}
# weights + gradients + two moments in fp32, T = P, two ranks; of what pytorch_ddp holds (Rajbhandari et al. 2020)
THEORY = {
    "zero1": 3 / 4,
    "zero2": 5 / 8,
    "zero3": 1 / 2,
    "pytorch_zero1": 3 / 4,
    "pytorch_zero2": 1 / 2,
    "pytorch_zero3": 1 / 2,
    # DeepSpeed updates a float32 copy of its part of the weights; Accelerate keeps buckets beside the gradients
    "deepspeed_zero1": 3 / 4,
    "deepspeed_zero2": 3 / 4,
    "deepspeed_zero3": 5 / 8,
    "hf_trainer": 5 / 4,
}
WORKLOAD = {
    "config": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "length": 64,
    "micro_batch": 2,
    "warm_up": 3,
}


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def launched(module: str, asked: dict[str, Any], ranks: int, timeout_s: float) -> Any:
    """What rank 0 of a module's gloo ranks wrote; one thread a rank."""
    folder = Path(asked["folder"])
    result = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", module, str(result), json.dumps(asked)]
    programs.run(command, folder / "log.txt", timeout_s, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    return json.loads(result.read_text())


def judged(race: dict[str, Any]) -> dict[str, Any]:
    """A race with its ratios, one a round."""
    ours, twin, rounds = race["ours"], race["twin"], race["tokens_per_s_per_rank"]
    ratios = [r[ours] / r[twin] for r in rounds]
    speeds = {name: spread([r[name] for r in rounds]) for name in (ours, twin)}
    return {**race, "ratio": spread(ratios), "ratios": [round(r, 4) for r in ratios], "tokens_per_s": speeds}


def memory_table(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums over ranks, as ratios to pytorch_ddp: shards of whole parameters differ by rank, their sum does not."""
    rows = []
    for one in found:
        parts = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
        held = [sum(r[p] for p in parts) for r in one["ranks"]]
        peaks = [r["peak_bytes"] for r in one["ranks"]]
        rows.append({**one, "persistent_bytes": sum(held) / len(held), "peak_bytes": max(peaks), "largest": max(held)})
    base = {r["strategy"]: r for r in rows}.get("pytorch_ddp", rows[0])
    for row in rows:
        row["persistent_ratio"] = round(row["persistent_bytes"] / base["persistent_bytes"], 4)
        row["theory_ratio"] = THEORY.get(row["strategy"], 1.0)
        row["peak_ratio"] = round(row["peak_bytes"] / base["peak_bytes"], 4)
    return rows


def short_of(races: list[dict[str, Any]], memory: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be, one line each."""
    lines = [
        f"{r['ours']} has {r['ratio']['median']:.3f} of {r['twin']} (accum {r['accum']}, lora {r['lora']}); the aim is {AIM}"
        for r in races
        if r["ratio"]["median"] < AIM
    ]
    lines += [
        f"{m['strategy']} holds {m['persistent_ratio']:.3f} of pytorch_ddp's memory, not {m['theory_ratio']:.3f}"
        for m in memory
        if abs(m["persistent_ratio"] / m["theory_ratio"] - 1) > 0.02
    ]
    peak = {m["strategy"]: m["peak_bytes"] for m in memory}
    if {"zero2", "zero3"} <= peak.keys() and peak["zero3"] >= peak["zero2"]:
        lines.append(f"zero3 peaks at {peak['zero3']} bytes, zero2 at {peak['zero2']}")
    return lines


def show(races: list[dict[str, Any]], memory: list[dict[str, Any]]) -> None:
    """Two tables."""
    for r in races:
        form = f"accum {r['accum']}{', LoRA' if r['lora'] else ''}"
        ratio = r["ratio"]
        print(
            f"{r['ours']:>17} / {r['twin']:<14} {form:<14} {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
        )
    for m in memory:
        print(
            f"{m['strategy']:>17}: holds {m['persistent_bytes'] / 2**20:7.1f} MiB, {m['persistent_ratio']:.3f} of pytorch_ddp "
            f"(theory {m['theory_ratio']:.3f}); peak {m['peak_bytes'] / 2**20:.1f} MiB, {m['peak_ratio']:.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    programs.exit_on_sigterm()
    names = [] if args.no_memory else [n for n, e in REGISTRY.items() if not e.single_process]
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            **WORKLOAD,
            "folder": folder,
            "rounds": args.rounds,
            "steps": args.steps,
            "pairs": [p.split(":") for p in args.pairs.split(",") if p],
            "forms": [FORMS[f] for f in args.forms.split(",") if f],
            "memory": names,
        }
        clock = machine.CpuClock.now()
        found = launched("benchmarks.strategies_ranks", asked, 2, args.timeout)
        disturbed = clock.disturbance()
    races = [judged(r) for r in found["races"]]
    memory = memory_table(found["memory"]) if found["memory"] else []
    show(races, memory)
    lines = short_of(races, memory)
    print("\n".join(lines) or "all as it should be")
    if args.json:
        workload = {**WORKLOAD, "parameters": found["parameters"], "ranks": 2, "steps": args.steps}
        written = {
            "aim": AIM,
            "workload": workload,
            "races": races,
            "memory": memory,
            "short_of": lines,
            "disturbed": disturbed,
            "machine": machine.facts(),
        }
        args.json.write_text(json.dumps(written, indent=2) + "\n")
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
