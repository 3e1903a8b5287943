"""Run the training loop; observers see each step begin, its parts, and its end.

The loop does not depend on a strategy, a model or a file format; observers implement a contract defined here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from allranks.rundir.events import EventLog
from allranks.rundir.heartbeat import HeartbeatWriter, heartbeat
from allranks.spec.strategies import strategy_info
from allranks.train.data.batches import Batch
from allranks.train.data.prepared import TokenSet
from allranks.train.data.sampler import Rows, SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.optimizer import learning_rate, set_learning_rate
from allranks.train.step_metrics import LoopOutcome, LoopPlan, StepMetrics, StepWork, StopRequest, TokenCounts
from allranks.train.step_timers import StepTimer
from allranks.train.strategies import import_target
from allranks.train.strategies.base import Strategy


class HeartbeatWatcher:
    """Looks on beside another watcher (`allranks.train.loop.StepWatcher`)."""

    def __init__(self, other: StepWatcher, beats: HeartbeatWriter = heartbeat) -> None:
        self._other, self._pulse = other, beats

    def attach(self, quiet: Callable[[], None]) -> None:
        """Hands on."""
        self._other.attach(quiet)

    def step_begins(self, step: int) -> None:
        """A beat, and the step's number."""
        self._pulse.step(step)
        self._other.step_begins(step)

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A beat, and the part's name."""
        self._pulse.part(name)
        return self._other.part(name)

    def step_ends(self, step: int) -> bool:
        """Hands on."""
        return self._other.step_ends(step)

    def close(self) -> None:
        """Hands on."""
        self._other.close()


_NOTHING = nullcontext()


class StepWatcher(Protocol):
    """Is told where steps and their parts begin and end. Steps count from 0."""

    def attach(self, quiet: Callable[[], None]) -> None:
        """Before the first step. ``quiet()`` returns when nothing that the loop began is under way on this rank; it may
        be called wherever a step begins or ends."""
        ...

    def step_begins(self, step: int) -> None:
        """Before anything of the step."""
        ...

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Around ``data``, ``forward``, ``backward``, ``optimizer`` and ``control``."""
        ...

    def step_ends(self, step: int) -> bool:
        """After all of the step; True if the watcher took time of its own, which is no training time."""
        ...

    def close(self) -> None:
        """No step follows."""
        ...


class NullStepWatcher:
    """Nobody looks on."""

    def attach(self, quiet: Callable[[], None]) -> None: ...

    def step_begins(self, step: int) -> None: ...

    def part(self, name: str) -> AbstractContextManager[Any]:
        return _NOTHING

    def step_ends(self, step: int) -> bool:
        return False

    def close(self) -> None: ...


class TrainingLoop:
    """Runs optimizer steps until the plan is done or a stop is agreed on."""

    def __init__(
        self,
        world: DistContext,
        strategy: Strategy,
        order: SampleOrder,
        tokens: TokenSet,
        make_batch: Callable[[Rows], Batch],
        plan: LoopPlan,
        events: EventLog,
        stop: StopRequest,
        watcher: StepWatcher | None = None,
    ) -> None:
        self._watcher = watcher or NullStepWatcher()
        self._world, self._strategy, self._order = world, strategy, order
        self._make_batch, self._plan = make_batch, plan
        self._step_metrics = StepMetrics(world, order, tokens, plan, events, stop)
        self._watcher.attach(self._step_metrics.quiet)
        self._clock = StepTimer(world.device)
        self._clock.follow(strategy.module)

    def run(self) -> LoopOutcome:
        """All steps; returns at an edge where every rank has done equally many.

        Raises:
            NonFiniteLoss: on every rank; the weights are those before the step that it names.
        """
        self._strategy.module.train()
        step = self._plan.first_step
        self._clock.pause()
        while step < self._plan.total_steps:
            self._watcher.step_begins(step)
            work = self._step(step)
            with self._watcher.part("control"):
                agreed = self._step_metrics.exchange(work)
            if self._watcher.step_ends(step):
                self._clock.pause()
            step += 1
            stop = self._step_metrics.process_reduced(agreed)
            if self._step_metrics.callbacks_due(step, stop):
                stop = self._step_metrics.edge(step, stop)
                self._strategy.module.train()
                self._clock.pause()
            if stop:
                break
        self._step_metrics.drain()
        return LoopOutcome(step, stopped=step < self._plan.total_steps)

    def _step(self, step: int) -> StepWork:
        """One optimizer step."""
        clock, part = self._clock, self._watcher.part
        set_learning_rate(self._strategy.optimizer, learning_rate(self._plan.train, step, self._plan.total_steps))
        clock.begin()
        trained = self._step_metrics.trained(step)
        micro = self._order.micro_batches(step)
        scale = self._world.size / max(trained, 1)
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._world.device)
        counts = TokenCounts()
        for i, rows in enumerate(micro):
            with part("data"):
                batch = self._make_batch(rows)
            clock.lap("data")
            with nullcontext() if i == len(micro) - 1 else self._strategy.accumulate():
                with part("forward"):
                    loss = self._strategy.module(batch)
                clock.lap("forward")
                with part("backward"):
                    self._strategy.backward(loss * scale)
                clock.lap("backward")
            loss_sum += loss.detach().float()
            counts.add(batch)
        with part("optimizer"):
            norm = self._strategy.step()
        clock.lap("optimizer")
        rate = self._strategy.optimizer.param_groups[0]["lr"]
        return StepWork(step, loss_sum, norm, counts, trained, rate, clock.end_step())


def loop_of(name: str) -> type[TrainingLoop]:
    """Return the engine that runs a strategy's optimizer steps: `TrainingLoop`, or a class that is made and run like it."""
    return import_target(strategy_info(name).engine)
