"""Implement ``zero2``: gradients are sharded, too; each rank gets only the mean of its own part.

Communication: a reduce-scatter per bucket in the backward of every micro-step (A T g bytes per step, T trained parameters of
g bytes, A micro-steps), then an all-gather of the new weights per bucket (T g bytes): (A + 1) T g (W-1)/W sent by each rank
on a ring. Without accumulation this equals plain data parallelism. And one float32 for the gradient norm.
Memory per rank (P parameters, fp32 AdamW): 4P + 12T/W bytes, and up to three buckets of gradients in flight; at two
ranks and T = P 5/8 of plain data parallelism.
Predecessor (``zero1``): every rank reduces full gradients, but uses only one part.
Source: ZeRO stage 2, Rajbhandari et al. 2020.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.base import MakeOptimizer, Sizes, Traffic
from allranks.train.strategies.sharded_optimizer import GradientReduceScatter, ShardedOptimizer


class Zero2(ShardedOptimizer):
    """Shard optimizer state and gradients; every rank holds all weights."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._gradients = GradientReduceScatter(self._flats, group)

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.finish()

    def step(self) -> torch.Tensor:
        self._gradients.give()
        norm = self._update()
        self._share_update()
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        whole = sum(flat.bytes for flat in self._flats)
        return [
            Traffic("reduce_scatter", "backward", len(self._flats) * accum, whole * accum),
            Traffic("all_reduce", "step", 1, 4),
            Traffic("all_gather", "step", len(self._flats), whole),
        ]
