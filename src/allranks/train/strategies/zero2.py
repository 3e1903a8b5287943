"""``zero2``: gradients, too, are kept in parts: each rank gets the mean of its own part alone.

Communication: a reduce-scatter a bucket in the backward of every micro-step (A T g bytes a step, T trained parameters of
g bytes, A micro-steps), then an all-gather a bucket of the new weights (T g bytes): (A + 1) T g (W-1)/W sent by each rank
on a ring. Without accumulation that is what plain data parallelism sends. And one float32 for the gradients' norm.
Memory per rank (P parameters, fp32 AdamW): 4P + 12T/W bytes, and up to three buckets of gradients on their way; at two
ranks and T = P 5/8 of plain data parallelism.
Predecessor (``zero1``): it reduces whole gradients on every rank, of which each uses one part.
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
    """Optimizer state and gradients in parts; weights on every rank."""

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
