"""Between steps: evaluation and checkpoints, where the spec wants them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from allranks.train.attempt import Attempt
from allranks.train.building import Built
from allranks.train.data.prepared import Prepared
from allranks.train.generate import answer
from allranks.train.saving import Saves
from allranks.train.tasks.contract import Task
from allranks.train.telling import tell_end, tell_experts


class Edges:
    """What is done where no step is under way. Every rank calls every method, at the same step."""

    def __init__(self, here: Attempt, task: Task, data: Prepared, built: Built, total_steps: int) -> None:
        self._here, self._task, self._data, self._built, self._total = here, task, data, built, total_steps
        self._spec = here.spec.eval
        self._evaluator = task.evaluator(here.world, built.loss_model, data, here.plan.dtype)
        self.saves = Saves(here, built.saver)

    def before(self, first_step: int) -> None:
        """Before the first step of all."""
        if first_step == 0 and (self._spec.baseline or self._total == 0):
            self._evaluate(0)

    def is_due(self, done: int) -> bool:
        """Whether anything is to be done after so many steps; the end is no edge."""
        return done < self._total and any(
            every and done % every == 0
            for every in (self._spec.every if self._evaluator else None, self._here.spec.checkpoint.every)
        )

    def at_edge(self, done: int, stopping: bool) -> None:
        """After a step where it is due, or after the last one before a stop."""
        tell_experts(self._here, self._built, done)
        if stopping:
            self.saves.save(done, "full", last=True)
            return
        if self._spec.every and done % self._spec.every == 0:
            self._evaluate(done)
        self.saves.save_due(done)

    def at_end(self, first_step: int) -> None:
        """After the last step."""
        if self._total > first_step:
            tell_experts(self._here, self._built, self._total)
            tell_end(self._here, self._built, self._total)
        if self._spec.at_end and self._total > 0:
            self._evaluate(self._total)
        self.saves.save_end(self._total)

    def _evaluate(self, done: int) -> None:
        if self._evaluator is None:
            return
        here = self._here
        here.phase("evaluate", step=done)
        result = self._evaluator.run()
        answers = self._answers()
        if here.world.is_first:
            here.events.write("eval", step=done, **msgspec.to_builtins(result), **answers)
        here.phase("train", step=done)

    def _answers(self) -> dict[str, Any]:
        """What the model answers to some questions, where the data has any."""
        if self._task.classifier or not self._data.questions or not self._spec.samples:
            return {}
        started = time.perf_counter()
        found = answer(
            self._here.world,
            self._built.model,
            self._data.tokenizer,
            self._data.questions,
            self._spec.samples,
            lockstep=self._built.strategy.lockstep,
        )
        return {**msgspec.to_builtins(found), "answers_s": round(time.perf_counter() - started, 3)}
