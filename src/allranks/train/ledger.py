"""What a loop has to do and what it writes down: agreement between ranks, step records, the edges of steps.

Every engine keeps one, so that all write the same records by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import NonFiniteLoss
from allranks.observe.events import EventLog
from allranks.spec.records import TrainSpec
from allranks.train.clock import memory_now
from allranks.train.control import Agreed, Control, StopRequest
from allranks.train.data.collate import Batch
from allranks.train.data.noise import NoiseBatch
from allranks.train.data.order import Order
from allranks.train.data.prepared import TokenSet
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
class Counts:
    """Tokens of this rank."""

    tokens: int = 0
    tokens_trained: int = 0
    tokens_padded: int = 0

    def add(self, more: Batch | NoiseBatch | Counts) -> None:
        """Count those of a batch, or of a step."""
        self.tokens += more.tokens if isinstance(more, Counts) else more.tokens_real
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
    counts: Counts
    trained: int
    lr: float
    times: dict[str, Any]


@dataclass
class _Interval:
    """What was done since the last logged step."""

    counts: Counts = field(default_factory=Counts)
    steps: int = 0
    loss_sum: float = 0.0
    own_loss_sum: float = 0.0
    trained_everywhere: int = 0
    times: list[dict[str, Any]] = field(default_factory=list)


class Ledger:
    """Agrees on steps one step late, so that nobody waits, and writes their records.

    Args:
        check: looks at each step once all ranks agree on it; raises if it is not as it should be.
    """

    def __init__(
        self,
        world: World,
        order: Order,
        tokens: TokenSet,
        plan: Plan,
        events: EventLog,
        stop: StopRequest,
        check: Callable[[StepWork, Agreed], None] | None = None,
    ) -> None:
        self._world, self._order, self._tokens, self._plan = world, order, tokens, plan
        self._events, self._stop, self._check = events, stop, check
        self._control = Control(world)
        self._interval = _Interval()
        self._last: tuple[int, Agreed, StepWork]
        self._waiting: dict[int, StepWork] = {}  # steps whose numbers are not agreed yet

    def quiet(self) -> None:
        """Wait for the reduction that is under way on this rank."""
        self._control.quiet()

    def trained(self, step: int) -> int:
        """Trained tokens of a step over all ranks: known from the data's plan, nobody is asked."""
        return int(self._tokens.trained[self._order.global_batch(step)].sum())

    def exchange(self, work: StepWork) -> Agreed | None:
        """Begin the agreement on a step, and take that on the one before it."""
        self._waiting[work.step] = work
        agreed = self._control.finish()
        self._control.start(work.step, work.loss_sum, work.grad_norm, stop=self._stop.asked)
        return agreed

    def heed(self, agreed: Agreed | None) -> bool:
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

    def is_edge(self, done: int, stop: bool) -> bool:
        """Whether something is to be done between this step and the next."""
        return stop or self._plan.is_due(done)

    def edge(self, done: int, stop: bool) -> bool:
        """Between two steps, where every rank has done equally many: agree on all, then evaluate and save what is due.

        Returns:
            True if all are to stop.
        """
        stop = self.drain() or stop
        self._plan.at_edge(done, stop and done < self._plan.total_steps)
        return stop

    def drain(self) -> bool:
        """Agree on all that is under way; True if all are to stop."""
        stop = False
        for agreed in self._control.drain():
            stop = self.heed(agreed) or stop
        if self._interval.steps:
            self._log(*self._last)
        self._events.sync()
        return stop

    def _add(self, work: StepWork, agreed: Agreed) -> None:
        into = self._interval
        into.steps += 1
        into.counts.add(work.counts)
        into.loss_sum += agreed.loss_sum
        into.own_loss_sum += agreed.own_loss_sum
        into.trained_everywhere += work.trained
        into.times.append(work.times)

    def _log(self, done: int, agreed: Agreed, work: StepWork) -> None:
        into, self._interval = self._interval, _Interval()
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
            **memory_now(self._world.device),
        )

    def _fail(self, agreed: Agreed, work: StepWork) -> None:
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
