"""Reduce each step's metrics over ranks asynchronously, one step behind, and write the step events.

One small all-reduce per optimizer step carries what the ranks must agree on (stop? non-finite values?) and, on logging steps,
the loss. It runs on the control group (gloo, CPU) while the next step computes, and is read at the end of that step: all ranks
read the same numbers at the same step and decide equally. All engines use this module, so their records are computed alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import NonFiniteLoss
from allranks.rundir.events import EventLog
from allranks.spec.records import TrainSpec
from allranks.train.data.batches import Batch, NoiseBatch
from allranks.train.data.prepared import TokenSet
from allranks.train.data.sampler import SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.step_timers import memory_usage


@dataclass(frozen=True)
class ReducedStep:
    """What all ranks together say about one step (numbered from 0). ``loss_sum`` is in nats over ``trained`` tokens;
    ``own_loss_sum`` is what this rank put in."""

    step: int
    loss_sum: float
    own_loss_sum: float
    grad_norm: float
    stop: bool
    bad_ranks: int


class AsyncStepReduction:
    """Starts the reduction of a step, and hands out the latest one that has been started before."""

    def __init__(self, world: DistContext) -> None:
        self._world = world
        self._copied: tuple[int, torch.Tensor, torch.cuda.Event] | None = None
        self._pending: tuple[int, dist.Work | None, torch.Tensor, float] | None = None

    def start(self, step: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor, *, stop: bool) -> None:
        """Begin the reduction for `step`. Both tensors are float32 scalars on the device.

        On a GPU the numbers are first copied without waiting, and their reduction begins at the next step's edge,
        when they have long arrived: the host never waits for the step that it has just queued.
        """
        local = torch.stack([loss_sum.detach().double(), grad_norm.detach().double() / self._world.size])
        vector = torch.zeros(4, dtype=torch.float64, pin_memory=local.is_cuda)
        vector[2] = float(stop)
        vector[:2].copy_(local, non_blocking=True)
        if not local.is_cuda:
            self._reduce(step, vector)
            return
        arrived = torch.cuda.Event()
        arrived.record()
        earlier, self._copied = self._copied, (step, vector, arrived)
        self._reduce_copied(earlier)

    def _reduce_copied(self, copied: tuple[int, torch.Tensor, torch.cuda.Event] | None) -> None:
        if copied is not None:
            step, vector, arrived = copied
            arrived.synchronize()
            self._reduce(step, vector)

    def _reduce(self, step: int, vector: torch.Tensor) -> None:
        vector[3] = float(not bool(torch.isfinite(vector[:2]).all()))
        own = float(vector[0])
        work = dist.all_reduce(vector, group=self._world.control, async_op=True) if self._world.size > 1 else None
        self._pending = (step, work, vector, own)

    def quiet(self) -> None:
        """Wait for the reduction that is under way on this rank; its numbers stay to be read."""
        if self._pending is not None and self._pending[1] is not None:
            self._pending[1].wait()

    def finish(self) -> ReducedStep | None:
        """The numbers of the step whose reduction is under way, or None."""
        if self._pending is None:
            return None
        step, work, vector, own = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        loss, norm, stop, bad = vector.tolist()
        return ReducedStep(
            step=step, loss_sum=loss, own_loss_sum=own, grad_norm=norm, stop=stop > 0, bad_ranks=int(bad)
        )

    def drain(self) -> list[ReducedStep]:
        """Everything that is still under way, oldest first. All ranks call at the same edge."""
        found = [self.finish()]
        copied, self._copied = self._copied, None
        self._reduce_copied(copied)
        found.append(self.finish())
        return [agreed for agreed in found if agreed is not None]


class StopRequest:
    """Set by SIGTERM or SIGUSR1; all ranks stop together at the end of a step.

    Plain attributes, no lock: a signal may arrive while the handler of another one runs, in the same thread, which a lock
    that the first handler holds would block forever.
    """

    def __init__(self) -> None:
        self.asked = False
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Ask for a stop. Safe in a signal handler, also in nested ones; the first reason is kept."""
        if not self.asked:
            self.reason = reason
        self.asked = True


@dataclass(frozen=True)
class LoopPlan:
    """What the loop is to do. ``at_edge(steps_done, stopping)`` evaluates and saves where that is due."""

    first_step: int
    total_steps: int
    train: TrainSpec
    log_every: int
    global_batch_size: int
    is_due: Callable[[int], bool]
    run_callbacks: Callable[[int, bool], None]


@dataclass
class LoopOutcome:
    """How the loop ended."""

    steps_done: int
    stopped: bool = False


@dataclass
class TokenCounts:
    """Tokens of this rank."""

    tokens: int = 0
    tokens_trained: int = 0
    tokens_padded: int = 0

    def add(self, more: Batch | NoiseBatch | TokenCounts) -> None:
        """Count those of a batch, or of a step."""
        self.tokens += more.tokens if isinstance(more, TokenCounts) else more.tokens_real
        self.tokens_trained += more.tokens_trained
        self.tokens_padded += more.tokens_padded


