"""The loop: optimizer steps, and what happens at their edges. It knows no strategy, no model and no file format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from allranks.observe.events import EventLog
from allranks.train.clock import StepClock
from allranks.train.control import StopRequest
from allranks.train.data.collate import Batch
from allranks.train.data.order import Order, Rows
from allranks.train.data.prepared import TokenSet
from allranks.train.ledger import Counts, Ledger, Outcome, Plan, StepWork
from allranks.train.optim import learning_rate, set_learning_rate
from allranks.train.strategies.contract import Strategy
from allranks.train.watching import StepWatcher, Unwatched
from allranks.train.world import World


class Loop:
    """Runs optimizer steps until the plan is done or a stop is agreed on."""

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        order: Order,
        tokens: TokenSet,
        make_batch: Callable[[Rows], Batch],
        plan: Plan,
        events: EventLog,
        stop: StopRequest,
        watcher: StepWatcher | None = None,
    ) -> None:
        self._watcher = watcher or Unwatched()
        self._world, self._strategy, self._order = world, strategy, order
        self._make_batch, self._plan = make_batch, plan
        self._ledger = Ledger(world, order, tokens, plan, events, stop)
        self._watcher.attach(self._ledger.quiet)
        self._clock = StepClock(world.device)
        self._clock.follow(strategy.module)

    def run(self) -> Outcome:
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
                agreed = self._ledger.exchange(work)
            if self._watcher.step_ends(step):
                self._clock.pause()
            step += 1
            stop = self._ledger.heed(agreed)
            if self._ledger.is_edge(step, stop):
                stop = self._ledger.edge(step, stop)
                self._strategy.module.train()
                self._clock.pause()
            if stop:
                break
        self._ledger.drain()
        return Outcome(step, stopped=step < self._plan.total_steps)

    def _step(self, step: int) -> StepWork:
        """One optimizer step."""
        clock, part = self._clock, self._watcher.part
        set_learning_rate(self._strategy.optimizer, learning_rate(self._plan.train, step, self._plan.total_steps))
        clock.begin()
        trained = self._ledger.trained(step)
        micro = self._order.micro_batches(step)
        scale = self._world.size / max(trained, 1)
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._world.device)
        counts = Counts()
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
