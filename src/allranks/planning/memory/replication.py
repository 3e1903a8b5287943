"""Decide whether an FSDP2 strategy replicates weights between nodes (hybrid sharding, HSDP), and say why. Pure but for the model's config."""

from __future__ import annotations

import msgspec

from allranks.errors import SpecError
from allranks.planning.memory.config_sources import find_config
from allranks.planning.memory.estimate import capacity, estimate, model_of
from allranks.planning.memory.records import FITS
from allranks.planning.records import LaunchPlan
from allranks.spec.records import RunSpec
from allranks.spec.strategies import strategy_info
from allranks.utils.formatting import format_bytes
from allranks.utils.machine import MachineFacts

OPTION, AUTO, NODES, NONE = "replicate", "auto", "nodes", "none"
SHARDED = "weights are sharded over all ranks"


def decide_replication(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> LaunchPlan:
    """Return the plan with ``strategy.replicate`` nodes or none instead of auto, and the reason in ``replication``.

    Raises:
        SpecError: ``replicate: nodes`` with one rank per node; or the model's config is broken.
    """
    asked = plan.strategy_options.get(OPTION)
    if asked is None or plan.batch is None:
        return plan
    nodes, procs = len(plan.nodes), plan.procs_per_node
    if nodes == 1:
        return _chosen(plan, NONE, "")
    if procs == 1 and asked == NODES:
        raise SpecError(
            "strategy.replicate: nodes shards weights over the ranks of each node, and there is one rank per node; use pytorch_ddp, which "
            "replicates them, or set strategy.replicate: none"
        )
    if procs == 1:
        return _chosen(plan, NONE, f"{SHARDED}: a node has one rank")
    saved = _sent(spec, plan)
    if asked != AUTO:
        what = f"weights are sharded over the {procs} ranks of each node" if asked == NODES else SHARDED
        return _chosen(plan, str(asked), f"{what} (strategy.replicate: {asked}){saved}")
    return _by_memory(spec, plan, facts, saved)


def _by_memory(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, saved: str) -> LaunchPlan:
    """Replicate weights if a rank then fits in its device's memory."""
    there, procs = capacity(spec, plan, facts), plan.procs_per_node
    found = estimate(spec, _chosen(plan, NODES, ""), find_config(spec), there)
    if found.unknown or there.bytes is None:
        why = found.unknown or f"the memory of a rank's device is unknown ({there.source})"
        return _chosen(plan, NONE, f"{SHARDED}: {why}; strategy.replicate: nodes replicates them nevertheless")
    need = f"a rank then needs about {format_bytes(found.needed_bytes)} of {format_bytes(there.bytes)}"
    if found.verdict != FITS:
        return _chosen(plan, NONE, f"{SHARDED}: a node cannot hold a copy, because {need}")
    return _chosen(
        plan, NODES, f"every node holds a copy of the weights, sharded over its {procs} ranks (HSDP): {need}{saved}"
    )


def _chosen(plan: LaunchPlan, value: str, why: str) -> LaunchPlan:
    return msgspec.structs.replace(plan, strategy_options={**plan.strategy_options, OPTION: value}, replication=why)


def _sent(spec: RunSpec, plan: LaunchPlan) -> str:
    """Return what a node sends to others with and without copies, as part of a sentence; empty if the model is unknown."""
    sends, config = strategy_info(plan.strategy).node_sends, find_config(spec).config
    if sends is None or config is None or plan.batch is None:
        return ""
    model, nodes, accum = model_of(spec, plan, config), len(plan.nodes), plan.batch.grad_accum
    copies, shards = (sends(model, {**plan.strategy_options, OPTION: value}, nodes, accum) for value in (NODES, NONE))
    return f"; a node sends {format_bytes(copies)} to other nodes in an optimizer step with copies, {format_bytes(shards)} without"
