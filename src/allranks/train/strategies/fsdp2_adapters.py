"""Adapters that stay out of the sharding: when, and how their gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import SpecError
from allranks.train.adapters import is_adapted
from allranks.train.strategies.common import trained
from allranks.train.strategies.gradients import gradient_of

SMALL_BYTES = 64 << 20


def keeps_whole(model: nn.Module, adapters: str, world: int) -> bool:
    """Whether what is trained stays out of the sharding.

    Four times its bytes (weight, gradient, two moments) are then on every rank. ``auto`` takes that where it is at most
    64 MiB, or a tenth of this rank's share of the frozen weights.

    Raises:
        SpecError: ``ignored`` without adapters.
    """
    if not is_adapted(model) and not is_adapted(getattr(model, "model", model)):
        if adapters == "ignored":
            raise SpecError("strategy.adapters: ignored keeps adapters on every rank, and this model has none")
        return False
    if adapters != "auto":
        return adapters == "ignored"
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    held = 4 * sum(p.numel() * p.element_size() for _, p in trained(model))
    return held <= max(SMALL_BYTES, 0.1 * frozen / world)


def average_together(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """The mean of gradients over the ranks, in one flat all-reduce for each dtype. Every rank calls."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for p in parameters:
        by_dtype.setdefault(p.dtype, []).append(gradient_of(p))
    for gradients in by_dtype.values():
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
