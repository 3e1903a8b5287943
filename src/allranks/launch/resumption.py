"""Check whether a run can resume from a checkpoint as requested, and what it must keep. Reads only the run folder."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import RequestError
from allranks.planning.memory.model_config import find_files
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import read_json, read_record, require_current
from allranks.rundir.paths import RunDir
from allranks.spec.records import COMPILE_AUTO, RunSpec
from allranks.utils.redaction import HIDDEN

# What a checkpoint's weights, or its place in the data, are of: a resume cannot change it, and a failed try must not be
# kept.
MODEL_KEYS = (
    "model.config",
    *(f"adapter.{key}" for key in ("type", "r", "alpha", "targets", "target_parameters", "modules_to_save")),
)
DATA_KEYS = (
    *(f"data.{key}" for key in ("split", "config", "revision", "template", "columns", "subset", "max_length")),
    *(f"data.{key}" for key in ("packing", "mask_prompt", "eval_fraction", "seed")),
)
STEP_KEYS = (
    *(
        f"train.{key}"
        for key in ("lr", "schedule", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "param_dtype")
    ),
    *(f"model.{key}" for key in ("dtype", "attention", "router_aux_loss", "float8")),
    *("adapter.dropout", "strategy.options"),
)
"""What an optimizer step computes."""
REPLICATE = "replicate"
"""The option of FSDP2 that decides over how many ranks weights are sharded; a resume compares that number."""
PATIENCE_KEYS = ("eval.patience", "eval.min_delta")
BATCH_KEYS = ("train.micro_batch_size", "train.grad_accum", "train.global_batch_size")


def require_same_schema(run: RunDir) -> None:
    """Refuse a run that was planned by another version of allranks, before anything else of it is read.

    Raises:
        RequestError: with the file and both versions.
    """
    plan = read_json(run.plan)
    if isinstance(plan, dict):
        require_current(run.plan, plan)


def keep_global_batch(
    before: RunSpec, spec: RunSpec, plan: Callable[[RunSpec], LaunchPlan], had: int | None
) -> RunSpec:
    """Return the spec with the run's previous global batch, if another number of ranks would change it unintentionally:
    the position in the data counts steps of that many sequences.

    Raises:
        SpecError: it is not divisible among the ranks.
    """
    batch = plan(spec).batch
    if had is None or batch is None or batch.global_batch_size == had or _changed(before, spec, BATCH_KEYS):
        return spec
    train = msgspec.structs.replace(spec.train, global_batch_size=had, grad_accum=None)
    return msgspec.structs.replace(spec, train=train)


def keep_compilation(run: RunDir, spec: RunSpec, plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with what the run did for ``model.compile: auto``, because compiled blocks round differently.

    The spec stays at auto; memory estimate and recomputation use it. If the compiler failed, blocks were not compiled.
    """
    if spec.model is None or spec.model.compile != COMPILE_AUTO:
        return plan
    did, had = read_record(run.metrics).get("compiled"), read_record(run.plan)
    compiled = had.get("compiled") if did is None else did
    return msgspec.structs.replace(plan, compiled=compiled is True, compile_reason=str(had.get("compile_reason") or ""))


def global_batch_of(run: RunDir, step: int) -> int | None:
    """Return the sequences per step from the checkpoint (mode full) or from the run's plan."""
    progress = read_record(run.checkpoint(step) / "state" / "progress.json")
    batch = read_record(run.plan).get("batch") or {}
    return progress.get("global_batch_size") or batch.get("global_batch_size")


