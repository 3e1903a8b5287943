"""Synchronise gradients in backward: equal initial weights, one collective order on all ranks, bucketed all-reduce."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import ProofFailed
from allranks.spec.strategies.base import cut_into_buckets
from allranks.train.models.weight_loader import is_unmaterialized


def broadcast_from_first(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast parameters and buffers from the group's rank 0, except unmaterialized ones. Collective."""
    first = dist.get_global_rank(group, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not is_unmaterialized(tensor):
            dist.broadcast(tensor.data, src=first, group=group)


def reduce_scatter(out: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start a reduce-scatter of `whole` (W n elements); each rank gets its n elements of the sum in `out`."""
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    return cast(dist.Work, start(out, whole, group=group, async_op=True))


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of `own` (n elements per rank) into `whole` (W n); `own` may be a view of `whole`."""
    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(dist.Work, start(whole, own, group=group, async_op=True))


def require_same_order(named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup) -> None:
    """Raise `ProofFailed` on all ranks unless they reduce the same parameters in one order (else silent corruption)."""
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
            "their sums would mix different parameters. Ranks must build the same model, with the same parameters "
            "trained"
        )


class MicroStepState:
    """Track whether the current micro-step is the last of the optimizer step, which communicates."""

    def __init__(self) -> None:
        self.last = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for micro-steps that do not communicate."""
        self.last = False
        try:
            yield
        finally:
            self.last = True


class OrderedCollectives:
    """Launch items 0, 1, 2, ... as soon as they are ready, but always in this order.

    The order of readiness may differ between ranks, and items may never be ready (a parameter without gradient); the
    order of collectives must not depend on it.
    """

    def __init__(self, n: int, launch: Callable[[int], None]) -> None:
        self._n, self._launch = n, launch
        self._ready = [False] * n
        self._next = 0

    def ready(self, i: int) -> None:
        """Mark item `i` as ready."""
        self._ready[i] = True
        while self._next < self._n and self._ready[self._next]:
            self._next += 1
            self._launch(self._next - 1)

    def launch(self, count: int) -> None:
        """Launch the first `count` items, if they are not launched."""
        while self._next < count:
            self._next += 1
            self._launch(self._next - 1)

    def finish(self) -> None:
        """Launch the remaining items and reset."""
        self.launch(self._n)
        self._ready = [False] * self._n
        self._next = 0


def queue_after_backward(action: Callable[[], None]) -> None:
    """Let autograd's engine call `action` at the end of the running backward. Call it from a hook in it."""
    torch.autograd.Variable._execution_engine.queue_callback(action)  # pyright: ignore[reportAttributeAccessIssue]


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient; zeros if this rank's batch did not use the parameter (another rank's may have)."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def on_gradient(parameter: nn.Parameter, action: Callable[[], None]) -> Any:
    """Call `action` when the parameter's gradient is accumulated in a backward.

    The hook's argument is the parameter, not its gradient: reducing it would average weights instead of gradients.
    """
    return parameter.register_post_accumulate_grad_hook(lambda _: action())


class GradientBucket:
    """Flat tensor with the gradients of some parameters; its length is a multiple of `multiple`."""

    def __init__(self, parameters: list[nn.Parameter], multiple: int = 1) -> None:
        self.parameters = parameters
        first, numel = parameters[0], sum(p.numel() for p in parameters)
        self.flat = torch.zeros(-(-numel // multiple) * multiple, dtype=first.dtype, device=first.device)
        parts = self.flat[:numel].split([p.numel() for p in parameters])
        self.views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self.missing = len(parameters)

    def take(self, i: int) -> None:
        """Copy gradient `i` into the bucket, if it is not already a view of it."""
        parameter, view = self.parameters[i], self.views[i]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def fill(self) -> None:
        """Fill in zeros for parameters without a gradient in this optimizer step."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view.zero_()


def split_into_buckets(parameters: list[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Group neighbouring parameters of one dtype and device into buckets of up to `bucket_bytes`."""
    return cut_into_buckets(
        parameters, lambda p: p.numel() * p.element_size(), bucket_bytes, lambda p: (p.dtype, p.device)
    )


class BucketAllReduce:
    """Average gradient buckets, each with one asynchronous all-reduce.

    The last micro-step's backward starts it when the bucket is full, always in the given order.
    """

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
        self._in_flight.append(cast(dist.Work, dist.all_reduce(bucket.flat, group=self._group, async_op=True)))

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context for micro-steps before the last one."""
        return self._micro.no_sync()

    def finish(self) -> None:
        """Reduce the remaining buckets after backward."""
        if self._micro.last:
            self._order.finish()

    def wait(self) -> None:
        """Wait for all all-reduces."""
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()
