"""The optimizer step that is under way in the Trainer, as this project counts it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from allranks.errors import EnvironmentNotAble
from allranks.train.clock import StepClock
from allranks.train.data.order import Rows
from allranks.train.hf.feed import Micro
from allranks.train.ledger import Counts, StepWork


class Running:
    """Collects what the Trainer does between the data of a step and its end."""

    def __init__(self, device: torch.device, part: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.clock = StepClock(device)
        self._device, self._part = device, part
        self._open = ExitStack()

    def begin(self, step: int, trained: int, rate: float) -> None:
        """Before the data of optimizer step `step` (from 0), whose ranks train so many tokens at this rate."""
        self.step, self.trained, self._rate = step, trained, rate
        self.fed: list[Rows] = []
        self._counts, self._norm = Counts(), None
        self._loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        self.clock.begin()

    def enter(self, name: str) -> None:
        """A part of the step begins; the one before it is over."""
        self._open.close()
        self._open.enter_context(self._part(name))

    def leave(self, name: str) -> None:
        """The part is over; its time counts."""
        self._open.close()
        self.clock.lap(name)

    def abandon(self) -> None:
        """The step is not going to end."""
        self._open.close()

    def add(self, micro: Micro, loss: torch.Tensor) -> None:
        """A micro-batch went forward; `loss` is its sum over trained tokens."""
        self.fed.append(micro.rows)
        self._counts.add(micro.batch)
        self._loss_sum += loss.detach().float()

    def clipped(self, norm: torch.Tensor) -> None:
        """The gradients' norm before clipping."""
        self._norm = norm

    def end(self) -> StepWork:
        """The step as it goes into the ledger.

        Raises:
            EnvironmentNotAble: this version of transformers works in another way.
        """
        if self._norm is None:
            import transformers

            raise EnvironmentNotAble(
                f"hf_trainer: the Trainer of transformers {transformers.__version__} did not ask for the gradients' norm, "
                "so that a loss that is not finite would go unseen; use a version that this project was tested with (5.23), "
                "or strategy pytorch_ddp"
            )
        return StepWork(
            self.step, self._loss_sum, self._norm, self._counts, self.trained, self._rate, self.clock.end_step()
        )
