"""Implement ``zero1``: each rank updates its own part of the weights and keeps optimizer state only for that part.

Communication per step: an asynchronous all-reduce per bucket in the last backward (T g bytes in total, T trained parameters of
g bytes), then an all-gather of the new weights per bucket (T g bytes): 3 T g (W-1)/W sent by each rank on a ring, compared to
2 T g (W-1)/W without sharding. And one float32 for the gradient norm.
Memory per rank (P parameters, fp32 AdamW): 4P + 4T + 8T/W bytes; at two ranks and T = P 3/4 of plain data parallelism.
Predecessor (``bucket_ddp_async``): every rank keeps the same moments and makes the same update.
Source: ZeRO stage 1, Rajbhandari et al. 2020. Parts have exactly equal size; they are not full parameters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.base import MakeOptimizer, Sizes, Traffic
from allranks.train.strategies.gradient_sync import BucketAllReduce, GradientBucket
from allranks.train.strategies.sharded_optimizer import ShardedOptimizer


class Zero1(ShardedOptimizer):
    """Shard optimizer state; every rank holds all gradients and weights."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._buckets = [GradientBucket([p for _, p in flat.named], dist.get_world_size(group)) for flat in self._flats]
        self._gradients = BucketAllReduce(self._buckets, group)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._gradients.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.finish()

    def step(self) -> torch.Tensor:
        self._gradients.wait()
        for flat, bucket in zip(self._flats, self._buckets, strict=True):
            flat.give_gradient(bucket.flat[flat.low : flat.high])
        norm = self._update()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self._share_update()
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        whole = sum(flat.bytes for flat in self._flats)
        return [
            Traffic("all_reduce", "backward", len(self._flats), whole),
            Traffic("all_reduce", "step", 1, 4),
            Traffic("all_gather", "step", len(self._flats), whole),
        ]
