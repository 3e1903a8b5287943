"""Find changes of the spec that make a run fit, and describe the estimate in sentences.

Changes are ordered by cost: first those that are free, then those that change what is trained, last weights of less precision.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Literal

import msgspec

from allranks.errors import AllranksError
from allranks.planning.memory.config_sources import ConfigSource
from allranks.planning.memory.estimate import estimate
from allranks.planning.memory.recomputation import make_plan
from allranks.planning.memory.records import CLOSE, FITS, NOT_KNOWN, TOO_LARGE, Fit, Remedy
from allranks.planning.records import LaunchPlan
from allranks.spec.recomputation import FULL, NONE, SELECTIVE
from allranks.spec.records import RunSpec
from allranks.spec.strategies import strategy_info
from allranks.utils.formatting import format_bytes
from allranks.utils.machine import MachineFacts


def verdict_line(found: Fit) -> str:
    """Return one sentence: what a rank needs, what it has, and whether that is enough."""
    if found.unknown:
        return f"not known: {found.unknown}; not refused"
    there = found.capacity
    need = f"a rank needs about {format_bytes(found.needed_bytes)}, most of it at: {found.peak}"
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
    if plan.recomputation == NONE:
        change = "recompute element-wise operations in backward"
        yield change, [SELECT], _checkpointed(spec, SELECTIVE), "a few per cent more compute"
    if plan.recomputation != FULL:
        change = "recompute activations in backward"
        yield change, [CHECKPOINTING], _checkpointed(spec, FULL), "about a third more compute"
        lean, settings = _checkpointed(lean, FULL), [*settings, CHECKPOINTING]
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
