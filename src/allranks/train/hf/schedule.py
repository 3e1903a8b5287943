"""The run's learning rates, as a scheduler that the Trainer steps."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler

from allranks.spec.records import TrainSpec
from allranks.train.optim import learning_rate


class Schedule(LRScheduler):
    """The rates of `optim.learning_rate`, from optimizer step `first` (from 0) on."""

    def __init__(self, optimizer: torch.optim.Optimizer, train: TrainSpec, first: int, total: int) -> None:
        self._train, self._total = train, total
        for group in optimizer.param_groups:
            group["initial_lr"] = train.lr
        super().__init__(optimizer, last_epoch=first - 1)  # it makes a step of its own at once

    def get_lr(self) -> list[float | torch.Tensor]:
        """One rate for all groups."""
        rate = learning_rate(self._train, self.last_epoch, self._total)
        return [rate for _ in self.optimizer.param_groups]
