"""Tokens per second of each engine side by side: torch's DDP and FSDP2, DeepSpeed's stages, HF Trainer.

``python -m benchmarks.engines [--rounds 7] [--steps 10] [--engines a,b] [--forms full,lora] [--json benchmarks/results/engines.json]``.
Two gloo ranks, one launch, one model, the same batches; each round begins with another engine, ratios are formed within a
round. The exit code is 1 if an engine's losses are not those of `pytorch_ddp`: then its speed says nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, programs
from benchmarks.strategies import WORKLOAD, launched, spread

BASE = "pytorch_ddp"
ENGINES = [BASE, "pytorch_zero3", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "hf_trainer"]
FORMS: dict[str, dict[str, Any]] = {
    "full": {"accum": 1, "lora": False},
    "full_accum4": {"accum": 4, "lora": False},
    "lora": {"accum": 1, "lora": True},
}
LOSS_TOLERANCE = 1e-3  # relative, at any step; sums are rounded in another order, and steps carry it on


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Speeds as median and range, ratios to `pytorch_ddp` within a round, and how far losses are from its own."""
    rounds, losses = found.pop("tokens_per_s_per_rank"), found.pop("losses")
    engines = {
        name: {
            "tokens_per_s_per_rank": spread([r[name] for r in rounds]),
            "of_pytorch_ddp": spread([r[name] / r[BASE] for r in rounds]),
            "loss_distance": max(abs(a - b) / b for a, b in zip(losses[name], losses[BASE], strict=True)),
        }
        for name in rounds[0]
    }
    return {**found, "steps_compared": len(losses[BASE]), "last_loss": losses[BASE][-1], "engines": engines}


def short_of(races: list[dict[str, Any]]) -> list[str]:
    """Engines that did not do the same work, one line each."""
    return [
        f"{name} has losses {one['loss_distance']:.2g} away from {BASE}'s (accum {race['accum']}, lora {race['lora']})"
        for race in races
        for name, one in race["engines"].items()
        if not one["loss_distance"] <= LOSS_TOLERANCE
    ]


def show(races: list[dict[str, Any]]) -> None:
    """A table a form."""
    for race in races:
        print(f"{'LoRA' if race['lora'] else 'all weights'}, {race['accum']} micro-steps: tokens per second and rank")
        for name, one in race["engines"].items():
            speed, ratio = one["tokens_per_s_per_rank"], one["of_pytorch_ddp"]
            print(
                f"  {name:>16} {speed['median']:9.0f} ({speed['min']:.0f} to {speed['max']:.0f})"
                f"   {ratio['median']:.3f} of {BASE} ({ratio['min']:.3f} to {ratio['max']:.3f})   loss within {one['loss_distance']:.1g}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    programs.exit_on_sigterm()
    have = importlib.util.find_spec("deepspeed") is not None
    wanted = dict.fromkeys([BASE, *args.engines.split(",")])
    names = [n for n in wanted if have or not n.startswith("deepspeed")]
    clock = machine.CpuClock.now()
    with tempfile.TemporaryDirectory() as folder:
        asked = {**WORKLOAD, "folder": folder, "rounds": args.rounds, "steps": args.steps, "engines": names}
        asked["forms"] = [FORMS[f] for f in args.forms.split(",") if f]
        races = [judged(one) for one in launched("benchmarks.engines_ranks", asked, 2, args.timeout)]
    disturbed = clock.disturbance()
    show(races)
    lines = short_of(races)
    print("\n".join(lines) or f"all have the losses of {BASE}")
    if args.json:
        workload = {**WORKLOAD, "ranks": 2, "rounds": args.rounds, "steps": args.steps}
        written = {"workload": workload, "races": races, "short_of": lines, "disturbed": disturbed}
        args.json.write_text(json.dumps({**written, "machine": machine.facts()}, indent=2) + "\n")
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
