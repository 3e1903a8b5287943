"""A run's checkpoints: what goes into them beside the weights, when they are written, and what is told of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from allranks.train import checkpoint
from allranks.train.attempt import Attempt
from allranks.train.checkpoint.saver import Saved
from allranks.train.strategies.contract import Strategy


def saver_of(
    here: Attempt,
    strategy: Strategy,
    model: torch.nn.Module,
    tokenizer: Any,
    published: checkpoint.Published,
    sequences: int,
) -> checkpoint.Saver:
    """Writes this run's checkpoints; ``sequences``: of the training data."""
    return checkpoint.Saver(
        here.run,
        here.world,
        strategy,
        model,
        tokenizer,
        published,
        here.spec.checkpoint,
        {"strategy": here.plan.strategy, "run": here.run.name},
        partial(_progress, here, sequences),
        partial(_tell_saved, here),
    )


def _progress(here: Attempt, sequences: int, done: int) -> dict[str, Any]:
    """Schedule and data go on by the number of steps alone; the rest is what that number counts on."""
    return {
        "step": done,
        "sequences": sequences,
        "sequences_done": done * here.batch.global_batch_size,
        "global_batch_size": here.batch.global_batch_size,
        "data_seed": here.data.seed,
        "scaler": None,  # no dtype here needs one
    }


def _tell_saved(here: Attempt, saved: Saved) -> None:
    if saved.removed and here.world.is_first:
        steps = ", ".join(str(step) for step in saved.removed)
        here.events.write(
            "warning",
            what="checkpoint",
            message=f"checkpoints of steps {steps} were removed to make room on the disk",
        )
    here.events.write(
        "checkpoint",
        step=saved.step,
        mode=saved.mode,
        seconds=round(saved.stalled_s, 4),
        written_s=round(saved.seconds, 4),
        bytes=saved.bytes,
        path=str(here.run.checkpoint(saved.step)),
    )


class Saves:
    """Saves where that is due, each state once. Every rank calls every method."""

    def __init__(self, here: Attempt, saver: checkpoint.Saver) -> None:
        self._here, self._saver = here, saver
        self._spec = here.spec.checkpoint
        self._saved: set[tuple[int, str]] = set()

    def due(self, done: int) -> bool:
        """Whether a checkpoint is asked for after so many steps."""
        return self._spec.mode != "none" and bool(self._spec.every) and done % (self._spec.every or 1) == 0

    def save(self, done: int, mode: str, *, last: bool = False) -> None:
        if (done, mode) in self._saved or (done, "full") in self._saved:
            return
        self._here.phase("save", step=done)
        self._here.events.sync()
        # what a stop or the end saves is waited for at once: nothing is left to go on with meanwhile
        self._saver.save(done, mode, behind=self._spec.async_ and not last)
        self._saved.add((done, mode))
        self._here.phase("train", step=done)

    def save_due(self, done: int) -> None:
        if self.due(done):
            self.save(done, self._spec.mode)

    def save_end(self, done: int) -> None:
        """What the spec wants at the end; returns once all that was saved is on the disk."""
        if self._spec.at_end and self._spec.mode != "none" and done > 0:
            self.save(done, self._spec.mode, last=True)
        self._saver.finish()

    def save_last_good(self, done: int) -> None:
        """After a loss that was not finite the weights are those before it: worth keeping, whatever the mode."""
        if done > 0 and self._spec.mode != "none" and not self._here.run.checkpoint(done).exists():
            self.save(done, "full", last=True)
