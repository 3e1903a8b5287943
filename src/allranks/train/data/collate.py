"""Sequences to tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from allranks.train.data.order import Rows
from allranks.train.data.prepared import TokenSet

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch of ``B`` sequences of ``L`` tokens, all int64.

    ``input_ids`` (B, L); ``targets`` (B, L): the next token where it carries loss, else -100, or (B,) classes;
    ``position_ids`` (B, L) starting at 0 for every packed row, or None where the plain ones are meant;
    ``attention_mask`` (B, L) for classifiers, else None: padding is on the right, where causal models never look.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    tokens_real: int
    tokens_trained: int

    @property
    def inputs(self) -> torch.Tensor:
        return self.input_ids

    @property
    def tokens_padded(self) -> int:
        return self.input_ids.numel() - self.tokens_real

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the copies do not wait."""
        if device.type == "cpu":
            return self

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)

        ids, targets = move(self.input_ids), move(self.targets)
        assert ids is not None and targets is not None
        return Batch(
            ids, targets, move(self.position_ids), move(self.attention_mask), self.tokens_real, self.tokens_trained
        )


def collate(tokens: TokenSet, sequences: Rows, pad_id: int, pad_to: int | None) -> Batch:
    """A micro-batch of language-model sequences.

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
        positions[i, at:] = np.arange(width - at)  # padding is a row of its own
    return Batch(
        input_ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(positions) if packed else None,
        attention_mask=None,
        tokens_real=sum(lengths),
        tokens_trained=int((targets != IGNORE).sum()),
    )


def collate_labelled(tokens: TokenSet, sequences: Rows, pad_id: int) -> Batch:
    """A micro-batch of labelled rows, padded to the longest, with an attention mask."""
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
    )
