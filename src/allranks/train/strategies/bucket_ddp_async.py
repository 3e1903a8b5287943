"""Implement ``bucket_ddp_async``: gradients in buckets, one asynchronous all-reduce per bucket.

Communication: one all-reduce per bucket (25 MB by default), started in the backward of the last micro-step when the bucket
is full, and waited for in ``step``: about T g / 25 MB calls, T g bytes per step; 2 T g (W-1)/W sent by each rank on a ring.
Buckets are filled and launched from the last parameter to the first, in the same order on all ranks (checked at the start).
Memory per rank (P parameters, T trained, fp32 AdamW): 4P + 12T bytes; gradients are views into the buckets.
Predecessor (``simple_ddp_async``): hundreds of small messages, each with its own latency. Filling buckets in the order in
which hooks run would be simpler, but that order may differ between ranks, which silently corrupts gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.base import MakeOptimizer, Replicated, Sizes, Traffic, trained_parameters
from allranks.train.strategies.gradient_sync import (
    BucketAllReduce,
    GradientBucket,
    broadcast_from_first,
    require_same_order,
    split_into_buckets,
)


class BucketDDPAsync(Replicated):
    """Start an asynchronous all-reduce per bucket in the last backward."""

    claims_overlap = True

    def __init__(self, bucket_mb: float) -> None:
        self._bucket_bytes = bucket_mb * 2**20

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        named = trained_parameters(model)
        backwards = named[::-1]  # backward runs from the last layer to the first
        require_same_order(backwards, group)
        broadcast_from_first(model, group)
        self._hold(model, named, make_optimizer, group, clip_norm)
        self._buckets = [
            GradientBucket(part) for part in split_into_buckets([p for _, p in backwards], self._bucket_bytes)
        ]
        self._gradients = BucketAllReduce(self._buckets, group)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._gradients.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.finish()

    def step(self) -> torch.Tensor:
        self._gradients.wait()
        return super().step()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", len(self._buckets), sizes.trained_bytes)]
