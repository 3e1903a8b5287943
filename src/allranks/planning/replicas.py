"""Decide which ranks hold the same weights, and say in the plan whether they are compared. Pure."""

from __future__ import annotations

from allranks.planning.records import LaunchPlan
from allranks.spec.strategies import strategy_info


def replica_sets(world_size: int, shard_ranks: int, *, replicated: bool) -> list[list[int]]:
    """Return the sets of ranks that hold the same weights, or the same part of them; empty if no rank has a replica.

    Args:
        shard_ranks: over how many ranks weights are sharded; less than all under HSDP.
        replicated: every rank holds all weights.
    """
    step = 1 if replicated else shard_ranks
    return [list(range(first, world_size, step)) for first in range(step)] if step < world_size else []


def verify_line(plan: LaunchPlan, every: int | None) -> str | None:
    """Return a line of the plan: whether weights are compared during training (``observe.verify_every``)."""
    if every is None:
        return None
    if plan.batch is None:
        return "replicas: nothing is compared, because allranks does not know the weights of your own program"
    sets = replica_sets(plan.world_size, plan.shard_ranks, replicated=not strategy_info(plan.strategy).shards_weights)
    if not sets:
        why = f"{plan.strategy} shards all weights" if plan.world_size > 1 else "one rank has none"
        return f"replicas: nothing is compared, because no rank holds the weights of another: {why}"
    unsure = "; with two the wrong one cannot be told" if len(sets[0]) == 2 else ""
    return (
        f"replicas: the weights of {len(sets[0])} copies are compared every {every} steps, before each checkpoint and "
        f"at the end (observe.verify_every){unsure}"
    )
