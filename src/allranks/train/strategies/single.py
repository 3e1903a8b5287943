"""``single``: one process.

Communication: none, 0 bytes per step.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes, and activations.
Predecessor: none; it is the reference that the others are compared with.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange, whole_states, whole_weights
from allranks.train.strategies.common import (
    clip_and_update,
    load_replicated_state,
    replicated_state,
    replicated_weights,
    trained,
)
from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.traffic import Sizes, Traffic


class Single:
    """One process, nothing to communicate."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicated, lockstep = True, False
    claims_overlap = False
    rehearse = False

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._clip_norm = model, clip_norm
        self._named = trained(model)
        self.optimizer = make_optimizer(self._named)

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> torch.Tensor:
        return clip_and_update(self.optimizer, (p for _, p in self._named), self._clip_norm)

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return []

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self.module, trained_only)

    def weight_shards(self) -> list[Shard]:
        return whole_weights([*self._named, *self.module.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return whole_states(self._named, self.optimizer, everywhere=True)

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.module, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated_state(self.module, self.optimizer, state)
