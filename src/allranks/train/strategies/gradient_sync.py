"""Synchronise gradients in backward: equal initial weights, collectives launched in one order on all ranks, all-reduce in buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import ProofFailed
from allranks.train.models.weight_loader import is_unmaterialized


def broadcast_from_first(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's rank 0, but for those that wait for weights. Every rank calls."""
    first = dist.get_global_rank(group, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not is_unmaterialized(tensor):
            dist.broadcast(tensor.data, src=first, group=group)


def reduce_scatter(out: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to add `whole` (W n) over the ranks; each gets its n of the sum in `out`."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    work = start(out, whole, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to put the ranks' `own` (n) side by side in `whole` (W n) on every rank; `own` may be its place there."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = start(whole, own, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def require_same_order(named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
    """Ranks that reduce different parameters together would corrupt gradients in silence.

    Raises:
        ProofFailed: on every rank; names the ranks whose parameters are others, or in another order.
    """
    digest = hashlib.sha256(repr([(n, tuple(p.shape), str(p.dtype)) for n, p in named]).encode()).digest()
    device = named[0][1].device if named else torch.device("cpu")
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    digests = [bytes(t.tolist()) for t in every]
    usual = max(set(digests), key=digests.count)
    odd = [str(r) for r, d in enumerate(digests) if d != usual]
    if odd:
        raise ProofFailed(
            f"the order of gradients is not the same on all ranks: rank {', '.join(odd)} differs from the others; "
            "their sums would mix different parameters. Ranks must build the same model, with the same parameters trained"
        )


class MicroStepState:
    """Whether the present micro-step is the optimizer step's last, which communicates."""

    def __init__(self) -> None:
        self.last = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around micro-steps that do not communicate."""
        self.last = False
        try:
            yield
        finally:
            self.last = True


class OrderedCollectives:
    """Launches items 0, 1, 2, ... as soon as they are ready, but never before those in front of them.

    Ranks may be ready in different orders, or some never (a parameter without gradient): collectives must not follow that.
    """

    def __init__(self, n: int, launch: Callable[[int], None]) -> None:
        self._n, self._launch = n, launch
        self._ready = [False] * n
        self._next = 0

    def ready(self, i: int) -> None:
        """Item `i` can be launched."""
        self._ready[i] = True
        while self._next < self._n and self._ready[self._next]:
            self._next += 1
            self._launch(self._next - 1)

    def finish(self) -> None:
        """Launch the rest, and begin anew."""
        while self._next < self._n:
            self._next += 1
            self._launch(self._next - 1)
        self._ready = [False] * self._n
        self._next = 0


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient; zeros where this rank's batch did not reach the parameter, though another rank's may have."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def on_gradient(parameter: nn.Parameter, action: Callable[[], None]) -> Any:
    """Call `action` when the parameter's gradient of a backward is whole. The hook's argument is the parameter, not
    its gradient: reducing that would average weights and leave every gradient to its rank."""
    return parameter.register_post_accumulate_grad_hook(lambda _: action())


class GradientBucket:
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


def split_into_buckets(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
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


class BucketAllReduce:
    """Gradients in buckets, each averaged by one asynchronous all-reduce that the last micro-step's backward starts when the
    bucket is full, always in the order given."""

    def __init__(self, buckets: Sequence[GradientBucket], group: dist.ProcessGroup) -> None:
        self._buckets, self._group, self._world = buckets, group, dist.get_world_size(group)
        self._micro = MicroStepState()
        self._order = OrderedCollectives(len(buckets), self._reduce)
        self._in_flight: list[dist.Work] = []
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
        self._in_flight.append(work)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Around a micro-step after which more follow."""
        return self._micro.no_sync()

    def finish(self) -> None:
        """After backward: what has not come in the last micro-step is reduced, too."""
        if self._micro.last:
            self._order.finish()

    def wait(self) -> None:
        """Until the means are there."""
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()
