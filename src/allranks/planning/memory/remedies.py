"""Make a run fit in memory: choose replication and recomputation for ``auto``, and find changes of the spec.

Replication between nodes (hybrid sharding, HSDP, of an FSDP2 strategy) needs more memory and less network; recomputation of activations
needs less memory and more time: as little of it as possible, so that the plan fits. Changes of the spec are ordered by cost: first those
that are free, then those that change what is trained, last weights of less precision.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Literal

import msgspec

from allranks.errors import AllranksError, SpecError
from allranks.planning import planner
from allranks.planning.memory.compilation import decide_compilation
from allranks.planning.memory.estimate import (
    CLOSE,
    FITS,
    NOT_KNOWN,
    TOO_LARGE,
    Fit,
    Remedy,
    capacity,
    estimate,
    model_of,
)
from allranks.planning.memory.model_config import ConfigSource, find_config
from allranks.planning.rank_environment import with_allocator
from allranks.planning.records import LaunchPlan
from allranks.spec.records import (
    RECOMPUTE_AUTO,
    RECOMPUTE_FULL,
    RECOMPUTE_MODES,
    RECOMPUTE_NONE,
    RECOMPUTE_SELECTIVE,
    RunSpec,
)
from allranks.spec.strategies import strategy_info
from allranks.utils.machine import MachineFacts
from allranks.utils.text import format_bytes

REPLICATE, REPLICATE_AUTO, REPLICATE_NODES, REPLICATE_NONE = "replicate", "auto", "nodes", "none"
SHARDED = "weights are sharded over all ranks"


def decide_replication(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> LaunchPlan:
    """Return the plan with ``strategy.replicate`` nodes or none instead of auto, and the reason in ``replication``.

    Raises:
        SpecError: ``replicate: nodes`` with one rank per node; or the model's config is broken.
    """
    asked = plan.strategy_options.get(REPLICATE)
    if asked is None or plan.batch is None:
        return plan
    nodes, procs = len(plan.nodes), plan.procs_per_node
    if nodes == 1:
        return _with_replication(plan, REPLICATE_NONE, "")
    if procs == 1 and asked == REPLICATE_NODES:
        raise SpecError(
            "strategy.replicate: nodes shards weights over the ranks of each node, and there is one rank per node; use pytorch_ddp, which "
            "replicates them, or set strategy.replicate: none"
        )
    if procs == 1:
        return _with_replication(plan, REPLICATE_NONE, f"{SHARDED}: a node has one rank")
    saved = _sent(spec, plan)
    if asked != REPLICATE_AUTO:
        what = f"weights are sharded over the {procs} ranks of each node" if asked == REPLICATE_NODES else SHARDED
        return _with_replication(plan, str(asked), f"{what} (strategy.replicate: {asked}){saved}")
    return _by_memory(spec, plan, facts, saved)


def _by_memory(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, saved: str) -> LaunchPlan:
    """Replicate weights if a rank then fits in its device's memory."""
    there, procs = capacity(spec, plan, facts), plan.procs_per_node
    found = estimate(spec, _with_replication(plan, REPLICATE_NODES, ""), find_config(spec), there)
    if found.unknown or there.bytes is None:
        why = found.unknown or f"the memory of a rank's device is unknown ({there.source})"
        return _with_replication(
            plan, REPLICATE_NONE, f"{SHARDED}: {why}; strategy.replicate: nodes replicates them nevertheless"
        )
    need = f"a rank then needs about {format_bytes(found.needed_bytes)} of {format_bytes(there.bytes)}"
    if found.verdict != FITS:
        return _with_replication(plan, REPLICATE_NONE, f"{SHARDED}: a node cannot hold a copy, because {need}")
    return _with_replication(
        plan,
        REPLICATE_NODES,
        f"every node holds a copy of the weights, sharded over its {procs} ranks (HSDP): {need}{saved}",
    )


def _with_replication(plan: LaunchPlan, value: str, why: str) -> LaunchPlan:
    return msgspec.structs.replace(plan, strategy_options={**plan.strategy_options, REPLICATE: value}, replication=why)


