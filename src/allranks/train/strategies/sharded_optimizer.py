"""Shard flat parameters, gradients (reduce-scatter) and optimizer state evenly over ranks.

Parameters are concatenated into one flat tensor, so that every rank owns an equal part. Shards of full parameters would
differ in size (by 1.3 with one large embedding); parts of the flat tensor differ by less than W elements of padding,
and one collective handles them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.spec.strategies.base import BUFFERS_IN_FLIGHT
from allranks.train.strategies.base import (
    LoopStrategy,
    MakeOptimizer,
    clip_and_update,
    has_weight_decay,
    host_copy,
    replicated_weights,
    trained_parameters,
    wait_for_host_copies,
)
from allranks.train.strategies.gradient_sync import (
    OrderedCollectives,
    all_gather,
    broadcast_from_first,
    on_gradient,
    reduce_scatter,
    require_same_order,
    split_into_buckets,
)
from allranks.train.strategies.shards import StateRange, TensorShard, whole_weights

Named = tuple[str, nn.Parameter]


class FlatParameter:
    """Parameters of one dtype and device in one flat tensor.

    ``whole`` (W n elements) holds the weights, parameters are views of it; this rank owns ``whole[low:high]`` (n).
    """

    def __init__(self, named: Sequence[Named], group: dist.ProcessGroup) -> None:
        # those with weight decay come first, so that a part has at most one boundary between the two kinds
        self.named = sorted(named, key=lambda item: not has_weight_decay(*item))
        self.group, world = group, dist.get_world_size(group)
        sizes = [p.numel() for _, p in self.named]
        self.numel = sum(sizes)
        self.part = -(-self.numel // world)
        self.low = dist.get_rank(group) * self.part
        self.high = self.low + self.part
        self._decayed = sum(p.numel() for name, p in self.named if has_weight_decay(name, p))
        self.spans = [(stop - n, stop) for n, stop in zip(sizes, accumulate(sizes), strict=True)]
        first = self.named[0][1]
        self.trained = first.requires_grad
        self.dtype = first.dtype  # dtype of this rank's part, its gradient and the optimizer state
        self.whole = torch.zeros(self.part * world, dtype=first.dtype, device=first.device)
        for (_, p), (start, stop) in zip(self.named, self.spans, strict=True):
            self.whole[start:stop].copy_(p.data.flatten())
        self._view_parameters()
        self.pieces: list[nn.Parameter] = []

    @property
    def bytes(self) -> int:
        """Bytes of the full tensor with padding, in the dtype in which it is gathered."""
        return self.whole.numel() * self.whole.element_size()

    def _view_parameters(self) -> None:
        for (_, p), (start, stop) in zip(self.named, self.spans, strict=True):
            p.data = self.whole[start:stop].view(p.shape)

    def gather_in(self, dtype: torch.dtype) -> None:
        """Gather in another dtype than that of this rank's part; the full tensor must have no memory now."""
        self.whole = torch.empty(self.whole.numel(), dtype=dtype, device=self.whole.device)
        self._view_parameters()
        self.whole.untyped_storage().resize_(0)

    def own(self) -> torch.Tensor:
        """Return this rank's part of the weights, as a view."""
        return self.whole[self.low : self.high]

    def cut(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Split a part into decayed elements (1, k) and the rest (n-k,), which the optimizer tells apart by shape."""
        border = min(max(self._decayed - self.low, 0), self.part)
        return [p for p in (part[:border].view(1, -1), part[border:]) if p.numel()]

    def make_pieces(self, part: torch.Tensor, *, on_host: bool = False) -> list[nn.Parameter]:
        """Create the parameters of this rank's optimizer: views of `part`, or copies in host memory."""
        self._own = part
        self._on_host = on_host
        self.pieces = [nn.Parameter(host_copy(p) if on_host else p) for p in self.cut(part)]
        return self.pieces

    def give_gradient(self, part: torch.Tensor) -> None:
        """Set this rank's part of the gradient."""
        for piece, gradient in zip(self.pieces, self.cut(part), strict=True):
            piece.grad = host_copy(gradient) if self._on_host else gradient

    def give_weights(self) -> None:
        """Copy loaded weights to pieces on the host, which otherwise have them, because they are updated there."""
        if self._on_host:
            for piece, own in zip(self.pieces, self.cut(self._own), strict=True):
                piece.data.copy_(own, non_blocking=True)
            wait_for_host_copies(self._own.device)

    def take_update(self) -> None:
        """Copy weights that were updated on the host back to the device."""
        if self._on_host:
            for piece, own in zip(self.pieces, self.cut(self._own), strict=True):
                own.copy_(piece.data, non_blocking=True)

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a full flat tensor into parameters."""
        spans = zip(self.named, self.spans, strict=True)
        return {name: whole[start:stop].view(p.shape) for (name, p), (start, stop) in spans}


def make_flat_parameters(groups: Sequence[Sequence[Named]], group: dist.ProcessGroup) -> list[FlatParameter]:
    """Create flat parameters for each group; several if dtypes, devices or being trained differ."""
    flats = []
    for named in groups:
        kinds: dict[Any, list[Named]] = {}
        for name, p in named:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((name, p))
        flats += [FlatParameter(part, group) for part in kinds.values()]
    return flats


def optimizer_pieces(flats: Sequence[FlatParameter]) -> list[Named]:
    """Return the tensors that this rank's optimizer updates."""
    return [(f"flat{i}.{k}", piece) for i, flat in enumerate(flats) for k, piece in enumerate(flat.pieces)]


def flat_weights(flats: Sequence[FlatParameter], parts: Sequence[torch.Tensor]) -> list[TensorShard]:
    """Return this rank's ranges of the weights by parameter; `parts` are its parts of the flat tensors."""
    return [
        TensorShard(f"model/{name}", numel, offset, part[start : start + length])
        for flat, part in zip(flats, parts, strict=True)
        for name, numel, offset, start, length in _ranges(flat)
    ]


def flat_states(flats: Sequence[FlatParameter], optimizer: torch.optim.Optimizer) -> list[StateRange]:
    """Return where the state of each parameter is in this rank's pieces."""
    out = []
    for flat in flats:
        begin = 0
        for piece in flat.pieces:
            end = begin + piece.numel()
            for name, numel, offset, start, length in _ranges(flat):
                low, high = max(start, begin), min(start + length, end)
                if low < high:
                    out.append(StateRange(optimizer, piece, low - begin, high - low, name, numel, offset + low - start))
            if not out or out[-1].parameter is not piece:  # only padding: its state must exist, but holds no values
                name, p = flat.named[-1]
                out.append(StateRange(optimizer, piece, 0, 0, name, p.shape.numel(), p.shape.numel()))
            begin = end
    return out


def _ranges(flat: FlatParameter) -> list[tuple[str, int, int, int, int]]:
    """Return (name, elements, offset of this rank's range in the parameter, offset in the part, length)."""
    out = []
    for (name, _), (start, stop) in zip(flat.named, flat.spans, strict=True):
        low, high = max(start, flat.low), min(stop, flat.high)
        if low < high:
            out.append((name, stop - start, low - start, low - flat.low, high - low))
    return out


class GradientReduceScatter:
    """Reduce-scatter the gradients of flat parameters in the order of backward; the last one of the model comes first.

    Args:
        when_ready: launch each one when its gradients are there; False: when `launch` says so.
    """

    def __init__(self, flats: Sequence[FlatParameter], group: dist.ProcessGroup, *, when_ready: bool = True) -> None:
        self._when_ready = when_ready
        self._flats, self._group, self._world = flats, group, dist.get_world_size(group)
        self._buffers: list[torch.Tensor | None] = [None] * len(flats)
        self._came: list[set[int]] = [set() for _ in flats]
        self._in_flight: list[tuple[dist.Work, int, torch.Tensor, torch.Tensor]] = []
        self._own: list[torch.Tensor | None] = [None] * len(flats)
        self._order = OrderedCollectives(len(flats), self._launch)
        for at, flat in enumerate(flats):
            for i, (_, parameter) in enumerate(flat.named):
                on_gradient(parameter, partial(self._take, at, i))

    def _take(self, at: int, i: int) -> None:
        """Move a gradient into the buffer, divided by W, and clear it on the parameter."""
        flat = self._flats[at]
        parameter, (start, stop) = flat.named[i][1], flat.spans[i]
        buffer = self._buffers[at]
        if buffer is None:
            buffer = self._buffers[at] = torch.empty_like(flat.whole, dtype=flat.dtype)
        assert parameter.grad is not None
        torch.div(parameter.grad.flatten(), self._world, out=buffer[start:stop])
        parameter.grad = None
        self._came[at].add(i)
        if self._when_ready and len(self._came[at]) == len(flat.named):
            self._order.ready(at)

    def _launch(self, at: int) -> None:
        flat, buffer = self._flats[at], self._buffers[at]
        buffer = torch.empty_like(flat.whole, dtype=flat.dtype) if buffer is None else buffer
        # a parameter that this rank's batch has not used, such as an expert, has no gradient
        for i, (start, stop) in enumerate(flat.spans):
            if i not in self._came[at]:
                buffer[start:stop].zero_()
        buffer[flat.numel :].zero_()
        out = buffer.new_empty(flat.part)
        self._in_flight.append((reduce_scatter(out, buffer, self._group), at, out, buffer))
        self._buffers[at] = None
        self._came[at].clear()
        if len(self._in_flight) > BUFFERS_IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        work, at, out, _ = self._in_flight.pop(0)
        work.wait()
        own = self._own[at]
        self._own[at] = out if own is None else own.add_(out)

    def launch(self, count: int) -> None:
        """Launch the first `count` reduce-scatters, if they are not launched; what has no gradient counts as zero."""
        self._order.launch(count)

    def finish(self) -> None:
        """Launch the remaining reduce-scatters at the end of a backward."""
        self._order.finish()

    def give(self) -> None:
        """Wait before the update, and set the gradients of all pieces."""
        while self._in_flight:
            self._land()
        for at, flat in enumerate(self._flats):
            own = self._own[at]
            assert own is not None
            flat.give_gradient(own)
            self._own[at] = None


class ShardedOptimizer(LoopStrategy):
    """Base class of strategies with a sharded optimizer; subclasses add the communication of gradients."""

    replicated, forward_has_collectives = True, False
    claims_overlap = True

    def __init__(self, bucket_mb: float, offload: str) -> None:
        self._bucket_bytes, self._on_host = bucket_mb * 2**20, offload == "optimizer"

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._group, self._clip_norm = model, group, clip_norm
        named = trained_parameters(model)[::-1]  # in the order of backward
        require_same_order(named, group)
        broadcast_from_first(model, group)
        names = {p: n for n, p in named}
        parts = split_into_buckets([p for _, p in named], self._bucket_bytes)
        self._flats = make_flat_parameters([[(names[p], p) for p in part] for part in parts], group)
        for flat in self._flats:
            flat.make_pieces(flat.own(), on_host=self._on_host)
        self.optimizer = make_optimizer(optimizer_pieces(self._flats))

    def _update(self) -> torch.Tensor:
        """Update this rank's parts; return the gradient norm over all ranks."""
        pieces = [p for flat in self._flats for p in flat.pieces]
        norm = clip_and_update(self.optimizer, pieces, self._clip_norm, self._group, self._flats[0].whole.device)
        for flat in self._flats:
            flat.take_update()
        return norm

    def _share_update(self) -> None:
        """All-gather the updated weights."""
        for work in [all_gather(flat.whole, flat.own(), self._group) for flat in self._flats]:
            work.wait()

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self.module, trained_only)

    def weight_shards(self) -> list[TensorShard]:
        return whole_weights([*trained_parameters(self.module), *self.module.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return flat_states(self._flats, self.optimizer)

    def finish_loading(self) -> None:
        for flat in self._flats:
            flat.give_weights()
