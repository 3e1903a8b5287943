"""Measure the load of the machines during timed repeats, and decide which strategies are timed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from allranks.train.distributed import DistContext
from allranks.utils.cpu_load import CpuUse, sample_cpu, use_between
from allranks.utils.load_rules import judge_machine

EXTRA_ROUNDS = 2
"""A strategy is timed again at most so often, because its repeats were disturbed."""
Result = TypeVar("Result")


def with_load(world: DistContext, action: Callable[[], Result]) -> tuple[Result, dict[str, Any]]:
    """Run an action; return its result, and this rank's host and CPU time meanwhile."""
    first = sample_cpu()
    result = action()
    return result, {"host": world.host, **msgspec.to_builtins(use_between(first, sample_cpu()))}


def was_disturbed(world: DistContext, load: dict[str, Any]) -> bool:
    """Return whether CPU time was taken from the ranks of any host. Collective: all ranks get the same answer."""
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, load, group=world.control)
    hosts: dict[str, list[CpuUse]] = {}
    for one in every:
        hosts.setdefault(one["host"], []).append(msgspec.convert(one, CpuUse))
    return any(judge_machine(host, uses).overloaded for host, uses in hosts.items())
