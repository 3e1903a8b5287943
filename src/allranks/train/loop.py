"""Run the training loop: one optimizer step after another, with AdamW and a learning rate that is a pure function of
the step.

Between two steps `StepMetrics.run_callbacks` calls those of the `LoopPlan` (`train.worker.StepCallbacks`), which
evaluate, and save by `checkpoint.saver`.
Observers see each step begin, its parts, and its end. The loop does not depend on a strategy, a model or a file format;
observers implement a contract defined here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from torch import nn

from allranks.rundir.events import EventLog
from allranks.rundir.heartbeat import HeartbeatWriter, heartbeat
from allranks.spec.records import TrainSpec
from allranks.spec.strategies.base import ADAM_BETAS, ADAM_EPS
from allranks.train.data.batch_feed import BatchFeed
from allranks.train.distributed import DistContext
from allranks.train.step_metrics import LoopPlan, StepMetrics, StepWork, TokenCounts, TrainingRows
from allranks.train.step_timers import StepTimer
from allranks.train.strategies.base import LoopStrategy, MakeOptimizer, has_weight_decay

_NOTHING = nullcontext()


class StepWatcher:
    """Observe where steps and their parts begin and end. Steps count from 0. This one does nothing."""

    def attach(self, quiet: Callable[[], None]) -> None:
        """Prepare before the first step.

        ``quiet()`` waits until all communication that the loop started on this rank is finished. It may be called
        whenever a step begins or ends.
        """

    def step_begins(self, step: int) -> None:
        """Handle the beginning of a step."""

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for one part: ``data``, ``forward``, ``backward``, ``optimizer`` or ``control``."""
        return _NOTHING

    def step_ends(self, step: int) -> bool:
        """Handle the end of a step; return whether the watcher used time that must not count as training time."""
        return False

    def close(self) -> None:
        """Finish after the last step."""


class HeartbeatWatcher(StepWatcher):
    """Write heartbeats, and forward every call to another watcher."""

    def __init__(self, other: StepWatcher, beats: HeartbeatWriter = heartbeat) -> None:
        self._beats = beats
        self.attach, self.close, self.step_ends = other.attach, other.close, other.step_ends
        self._other = other

    def step_begins(self, step: int) -> None:
        self._beats.step(step)
        self._other.step_begins(step)

    def part(self, name: str) -> AbstractContextManager[Any]:
        self._beats.part(name)
        return self._other.part(name)


class TrainingLoop:
    """Run optimizer steps until all planned steps are done or all ranks agree to stop."""

    def __init__(
        self,
        world: DistContext,
        strategy: LoopStrategy,
        rows: TrainingRows,
        plan: LoopPlan,
        events: EventLog,
        watcher: StepWatcher | None = None,
    ) -> None:
        self._watcher = watcher or StepWatcher()
        self._world, self._strategy, self._rows, self._plan = world, strategy, rows, plan
        self._clock = StepTimer(world.device)
        self._step_metrics = StepMetrics(world, rows, plan, events, self._clock)
        self._watcher.attach(self._step_metrics.quiet)
        self._clock.follow(strategy.module, update_times_comparable=strategy.update_times_comparable)

    def run(self) -> int:
        """Run all steps; return how many are done, the same number on every rank.

        Raises:
            NonFiniteLoss: on every rank; the weights are those before the named step.
        """
        world, plan, metrics = self._world, self._plan, self._step_metrics
        self._strategy.module.train()
        step = plan.first_step
        made = BatchFeed(self._rows.order, self._rows.make_batch, world.device, step, plan.total_steps)
        with closing(made) as feed, closing(metrics):
            self._clock.pause()
            while step < plan.total_steps:
                self._watcher.step_begins(step)
                work = self.train_step(step, feed)
                with self._watcher.part("control"):
                    # of the step before, whose sums have arrived by now: this step's would make the host wait
                    earlier_step = metrics.exchange(work)
                if self._watcher.step_ends(step):
                    self._clock.pause()
                step += 1
                stop = metrics.process_reduced(earlier_step)
                if stop or plan.is_due(step):
                    stop = metrics.run_callbacks(step, stop)
                    # an evaluation has switched to eval mode, and its time is none of the next step's
                    self._strategy.module.train()
                    self._clock.pause()
                if stop:
                    break
        metrics.drain()
        return step

    def train_step(self, step: int, feed: BatchFeed) -> StepWork:
        """Run one optimizer step: forward and backward of its micro-batches, then the update."""
        clock, part = self._clock, self._watcher.part
        set_learning_rate(self._strategy.optimizer, learning_rate(self._plan.train, step, self._plan.total_steps))
        clock.begin()
        trained = self._step_metrics.trained(step)
        # strategies average gradients over ranks: the factor makes it the mean over all trained tokens of the step
        scale = self._world.size / max(trained, 1)
        # kept on the device: reading the loss of each micro-batch would synchronise
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._world.device)
        counts, sequences = TokenCounts(), []
        micro_steps = self._rows.order.micro_steps
        for i in range(micro_steps):
            with part("data"):
                batch = feed.take()
            clock.lap("data")
            # gradients add up on the rank, so that a strategy can exchange them once, in the last backward pass
            with nullcontext() if i == micro_steps - 1 else self._strategy.accumulate():
                with part("forward"):
                    loss = self._strategy.module(batch)
                clock.lap("forward")
                with part("backward"):
                    self._strategy.backward(loss * scale)
                clock.lap("backward")
            loss_sum += loss.detach().float()
            counts.add(batch)
            sequences += batch.sequences
        with part("optimizer"):
            norm = self._strategy.step()
        clock.lap("optimizer")
        return StepWork(
            step=step,
            loss_sum=loss_sum,
            grad_norm=norm,
            counts=counts,
            trained=trained,
            lr=self._strategy.optimizer.param_groups[0]["lr"],
            times=clock.end_step(),
            sequences=sequences,
        )


def adamw(train: TrainSpec) -> MakeOptimizer:
    """Return a function that creates a fused AdamW; biases and norms have no weight decay.

    The fused form runs one kernel per group and, unlike the foreach form, needs no temporary as large as the weights.
    """

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [p for name, p in named if has_weight_decay(name, p)]
        plain = [p for name, p in named if not has_weight_decay(name, p)]
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=train.lr, betas=ADAM_BETAS, eps=ADAM_EPS, fused=True
        )

    return make


def learning_rate(train: TrainSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` (from 0): linear warm-up, then the schedule to 0 at `total_steps`."""
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
