"""``zero2``: gradients, too, are kept in parts: each rank gets the mean of its own part alone.

Communication: a reduce-scatter a bucket in the backward of every micro-step (A T g bytes a step, T trained parameters of
g bytes, A micro-steps), then an all-gather a bucket of the new weights (T g bytes): (A + 1) T g (W-1)/W sent by each rank
on a ring. Without accumulation that is what plain data parallelism sends. And one float32 for the gradients' norm.
Memory per rank (P parameters, fp32 AdamW): 4P + 12T/W bytes, and up to three buckets of gradients on their way; at two
ranks and T = P 5/8 of plain data parallelism.
Predecessor (``zero1``): it reduces whole gradients on every rank, of which each uses one part.
Source: ZeRO stage 2, Rajbhandari et al. 2020.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange, whole_weights
from allranks.train.strategies.bucket_ddp_async import cut
from allranks.train.strategies.common import clip_and_update, load_weights, replicated_weights, trained
from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.flat import all_pieces, flat_states, flats_of, gathered_states, scatter_states
from allranks.train.strategies.gradients import all_gather, broadcast_from_first, require_same_order
from allranks.train.strategies.scatter import ScatteredGradients
from allranks.train.strategies.traffic import Sizes, Traffic


class Zero2:
    """Optimizer state and gradients in parts; weights on every rank."""

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
        named = trained(model)[::-1]  # backward runs from the last layer to the first
        require_same_order(named, group)
        broadcast_from_first(model, group)
        names = {p: n for n, p in named}
        parts = cut([p for _, p in named], self._bucket_bytes)
        self._flats = flats_of([[(names[p], p) for p in part] for part in parts], group)
        for flat in self._flats:
            flat.make_pieces(flat.own(), on_host=self._on_host)
        self.optimizer = make_optimizer(all_pieces(self._flats))
        self._gradients = ScatteredGradients(self._flats, group)

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.finish()

    def step(self) -> torch.Tensor:
        self._gradients.give()
        pieces = [p for flat in self._flats for p in flat.pieces]
        norm = clip_and_update(self.optimizer, pieces, self._clip_norm, self._group, self._flats[0].whole.device)
        for flat in self._flats:
            flat.take_update()
        for work in [all_gather(flat.whole, flat.own(), self._group) for flat in self._flats]:
            work.wait()
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        whole = sum(flat.bytes for flat in self._flats)
        return [
            Traffic("reduce_scatter", "backward", len(self._flats) * accum, whole * accum),
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