def resume_notes(before: RunSpec, requested: RunSpec, spec: RunSpec, plan: LaunchPlan) -> list[str]:
    """Return notes for the user before the run resumes."""
    said = [
        (
            f"cluster.env.{name} is a secret and not saved in the run folder: it stays unset unless you export it or "
            f"set it with --set cluster.env.{name}=..."
        )
        for name, value in spec.cluster.env.items()
        if value == HIDDEN and name not in os.environ
    ]
    if spec.train.schedule != "constant" and _changed(before, spec, ("train.max_steps", "train.epochs")):
        said.append(
            f"the run ends at another step than before, so train.schedule {spec.train.schedule} gives the remaining "
            "steps other learning rates: a run of this length from the start would differ"
        )
    if plan.device == "cuda" and not spec.train.deterministic:
        said.append(
            "kernels on GPUs may not be deterministic: the resumed losses can differ in the last digits from an "
            "uninterrupted run; train.deterministic: true makes them so, at some cost in speed"
        )
    if requested.train.global_batch_size != spec.train.global_batch_size:
        said.append(
            f"train.global_batch_size stays {spec.train.global_batch_size}, so that the data continues at the same "
            "position; override it with --set"
        )
    return said


def require_resumable(
    run: RunDir,
    before: RunSpec,
    spec: RunSpec,
    plan: LaunchPlan,
    facts: dict[str, Any],
    step: int,
    *,
    allow_inexact: bool,
) -> None:
    """Refuse a completed run, settings that do not fit the checkpoint of `step`, and, unless `allow_inexact`, a resume
    that is not bitwise.

    Args:
        before: the run's own spec, without the settings of this resume.
        facts: the checkpoint's manifest.

    Raises:
        RequestError: the resume is refused; the message says what to change.
    """
    folder, total = run.checkpoint(step), _total_steps(run, step, plan)
    if total is not None and step >= total:
        more = "--set train.max_steps=N" if plan.epochs is None else "--set train.epochs=N"
        done = f"its {total} steps" if step == total else f"{step} steps already, and {total} are requested"
        raise RequestError(f"run {run.name} has done {done}; raise them with {more} to train on")
    ended = read_record(run.metrics).get("stopped_early")
    if isinstance(ended, dict) and ended.get("step") == step and not _changed(before, spec, PATIENCE_KEYS):
        raise RequestError(
            f"run {run.name} ended early after step {step}: {ended.get('reason')}; raise --set eval.patience=N, or set "
            "it to null, to train on"
        )
    if changed := _changed(before, spec, MODEL_KEYS):
        raise RequestError(
            f"{folder} was saved with {_was(before, changed)}: it does not fit another model; remove --set "
            f"{changed[0]}, or start a new run"
        )
    if different := _different_sizes(run, before, spec, step):
        raise RequestError(
            f"{folder} was saved from a model with {different}: it does not fit another model; use the model of the "
            "run, or start a new run"
        )
    if facts["mode"] != "full" and not allow_inexact:
        raise RequestError(
            f"{folder} is a weights-only checkpoint without optimizer and random states, so an exact resume is not "
            "possible; resume from the weights alone with --allow-inexact, or train with checkpoint.mode: full"
        )
    if allow_inexact:
        return
    ranks = f"{facts['world_size']} rank{'s' * (facts['world_size'] != 1)}"
    for was, now, differs, use in (
        (ranks, plan.world_size, facts["world_size"] != plan.world_size, "the same number of ranks"),
        (facts["strategy"], plan.strategy, facts["strategy"] != plan.strategy, "that strategy"),
    ):
        if differs:
            raise RequestError(
                f"{folder} was written by {was}, the plan has {now}; losses would not be bitwise equal: use {use}, or "
                "--allow-inexact"
            )
    if reason := _other_arithmetic(run, folder, spec, plan, facts):
        raise RequestError(f"{reason}, or --allow-inexact")
    for keys, why in (
        (DATA_KEYS, "the data would continue in another order"),
        (STEP_KEYS, "the steps would compute something else"),
    ):
        if changed := _changed(before, spec, keys):
            raise RequestError(
                f"{folder} was saved with {_was(before, changed)}; {why}: remove --set {changed[0]}, or use "
                "--allow-inexact"
            )
    had = global_batch_of(run, step)
    if had and plan.batch and plan.batch.global_batch_size != had:
        raise RequestError(
            f"{folder} was trained with {had} sequences per step, the plan has {plan.batch.global_batch_size}; data "
            f"would be skipped or seen twice: use --set train.global_batch_size={had} --set train.grad_accum=null, or "
            "--allow-inexact"
        )


