"""Order sequences by epoch, step and rank, collate them to tensors, and generate the batches of ``builtin:noise``.

The stream of sequences is the shuffled set, epoch after epoch. Optimizer step ``s`` takes positions
``s*G .. (s+1)*G`` of it (``G`` = global batch), for any number of ranks: another world size sees the same data
in the same order. Within a step, micro-step ``m`` of rank ``r`` takes the ``(m*W + r)``-th slice of the batch.

Noise rows are generated on demand and only serve to run steps. Row `i` of a seed is the same on every machine, for any
batch size and number of ranks, because each row has its own generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from allranks.errors import DataError
from allranks.planning.records import BatchPlan
from allranks.spec.data_rows import shuffle
from allranks.spec.data_sources import source_of
from allranks.spec.records import DataSpec, EvalSpec
from allranks.train.data.prepared import DataFacts, PreparedData, TokenSet

Rows = npt.NDArray[np.int64]
Map = Callable[[torch.Tensor], torch.Tensor]
CHECKSUM_MODULUS = 1 << 32
IGNORE = -100


class SampleOrder:
    """The order of `n` sequences for one rank of `world_size`."""

    def __init__(self, n: int, seed: int, batch: BatchPlan, rank: int, world_size: int) -> None:
        if n < world_size:
            raise DataError(
                f"{n} training sequences for {world_size} ranks: some ranks would have no data; "
                "use fewer ranks, more rows, data.packing: none, or a smaller data.max_length"
            )
        self.n, self._seed, self._batch, self._rank, self._world = n, seed, batch, rank, world_size
        self._epoch = lru_cache(maxsize=2)(lambda epoch: shuffle(n, seed, epoch + 1))

    @property
    def micro_steps(self) -> int:
        """The micro-steps of a step."""
        return self._batch.grad_accum

    def at(self, positions: Rows) -> Rows:
        """Return the sequences at positions of the infinite stream."""
        epochs, within = np.divmod(positions, self.n)
        out = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            out[in_epoch] = self._epoch(int(epoch))[within[in_epoch]]
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
        size = self._batch.global_batch_size
        batches = []
        for step in range(min(math.ceil(self.n / size), max_steps or self.n)):
            rows = np.concatenate(self.micro_batches(step))
            places = np.arange(step * size, (step + 1) * size).reshape(self._batch.grad_accum, self._world, -1)
            batches.append(rows[places[:, self._rank].ravel() < self.n])  # the last batch is filled from the next epoch
        return np.concatenate(batches)

    def positions_in(self, max_steps: int) -> int:
        """Return how many sequences of the first epoch all ranks take in at most this many steps."""
        return min(self.n, max_steps * self._batch.global_batch_size)

    def planned_checksum(self, step: int) -> int:
        """Return the checksum of all sequences of a step, over all ranks."""
        return rows_checksum(self.global_batch(step))


def rows_checksum(rows: Sequence[int] | Rows) -> int:
    """Return a checksum of row numbers in any order; those of several ranks add up (modulo 2^32) to that of all
    rows."""
    words = np.asarray(rows, np.uint64) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64, so that no two sets have one sum
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((words ^ (words >> np.uint64(31))).astype(np.uint32).sum(dtype=np.uint64)) % CHECKSUM_MODULUS


def steps_of_epochs(n: int, epochs: float, global_batch_size: int) -> int:
    """Return the optimizer steps for `epochs` epochs; the last batch is filled from the next epoch."""
    return max(1, math.ceil(epochs * n / global_batch_size))


def _on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; copies are asynchronous."""
    if device.type == "cpu":
        return batch
    return batch.map_tensors(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))


@dataclass(frozen=True)
class PackedRows:
    """Where the rows of packed sequences end. Padding at the end of a sequence counts as one or more rows.

    ``ends`` (rows + 1,) int64, in host memory: 0, and after each row the number of tokens up to its end, sequence after
    sequence;
    ``ends_on_device``: the same in int32 on the device; ``shape``: (B, L); ``longest``: tokens of the longest row;
    ``length_limit``: the same for all batches of a set of rows, because programs of compiled blocks depend on it.
    """

    ends: torch.Tensor
    ends_on_device: torch.Tensor
    shape: tuple[int, int]
    longest: int
    length_limit: int

    def map_tensors(self, function: Map) -> PackedRows:
        """Return a copy with what the function returns for the tensor that the device needs."""
        return replace(self, ends_on_device=function(self.ends_on_device))


