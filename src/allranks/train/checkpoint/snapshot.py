"""Find in memory what a rank must save, and copy it to the host for a save in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from allranks.train.checkpoint.writer import MODEL, PublishedFiles, RankParts, bytes_in, bytes_of, weight_name
from allranks.train.strategies.base import Strategy
from allranks.train.strategies.shards import TensorShard, share_to_write, state_shards


def collect_parts(
    strategy: Strategy, published: PublishedFiles, rank: int, world: int, random: dict[str, Any] | None
) -> RankParts:
    """Return views of what this rank must write; `random` is given in mode full. Not collective."""
    full, owners = random is not None, published.owners(world)
    owned, scattered, state = {}, [], []
    for shard in strategy.weight_shards():
        name = weight_name(shard.key)
        if name in owners:
            if not shard.everywhere:
                own = share_to_write(shard, rank, world)
                scattered.append(TensorShard(MODEL + name, own.numel, own.offset, own.tensor))
            elif owners[name] == rank:
                owned[name] = shard.tensor
        if full and name not in published.keys:
            state.append(shard)
    if full:
        state += state_shards(strategy.state_ranges())
    ends = ends_of_shares(published, world, sum(bytes_in(s.tensor) for s in state if s.everywhere))
    mine = (share_to_write(shard, rank, world, ends) for shard in state)
    return RankParts(owned, tuple(scattered), tuple(s for s in mine if s.tensor.numel()), random)


def ends_of_shares(published: PublishedFiles, world: int, state_bytes: int) -> list[int] | None:
    """Return for `share_to_write` how the `state_bytes` that every rank holds are divided, so that all ranks write
    equally much: a rank that writes published files writes less of the state."""
    load = [0] * world
    for i, names in enumerate(published.files):
        load[i % world] += sum(bytes_of(*published.whole[name]) for name in names)
    target = -(-(sum(load) + state_bytes) // world)
    ends, end = [], 0
    for own in load:
        end += max(target - own, 0)
        ends.append(end)
    return ends if end else None


def _map_tensors(parts: RankParts, function: Callable[[str, torch.Tensor], torch.Tensor]) -> RankParts:
    """Return the parts with what the function returns for the place and the content of each tensor."""

    def of(kind: str, given: tuple[TensorShard, ...]) -> tuple[TensorShard, ...]:
        return tuple(replace(s, tensor=function(f"{kind} {s.key}@{s.offset}", s.tensor.detach())) for s in given)

    owned = {name: function(f"owned {name}", tensor.detach()) for name, tensor in parts.owned.items()}
    return RankParts(owned, of("scattered", parts.scattered), of("state", parts.state), parts.random)


def on_cpu(parts: RankParts) -> RankParts:
    """Return the parts in host memory: copies only of what is on a GPU."""
    return _map_tensors(parts, lambda place, tensor: tensor.cpu())


@dataclass
class CpuCopies:
    """CPU memory for one checkpoint's parts, reused by the next: there is never more than one copy."""

    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, parts: RankParts) -> RankParts:
        """Return copies of the parts, on CUDA made asynchronously on the current stream with one synchronisation."""
        used: dict[str, torch.Tensor] = {}
        device = None

        def copy(place: str, tensor: torch.Tensor) -> torch.Tensor:
            nonlocal device
            own = self._kept.get(place)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            device = tensor.device if tensor.is_cuda else device
            used[place] = own.copy_(tensor, non_blocking=True)
            return own

        out = _map_tensors(parts, copy)
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        self._kept = used
        return out