def _sent(spec: RunSpec, plan: LaunchPlan) -> str:
    """Return what a node sends to others with and without copies, as part of a sentence; empty if the model is unknown."""
    sends, config = strategy_info(plan.strategy).node_sends, find_config(spec).config
    if sends is None or config is None or plan.batch is None:
        return ""
    model, nodes, accum = model_of(spec, plan, config), len(plan.nodes), plan.batch.grad_accum
    copies, shards = (
        sends(model, {**plan.strategy_options, REPLICATE: value}, nodes, accum)
        for value in (REPLICATE_NODES, REPLICATE_NONE)
    )
    return f"; a node sends {format_bytes(copies)} to other nodes in an optimizer step with copies, {format_bytes(shards)} without"


def make_plan(spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Return the plan of `planner.make_plan`, with the compilation, the recomputation and the replication between nodes that ``auto`` means.

    Whether nodes hold copies of the weights is decided first, for the recomputation that saves most: traffic between nodes costs more.

    Raises:
        SpecError, EnvironmentNotAble: as `planner.make_plan`; the model's config is broken.
    """
    plan = decide_compilation(spec, planner.make_plan(spec, facts), facts)
    if spec.model is None or spec.model.recomputation != RECOMPUTE_AUTO:
        plan = decide_replication(spec, plan, facts)
    else:
        plan = decide_replication(spec, msgspec.structs.replace(plan, recomputation=RECOMPUTE_FULL), facts)
        plan = choose_recomputation(plan, spec, facts)
    if spec.script is not None:  # a program of the user's own decides for itself
        return plan
    environment = with_allocator(plan.environment, device=plan.device, recomputes=plan.recomputation != RECOMPUTE_NONE)
    return msgspec.structs.replace(plan, environment=environment)


def choose_recomputation(plan: LaunchPlan, spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Return the plan with the first mode that fits and the reason; ``full`` if none fits, ``none`` if memory or model is unknown.

    Raises:
        SpecError: the model's config is broken.
    """
    found, there = find_config(spec), capacity(spec, plan, facts)
    larger: list[str] = []
    for mode in RECOMPUTE_MODES:
        tried = msgspec.structs.replace(plan, recomputation=mode)
        needed = estimate(spec, tried, found, there)
        if needed.unknown or there.bytes is None:
            why = needed.unknown or f"the memory of the device is not known ({there.source})"
            return _with_recomputation(plan, RECOMPUTE_NONE, f"{why}; if memory is short, set it to selective or full")
        if needed.verdict == FITS:
            return _with_recomputation(plan, mode, _fit_reason(needed, there.bytes, larger))
        larger.append(f"{mode} needs {format_bytes(needed.needed_bytes)}")
    return _with_recomputation(
        plan, RECOMPUTE_FULL, f"none of the modes fits: {', '.join(larger)} of {format_bytes(there.bytes or 0)}"
    )


def _fit_reason(needed: Fit, limit: int, larger: list[str]) -> str:
    fits = f"a rank needs {format_bytes(needed.needed_bytes)} of {format_bytes(limit)}"
    return f"{fits} ({', '.join(larger)})" if larger else fits


def _with_recomputation(plan: LaunchPlan, mode: str, reason: str) -> LaunchPlan:
    return msgspec.structs.replace(plan, recomputation=mode, recomputation_reason=reason)


FIXED_SHARE = 0.5
"""Above this share of fixed memory the error of the estimate may be larger than `ESTIMATE_ERROR` (docs/fit.md)."""


def verdict_line(found: Fit) -> str:
    """Return one sentence: what a rank needs, what it has, and whether that is enough."""
    if found.unknown:
        return f"not known: {found.unknown}; not refused"
    there = found.capacity
    need = f"a rank needs about {format_bytes(found.needed_bytes)}"
    if found.fixed_bytes > FIXED_SHARE * found.needed_bytes:
        fixed = format_bytes(found.fixed_bytes)
        need += f" ({fixed} of it for Python and libraries, which vary with strategy and data: up to 25 % more in all)"
    need += f", most of it at: {found.peak}"
    if found.verdict == NOT_KNOWN or there.bytes is None:
        return f"{need}; its capacity is not known, so it is not refused ({there.source})"
    has = f"it has {format_bytes(there.bytes)} ({there.device}, {there.source})"
    if found.verdict == FITS:
        return f"{need}; {has}: it fits"
    if found.verdict == CLOSE:
        return f"{need}; {has}: too close to the limit to decide, so it is not refused"
    return f"{need}; {has}: it does not fit, and would fail in: {found.fails_in}"


def remedy_line(remedy: Remedy) -> str:
    """Return a change and what a rank needs with it."""
    enough = "" if remedy.fits else ", still too much"
    return f"{remedy.change}: {format_bytes(remedy.needed_bytes)}{enough} ({remedy.cost})"


def remedy_settings(remedy: Remedy) -> str:
    """Return the command-line options for a change."""
    return " ".join(f"--set {shlex.quote(s)}" for s in remedy.settings)


def refusal(found: Fit) -> str:
    """Return the full error message."""
    cures = [f"  {i}. {remedy_line(r)}\n     {remedy_settings(r)}" for i, r in enumerate(found.remedies, 1)]
    fits = any(r.fits for r in found.remedies)
    head = (
        "changes that make it fit, the cheapest first:"
        if fits
        else "no known change of the spec makes it fit; the closest is:"
    )
    lines = [f"memory: {verdict_line(found)}", *([head, *cures] if cures else [])]
    return "\n".join([*lines, "to start it anyway: --force"])


MAX_REMEDIES = 3
SELECT, CHECKPOINTING = "model.gradient_checkpointing=selective", "model.gradient_checkpointing=full"
LORA = "adapter.type=lora"
COMPUTE = "model.dtype=bfloat16"

SpecChange = tuple[str, list[str], RunSpec, str]


def with_remedies(found: Fit, spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, config: ConfigSource) -> Fit:
    """Return the estimate with up to three changes that make it fit; if none does, with all of them combined."""
    if found.verdict not in (CLOSE, TOO_LARGE):
        return found
    good: list[Remedy] = []
    nearest: Remedy | None = None
    for change in _changes(spec, plan):
        tried = _try(change, facts, config, found)
        if tried is None:
            continue
        if tried.fits:
            good.append(tried)
        elif nearest is None or tried.needed_bytes < nearest.needed_bytes:
            nearest = tried
        if len(good) == MAX_REMEDIES:
            break
    if not good and nearest:
        good = [nearest]
    return msgspec.structs.replace(found, remedies=good)


def _try(change: SpecChange, facts: MachineFacts, config: ConfigSource, before: Fit) -> Remedy | None:
    what, settings, spec, cost = change
    try:
        plan = make_plan(spec, facts)
    except AllranksError:
        return None
    got = estimate(spec, plan, config, before.capacity)
    if got.unknown or got.needed_bytes >= before.needed_bytes:
        return None
    return Remedy(change=what, settings=settings, needed_bytes=got.needed_bytes, fits=got.verdict == FITS, cost=cost)


def _changes(spec: RunSpec, plan: LaunchPlan) -> Iterator[SpecChange]:
    """Yield changes that keep what is trained, then LoRA; each alone, then combined with the smallest activations.

    Trained weights in bfloat16 come last, because the loss gets worse.
    """
    assert spec.model is not None
    lean, settings = spec, []
    smaller = _smaller_batch(spec, plan)
    if smaller is not None:
        yield smaller
        lean, settings = smaller[2], smaller[1]
    if plan.recomputation == RECOMPUTE_NONE:
        change = "recompute element-wise operations in backward"
        yield change, [SELECT], _checkpointed(spec, RECOMPUTE_SELECTIVE), "a few per cent more compute"
    if plan.recomputation != RECOMPUTE_FULL:
        change = "recompute activations in backward"
        yield change, [CHECKPOINTING], _checkpointed(spec, RECOMPUTE_FULL), "about a third more compute"
        lean, settings = _checkpointed(lean, RECOMPUTE_FULL), [*settings, CHECKPOINTING]
    if (narrow := _narrow(spec, plan)) is not None:
        yield narrow
    yield from _sharded(spec, plan, spec, [], "")
    full = spec.adapter.type == "none"
    if full:
        yield "train only LoRA adapters", [LORA], _lora(spec), "a different kind of training; often equally good"
    if lean is not spec:
        yield from _sharded(spec, plan, lean, settings, ", with the smallest activations")
        if full:
            yield "LoRA, with the smallest activations", [LORA, *settings], _lora(lean), "a different kind of training"
    if full:
        yield from _sharded(spec, plan, _lora(lean), [LORA, *settings], " and LoRA, with the smallest activations")
    if plan.device == "cuda" and plan.world_size > 1:
        yield _on_host(lean, settings)
    if full and plan.param_dtype == "float32" and (narrow is not None or plan.dtype == "bfloat16"):
        yield _low_precision(spec, [], "")
        if lean is not spec:
            yield _low_precision(lean, settings, ", with the smallest activations")


def _smaller_batch(spec: RunSpec, plan: LaunchPlan) -> SpecChange | None:
    assert plan.batch is not None
    micro = plan.batch.micro_batch_size
    if micro == 1:
        return None
    settings, train = ["train.micro_batch_size=1"], msgspec.structs.replace(spec.train, micro_batch_size=1)
    if spec.train.global_batch_size is None:  # else the accumulation follows from it, and both together are refused
        accum = plan.batch.grad_accum * micro
        settings, train = [*settings, f"train.grad_accum={accum}"], msgspec.structs.replace(train, grad_accum=accum)
    return (
        "one sequence per micro-batch, the same global batch",
        settings,
        msgspec.structs.replace(spec, train=train),
        "smaller matrix products",
    )


def _narrow(spec: RunSpec, plan: LaunchPlan) -> SpecChange | None:
    assert spec.model is not None
    if plan.dtype != "float32" or plan.device != "cuda":
        return None
    model = msgspec.structs.replace(spec.model, dtype="bfloat16")
    return (
        "computation in bfloat16, trained weights stay in float32",
        [COMPUTE],
        msgspec.structs.replace(spec, model=model),
        "less precise activations and gradients",
    )


def _low_precision(base: RunSpec, settings: list[str], more: str) -> SpecChange:
    assert base.model is not None
    model = msgspec.structs.replace(base.model, dtype="bfloat16")
    train = msgspec.structs.replace(base.train, param_dtype="bfloat16")
    return (
        f"trained weights and optimizer state in bfloat16{more}",
        [COMPUTE, "train.param_dtype=bfloat16", *settings],
        msgspec.structs.replace(base, model=model, train=train),
        "less precise gradients"
        if strategy_info(base.strategy.name).keeps_master_weights
        else "loses small updates: expect a higher loss",
    )


def _sharded(spec: RunSpec, plan: LaunchPlan, base: RunSpec, settings: list[str], more: str) -> Iterator[SpecChange]:
    if plan.world_size == 1:
        return
    for name, cost in (
        ("zero1", "1.5 times the communication"),
        ("zero2", "gradients are reduced in every micro-step"),
        ("pytorch_zero3", "weights are gathered twice in every micro-step"),
    ):
        if name != spec.strategy.name:
            strategy = msgspec.structs.replace(spec.strategy, name=name, options={})
            changed = msgspec.structs.replace(base, strategy=strategy)
            yield f"strategy {name}{more}", [_strategy_setting(spec, name), *settings], changed, cost


def _strategy_setting(spec: RunSpec, name: str, **options: str) -> str:
    """Return the setting of another strategy without the spec's own options, which it may not have."""
    if spec.strategy.options or options:
        return f"strategy={{{', '.join(f'{k}: {v}' for k, v in {'name': name, **options}.items())}}}"
    return f"strategy.name={name}"


def _on_host(base: RunSpec, settings: list[str]) -> SpecChange:
    strategy = msgspec.structs.replace(base.strategy, name="pytorch_zero3", options={"offload": "all"})
    return (
        "weights and optimizer state in the host's memory",
        [_strategy_setting(base, "pytorch_zero3", offload="all"), *settings],
        msgspec.structs.replace(base, strategy=strategy),
        "they are copied to the device and back in every step",
    )


def _checkpointed(spec: RunSpec, mode: Literal["selective", "full"]) -> RunSpec:
    assert spec.model is not None
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, gradient_checkpointing=mode))


def _lora(spec: RunSpec) -> RunSpec:
    return msgspec.structs.replace(spec, adapter=msgspec.structs.replace(spec.adapter, type="lora"))
