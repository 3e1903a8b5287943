"""Reduce-scatter of gradients in backward: each rank keeps the mean of its own part alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from allranks.train.strategies.flat import Flat
from allranks.train.strategies.gradients import InOrder, on_gradient, reduce_scatter

AT_ONCE = 2  # whole gradient buffers in flight: more hide no more, and are memory


class ScatteredGradients:
    """Gradients of flats in the order in which backward makes them; the last flat of the model comes first."""

    def __init__(self, flats: Sequence[Flat], group: dist.ProcessGroup) -> None:
        self._flats, self._group, self._world = flats, group, dist.get_world_size(group)
        self._buffers: list[torch.Tensor | None] = [None] * len(flats)
        self._came: list[set[int]] = [set() for _ in flats]
        self._flying: list[tuple[dist.Work, int, torch.Tensor, torch.Tensor]] = []
        self._own: list[torch.Tensor | None] = [None] * len(flats)
        self._order = InOrder(len(flats), self._launch)
        for at, flat in enumerate(flats):
            for i, (_, parameter) in enumerate(flat.named):
                on_gradient(parameter, partial(self._take, at, i))

    def _take(self, at: int, i: int) -> None:
        """A gradient has come: into the buffer, divided by W, and gone from the parameter."""
        flat = self._flats[at]
        parameter, (start, stop) = flat.named[i][1], flat.spans[i]
        buffer = self._buffers[at]
        if buffer is None:
            buffer = self._buffers[at] = torch.empty_like(flat.whole)
        assert parameter.grad is not None
        torch.div(parameter.grad.flatten(), self._world, out=buffer[start:stop])
        parameter.grad = None
        self._came[at].add(i)
        if len(self._came[at]) == len(flat.named):
            self._order.ready(at)

    def _launch(self, at: int) -> None:
        flat, buffer = self._flats[at], self._buffers[at]
        buffer = torch.empty_like(flat.whole) if buffer is None else buffer
        for i, (start, stop) in enumerate(flat.spans):
            if i not in self._came[at]:
                buffer[start:stop].zero_()
        buffer[flat.numel :].zero_()
        out = buffer.new_empty(flat.part)
        self._flying.append((reduce_scatter(out, buffer, self._group), at, out, buffer))
        self._buffers[at] = None
        self._came[at].clear()
        if len(self._flying) > AT_ONCE:
            self._land()

    def _land(self) -> None:
        work, at, out, _ = self._flying.pop(0)
        work.wait()
        own = self._own[at]
        self._own[at] = out if own is None else own.add_(out)

    def finish(self) -> None:
        """At the end of a backward: what has not been sent goes now."""
        self._order.finish()

    def give(self) -> None:
        """Before the update: wait, and hand each flat's pieces their gradient."""
        while self._flying:
            self._land()
        for at, flat in enumerate(self._flats):
            own = self._own[at]
            assert own is not None
            flat.give_gradient(own)
            self._own[at] = None
