"""What a kind of work must know, so that worker and loop know none of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from allranks.train.data import cache
from allranks.train.data.order import Rows
from allranks.train.data.prepared import Prepared
from allranks.train.evaluate import Evaluator
from allranks.train.loading.filler import Filler
from allranks.train.world import World


class Task(Protocol):
    """One kind of work, made from a spec."""

    classifier: bool

    def prepare(self, cache_root: Path, log: cache.Log) -> Prepared:
        """Find, wait for, or build the data. Safe to call on any number of ranks at once."""
        ...

    def load(self, world: World, data: Prepared, dtype: str, built: Callable[[Any], None]) -> tuple[nn.Module, Filler]:
        """As `train.model.load_model`."""
        ...

    def loss_model(self, model: nn.Module) -> nn.Module:
        """The model with its loss: forward(batch) gives the sum over trained tokens, a float32 scalar."""
        ...

    def batches(self, data: Prepared, dtype: str, device: torch.device) -> Callable[[Rows], Any]:
        """Makes micro-batches of training sequences, on the device. They have ``inputs``, ``to``, and counts of tokens."""
        ...

    def evaluator(self, world: World, loss_model: Any, data: Prepared, dtype: str) -> Evaluator | None:
        """Of the rows held out; None if there are none."""
        ...
