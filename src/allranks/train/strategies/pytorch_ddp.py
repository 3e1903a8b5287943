"""Implement ``pytorch_ddp``: torch's DistributedDataParallel.

Communication: one all-reduce per bucket (25 MB by default) of the trained gradients, launched during backward as
soon as a bucket is full, on the last micro-step only. Bytes per step and rank on a ring: 2 T g (W-1)/W, with T
trained parameters of g bytes each, W ranks.
Memory per rank (P parameters, fp32 AdamW): 4P + 16T bytes: weights, gradients (views into the buckets), two moments.
Predecessor (``bucket_ddp_async``): buckets follow the order in which gradients were ready in the first step, the
same on all ranks, instead of a fixed order.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.train.strategies.base import MakeOptimizer, Replicated, Sizes, Traffic, trained_parameters


class PyTorchDDP(Replicated):
    """Use DistributedDataParallel with gradients as bucket views."""

    claims_overlap = True
    # DDP rebuilds its buckets after the first backward. With three or more ranks the order of a ring's sums depends on the
    # layout: without a warm-up the first step after a resume would be rounded differently than without the stop.
    # A new run needs none: its first step is always rounded alike.
    warmup = "after_resume"

    def __init__(self, bucket_mb: float, find_unused_parameters: bool, static_graph: bool) -> None:
        self._options = {
            "bucket_cap_mb": bucket_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
        }

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._hold(model, trained_parameters(model), make_optimizer, group, clip_norm)
        with warnings.catch_warnings():  # the new name has another meaning at the start
            warnings.filterwarnings("ignore", ".*broadcast_buffers. is deprecated", FutureWarning)
            self._ddp = DistributedDataParallel(
                model,
                process_group=group,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # buffers are constant and equal from the start: no broadcast per step is needed
                **self._options,
            )
        self.module = self._ddp

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", None, sizes.trained_bytes)]
