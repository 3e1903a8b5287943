"""``builtin:noise``: rows of normal noise, made when they are asked for. Nothing is stored, nothing is learnt from it but that a step runs.

Row `i` of a seed is the same on every machine, whatever the batch and the number of ranks: it has a generator of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allranks.spec.records import DataSpec, EvalSpec
from allranks.train.data.order import Rows
from allranks.train.data.prepared import DataFacts, Prepared, TokenSet

DEFAULT_ROWS = 65_536  # more than the 51,200 that 100 steps of 8 ranks with 64 rows take: none comes twice there

SPREAD = 0x9E3779B1  # keeps the rows of neighbouring seeds apart


@dataclass(frozen=True)
class NoiseBatch:
    """``inputs`` and ``targets`` (B, width), in the model's dtype. A row counts as one token."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def tokens_real(self) -> int:
        return len(self.inputs)

    tokens_trained = tokens_real
    tokens_padded = 0

    def to(self, device: torch.device) -> NoiseBatch:
        """The same batch on a device; the copies do not wait."""
        if device.type == "cpu":
            return self
        moved = [t.pin_memory().to(device, non_blocking=True) for t in (self.inputs, self.targets)]
        return NoiseBatch(*moved)


class NoTokenizer:
    """Stands where a tokenizer would: there is no text."""

    pad_token_id = 0

    def save_pretrained(self, folder: str | Path) -> None:
        """Nothing to save."""

    def __len__(self) -> int:
        return 0


def noise_batch(data: DataSpec, tokens: TokenSet, sequences: Rows, width: int, dtype: torch.dtype) -> NoiseBatch:
    """The rows that `sequences` name, drawn in float32."""
    drawn = torch.empty(len(sequences), 2, width)
    for i, row in enumerate(tokens.labels[sequences]):
        generator = torch.Generator().manual_seed((data.seed * SPREAD + int(row)) % 2**32)  # it looks at 32 bits only
        torch.randn(2, width, generator=generator, out=drawn[i])
    drawn = drawn.to(dtype)
    return NoiseBatch(drawn[:, 0].contiguous(), drawn[:, 1].contiguous())


def prepared_noise(data: DataSpec, evaluation: EvalSpec) -> Prepared:
    """The rows' numbers; those held out come behind those of training."""
    rows = data.subset or DEFAULT_ROWS
    held = max(1, round(data.eval_fraction * rows)) if data.eval_fraction and rows > 1 else 0
    held = min(held, evaluation.subset or held)
    train = _numbered(0, rows - held)
    facts = DataFacts(
        source=data.source,
        template="noise",
        rows=rows,
        rows_train=len(train),
        rows_eval=held,
        rows_truncated=0,
        rows_without_target=0,
        tokens_cut=0,
        sequences=len(train),
        tokens_real=len(train),
        tokens_trained=len(train),
        fill=1.0,
        vocab_size=0,
        labels={},
    )
    return Prepared(
        train=train,
        held_out=_numbered(rows - held, rows) if held else None,
        questions=[],
        facts=facts,
        tokenizer=NoTokenizer(),
        how="drawn as it is read",
        folder=Path(),
    )


def _numbered(first: int, last: int) -> TokenSet:
    """Rows first to last (not included): no tokens, and the row's number as its label."""
    n = last - first
    each: Any = np.arange(n, dtype=np.int64)
    ends: Any = np.arange(n + 1, dtype=np.int64)
    ones: Any = np.ones(n, np.int64)
    return TokenSet(
        ids=np.zeros(0, np.int32),
        mask=np.zeros(0, np.uint8),
        offsets=ends,
        pack_offsets=ends,
        pack_rows=each,
        labels=each + first,
        real=ones,
        trained=ones,
    )
