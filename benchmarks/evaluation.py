"""Our evaluation beside HF Trainer's ``evaluate()``: time, number of collectives, and what loss each says.

``python -m benchmarks.evaluation [--ranks 1,2,3] [--batch-sizes 1,4,16] [--rounds 7] [--json benchmarks/results/evaluation.json]``.
The same model and rows for both, in turns. The exit code is 1 if our figures are not one figure for all ranks and batch
sizes (to 1e-6), or if ours needs more than one collective.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, programs
from benchmarks.strategies import launched, spread

SAME = 1e-6
WORKLOAD = {
    "config": {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "rows": 96,
    "longest": 160,
    "taught_steps": 60,
}


def judged(one: dict[str, Any]) -> dict[str, Any]:
    """With seconds and their ratio within a round, as median and range."""
    rounds = one.pop("rounds")
    for name in ("ours", "trainer"):
        one[name]["seconds"] = spread([r[name] for r in rounds])
    return {**one, "trainer_over_ours": spread([r["trainer"] / r["ours"] for r in rounds])}


def short_of(found: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be, one line each."""
    losses = [one["ours"]["loss"] for one in found]
    lines = []
    if max(losses) - min(losses) > SAME * abs(losses[0]):
        lines.append(f"our loss is {min(losses):.8f} to {max(losses):.8f}, not one figure")
    lines += [
        f"ours made {one['ours']['collectives']} collectives with {one['ranks']} ranks at batch size {one['batch_size']}"
        for one in found
        if one["ours"]["collectives"] != 1
    ]
    return lines


def show(found: list[dict[str, Any]]) -> None:
    """A table."""
    print(
        "ranks  batch |  our loss   trainer's |  our s  trainer's  ratio (range)        | collectives ours, trainer's"
    )
    for one in found:
        ours, peer, ratio = one["ours"], one["trainer"], one["trainer_over_ours"]
        print(
            f"{one['ranks']:>5} {one['batch_size']:>6} | {ours['loss']:9.6f}  {peer['loss']:9.6f} | "
            f"{ours['seconds']['median']:6.3f} {peer['seconds']['median']:9.3f}  "
            f"{ratio['median']:5.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) | {ours['collectives']}, {peer['collectives']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,3")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    programs.exit_on_sigterm()
    clock = machine.CpuClock.now()
    found: list[dict[str, Any]] = []
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            asked = {**WORKLOAD, "folder": folder, "rounds": args.rounds}
            asked["batch_sizes"] = [int(s) for s in args.batch_sizes.split(",")]
            found += map(judged, launched("benchmarks.evaluation_ranks", asked, ranks, args.timeout))
    disturbed = clock.disturbance()
    show(found)
    lines = short_of(found)
    print("\n".join(lines) or "ours is one figure, and one collective, everywhere")
    if args.json:
        written = {
            "workload": {**WORKLOAD, "rounds": args.rounds},
            "evaluations": found,
            "short_of": lines,
            "disturbed": disturbed,
        }
        args.json.write_text(json.dumps({**written, "machine": machine.facts()}, indent=2) + "\n")
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
