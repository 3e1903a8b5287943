"""``zero1``: every rank updates its own part of the weights, and keeps optimizer state for that part alone.

Communication per step: an asynchronous all-reduce a bucket in the last backward (T g bytes in all, T trained parameters of
g bytes), then an all-gather a bucket of the new weights (T g bytes): 3 T g (W-1)/W sent by each rank on a ring, against
2 T g (W-1)/W without sharding. And one float32 for the gradients' norm.
Memory per rank (P parameters, fp32 AdamW): 4P + 4T + 8T/W bytes; at two ranks and T = P 3/4 of plain data parallelism.
Predecessor (``bucket_ddp_async``): every rank keeps the same moments and makes the same update.
Source: ZeRO stage 1, Rajbhandari et al. 2020. Parts are equal to the byte, not whole parameters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange, whole_weights
from allranks.train.strategies.bucket_ddp_async import Bucket, cut
from allranks.train.strategies.common import clip_and_update, load_weights, replicated_weights, trained
from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.flat import all_pieces, flat_states, flats_of, gathered_states, scatter_states
from allranks.train.strategies.gradients import (
    InOrder,
    MicroStep,
    all_gather,
    broadcast_from_first,
    on_gradient,
    require_same_order,
)
from allranks.train.strategies.traffic import Sizes, Traffic


class Zero1:
    """Optimizer state in parts; gradients and weights on every rank."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicated, lockstep, rehearse = True, False, False
    claims_overlap = True

    def __init__(self, bucket_mb: float, offload: str) -> None:
        self._bucket_bytes, self._on_host = bucket_mb * 2**20, offload == "optimizer"

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._group, self._clip_norm = model, group, clip_norm
        self._world = dist.get_world_size(group)
        named = trained(model)[::-1]  # backward runs from the last layer to the first
        require_same_order(named, group)
        broadcast_from_first(model, group)
        names = {p: n for n, p in named}
        parts = cut([p for _, p in named], self._bucket_bytes)
        self._flats = flats_of([[(names[p], p) for p in part] for part in parts], group)
        self._buckets = [Bucket([p for _, p in flat.named], self._world) for flat in self._flats]
        for flat in self._flats:
            flat.make_pieces(flat.own(), on_host=self._on_host)
        self.optimizer = make_optimizer(all_pieces(self._flats))
        self._micro = MicroStep()
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
        bucket.flat.div_(self._world)
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
        for flat, bucket in zip(self._flats, self._buckets, strict=True):
            flat.give_gradient(bucket.flat[flat.low : flat.high])
        pieces = [p for flat in self._flats for p in flat.pieces]
        norm = clip_and_update(self.optimizer, pieces, self._clip_norm, self._group, self._flats[0].whole.device)
        for flat in self._flats:
            flat.take_update()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        for work in [all_gather(flat.whole, flat.own(), self._group) for flat in self._flats]:
            work.wait()
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        whole = sum(flat.bytes for flat in self._flats)
        return [
            Traffic("all_reduce", "backward", len(self._flats), whole),
            Traffic("all_reduce", "step", 1, 4),
            Traffic("all_gather", "step", len(self._flats), whole),
        ]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self.module, trained_only)

    def weight_shards(self) -> list[Shard]:
        return whole_weights([*trained(self.module), *self.module.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return flat_states(self._flats, self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        kept = {n: p.detach() for n, p in trained(self.module)} | dict(self.module.named_buffers())
        return {
            "model": {n: t.to("cpu", copy=True) for n, t in kept.items()},
            "optimizer": gathered_states(self._flats, self.optimizer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_weights(self.module, state["model"])
        scatter_states(self._flats, self.optimizer, state["optimizer"])
