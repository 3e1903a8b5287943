"""Pack rows into sequences, and order them by epoch, step and rank. Pure.

The stream of sequences is the shuffled set, epoch after epoch. Optimizer step ``s`` takes positions
``s*G .. (s+1)*G`` of it (``G`` = global batch), for any number of ranks: another world size sees the same data
in the same order. Within a step, micro-step ``m`` of rank ``r`` takes the ``(m*W + r)``-th slice of the batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from allranks.errors import DataError
from allranks.planning.records import BatchPlan
from allranks.spec.data_rows import shuffle


def pack_isolated(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Pack by best-fit decreasing: take rows longest first, and put each into the fullest sequence with enough space.

    Rows of equal length are shuffled with `seed`, so that neighbours in the file do not stay together.
    Source of the algorithm: Johnson, "Fast algorithms for bin packing", 1974; it wastes at most about 22 %.
    """
    shuffled = shuffle(len(lengths), seed, 0)
    order = sorted(shuffled.tolist(), key=lambda row: -lengths[row])
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, pack), ascending
    for row in order:
        need = lengths[row]
        at = bisect_left(free, (need, -1))
        if at == len(free):
            packs.append([row])
            left, pack = capacity - need, len(packs) - 1
        else:
            space, pack = free.pop(at)
            packs[pack].append(row)
            left = space - need
        if left > 0:
            insort(free, (left, pack))
    return packs


Rows = npt.NDArray[np.int64]
CHECKSUM_MODULUS = 1 << 32


class SampleOrder:
    """The order of `n` sequences for one rank of `world_size`."""

    def __init__(self, n: int, seed: int, batch: BatchPlan, rank: int, world_size: int) -> None:
        if n < world_size:
            raise DataError(
                f"{n} training sequences for {world_size} ranks: some ranks would have no data; "
                "use fewer ranks, more rows, data.packing: none, or a smaller data.max_length"
            )
        self.n, self._seed, self._batch, self._rank, self._world = n, seed, batch, rank, world_size
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> Rows:
        return shuffle(self.n, self._seed, epoch + 1)

    def at(self, positions: Rows) -> Rows:
        """Return the sequences at positions of the infinite stream."""
        epochs, within = np.divmod(positions, self.n)
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = self._epoch(int(epoch))[within[here]]
        return out

    def global_batch(self, step: int) -> Rows:
        """Return all sequences of optimizer step `step` (from 0), over all ranks."""
        size = self._batch.global_batch_size
        return self.at(np.arange(step * size, (step + 1) * size, dtype=np.int64))

    def micro_batches(self, step: int) -> list[Rows]:
        """Return this rank's sequences of a step, one array per micro-step."""
        cells = self.global_batch(step).reshape(self._batch.grad_accum, self._world, self._batch.micro_batch_size)
        return list(cells[:, self._rank])

    def first_epoch(self, max_steps: int | None = None) -> Rows:
        """Return the sequences of the first epoch in this rank's micro-batches, as training gets them.

        Args:
            max_steps: look at this many steps at most.
        """
        size, batch = self._batch.global_batch_size, self._batch
        found = []
        for step in range(min(math.ceil(self.n / size), max_steps or self.n)):
            rows = np.concatenate(self.micro_batches(step))
            if (step + 1) * size > self.n:  # the last batch is filled from the next epoch
                cells = np.arange(step * size, (step + 1) * size).reshape(batch.grad_accum, self._world, -1)
                rows = rows[cells[:, self._rank].ravel() < self.n]
            found.append(rows)
        return np.concatenate(found)

    def positions_in(self, max_steps: int) -> int:
        """Return how many sequences of the first epoch all ranks take in at most this many steps."""
        return min(self.n, max_steps * self._batch.global_batch_size)

    def planned_checksum(self, step: int) -> int:
        """Return the checksum of all sequences of a step, over all ranks."""
        return rows_checksum(self.global_batch(step))


def rows_checksum(rows: Sequence[int] | Rows) -> int:
    """Return a 32-bit checksum of row numbers in any order, each as often as it occurs.

    The checksums of several ranks add up (modulo 2^32) to that of all their rows.
    """
    words = np.asarray(rows, np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64, so that no two sets have one sum
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((words ^ (words >> np.uint64(31))).astype(np.uint32).sum(dtype=np.uint64)) % CHECKSUM_MODULUS


def steps_of_epochs(n: int, epochs: float, global_batch_size: int) -> int:
    """Return the optimizer steps for `epochs` epochs; the last batch is filled from the next epoch."""
    return max(1, math.ceil(epochs * n / global_batch_size))
