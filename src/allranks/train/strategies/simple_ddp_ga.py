"""``simple_ddp_ga``: all-reduce every gradient once an optimizer step.

Communication: one blocking all-reduce a trained parameter, after the backward of the last micro-step: n calls and T g
bytes a step, however many micro-steps.
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes.
Predecessor (``simple_ddp``): it communicates on every micro-step what only the last one needs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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
from allranks.train.strategies.gradients import (
    MicroStep,
    broadcast_from_first,
    gradient_of,
    require_same_order,
)
from allranks.train.strategies.traffic import Sizes, Traffic


class SimpleDDPAccumulating:
    """A blocking all-reduce a parameter, after the last backward of the step."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicated, lockstep, rehearse = True, False, False
    claims_overlap = False

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._group, self._clip_norm = model, group, clip_norm
        self._named = trained(model)
        require_same_order(self._named, group)
        broadcast_from_first(model, group)
        self.optimizer = make_optimizer(self._named)
        self._micro = MicroStep()

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.held_back()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if not self._micro.last:
            return
        for _, parameter in self._named:
            gradient = gradient_of(parameter)
            dist.all_reduce(gradient, group=self._group)
            gradient.div_(dist.get_world_size(self._group))

    def step(self) -> torch.Tensor:
        return clip_and_update(self.optimizer, (p for _, p in self._named), self._clip_norm)

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "after_backward", len(sizes.trained), sizes.trained_bytes)]

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
