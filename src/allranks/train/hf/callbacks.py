"""Where the Trainer says that something happened, this project's ledger writes it down."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl


class Steps(Protocol):
    """Who wants to know."""

    def train_begins(self) -> None: ...

    def updated(self) -> None: ...

    def step_ended(self) -> bool:
        """True if all ranks are to stop."""
        ...


class Records(TrainerCallback):
    """Tells of the wrapped model, of each update, and of each step's end; ends the training when all agreed to stop."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_train_begin(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._steps.train_begins()

    def on_optimizer_step(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self._steps.updated()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self._steps.step_ended():
            control.should_training_stop = True
