"""``simple_ddp_ga``: all-reduce every gradient once an optimizer step.

Communication: one blocking all-reduce a trained parameter, after the backward of the last micro-step: n calls and T g
bytes a step, however many micro-steps.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes.
Predecessor (``simple_ddp``): it communicates on every micro-step what only the last one needs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.gradients import MicroStep, gradient_of
from allranks.train.strategies.replicated import Replicated
from allranks.train.strategies.traffic import Sizes, Traffic


class SimpleDDPAccumulating(Replicated):
    """A blocking all-reduce a parameter, after the last backward of the step."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._micro = MicroStep()

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.held_back()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if not self._micro.last:
            return
        for _, parameter in self._named:
            gradient = gradient_of(parameter)
            dist.all_reduce(gradient, group=self._group)
            gradient.div_(dist.get_world_size(self._group))

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "after_backward", len(sizes.trained), sizes.trained_bytes)]