@dataclass(frozen=True)
class StepWork:
    """One optimizer step of this rank.

    ``loss_sum`` (nats over this rank's trained tokens) and ``grad_norm`` are scalars on the device; ``trained`` counts the
    trained tokens of all ranks; ``times`` come from the step's clock.
    """

    step: int
    loss_sum: torch.Tensor
    grad_norm: torch.Tensor
    counts: TokenCounts
    trained: int
    lr: float
    times: dict[str, Any]


@dataclass
class _LogInterval:
    """What was done since the last logged step."""

    counts: TokenCounts = field(default_factory=TokenCounts)
    steps: int = 0
    loss_sum: float = 0.0
    own_loss_sum: float = 0.0
    trained_everywhere: int = 0
    times: list[dict[str, Any]] = field(default_factory=list)


class StepMetrics:
    """Agrees on steps one step late, so that nobody waits, and writes their records.

    Args:
        check: looks at each step once all ranks agree on it; raises if it is not as it should be.
    """

    def __init__(
        self,
        world: DistContext,
        order: SampleOrder,
        tokens: TokenSet,
        plan: LoopPlan,
        events: EventLog,
        stop: StopRequest,
        check: Callable[[StepWork, ReducedStep], None] | None = None,
    ) -> None:
        self._world, self._order, self._tokens, self._plan = world, order, tokens, plan
        self._events, self._stop, self._check = events, stop, check
        self._control = AsyncStepReduction(world)
        self._interval = _LogInterval()
        self._last: tuple[int, ReducedStep, StepWork]
        self._waiting: dict[int, StepWork] = {}  # steps whose numbers are not agreed yet

    def quiet(self) -> None:
        """Wait for the reduction that is under way on this rank."""
        self._control.quiet()

    def trained(self, step: int) -> int:
        """Trained tokens of a step over all ranks: known from the data's plan, nobody is asked."""
        return int(self._tokens.trained[self._order.global_batch(step)].sum())

    def exchange(self, work: StepWork) -> ReducedStep | None:
        """Begin the agreement on a step, and take that on the one before it."""
        self._waiting[work.step] = work
        agreed = self._control.finish()
        self._control.start(work.step, work.loss_sum, work.grad_norm, stop=self._stop.asked)
        return agreed

    def process_reduced(self, agreed: ReducedStep | None) -> bool:
        """Log what has been agreed on; True if all are to stop.

        Raises:
            NonFiniteLoss: on every rank; the weights are those before the step that it names.
        """
        if agreed is None:
            return False
        work = self._waiting.pop(agreed.step)
        if agreed.bad_ranks:
            self._fail(agreed, work)
        if self._check is not None:
            self._check(work, agreed)
        self._add(work, agreed)
        done = agreed.step + 1
        self._last = (done, agreed, work)
        if done % self._plan.log_every == 0:
            self._log(*self._last)
        return agreed.stop

    def callbacks_due(self, done: int, stop: bool) -> bool:
        """Whether something is to be done between this step and the next."""
        return stop or self._plan.is_due(done)

    def edge(self, done: int, stop: bool) -> bool:
        """Between two steps, where every rank has done equally many: agree on all, then evaluate and save what is due.

        Returns:
            True if all are to stop.
        """
        stop = self.drain() or stop
        self._plan.run_callbacks(done, stop and done < self._plan.total_steps)
        return stop

    def drain(self) -> bool:
        """Agree on all that is under way; True if all are to stop."""
        stop = False
        for agreed in self._control.drain():
            stop = self.process_reduced(agreed) or stop
        if self._interval.steps:
            self._log(*self._last)
        self._events.sync()
        return stop

    def _add(self, work: StepWork, agreed: ReducedStep) -> None:
        into = self._interval
        into.steps += 1
        into.counts.add(work.counts)
        into.loss_sum += agreed.loss_sum
        into.own_loss_sum += agreed.own_loss_sum
        into.trained_everywhere += work.trained
        into.times.append(work.times)

    def _log(self, done: int, agreed: ReducedStep, work: StepWork) -> None:
        into, self._interval = self._interval, _LogInterval()
        parts = {name: round(sum(t.get(name, 0.0) for t in into.times) / len(into.times), 6) for name in into.times[0]}
        several = {"step_times_s": [t["step_time_s"] for t in into.times]} if into.steps > 1 else {}
        self._events.write(
            "step",
            step=done,
            steps=into.steps,
            loss=into.loss_sum / max(into.trained_everywhere, 1),
            loss_share=into.own_loss_sum
            / max(into.trained_everywhere, 1),  # this rank's part: all ranks' add up to the loss
            lr=work.lr,
            grad_norm=agreed.grad_norm,
            tokens=into.counts.tokens,
            tokens_trained=into.counts.tokens_trained,
            tokens_padded=into.counts.tokens_padded,
            epoch=round(done * self._plan.global_batch_size / self._order.n, 4),
            **parts,
            **several,
            **memory_usage(self._world.device),
        )

    def _fail(self, agreed: ReducedStep, work: StepWork) -> None:
        """Name the step and the ranks whose own loss was not finite; the sticky skip has kept the weights."""
        own = float(work.loss_sum)
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
