"""The ranks of this run and the groups over which they talk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from allranks.facts import host_name
from allranks.planning import LaunchPlan
from allranks.train import waits


@dataclass(frozen=True)
class World:
    """Who this rank is. ``group`` carries training; ``control`` (gloo, CPU) carries small bookkeeping beside it."""

    rank: int
    local_rank: int
    size: int
    host: str
    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes what is written once."""
        return self.rank == 0


# One process that talks to nobody; its groups are never used.
ALONE = World(
    rank=0,
    local_rank=0,
    size=1,
    host="",
    device=torch.device("cpu"),
    group=cast(dist.ProcessGroup, None),
    control=cast(dist.ProcessGroup, None),
)


def join(plan: LaunchPlan) -> World:
    """Join the process group by the environment that the agent gave, and make the control group.

    The timeout is the spec's (``cluster.timeout_s``): the only knob that really bounds a collective.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    timeout = timedelta(seconds=plan.timeout_s)
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    bind = device if plan.backend == "nccl" else None
    waits.measure()
    dist.init_process_group(plan.backend, timeout=timeout, device_id=bind)
    group = dist.group.WORLD
    assert group is not None
    control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
    assert isinstance(control, dist.ProcessGroup)
    return World(
        rank=dist.get_rank(),
        local_rank=local_rank,
        size=dist.get_world_size(),
        host=host_name(),
        device=device,
        group=group,
        control=control,
    )


def leave() -> None:
    """Leave the process group, if in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
