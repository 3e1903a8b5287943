"""Every rank holds all weights, the mean of all gradients, and the whole optimizer state: what follows from that."""

from __future__ import annotations

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
from allranks.train.strategies.gradients import broadcast_from_first, require_same_order


class Replicated:
    """A strategy (`contract.Strategy`) but for how gradients travel, which is all that those that share this differ in."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicated, lockstep, rehearse = True, False, False
    claims_overlap = False

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        named = trained(model)
        require_same_order(named, group)
        broadcast_from_first(model, group)
        self._hold(model, named, make_optimizer, group, clip_norm)

    def _hold(
        self,
        model: nn.Module,
        named: list[tuple[str, nn.Parameter]],
        make_optimizer: MakeOptimizer,
        group: dist.ProcessGroup,
        clip_norm: float | None,
    ) -> None:
        """A model that is the same on all ranks, and what is trained of it."""
        self.module = self._model = model
        self._named, self._group, self._clip_norm = named, group, clip_norm
        self.optimizer = make_optimizer(named)

    def step(self) -> torch.Tensor:
        return clip_and_update(self.optimizer, (p for _, p in self._named), self._clip_norm)

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self._model, trained_only)

    def weight_shards(self) -> list[Shard]:
        return whole_weights([*self._named, *self._model.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return whole_states(self._named, self.optimizer, everywhere=True)

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self._model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated_state(self._model, self.optimizer, state)
