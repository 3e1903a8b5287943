"""Make a run fit in memory: choose replication and recomputation for ``auto``, and find changes of the spec.

Replication between nodes (hybrid sharding, HSDP, of an FSDP2 strategy) needs more memory and less network;
recomputation of activations needs less memory and more time: as little of it as possible, so that the plan fits.
Changes of the spec are ordered by cost: first free ones, then changes of what is trained, last less precise weights.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

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
from allranks.planning.memory.weights import quantize_problem
from allranks.planning.rank_environment import with_allocator
from allranks.planning.records import LaunchPlan
from allranks.spec.loader import parse_spec, spec_to_dict
from allranks.spec.records import RECOMPUTE_AUTO, RECOMPUTE_FULL, RECOMPUTE_MODES, RECOMPUTE_NONE, RunSpec
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
    requested, procs = plan.strategy_options.get(REPLICATE), plan.procs_per_node

    def decided(value: str, reason: str) -> LaunchPlan:
        options = {**plan.strategy_options, REPLICATE: value}
        return msgspec.structs.replace(plan, strategy_options=options, replication=reason)

    if requested is None or plan.batch is None:
        return plan
    several = len(plan.nodes) > 1
    if several and procs == 1 and requested == REPLICATE_NODES:
        raise SpecError(
            "strategy.replicate: nodes shards weights over the ranks of each node, and there is one rank per node; use "
            "pytorch_ddp, which replicates them, or set strategy.replicate: none"
        )
    if not several or procs == 1:
        return decided(REPLICATE_NONE, f"{SHARDED}: a node has one rank" if several else "")
    saved = _sent(spec, plan)
    if requested != REPLICATE_AUTO:
        what = f"weights are sharded over the {procs} ranks of each node" if requested == REPLICATE_NODES else SHARDED
        return decided(str(requested), f"{what} (strategy.replicate: {requested}){saved}")
    there = capacity(spec, plan, facts)
    copied = estimate(spec, decided(REPLICATE_NODES, ""), find_config(spec), there)
    if copied.unknown or there.bytes is None:
        why = copied.unknown or f"the memory of a rank's device is unknown ({there.source})"
        return decided(REPLICATE_NONE, f"{SHARDED}: {why}; strategy.replicate: nodes replicates them nevertheless")
    need = f"a rank then needs about {format_bytes(copied.needed_bytes)} of {format_bytes(there.bytes)}"
    if copied.verdict != FITS:
        return decided(REPLICATE_NONE, f"{SHARDED}: a node cannot hold a copy, because {need}")
    why = f"every node holds a copy of the weights, sharded over its {procs} ranks (HSDP): {need}{saved}"
    return decided(REPLICATE_NODES, why)


def _sent(spec: RunSpec, plan: LaunchPlan) -> str:
    """Return what a node sends with and without copies, as part of a sentence; empty if the model is unknown."""
    sends, config = strategy_info(plan.strategy).node_sends, find_config(spec).config
    if sends is None or config is None or plan.batch is None:
        return ""
    model, nodes, accum = model_of(spec, plan, config), len(plan.nodes), plan.batch.grad_accum
    copies, shards = (
        sends(model, {**plan.strategy_options, REPLICATE: value}, nodes, accum)
        for value in (REPLICATE_NODES, REPLICATE_NONE)
    )
    return (
        f"; a node sends {format_bytes(copies)} to other nodes in an optimizer step with copies, "
        f"{format_bytes(shards)} without"
    )


def make_plan(spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Return the plan of `planner.make_plan`, with the compilation, the recomputation and the replication between nodes
    that ``auto`` means.

    Whether nodes hold copies of the weights is decided first, for the recomputation that saves most: traffic between
    nodes costs more.

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
    """Return the plan with the first mode that fits and the reason; ``full`` if none fits, ``none`` if memory or model
    is unknown.

    Raises:
        SpecError: the model's config is broken.
    """

    def decided(mode: str, reason: str) -> LaunchPlan:
        return msgspec.structs.replace(plan, recomputation=mode, recomputation_reason=reason)

    config, there = find_config(spec), capacity(spec, plan, facts)
    larger: list[str] = []
    for mode in RECOMPUTE_MODES:
        needed = estimate(spec, msgspec.structs.replace(plan, recomputation=mode), config, there)
        if needed.unknown or there.bytes is None:
            why = needed.unknown or f"the memory of the device is not known ({there.source})"
            return decided(RECOMPUTE_NONE, f"{why}; if memory is short, set it to selective or full")
        if needed.verdict == FITS:
            fits = f"a rank needs {format_bytes(needed.needed_bytes)} of {format_bytes(there.bytes)}"
            return decided(mode, f"{fits} ({', '.join(larger)})" if larger else fits)
        larger.append(f"{mode} needs {format_bytes(needed.needed_bytes)}")
    why = f"none of the modes fits: {', '.join(larger)} of {format_bytes(there.bytes or 0)}"
    return decided(RECOMPUTE_FULL, why)


def verdict_line(fit: Fit) -> str:
    """Return one sentence: what a rank needs, what it has, and whether that is enough."""
    if fit.unknown:
        return f"not known: {fit.unknown}; not refused"
    there = fit.capacity
    need = f"a rank needs about {format_bytes(fit.needed_bytes)}"
    need += f", most of it at: {fit.peak}"
    if fit.verdict == NOT_KNOWN or there.bytes is None:
        return f"{need}; its capacity is not known, so it is not refused ({there.source})"
    has = f"it has {format_bytes(there.bytes)} ({there.device}, {there.source})"
    if fit.verdict == FITS:
        return f"{need}; {has}: it fits"
    if fit.verdict == CLOSE:
        return f"{need}; {has}: too close to the limit to decide, so it is not refused"
    return f"{need}; {has}: it does not fit, and would fail in: {fit.fails_in}"


def remedy_line(remedy: Remedy) -> str:
    """Return a change and what a rank needs with it."""
    enough = "" if remedy.fits else ", still too much"
    return f"{remedy.change}: {format_bytes(remedy.needed_bytes)}{enough} ({remedy.cost})"


def remedy_settings(remedy: Remedy) -> str:
    """Return the command-line options for a change."""
    return " ".join(f"--set {shlex.quote(s)}" for s in remedy.settings)


def refusal(fit: Fit) -> str:
    """Return the full error message."""
    cures = [f"  {i}. {remedy_line(r)}\n     {remedy_settings(r)}" for i, r in enumerate(fit.remedies, 1)]
    head = "no known change of the spec makes it fit; the closest is:"
    if any(r.fits for r in fit.remedies):
        head = "changes that make it fit, the cheapest first:"
    lines = [f"memory: {verdict_line(fit)}", *([head, *cures] if cures else [])]
    return "\n".join([*lines, "to start it anyway: --force"])


MAX_REMEDIES = 3
SELECT, CHECKPOINTING = "model.gradient_checkpointing=selective", "model.gradient_checkpointing=full"
LORA, QUANTIZE = "adapter.type=lora", "model.quantize=nf4"
COMPUTE = "model.dtype=bfloat16"

Change = tuple[str, list[str], str]
"""What it is, its settings, and its cost."""


def with_remedies(fit: Fit, spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, config: ConfigSource) -> Fit:
    """Return the estimate with up to three changes that make it fit; if none does, with all of them combined."""
    if fit.verdict not in (CLOSE, TOO_LARGE):
        return fit
    tried = (_try(spec, change, facts, config, fit) for change in _changes(spec, plan))
    remedies = list(filter(None, tried))
    fitting = [remedy for remedy in remedies if remedy.fits][:MAX_REMEDIES]
    nearest = sorted(remedies, key=lambda remedy: remedy.needed_bytes)[:1]
    return msgspec.structs.replace(fit, remedies=fitting or nearest)


def _try(spec: RunSpec, change: Change, facts: MachineFacts, config: ConfigSource, before: Fit) -> Remedy | None:
    what, settings, cost = change
    try:
        changed = parse_spec(spec_to_dict(spec), settings)
        plan = make_plan(changed, facts)
    except AllranksError:
        return None
    if QUANTIZE in settings and config.config is not None and quantize_problem(config.config):
        return None
    got = estimate(changed, plan, config, before.capacity)
    if got.unknown or got.needed_bytes >= before.needed_bytes:
        return None
    return Remedy(change=what, settings=settings, needed_bytes=got.needed_bytes, fits=got.verdict == FITS, cost=cost)


def _changes(spec: RunSpec, plan: LaunchPlan) -> Iterator[Change]:
    """Yield changes that keep what is trained, then LoRA; each alone, then combined with the smallest activations.

    Trained weights in bfloat16 come last, because the loss gets worse.
    """
    assert plan.batch is not None
    lean: list[str] = []  # settings for the smallest activations
    if plan.batch.micro_batch_size > 1:
        lean = ["train.micro_batch_size=1"]
        if spec.train.global_batch_size is None:  # else the accumulation follows from it, and both together are refused
            lean.append(f"train.grad_accum={plan.batch.grad_accum * plan.batch.micro_batch_size}")
        yield "one sequence per micro-batch, the same global batch", lean, "smaller matrix products"
    if plan.recomputation == RECOMPUTE_NONE:
        yield "recompute element-wise operations in backward", [SELECT], "a few per cent more compute"
    if plan.recomputation != RECOMPUTE_FULL:
        yield "recompute activations in backward", [CHECKPOINTING], "about a third more compute"
        lean = [*lean, CHECKPOINTING]
    narrow = plan.dtype == "float32" and plan.device == "cuda"
    if narrow:
        what = "computation in bfloat16, trained weights stay in float32"
        yield what, [COMPUTE], "less precise activations and gradients"
    yield from _sharded(spec, plan, [], "")
    full = spec.adapter.type == "none"
    if full:
        yield "train only LoRA adapters", [LORA], "a different kind of training; often equally good"
    if lean:
        yield from _sharded(spec, plan, lean, ", with the smallest activations")
        if full:
            yield "LoRA, with the smallest activations", [LORA, *lean], "a different kind of training"
    if full:
        yield from _sharded(spec, plan, [LORA, *lean], " and LoRA, with the smallest activations")
    cost = "they are rounded, and unpacked again in each pass"
    yield "frozen weights in 4 bits (QLoRA)", [LORA, *lean, QUANTIZE] if full else [QUANTIZE], cost
    if plan.device == "cuda" and plan.world_size > 1:
        settings = [_strategy_setting(spec, "pytorch_zero3", offload="all"), *lean]
        cost = "they are copied to the device and back in every step"
        yield "weights and optimizer state in the host's memory", settings, cost
    if full and plan.param_dtype == "float32" and (narrow or plan.dtype == "bfloat16"):
        what, settings = "trained weights and optimizer state in bfloat16", [COMPUTE, "train.param_dtype=bfloat16"]
        keeps = strategy_info(spec.strategy.name).keeps_master_weights
        cost = "less precise gradients" if keeps else "loses small updates: expect a higher loss"
        yield what, settings, cost
        if lean:
            yield f"{what}, with the smallest activations", [*settings, *lean], cost


def _sharded(spec: RunSpec, plan: LaunchPlan, settings: list[str], more: str) -> Iterator[Change]:
    if plan.world_size == 1:
        return
    for name, cost in (
        ("zero1", "1.5 times the communication"),
        ("zero2", "gradients are reduced in every micro-step"),
        ("pytorch_zero3", "weights are gathered twice in every micro-step"),
    ):
        if name != spec.strategy.name:
            yield f"strategy {name}{more}", [_strategy_setting(spec, name), *settings], cost


def _strategy_setting(spec: RunSpec, name: str, **options: str) -> str:
    """Return the setting of another strategy without the spec's own options, which it may not have."""
    if spec.strategy.options or options:
        return f"strategy={{{', '.join(f'{k}: {v}' for k, v in {'name': name, **options}.items())}}}"
    return f"strategy.name={name}"
