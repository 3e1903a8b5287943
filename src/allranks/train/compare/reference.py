"""One process that goes through the ranks' micro-batches in order: no strategy, no collective, nothing of our loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from allranks.train.data.collate import Batch
from allranks.train.data.order import Order, Rows
from allranks.train.data.prepared import TokenSet
from allranks.train.losses import LossModel
from allranks.train.strategies.contract import MakeOptimizer


def reference_weights(
    model: LossModel,
    make_optimizer: MakeOptimizer,
    orders: Sequence[Order],
    tokens: TokenSet,
    make_batch: Callable[[Rows], Batch],
    steps: int,
    clip_norm: float | None,
    rates: Sequence[float],
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The trained weights after `steps`, on the CPU, and each step's gradient norm before clipping.

    `orders` has one entry a rank, `rates` one learning rate a step.
    """
    model.train()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = make_optimizer(named)
    norms = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        total = max(int(tokens.trained[orders[0].global_batch(step)].sum()), 1)
        for parts in zip(*(order.micro_batches(step) for order in orders), strict=True):
            for rows in parts:
                (model(make_batch(rows)) / total).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().to("cpu", copy=True) for n, p in named}, norms