SIZE_KEYS = (
    *("model_type", "hidden_size", "n_embd", "dim", "num_hidden_layers", "n_layer", "n_layers", "num_attention_heads"),
    *("n_head", "n_heads", "num_key_value_heads", "head_dim", "intermediate_size", "n_inner"),
    *("hidden_dim", "vocab_size", "tie_word_embeddings", "num_local_experts"),
    *("num_experts", "n_routed_experts", "moe_intermediate_size"),
)  # fmt: skip
"""Keys of config.json that determine the shapes of weights."""


def _different_sizes(run: RunDir, before: RunSpec, spec: RunSpec, step: int) -> str:
    """Return how the checkpoint's model sizes differ from the spec's; empty if they are equal or unknown."""
    if spec.model is None or spec.model.name.startswith("tiny:"):
        return ""
    now = find_files(spec)
    path = run.checkpoint(step) / "config.json"
    saved = read_record(path) if path.is_file() else None
    was = saved or (files.config if before.model != spec.model and (files := find_files(before)) else None)
    if now is None or was is None:
        return ""
    keys = [key for key in SIZE_KEYS if key in was and key in now.config and was[key] != now.config[key]]
    return ", ".join(f"{key} {was[key]} (now {now.config[key]})" for key in keys)


def _other_arithmetic(run: RunDir, folder: Path, spec: RunSpec, plan: LaunchPlan, facts: dict[str, Any]) -> str:
    """Return why the plan adds numbers in another order than the checkpoint's run, and what to set; else empty."""
    shared = facts.get("shard_ranks", facts["world_size"])
    if shared != plan.shard_ranks:
        was = "none" if shared == facts["world_size"] else "nodes"
        return (
            f"{folder} was written with weights sharded over {shared} ranks, the plan shards them over "
            f"{plan.shard_ranks}; losses would not be bitwise equal: use as many ranks per node and --set "
            f"strategy.{REPLICATE}={was}"
        )
    had = read_record(run.plan)
    compiled = had.get("compiled") is True
    if spec.model and spec.model.compile != COMPILE_AUTO and compiled != plan.compiled:  # auto goes on as the run did
        return (
            f"{folder} was trained {'with' if compiled else 'without'} compiled blocks, the plan is "
            f"{'without' if compiled else 'with'} them; losses would not be bitwise equal: use --set "
            f"model.compile={str(compiled).lower()}"
        )
    mode = had.get("recomputation", plan.recomputation)
    if plan.compiled and mode != plan.recomputation:
        return (
            f"{folder} was trained with recomputation {mode}, the plan has {plan.recomputation}: with model.compile "
            f"the losses would not be bitwise equal; use --set model.gradient_checkpointing={mode}"
        )
    return ""


def _total_steps(run: RunDir, step: int, plan: LaunchPlan) -> int | None:
    if plan.max_steps is not None or plan.epochs is None or plan.batch is None:
        return plan.max_steps
    sequences = read_record(run.checkpoint(step) / "state" / "progress.json").get("sequences")
    return math.ceil(sequences * plan.epochs / plan.batch.global_batch_size) if sequences else None


def _value(spec: RunSpec, key: str) -> Any:
    section, name = key.split(".")
    value = getattr(getattr(spec, section), name, None)
    return {k: v for k, v in value.items() if k != REPLICATE} if key == "strategy.options" and value else value


def _changed(before: RunSpec, spec: RunSpec, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if _value(before, key) != _value(spec, key)]


def _was(before: RunSpec, keys: list[str]) -> str:
    return ", ".join(f"{key} {_value(before, key)}" for key in keys)
