"""``bucket_ddp_async``: gradients side by side in buckets, one asynchronous all-reduce a bucket.

Communication: one all-reduce a bucket (25 MB by default), started in the backward of the last micro-step when the bucket
is full and waited for in ``step``: about T g / 25 MB calls, T g bytes a step; 2 T g (W-1)/W sent by each rank on a ring.
Buckets take the parameters from the last to the first, the same on all ranks (checked at the start), and are launched in
that order.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes; gradients are views into the buckets.
Predecessor (``simple_ddp_async``): hundreds of small messages, each with its own latency. Filling buckets in the order in
which hooks fire would be simpler, but that order may differ between ranks, which corrupts gradients in silence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange, whole_states, whole_weights
from allranks.train.strategies.common import (
    clip_and_update,
    load_replicated_state,
    replicated_state,
    replicated_weights,
    trained,
)
from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.gradients import (
    InOrder,
    MicroStep,
    broadcast_from_first,
    on_gradient,
    require_same_order,
)
from allranks.train.strategies.traffic import Sizes, Traffic


class Bucket:
    """Gradients of some parameters in one flat tensor, whose length is a multiple of `multiple`."""

    def __init__(self, parameters: list[nn.Parameter], multiple: int = 1) -> None:
        self.parameters = parameters
        first, numel = parameters[0], sum(p.numel() for p in parameters)
        self.flat = torch.zeros(-(-numel // multiple) * multiple, dtype=first.dtype, device=first.device)
        parts = self.flat[:numel].split([p.numel() for p in parameters])
        self.views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self.missing = len(parameters)

    def take(self, i: int) -> None:
        """Gradient `i` has come: put it in its place, if it is not there already."""
        parameter, view = self.parameters[i], self.views[i]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def fill(self) -> None:
        """Zeros for gradients that have not come in any micro-step of this optimizer step."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view.zero_()


def cut(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device together, up to `bucket_bytes` each."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        bytes_ = p.numel() * p.element_size()
        alike = bool(buckets) and (buckets[-1][0].dtype, buckets[-1][0].device) == (p.dtype, p.device)
        if alike and size + bytes_ <= bucket_bytes:
            buckets[-1].append(p)
            size += bytes_
        else:
            buckets.append([p])
            size = bytes_
    return buckets


class BucketDDPAsync:
    """An asynchronous all-reduce a bucket, started within the last backward."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicated, lockstep, rehearse = True, False, False
    claims_overlap = True

    def __init__(self, bucket_mb: float) -> None:
        self._bucket_bytes = bucket_mb * 2**20

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._group, self._clip_norm = model, group, clip_norm
        self._named = trained(model)
        backwards = self._named[::-1]  # backward runs from the last layer to the first
        require_same_order(backwards, group)
        broadcast_from_first(model, group)
        self.optimizer = make_optimizer(self._named)
        self._micro = MicroStep()
        self._buckets = [Bucket(part) for part in cut([p for _, p in backwards], self._bucket_bytes)]
        self._order = InOrder(len(self._buckets), self._reduce)
        self._flying: list[dist.Work] = []
        for at, bucket in enumerate(self._buckets):
            for i, parameter in enumerate(bucket.parameters):
                on_gradient(parameter, partial(self._take, at, i))

    def _take(self, at: int, i: int) -> None:
        bucket = self._buckets[at]
        bucket.take(i)
        if self._micro.last:
            bucket.missing -= 1
            if not bucket.missing:
                self._order.ready(at)

    def _reduce(self, at: int) -> None:
        bucket = self._buckets[at]
        if bucket.missing:
            bucket.fill()
        bucket.missing = len(bucket.parameters)
        bucket.flat.div_(dist.get_world_size(self._group))
        work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        assert work is not None
        self._flying.append(work)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.held_back()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self._micro.last:
            self._order.finish()

    def step(self) -> torch.Tensor:
        for work in self._flying:
            work.wait()
        self._flying.clear()
        return clip_and_update(self.optimizer, (p for _, p in self._named), self._clip_norm)

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", len(self._buckets), sizes.trained_bytes)]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self.module, trained_only)

    def weight_shards(self) -> list[Shard]:
        return whole_weights([*self._named, *self.module.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return whole_states(self._named, self.optimizer, everywhere=True)

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated_state(self.module, self.optimizer, state)
