"""``simple_ddp``: all-reduce every gradient after every backward.

Communication: one blocking all-reduce a trained parameter after each micro-step's backward: n A calls (n parameters,
A micro-steps) and A T g bytes a step, T trained parameters of g bytes; 2 A T g (W-1)/W sent by each rank on a ring.
Averaging a sum whose earlier part is already the mean of all ranks leaves that part as it is, so accumulation is right,
only wasteful.
Memory per rank (P parameters, fp32 AdamW): 4P + 12T bytes: weights, gradients, two moments.
Predecessor (``single``): one process cannot share the work.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from allranks.train.strategies.gradients import gradient_of
from allranks.train.strategies.replicated import Replicated
from allranks.train.strategies.traffic import Sizes, Traffic


class SimpleDDP(Replicated):
    """A blocking all-reduce a parameter, after every backward."""

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for _, parameter in self._named:
            gradient = gradient_of(parameter)
            dist.all_reduce(gradient, group=self._group)
            gradient.div_(dist.get_world_size(self._group))

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "after_backward", len(sizes.trained) * accum, sizes.trained_bytes * accum)]
