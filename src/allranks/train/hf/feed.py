"""The rows of this rank as an iterable for the Trainer, each micro-batch with the numbers of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from allranks.errors import ProofFailed
from allranks.train.data.collate import Batch
from allranks.train.data.order import Order, Rows
from allranks.train.world import World


@dataclass(frozen=True)
class Micro:
    """A micro-batch and the sequences it was made of."""

    rows: Rows
    batch: Batch


class Feed(IterableDataset[Micro]):
    """The micro-batches of steps ``first`` to ``last`` (not included), in the order in which every engine takes them."""

    def __init__(self, order: Order, make_batch: Callable[[Rows], Batch], first: int, last: int) -> None:
        self._order, self._make, self._first, self._last = order, make_batch, first, last
        self._seen: Micro | None = None

    def peek(self) -> Micro:
        """The first micro-batch. It is still to come, and is not made twice."""
        rows = self._order.micro_batches(self._first)[0]
        self._seen = self._seen or Micro(rows, self._make(rows))
        return self._seen

    def __iter__(self) -> Iterator[Micro]:
        for step in range(self._first, self._last):
            for rows in self._order.micro_batches(step):
                seen, self._seen = self._seen, None
                yield seen or Micro(rows, self._make(rows))


def loader(feed: Feed) -> DataLoader[Micro]:
    """A loader in this process. It has a generator of its own: else it would draw from the one that dropout draws from."""
    return DataLoader(feed, batch_size=None, generator=torch.Generator())


def check_rows(order: Order, step: int, fed: list[Rows]) -> None:
    """What the Trainer really trained in a step is what was planned for this rank.

    Raises:
        ProofFailed: other rows, or another order.
    """
    planned = order.micro_batches(step)
    if len(fed) != len(planned) or any(not np.array_equal(a, b) for a, b in zip(fed, planned, strict=False)):
        raise ProofFailed(
            f"step {step + 1}: the Trainer trained sequences {_few(fed)}, planned were {_few(planned)}; "
            "something has put another loader or sampler in between"
        )


def prove_fed(world: World, order: Order, step: int, fed: list[Rows]) -> None:
    """What all ranks trained in a step is its global batch, each sequence as often as planned. Every rank calls.

    Raises:
        ProofFailed: sequences were trained twice, or by nobody.
    """
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, [int(r) for rows in fed for r in rows], group=world.control)
    trained = sorted(r for rows in every for r in rows)
    planned = sorted(int(r) for r in order.global_batch(step))
    if trained == planned:
        return
    shared = next(
        ((a, b, both) for a in range(world.size) for b in range(a) if (both := set(every[a]) & set(every[b]))), None
    )
    who = f"; rank {shared[0]} and rank {shared[1]} both trained {sorted(shared[2])[:8]}" if shared else ""
    raise ProofFailed(
        f"step {step + 1}: the ranks together trained {len(set(trained))} different sequences of {len(set(planned))} planned{who}. "
        "Each rank must read its own part of the data"
    )


def _few(parts: list[Rows]) -> list[int]:
    return [int(r) for rows in parts for r in rows][:8]
