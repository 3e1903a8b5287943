"""Choose which activations are recomputed, for ``model.gradient_checkpointing: auto``: as few as possible, so that the plan fits."""

from __future__ import annotations

import msgspec

from allranks.planning import planner
from allranks.planning.memory.config_sources import find_config
from allranks.planning.memory.estimate import capacity, estimate
from allranks.planning.memory.records import FITS, Fit
from allranks.planning.memory.replication import decide_replication
from allranks.planning.rank_environment import with_allocator
from allranks.planning.records import LaunchPlan
from allranks.spec.recomputation import AUTO, FULL, MODES, NONE
from allranks.spec.records import RunSpec
from allranks.utils.formatting import format_bytes
from allranks.utils.machine import MachineFacts


def make_plan(spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Return the plan of `planner.make_plan`, with the recomputation and the replication between nodes that ``auto`` means.

    Whether nodes hold copies of the weights is decided first, for the recomputation that saves most: traffic between nodes costs more.

    Raises:
        SpecError, EnvironmentNotAble: as `planner.make_plan`; the model's config is broken.
    """
    plan = planner.make_plan(spec, facts)
    if spec.model is None or spec.model.recomputation != AUTO:
        plan = decide_replication(spec, plan, facts)
    else:
        plan = decide_replication(spec, msgspec.structs.replace(plan, recomputation=FULL), facts)
        plan = choose_recomputation(plan, spec, facts)
    if spec.script is not None:  # a program of the user's own decides for itself
        return plan
    environment = with_allocator(plan.environment, device=plan.device, recomputes=plan.recomputation != NONE)
    return msgspec.structs.replace(plan, environment=environment)


def choose_recomputation(plan: LaunchPlan, spec: RunSpec, facts: MachineFacts) -> LaunchPlan:
    """Return the plan with the first mode that fits and the reason; ``full`` if none fits, ``none`` if memory or model is unknown.

    Raises:
        SpecError: the model's config is broken.
    """
    found, there = find_config(spec), capacity(spec, plan, facts)
    larger: list[str] = []
    for mode in MODES:
        tried = msgspec.structs.replace(plan, recomputation=mode)
        needed = estimate(spec, tried, found, there)
        if needed.unknown or there.bytes is None:
            why = needed.unknown or f"the memory of the device is not known ({there.source})"
            return _chosen(plan, NONE, f"{why}; if memory is short, set it to selective or full")
        if needed.verdict == FITS:
            return _chosen(plan, mode, _reason(needed, there.bytes, larger))
        larger.append(f"{mode} needs {format_bytes(needed.needed_bytes)}")
    return _chosen(plan, FULL, f"none of the modes fits: {', '.join(larger)} of {format_bytes(there.bytes or 0)}")


def _reason(needed: Fit, limit: int, larger: list[str]) -> str:
    fits = f"a rank needs {format_bytes(needed.needed_bytes)} of {format_bytes(limit)}"
    return f"{fits} ({', '.join(larger)})" if larger else fits


def _chosen(plan: LaunchPlan, mode: str, reason: str) -> LaunchPlan:
    return msgspec.structs.replace(plan, recomputation=mode, recomputation_reason=reason)
