"""Whether a run can go on from a checkpoint as it is asked to, and what it must keep for that. No I/O but the run folder's."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import msgspec

from allranks.errors import RequestError
from allranks.planning import LaunchPlan
from allranks.redact import HIDDEN
from allranks.rundir import RunDir, read_json
from allranks.spec.records import RunSpec

# What a checkpoint's weights, or its place in the data, are of: a resume cannot change it, and a failed try must not be kept.
MODEL_KEYS = (
    "model.config",
    *(f"adapter.{key}" for key in ("type", "r", "alpha", "targets", "target_parameters", "modules_to_save")),
)
DATA_KEYS = (
    *(f"data.{key}" for key in ("split", "config", "revision", "template", "columns", "subset", "max_length")),
    *(f"data.{key}" for key in ("packing", "mask_prompt", "eval_fraction", "seed")),
)
BATCH_KEYS = ("train.micro_batch_size", "train.grad_accum", "train.global_batch_size")


def with_its_batch(before: RunSpec, spec: RunSpec, plan: Callable[[RunSpec], LaunchPlan], had: int | None) -> RunSpec:
    """The spec with the global batch that the run had, where another number of ranks would change it and nobody asked for that:
    the place in the data counts steps of that many sequences.

    Raises:
        SpecError: it cannot be shared by so many ranks.
    """
    batch = plan(spec).batch
    if had is None or batch is None or batch.global_batch_size == had or _changed(before, spec, BATCH_KEYS):
        return spec
    train = msgspec.structs.replace(spec.train, global_batch_size=had, grad_accum=None)
    return msgspec.structs.replace(spec, train=train)


def global_batch_of(run: RunDir, step: int) -> int | None:
    """Sequences of a step, as the checkpoint has it (mode full), or the plan of the run."""
    progress = read_json(run.checkpoint(step) / "state" / "progress.json") or {}
    batch = (read_json(run.plan) or {}).get("batch") or {}
    return progress.get("global_batch_size") or batch.get("global_batch_size")


def notes(asked: RunSpec, spec: RunSpec) -> list[str]:
    """What a person should know before it goes on."""
    said = [
        f"cluster.env.{name} is a secret, which no run folder keeps: the ranks do without, unless you export it or give it with --set cluster.env.{name}=..."
        for name, value in spec.cluster.env.items()
        if value == HIDDEN and name not in os.environ
    ]
    if asked.train.global_batch_size != spec.train.global_batch_size:
        said.append(
            f"train.global_batch_size stays {spec.train.global_batch_size}, so that the data goes on where it was; --set it for another"
        )
    return said


def require_resumable(
    run: RunDir, before: RunSpec, spec: RunSpec, plan: LaunchPlan, facts: dict[str, Any], step: int, *, inexact: bool
) -> None:
    """Refuse what is done, what does not fit the checkpoint of `step`, and, unless `inexact`, what would not be bitwise the same.

    Args:
        before: the run's own spec, without what this resume sets.
        facts: the checkpoint's manifest.

    Raises:
        RequestError: with the cure.
    """
    folder, total = run.checkpoint(step), _total_steps(run, step, plan)
    if total is not None and step >= total:
        more = "--set train.max_steps=N" if plan.epochs is None else "--set train.epochs=N"
        done = f"its {total} steps" if step == total else f"{step} steps already, and {total} are asked for"
        raise RequestError(f"run {run.name} has done {done}; raise them with {more} to train on")
    if changed := _changed(before, spec, MODEL_KEYS):
        raise RequestError(
            f"{folder} was saved with {_was(before, changed)}: it does not fit another model; leave out --set {changed[0]}, or begin a new run"
        )
    if facts["mode"] != "full" and not inexact:
        raise RequestError(
            f"{folder} is a lite checkpoint: it has no optimizer and random states, so an exact continuation is not possible; "
            "go on from the weights alone with --inexact, or train with checkpoint.mode: full"
        )
    if inexact:
        return
    if facts["world_size"] != plan.world_size:
        raise RequestError(
            f"{folder} was written by {facts['world_size']} rank{'s' * (facts['world_size'] != 1)}, the plan has {plan.world_size}; "
            "losses would not be bitwise the same: use as many ranks, or --inexact"
        )
    if facts.get("strategy", plan.strategy) != plan.strategy:
        raise RequestError(
            f"{folder} was written by {facts['strategy']}, the plan has {plan.strategy}; losses would not be bitwise the same: use that "
            "strategy, or --inexact"
        )
    if changed := _changed(before, spec, DATA_KEYS):
        raise RequestError(
            f"{folder} was saved with {_was(before, changed)}; the data would go on in another order: leave out --set {changed[0]}, or --inexact"
        )
    had = global_batch_of(run, step)
    if had and plan.batch and plan.batch.global_batch_size != had:
        raise RequestError(
            f"{folder} was trained with {had} sequences a step, the plan has {plan.batch.global_batch_size}; data would be left out or seen "
            f"twice: --set train.global_batch_size={had} --set train.grad_accum=null, or --inexact"
        )


def _total_steps(run: RunDir, step: int, plan: LaunchPlan) -> int | None:
    if plan.max_steps is not None or plan.epochs is None or plan.batch is None:
        return plan.max_steps
    sequences = (read_json(run.checkpoint(step) / "state" / "progress.json") or {}).get("sequences")
    return math.ceil(sequences * plan.epochs / plan.batch.global_batch_size) if sequences else None


def _value(spec: RunSpec, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(spec, section), name, None)


def _changed(before: RunSpec, spec: RunSpec, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if _value(before, key) != _value(spec, key)]


def _was(before: RunSpec, keys: list[str]) -> str:
    return ", ".join(f"{key} {_value(before, key)}" for key in keys)
