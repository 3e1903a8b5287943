"""Implement the strategies simple_ddp, simple_ddp_ga, simple_ddp_hook and simple_ddp_async: one all-reduce per gradient.

``simple_ddp``: all-reduce every gradient after every backward.

Communication: one blocking all-reduce per trained parameter after each micro-step's backward: n A calls (n parameters,
A micro-steps) and A T g bytes per step, T trained parameters of g bytes; 2 A T g (W-1)/W sent by each rank on a ring.
Averaging does not change the part of a sum that is already the mean of all ranks, so accumulation is correct, but wasteful.
Memory per rank (P parameters, fp32 AdamW): 4P + 12T bytes: weights, gradients, two moments.
Predecessor (``single``): one process.

``simple_ddp_ga``: all-reduce every gradient once per optimizer step.

Communication: one blocking all-reduce per trained parameter, after the backward of the last micro-step: n calls and T g
bytes per step, for any number of micro-steps.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes.
Predecessor (``simple_ddp``): it communicates on every micro-step, although only the last one needs it.

``simple_ddp_hook``: all-reduce each gradient in backward, as soon as it is ready.

Communication: one blocking all-reduce per trained parameter, called in the backward of the last micro-step from a hook:
n calls, T g bytes per step. The order is always from the last parameter to the first, independent of the order in which
gradients are ready; missing gradients are zeros, reduced at the end of backward.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes.
Predecessor (``simple_ddp_ga``): communication begins only after backward. Here it begins early, but each call blocks, so
communication does not overlap with computation yet.

``simple_ddp_async``: start each gradient's all-reduce in backward, and wait for all of them before the update.

Communication: one all-reduce per trained parameter, started in the backward of the last micro-step and waited for in
``step``: n calls, T g bytes per step, in a fixed order as in ``simple_ddp_hook``.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes.
Predecessor (``simple_ddp_hook``): its hooks wait, so that communication blocks computation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.base import MakeOptimizer, Replicated, Sizes, Traffic
from allranks.train.strategies.gradient_sync import MicroStepState, OrderedCollectives, gradient_of, on_gradient


class SimpleDDP(Replicated):
    """Run a blocking all-reduce per parameter after every backward."""

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


class SimpleDDPAccumulating(Replicated):
    """Run a blocking all-reduce per parameter after the last backward of the step."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._micro = MicroStepState()

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.no_sync()

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


class _ReducedInBackward(Replicated):
    """All-reduce each gradient in the last backward, in the order from the last parameter to the first."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._micro = MicroStepState()
        self._order = OrderedCollectives(len(self._named), self._reduce)
        last = len(self._named) - 1
        for i, (_, parameter) in enumerate(self._named):  # backward runs from the last layer to the first
            on_gradient(parameter, partial(self._ready, last - i))

    def _ready(self, turn: int) -> None:
        if self._micro.last:
            self._order.ready(turn)

    def _gradient(self, turn: int) -> torch.Tensor:
        return gradient_of(self._named[len(self._named) - 1 - turn][1])

    def _reduce(self, turn: int) -> None:
        raise NotImplementedError

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self._micro.last:
            self._order.finish()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", len(sizes.trained), sizes.trained_bytes)]


class SimpleDDPHook(_ReducedInBackward):
    """Run a blocking all-reduce per parameter in the last backward."""

    def _reduce(self, turn: int) -> None:
        gradient = self._gradient(turn)
        dist.all_reduce(gradient, group=self._group)
        gradient.div_(dist.get_world_size(self._group))


class SimpleDDPAsync(_ReducedInBackward):
    """Start an asynchronous all-reduce per parameter in the last backward."""

    claims_overlap = True

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._in_flight: list[tuple[dist.Work, torch.Tensor]] = []
        super().setup(model, make_optimizer, group, clip_norm)

    def _reduce(self, turn: int) -> None:
        gradient = self._gradient(turn)
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        assert work is not None
        self._in_flight.append((work, gradient))

    def step(self) -> torch.Tensor:
        for work, gradient in self._in_flight:
            work.wait()
            gradient.div_(dist.get_world_size(self._group))
        self._in_flight.clear()
        return super().step()
