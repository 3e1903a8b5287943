"""``simple_ddp_hook``: all-reduce each gradient in backward, as soon as it is there.

Communication: one blocking all-reduce a trained parameter, called in the backward of the last micro-step from a hook:
n calls, T g bytes a step. Always from the last parameter to the first, whatever the order in which gradients come;
gradients that do not come are zeros, reduced at the end of backward.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes.
Predecessor (``simple_ddp_ga``): communication begins only when backward has ended. Here it begins early, but as each call
waits for its own end, nothing is hidden behind computation yet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.gradients import InOrder, MicroStep, gradient_of, on_gradient
from allranks.train.strategies.replicated import Replicated
from allranks.train.strategies.traffic import Sizes, Traffic


class SimpleDDPHook(Replicated):
    """A blocking all-reduce a parameter, within the last backward."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._micro = MicroStep()
        self._order = InOrder(len(self._named), self._reduce)
        last = len(self._named) - 1
        for i, (_, parameter) in enumerate(self._named):  # backward runs from the last layer to the first
            on_gradient(parameter, partial(self._ready, last - i))

    def _ready(self, turn: int) -> None:
        if self._micro.last:
            self._order.ready(turn)

    def _reduce(self, turn: int) -> None:
        gradient = gradient_of(self._named[len(self._named) - 1 - turn][1])
        dist.all_reduce(gradient, group=self._group)
        gradient.div_(dist.get_world_size(self._group))

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.held_back()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self._micro.last:
            self._order.finish()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", len(sizes.trained), sizes.trained_bytes)]
