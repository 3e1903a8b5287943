"""Implement ``single``: one process.

Communication: none, 0 bytes per step.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes, and activations.
Predecessor: none; it is the reference for the other strategies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.base import MakeOptimizer, Replicated, Sizes, Traffic, trained_parameters


class Single(Replicated):
    """Train in one process, without communication."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._hold(model, trained_parameters(model), make_optimizer, group, clip_norm)

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return []
