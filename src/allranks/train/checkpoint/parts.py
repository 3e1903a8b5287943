"""What each rank is to write, copied off so that training may go on."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.train.checkpoint.published import PREFIX, Published
from allranks.train.dtypes import NAME_OF
from allranks.train.shards import Shard, own_share, state_shards
from allranks.train.strategies.contract import Strategy

MODEL = "model/"


@dataclass(frozen=True)
class Parts:
    """This rank's. A weight's name is the one within the model.

    Attributes:
        owned: weights that all ranks hold whole and this one writes, 1-D.
        scattered: parts of published weights that this rank alone holds, keyed ``model/<name>``.
        state: what resuming needs beside the published weights; empty in mode lite.
        random: states of this rank's random generators; None in mode lite.
    """

    owned: Mapping[str, torch.Tensor]
    scattered: tuple[Shard, ...]
    state: tuple[Shard, ...]
    random: dict[str, Any] | None

    @property
    def bytes(self) -> int:
        """That are written. What is scattered is written twice, once on its way."""
        return (
            sum(_bytes(t) for t in self.owned.values())
            + 2 * sum(_bytes(s.tensor) for s in self.scattered)
            + sum(_bytes(s.tensor) for s in self.state)
        )


@dataclass(frozen=True)
class Print:
    """A fingerprint of a range of a tensor, as it was in memory.

    Attributes:
        key: in a published file, or in ``state/``.
        offset, numel: elements; where the range begins in the flattened whole, and how many it has.
        crc: CRC-32 of its bytes. It is to find mistakes and damage, not forgery.
        dtype: as safetensors names it.
    """

    key: str
    offset: int
    numel: int
    crc: int
    dtype: str


def parts_of(strategy: Strategy, published: Published, rank: int, world: int, random: dict[str, Any] | None) -> Parts:
    """Views of what this rank is to write; `random` is given in mode full. No collective."""
    owners = published.owners(world)
    owned, scattered, state = {}, [], []
    for shard in strategy.weight_shards():
        name = weight_name(shard.key)
        if name in owners:
            if not shard.everywhere:
                scattered.append(Shard(MODEL + name, shard.numel, shard.offset, shard.tensor))
            elif owners[name] == rank:
                owned[name] = shard.tensor
        if random is not None and name not in published.keys:
            state.append(shard)
    if random is not None:
        state += state_shards(strategy.state_ranges())
    mine = (own_share(shard, rank, world) for shard in state)
    return Parts(owned, tuple(scattered), tuple(s for s in mine if s.tensor.numel()), random)


def weight_name(key: str) -> str:
    """Within the model, of a shard's key (`Strategy.weight_shards` names them within the loss)."""
    return key.removeprefix(MODEL).removeprefix(PREFIX)


@dataclass
class Copies:
    """CPU memory for one checkpoint's parts, used again by the next: never more than one copy."""

    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, parts: Parts) -> Parts:
        """The parts, copied. On CUDA all copies travel together."""
        used: dict[str, torch.Tensor] = {}

        def copied(place: str, tensor: torch.Tensor) -> torch.Tensor:
            old = self._kept.get(place)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            used[place] = old.copy_(tensor.detach(), non_blocking=True)
            return old

        def shards(kind: str, given: Iterable[Shard]) -> tuple[Shard, ...]:
            return tuple(Shard(s.key, s.numel, s.offset, copied(f"{kind}{s.key}@{s.offset}", s.tensor)) for s in given)

        out = Parts(
            {n: copied(f"owned {n}", t) for n, t in parts.owned.items()},
            shards("scattered ", parts.scattered),
            shards("state ", parts.state),
            parts.random,
        )
        self._kept = used
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return out


def on_cpu(parts: Parts) -> Parts:
    """The parts themselves where they are on the CPU, else copies."""
    return Parts(
        {n: t.detach().cpu() for n, t in parts.owned.items()},
        tuple(Shard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.scattered),
        tuple(Shard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.state),
        parts.random,
    )


def prints_of(parts: Parts, published: Published) -> list[Print]:
    """Of all that stands in a file bit by bit as it is in memory."""
    keys = published.keys
    return [
        *(print_of(keys[n], 0, t) for n, t in parts.owned.items() if n in keys),
        *(print_of(keys[n], s.offset, s.tensor) for s in parts.scattered if (n := s.key.removeprefix(MODEL)) in keys),
        *(print_of(s.key, s.offset, s.tensor) for s in parts.state),
    ]


def print_of(key: str, offset: int, tensor: torch.Tensor) -> Print:
    """Of a range on the CPU."""
    flat = tensor.detach().contiguous().view(-1)
    crc = zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    return Print(key, offset, flat.numel(), crc, NAME_OF[flat.dtype])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
