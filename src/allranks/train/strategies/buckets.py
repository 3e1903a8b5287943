"""All-reduce of gradients in backward, bucket by bucket: every rank gets the mean of all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.gradients import InOrder, MicroStep, on_gradient


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


class ReducedBuckets:
    """Gradients in buckets, each averaged by one asynchronous all-reduce that the last micro-step's backward starts when the
    bucket is full, always in the order given."""

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        self._buckets, self._group, self._world = buckets, group, dist.get_world_size(group)
        self._micro = MicroStep()
        self._order = InOrder(len(buckets), self._reduce)
        self._flying: list[dist.Work] = []
        for at, bucket in enumerate(buckets):
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
        bucket.flat.div_(self._world)
        work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
        assert work is not None
        self._flying.append(work)

    def held_back(self) -> AbstractContextManager[Any]:
        """Around a micro-step after which more follow."""
        return self._micro.held_back()

    def finish(self) -> None:
        """After backward: what has not come in the last micro-step is reduced, too."""
        if self._micro.last:
            self._order.finish()

    def wait(self) -> None:
        """Until the means are there."""
        for work in self._flying:
            work.wait()
        self._flying.clear()
