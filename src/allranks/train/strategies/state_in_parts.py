"""Weights whole on every rank, the optimizer's state in flat parts, one a rank: what follows from that."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange, whole_weights
from allranks.train.strategies.buckets import cut
from allranks.train.strategies.common import clip_and_update, load_weights, replicated_weights, trained
from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.flat import Flat, all_pieces, flat_states, flats_of, gathered_states, scatter_states
from allranks.train.strategies.gradients import all_gather, broadcast_from_first, require_same_order


class StateInParts:
    """A strategy (`contract.Strategy`) but for how gradients reach the parts."""

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
        self._flats: list[Flat] = flats_of([[(names[p], p) for p in part] for part in parts], group)
        for flat in self._flats:
            flat.make_pieces(flat.own(), on_host=self._on_host)
        self.optimizer = make_optimizer(all_pieces(self._flats))

    def _update(self) -> torch.Tensor:
        """This rank's parts, whose gradients are there; the gradients' norm over all ranks."""
        pieces = [p for flat in self._flats for p in flat.pieces]
        norm = clip_and_update(self.optimizer, pieces, self._clip_norm, self._group, self._flats[0].whole.device)
        for flat in self._flats:
            flat.take_update()
        return norm

    def _share_update(self) -> None:
        """Every rank gets the others' new weights."""
        for work in [all_gather(flat.whole, flat.own(), self._group) for flat in self._flats]:
            work.wait()

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
