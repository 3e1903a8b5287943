"""``simple_ddp_async``: start each gradient's all-reduce in backward, and wait for all of them before the update.

Communication: one all-reduce a trained parameter, started in the backward of the last micro-step and waited for in
``step``: n calls, T g bytes a step, in a fixed order as in ``simple_ddp_hook``.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes.
Predecessor (``simple_ddp_hook``): its hooks wait, so that computation stands still while gradients travel.
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


class SimpleDDPAsync(Replicated):
    """An asynchronous all-reduce a parameter, started within the last backward."""

    claims_overlap = True

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._micro = MicroStep()
        self._flying: list[tuple[dist.Work, torch.Tensor]] = []
        self._order = InOrder(len(self._named), self._reduce)
        last = len(self._named) - 1
        for i, (_, parameter) in enumerate(self._named):  # backward runs from the last layer to the first
            on_gradient(parameter, partial(self._ready, last - i))

    def _ready(self, turn: int) -> None:
        if self._micro.last:
            self._order.ready(turn)

    def _reduce(self, turn: int) -> None:
        gradient = gradient_of(self._named[len(self._named) - 1 - turn][1])
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        assert work is not None
        self._flying.append((work, gradient))

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.held_back()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self._micro.last:
            self._order.finish()

    def step(self) -> torch.Tensor:
        for work, gradient in self._flying:
            work.wait()
            gradient.div_(dist.get_world_size(self._group))
        self._flying.clear()
        return super().step()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", len(sizes.trained), sizes.trained_bytes)]
