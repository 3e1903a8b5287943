"""Create AdamW and compute learning rates as pure functions of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from allranks.spec.records import TrainSpec
from allranks.train.strategies.base import MakeOptimizer


def adamw(train: TrainSpec) -> MakeOptimizer:
    """Return a function that creates a fused AdamW; biases and norms (fewer than two dimensions) have no weight decay.

    The fused form runs one kernel per group and, unlike the foreach form, needs no temporary of the size of the weights.
    """

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [p for _, p in named if p.ndim >= 2]
        plain = [p for _, p in named if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=train.lr, betas=(0.9, 0.999), eps=1e-8, fused=True
        )

    return make


def learning_rate(train: TrainSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule down to 0 at `total_steps`."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    span = max(1, total_steps - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / span)
    if train.schedule == "linear":
        return train.lr * (1.0 - done)
    if train.schedule == "cosine":
        return train.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return train.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