def packed_rows(lengths: list[list[int]], width: int, limit: int | None = None) -> PackedRows:
    """Return the record of packed rows.

    Args:
        lengths: tokens of each row, for each sequence.
        width: tokens of a sequence, with padding.
        limit: the most tokens of a row in any batch; padding is divided into rows of at most as many. None: of this
            batch, padding included.
    """
    limit = limit or max(n for row in lengths for n in (*row, width - sum(row)))
    padded = [n for row in lengths for n in (*row, *_padding_rows(width - sum(row), limit)) if n]
    ends = torch.tensor([0, *padded]).cumsum(0)
    return PackedRows(ends, ends.to(torch.int32), (len(lengths), width), max(padded), limit)


def _padding_rows(tokens: int, limit: int) -> list[int]:
    return [*[limit] * (tokens // limit), tokens % limit]


@dataclass(frozen=True)
class Batch:
    """A micro-batch of ``B`` sequences of ``L`` tokens, all int64.

    ``input_ids`` (B, L); ``targets`` (B, L): the next token where it carries loss, else -100, or (B,) classes;
    ``position_ids`` (B, L) starting at 0 for every packed row, or None for the default positions;
    ``attention_mask`` (B, L) for classifiers, else None: padding is on the right, which causal attention never reads.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    tokens_real: int
    tokens_trained: int
    sequences: tuple[int, ...] = ()
    """The sequences that the tensors hold."""
    rows: PackedRows | None = None
    """Where packed rows end; None: not packed, or not known."""
    attention_pairs: int = 0
    """Pairs of a query and a key that it attends to, without padding."""
    scored: torch.Tensor | None = None
    """(K,) positions in the flattened batch whose targets carry loss; None: not known."""
    lengths: torch.Tensor | None = None
    """(B,) tokens of each sequence without padding, which follows them; None: there is no padding."""

    @property
    def inputs(self) -> torch.Tensor:
        return self.input_ids

    @property
    def tokens_padded(self) -> int:
        return self.input_ids.numel() - self.tokens_real

    def real_tokens(self) -> torch.Tensor:
        """Return (B, L) bool: which tokens are not padding."""
        if self.lengths is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device) < self.lengths.unsqueeze(1)

    def positions(self) -> torch.Tensor:
        """Return (B, L) the default positions, which for padding begin again at 0."""
        at = torch.arange(self.input_ids.shape[1], device=self.input_ids.device).expand_as(self.input_ids)
        return at if self.lengths is None else torch.where(self.real_tokens(), at, at - self.lengths.unsqueeze(1))

    def map_tensors(self, function: Map) -> Batch:
        """Return a copy with the function's result for each tensor that the device needs, always in the same order."""

        def of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else function(tensor)

        return replace(
            self,
            input_ids=function(self.input_ids),
            targets=function(self.targets),
            position_ids=of(self.position_ids),
            attention_mask=of(self.attention_mask),
            rows=self.rows and self.rows.map_tensors(function),
            scored=of(self.scored),
            lengths=of(self.lengths),
        )

    def to(self, device: torch.device) -> Batch:
        return _on_device(self, device)


def collate(tokens: TokenSet, sequences: Rows, pad_id: int, pad_to: int | None) -> Batch:
    """Collate a micro-batch of language-model sequences.

    Args:
        pad_to: pad every sequence to this length; None pads to the longest of this batch.
    """
    parts = [
        [slice(int(tokens.offsets[r]), int(tokens.offsets[r + 1])) for r in tokens.rows_of(int(s))] for s in sequences
    ]
    lengths = [sum(p.stop - p.start for p in row) for row in parts]
    width = pad_to or max(lengths)
    shape = (len(parts), width)
    ids = np.full(shape, pad_id, np.int64)
    targets = np.full(shape, IGNORE, np.int64)
    positions = np.zeros(shape, np.int64)
    packed = any(len(row) > 1 for row in parts)
    for i, row in enumerate(parts):
        at = 0
        for part in row:
            n = part.stop - part.start
            ids[i, at : at + n] = tokens.ids[part]
            nxt = tokens.ids[part.start + 1 : part.stop].astype(np.int64)
            targets[i, at : at + n - 1] = np.where(tokens.mask[part.start + 1 : part.stop] == 1, nxt, IGNORE)
            positions[i, at : at + n] = np.arange(n)
            at += n
        positions[i, at:] = np.arange(width - at) % tokens.longest_row  # padding counts as separate rows
    scored = np.flatnonzero(targets != IGNORE)
    return Batch(
        input_ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(positions) if packed else None,
        attention_mask=None,
        tokens_real=sum(lengths),
        tokens_trained=len(scored),
        sequences=tuple(int(s) for s in sequences),
        rows=packed_rows([[p.stop - p.start for p in row] for row in parts], width, tokens.longest_row)
        if packed
        else None,
        attention_pairs=sum(n * (n + 1) // 2 for row in parts for n in [p.stop - p.start for p in row]),
        scored=torch.from_numpy(scored),
        lengths=torch.tensor(lengths),
    )


def collate_labelled(tokens: TokenSet, sequences: Rows, pad_id: int) -> Batch:
    """Collate a micro-batch of labelled rows, padded to the longest, with an attention mask."""
    parts = [slice(int(tokens.offsets[r]), int(tokens.offsets[r + 1])) for r in sequences]
    lengths = [p.stop - p.start for p in parts]
    ids = np.full((len(parts), max(lengths)), pad_id, np.int64)
    mask = np.zeros_like(ids)
    for i, part in enumerate(parts):
        ids[i, : lengths[i]] = tokens.ids[part]
        mask[i, : lengths[i]] = 1
    return Batch(
        input_ids=torch.from_numpy(ids),
        targets=torch.from_numpy(np.asarray(tokens.labels[sequences], np.int64)),
        position_ids=None,
        attention_mask=torch.from_numpy(mask),
        tokens_real=sum(lengths),
        tokens_trained=len(parts),
        sequences=tuple(int(s) for s in sequences),
        attention_pairs=sum(n * n for n in lengths),
        lengths=torch.tensor(lengths),
    )


DEFAULT_ROWS = 65_536  # more than the 51,200 of 100 steps of 8 ranks with 64 rows, so that no row repeats

SPREAD = 0x9E3779B1  # so that consecutive seeds share no rows


@dataclass(frozen=True)
class NoiseBatch:
    """``inputs`` and ``targets`` (B, width), in the model's dtype. A row counts as one token."""

    inputs: torch.Tensor
    targets: torch.Tensor
    sequences: tuple[int, ...] = ()

    @property
    def tokens_real(self) -> int:
        return len(self.inputs)

    tokens_trained = tokens_real
    tokens_padded = attention_pairs = 0

    def map_tensors(self, function: Map) -> NoiseBatch:
        """Return a copy with what the function returns for each tensor."""
        return replace(self, inputs=function(self.inputs), targets=function(self.targets))

    def to(self, device: torch.device) -> NoiseBatch:
        return _on_device(self, device)


class NoTokenizer:
    """Placeholder for the tokenizer of data without text."""

    pad_token_id = 0

    def save_pretrained(self, folder: str | Path) -> None:
        """Save nothing."""

    def __len__(self) -> int:
        return 0


def noise_batch(data: DataSpec, tokens: TokenSet, sequences: Rows, width: int, dtype: torch.dtype) -> NoiseBatch:
    """Generate the rows of `sequences` in float32."""
    drawn = torch.empty(len(sequences), 2, width)
    for i, row in enumerate(tokens.labels[sequences]):
        generator = torch.Generator().manual_seed(
            (data.seed * SPREAD + int(row)) % 2**32
        )  # the generator uses only 32 bits of the seed
        torch.randn(2, width, generator=generator, out=drawn[i])
    drawn = drawn.to(dtype)
    return NoiseBatch(drawn[:, 0].contiguous(), drawn[:, 1].contiguous(), sequences=tuple(int(s) for s in sequences))


def prepared_noise(data: DataSpec, evaluation: EvalSpec) -> PreparedData:
    """Return the row numbers; held-out rows follow the training rows."""
    rows = data.subset or DEFAULT_ROWS
    held = max(1, round(data.eval_fraction * rows)) if data.eval_fraction and rows > 1 else 0
    held = min(held, evaluation.subset or held)
    train = _numbered(0, rows - held)
    facts = DataFacts(
        source=source_of(data),
        template="noise",
        rows=rows,
        rows_train=len(train),
        rows_eval=held,
        sequences=len(train),
        tokens_real=len(train),
        tokens_trained=len(train),
    )
    return PreparedData(
        train=train,
        held_out=_numbered(rows - held, rows) if held else None,
        questions=[],
        facts=facts,
        tokenizer=NoTokenizer(),
        origin="drawn as it is read",
        folder=Path(),
    )


def _numbered(first: int, last: int) -> TokenSet:
    """Return rows first to last (exclusive): no tokens, and the row number as label."""
    each, ends, ones = np.arange(last - first), np.arange(last - first + 1), np.ones(last - first, np.int64)
    none = np.zeros(0, np.int32), np.zeros(0, np.uint8)
    return TokenSet(*none, ends, ends, pack_rows=each, labels=each + first, real=ones, trained=ones)
