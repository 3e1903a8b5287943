"""The loop: optimizer steps, and what happens at their edges. It knows no strategy, no model and no file format."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import NonFiniteLoss
from allranks.observe.events import EventLog
from allranks.spec.records import TrainSpec
from allranks.train.clock import StepClock, memory_now
from allranks.train.control import Agreed, Control, StopRequest
from allranks.train.data.collate import Batch
from allranks.train.data.order import Order, Rows
from allranks.train.data.prepared import TokenSet
from allranks.train.optim import learning_rate, set_learning_rate
from allranks.train.strategies.contract import Strategy
from allranks.train.watching import StepWatcher, Unwatched
from allranks.train.world import World


@dataclass(frozen=True)
class Plan:
    """What the loop is to do. ``at_edge(steps_done, stopping)`` evaluates and saves where that is due."""

    first_step: int
    total_steps: int
    train: TrainSpec
    log_every: int
    global_batch_size: int
    is_due: Callable[[int], bool]
    at_edge: Callable[[int, bool], None]


@dataclass
class Outcome:
    """How the loop ended."""

    steps_done: int
    stopped: bool = False


@dataclass
class _Interval:
    """What this rank did since the last logged step."""

    tokens: int = 0
    tokens_trained: int = 0
    tokens_padded: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    trained_everywhere: int = 0
    times: list[dict[str, Any]] = field(default_factory=list)


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
        self._world, self._strategy, self._order, self._tokens = world, strategy, order, tokens
        self._make_batch, self._plan, self._events, self._stop = make_batch, plan, events, stop
        self._control = Control(world)
        self._watcher.attach(self._control.quiet)
        self._clock = StepClock(world.device)
        self._interval = _Interval()
        self._last: tuple[int, Agreed, dict[str, Any]]
        self._waiting: dict[int, dict[str, Any]] = {}  # steps whose numbers are not agreed yet
        self._local_loss: dict[int, torch.Tensor] = {}

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
            loss_sum, norm = self._step(step)
            with self._watcher.part("control"):
                agreed = self._control.finish()
                self._control.start(step, loss_sum, norm, stop=self._stop.asked)
            if self._watcher.step_ends(step):
                self._clock.pause()
            step += 1
            stop = self._heed(agreed)
            if stop or self._plan.is_due(step):
                stop = self._drain() or stop
                self._plan.at_edge(step, stop and step < self._plan.total_steps)
                self._strategy.module.train()
                self._clock.pause()
            if stop:
                break
        self._drain()
        return Outcome(step, stopped=step < self._plan.total_steps)

    def _step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step: (this rank's summed loss, gradient norm), both on the device."""
        clock, part = self._clock, self._watcher.part
        set_learning_rate(self._strategy.optimizer, learning_rate(self._plan.train, step, self._plan.total_steps))
        clock.begin()
        trained = int(self._tokens.trained[self._order.global_batch(step)].sum())
        micro = self._order.micro_batches(step)
        scale = self._world.size / max(trained, 1)
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._world.device)
        counts = _Interval()
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
            counts.tokens += batch.tokens_real
            counts.tokens_trained += batch.tokens_trained
            counts.tokens_padded += batch.tokens_padded
        with part("optimizer"):
            norm = self._strategy.step()
        clock.lap("optimizer")
        self._local_loss[step] = loss_sum
        rate = self._strategy.optimizer.param_groups[0]["lr"]
        self._waiting[step] = {"counts": counts, "trained": trained, "lr": rate, "times": clock.end_step()}
        return loss_sum, norm

    def _heed(self, agreed: Agreed | None) -> bool:
        """Log what has been agreed on; True if all are to stop."""
        if agreed is None:
            return False
        known = self._waiting.pop(agreed.step)
        if agreed.bad_ranks:
            self._fail(agreed)
        del self._local_loss[agreed.step]
        self._add(known, agreed)
        done = agreed.step + 1
        self._last = (done, agreed, known)
        if done % self._plan.log_every == 0:
            self._log(*self._last)
        return agreed.stop

    def _drain(self) -> bool:
        stop = False
        for agreed in self._control.drain():
            stop = self._heed(agreed) or stop
        if self._interval.steps:
            self._log(*self._last)
        self._events.sync()
        return stop

    def _add(self, known: dict[str, Any], agreed: Agreed) -> None:
        counts: _Interval = known["counts"]
        into = self._interval
        into.steps += 1
        into.tokens += counts.tokens
        into.tokens_trained += counts.tokens_trained
        into.tokens_padded += counts.tokens_padded
        into.loss_sum += agreed.loss_sum
        into.trained_everywhere += known["trained"]
        into.times.append(known["times"])

    def _log(self, done: int, agreed: Agreed, known: dict[str, Any]) -> None:
        into, self._interval = self._interval, _Interval()
        parts = {name: round(sum(t.get(name, 0.0) for t in into.times) / len(into.times), 6) for name in into.times[0]}
        several = {"step_times_s": [t["step_time_s"] for t in into.times]} if into.steps > 1 else {}
        self._events.write(
            "step",
            step=done,
            steps=into.steps,
            loss=into.loss_sum / max(into.trained_everywhere, 1),
            lr=known["lr"],
            grad_norm=agreed.grad_norm,
            tokens=into.tokens,
            tokens_trained=into.tokens_trained,
            tokens_padded=into.tokens_padded,
            epoch=round(done * self._plan.global_batch_size / self._order.n, 4),
            **parts,
            **several,
            **memory_now(self._world.device),
        )

    def _fail(self, agreed: Agreed) -> None:
        """Name the step and the ranks whose own loss was not finite; the sticky skip has kept the weights."""
        own = float(self._local_loss[agreed.step])
        everyone: list[Any] = [None] * self._world.size
        rows = [int(r) for part in self._order.micro_batches(agreed.step) for r in part]
        dist.all_gather_object(everyone, (own, rows), group=self._world.control)
        bad = [(r, loss, rows) for r, (loss, rows) in enumerate(everyone) if not torch.isfinite(torch.tensor(loss))]
        if bad:
            rank, loss, rows = bad[0]
            names = ", ".join(str(r) for r, _, _ in bad)
            what = f"the loss of rank {names} is not finite ({loss}) in step {agreed.step + 1}; rank {rank} trained sequences {rows[:8]}"
        else:
            what = f"the gradient is not finite in step {agreed.step + 1}, though every rank's loss is"
        error = NonFiniteLoss(
            f"{what}. The weights are those before that step; try a lower train.lr, more warmup_steps, or float32"
        )
        error.step = agreed.step  # type: ignore[attr-defined]
        raise error
