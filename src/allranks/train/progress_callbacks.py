"""Report the progress of the Trainers of Hugging Face and Lightning in a user's own program, which needs no change.

An import hook waits until the program imports the module that defines a Trainer, and then adds a callback to every
Trainer that the program makes. It imports no library itself. No callback raises, asks a GPU for a loss more often than
the program logs, or counts once the program calls `allranks.report` itself. ``ALLRANKS_TRAINER_CALLBACKS=0`` turns
this off.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from allranks.rundir.events import reporter
from allranks.train import patches

SWITCH = "ALLRANKS_TRAINER_CALLBACKS"


def add_progress_callbacks() -> None:
    """Add the callbacks to Trainers that this process defines from now on."""
    if os.environ.get(SWITCH) != "0":
        sys.meta_path.insert(0, _TrainerImports())


class _TrainerImports(MetaPathFinder):
    """Find modules as the other finders do; let a module of `_TRAINERS` be changed after it was executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = _TRAINERS.get(name)
        if change is None:
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        spec = next((spec for find in others if find is not None and (spec := find(name, path, target))), None)
        loader: Any = spec.loader if spec is not None else None
        with suppress(Exception):  # a loader of another kind; progress is then read in the output
            loader.exec_module = _then(loader.exec_module, change)
        return spec


def _then(execute: Callable[[ModuleType], None], change: Callable[[Any], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        with suppress(Exception):  # a version with other names
            change(module)

    return exec_module


def _quiet(method: Callable[..., None]) -> Callable[..., None]:
    """Let a callback ignore its own failures: objects of other versions may lack what it reads."""

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> None:
        with suppress(Exception):
            method(*args, **named)

    return call


def _report(step: Any, total: Any, loss: Any = None, **more: Any) -> None:
    known = {"total": total} if total and total > 0 and math.isfinite(total) else {}
    reporter.report(step, loss, None, by_callback=True, **known, **more)


def _end(step: Any) -> None:
    reporter.flush()  # a loss keeps the step at which it was logged
    reporter.report(step, None, None, by_callback=True)


def _hugging_face(module: Any) -> None:
    """Add the callback to ``transformers.trainer``, and so to all classes that inherit from its Trainer."""

    class Progress(module.TrainerCallback):
        @_quiet
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _report(state.global_step, state.max_steps)

        @_quiet
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            losses = {name: logs[name] for name in ("loss", "eval_loss") if name in logs}
            if losses:
                _report(state.global_step, state.max_steps, **losses)

        @_quiet
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _end(state.global_step)

        def __reduce__(self) -> Any:  # another process has no such class
            return module.TrainerCallback, ()

    patches.add_default_callback(module, Progress)


def _lightning(module: Any) -> None:
    """Add the callback to ``lightning.pytorch.trainer.trainer``, also under its older name."""

    class Progress(module.Callback):
        step = 0

        @_quiet
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            loss, step = outputs["loss"] if isinstance(outputs, dict) else outputs, trainer.global_step
            if step == self.step:  # gradients are accumulated: no step yet, but a sign of life
                return _report(None, None)
            self.step = step
            if loss is not None and (loss.device.type == "cpu" or step % trainer.log_every_n_steps == 0):
                loss = float(loss) * trainer.accumulate_grad_batches  # Lightning has divided it
            else:
                loss = None
            _report(step, trainer.estimated_stepping_batches, loss)

        @_quiet
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
                _report(trainer.global_step, None, eval_loss=trainer.callback_metrics["val_loss"])

        @_quiet
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            _end(trainer.global_step)

        def __reduce__(self) -> Any:  # as above
            return module.Callback, ()

    patches.append_lightning_callback(module.Trainer, Progress)


_TRAINERS: dict[str, Callable[[Any], None]] = {
    "transformers.trainer": _hugging_face,
    "lightning.pytorch.trainer.trainer": _lightning,
    "pytorch_lightning.trainer.trainer": _lightning,
}
