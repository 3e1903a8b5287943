"""Reduce step metrics over ranks asynchronously, one step behind; write step events and samples of machine load.

One small all-reduce per optimizer step carries what the ranks must agree on (stop? non-finite values?) and, on logging
steps, the loss. It runs on the control group (gloo, CPU) while the next step computes, and is read at its end: all
ranks read the same numbers at the same step and decide equally. All engines use it, so records are computed alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from allranks.errors import NonFiniteLoss
from allranks.rundir.events import WARMUP_STEPS, EventLog
from allranks.spec.records import TrainSpec
from allranks.train.data.batches import CHECKSUM_MODULUS, Batch, NoiseBatch, Rows, SampleOrder, rows_checksum
from allranks.train.data.prepared import TokenSet
from allranks.train.distributed import DistContext
from allranks.train.models.moe import RouterLoss
from allranks.train.save_requests import SaveRequests
from allranks.train.step_garbage import StepGarbage
from allranks.train.step_timers import StepTimer, memory_usage
from allranks.train.sync_proof import refuse_rows, require_own_random_numbers
from allranks.utils.kernel_counters import sample_cpu, tcp_links, use_between


@dataclass(frozen=True)
class ReducedStep:
    """One step's metrics, reduced over all ranks. Steps count from 0.

    ``loss_sum`` is in nats over ``trained`` tokens; ``own_loss_sum`` is this rank's part of it. ``router_sum`` is the
    load-balancing loss of a mixture of experts, which is no part of them. ``grad_norm`` is the mean over the ranks,
    ``own_grad_norm`` this rank's.
    """

    step: int
    loss_sum: float
    own_loss_sum: float
    grad_norm: float
    own_grad_norm: float
    stop: bool
    bad_ranks: int
    save: int = 0  # what `SaveRequests.wanted` has returned on rank 0
    router_sum: float = 0.0
    rows_differ: bool = False  # the ranks together did not train the planned sequences


class AsyncStepReduction:
    """Start the reduction of a step, and return the result of the one before."""

    def __init__(self, world: DistContext) -> None:
        self._world = world
        self._copied: tuple[int, torch.Tensor, torch.cuda.Event] | None = None
        self._pending: tuple[int, dist.Work | None, torch.Tensor, list[float]] | None = None

    def start(
        self,
        step: int,
        loss_sum: torch.Tensor,
        grad_norm: torch.Tensor,
        *,
        stop: bool,
        save: int = 0,
        rows: int = 0,
        planned_rows: int = 0,
        router_sum: torch.Tensor | None = None,
    ) -> None:
        """Start the reduction for `step`. The tensors are float32 scalars on the device; `router_sum` is a part of
        `loss_sum`; `save` is 0 but on rank 0; `rows` is the checksum of the sequences that this rank trained,
        `planned_rows` that of all ranks'.

        On a GPU the values are first copied asynchronously, and their reduction starts at the end of the next step,
        when the copy is complete: the host never waits for the step that it has just queued.
        """
        loss, norm = loss_sum.detach().double(), grad_norm.detach().double()
        router = torch.zeros_like(loss) if router_sum is None else router_sum.double()
        local = torch.stack([loss - router, norm / self._world.size, router])
        vector = torch.zeros(8, dtype=torch.float64, pin_memory=local.is_cuda)
        vector[3], vector[5], vector[6], vector[7] = float(stop), float(rows), float(planned_rows), float(save)
        vector[:3].copy_(local, non_blocking=True)
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
        # counted before the sum, in which one rank's NaN hides those of the others
        vector[4] = float(not bool(torch.isfinite(vector[:3]).all()))
        own = vector[:2].tolist()
        work = dist.all_reduce(vector, group=self._world.control, async_op=True) if self._world.size > 1 else None
        self._pending = (step, work, vector, own)

    def wait_for_device(self) -> None:
        """Wait until the GPU has ended the last step."""
        if self._copied is not None:
            self._copied[2].synchronize()

    def quiet(self) -> None:
        """Wait for the pending reduction on this rank, without consuming its result."""
        if self._pending is not None and self._pending[1] is not None:
            self._pending[1].wait()

    def finish(self) -> ReducedStep | None:
        """Wait for the pending reduction and return its result, or None."""
        if self._pending is None:
            return None
        step, work, vector, own = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        loss, norm, router, stop, bad, rows, planned, save = vector.tolist()
        return ReducedStep(
            step=step,
            loss_sum=loss,
            own_loss_sum=own[0],
            grad_norm=norm,
            own_grad_norm=own[1] * self._world.size,
            stop=stop > 0,
            bad_ranks=int(bad),
            save=int(save),
            router_sum=router,
            # the plan is summed too: all ranks decide equally even if their plans differ
            rows_differ=(int(rows) * self._world.size - int(planned)) % CHECKSUM_MODULUS != 0,
        )

    def drain(self) -> list[ReducedStep]:
        """Return the results of all pending reductions, oldest first. All ranks call after the same step."""
        reduced = [self.finish()]
        copied, self._copied = self._copied, None
        self._reduce_copied(copied)
        reduced.append(self.finish())
        return [agreed for agreed in reduced if agreed is not None]


class StopRequest:
    """A stop request, set by SIGTERM or SIGUSR1; all ranks stop together at the end of a step.

    There is no lock, which would deadlock when a second signal interrupts the first's handler in the same thread.
    """

    def __init__(self) -> None:
        self.asked = False
        self.reason: str | None = None

    def ask(self, reason: str) -> None:
        """Request a stop and keep the first reason. Safe in signal handlers, also in nested ones."""
        if not self.asked:
            self.reason = reason
        self.asked = True


@dataclass(frozen=True)
class TrainingRows:
    """Rows that a rank trains: which in each step, their tokens, and the function that makes batches in host memory."""

    order: SampleOrder
    tokens: TokenSet
    make_batch: Callable[[Rows], Batch]


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """Steps to run, and ``run_callbacks(steps_done, stopping)``, which evaluates and saves when ``is_due(steps_done)``.

    ``run_callbacks`` returns True on every rank if the training ends with this step. ``stop`` is set by a signal.
    ``saves`` are wanted at other steps than those known before.
    ``settled`` makes a strategy of another library run a pass before the first step also in a new run, so that DDP has
    rebuilt its buckets before measurements. ``router_loss`` computes a part of the loss, which is reported beside it.
    """

    train: TrainSpec
    total_steps: int
    first_step: int = 0
    log_every: int = 1
    global_batch_size: int = 1
    is_due: Callable[[int], bool] = lambda steps_done: False
    run_callbacks: Callable[[int, bool], bool | None] = lambda steps_done, stopping: None
    stop: StopRequest = field(default_factory=StopRequest)
    saves: SaveRequests | None = None
    settled: bool = False
    router_loss: RouterLoss | None = None


@dataclass
class TokenCounts:
    """Token counts of this rank."""

    tokens: int = 0
    tokens_trained: int = 0
    tokens_padded: int = 0
    attention_pairs: int = 0

    def add(self, more: Batch | NoiseBatch | TokenCounts) -> None:
        """Add the counts of a batch or a step."""
        self.tokens += more.tokens if isinstance(more, TokenCounts) else more.tokens_real
        self.tokens_trained += more.tokens_trained
        self.tokens_padded += more.tokens_padded
        self.attention_pairs += more.attention_pairs


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One optimizer step of this rank.

    ``loss_sum`` (nats over this rank's trained tokens) and ``grad_norm`` are device scalars; ``trained`` counts all
    ranks' trained tokens; ``times`` come from the step timer; ``sequences`` are those in this rank's micro-batches.
    """

    step: int
    loss_sum: torch.Tensor
    grad_norm: torch.Tensor
    counts: TokenCounts
    trained: int
    lr: float
    times: dict[str, Any]
    sequences: Sequence[int]

    @cached_property
    def rows_checksum(self) -> int:
        return rows_checksum(self.sequences)


class StepMetrics:
    """Reduce metrics asynchronously, one step behind, and write the step events.

    Args:
        clock: measures the steps.
        check: called with each step after its reduction; raises if the step is wrong.
    """

    def __init__(
        self,
        world: DistContext,
        rows: TrainingRows,
        plan: LoopPlan,
        events: EventLog,
        clock: StepTimer,
        check: Callable[[StepWork, ReducedStep], None] | None = None,
    ) -> None:
        self._world, self._order, self._tokens, self._plan = world, rows.order, rows.tokens, plan
        self._events, self._clock, self._check = events, clock, check
        self._control = AsyncStepReduction(world)
        self._machine = MachineSamples(events, world.device.type)
        self._garbage = StepGarbage(plan.total_steps - plan.first_step)
        self.quiet, self.close = self._control.quiet, self._garbage.close
        self._unlogged: list[tuple[StepWork, ReducedStep]] = []  # the steps since the last logged one
        self._waiting: dict[int, StepWork] = {}  # steps whose metrics are not reduced yet
        self._counted = -1  # the last step that includes its queued work

    def trained(self, step: int) -> int:
        """Return the trained tokens of a step over all ranks, known without communication."""
        return int(self._tokens.trained[self._order.global_batch(step)].sum())

    def exchange(self, work: StepWork) -> ReducedStep | None:
        """Start the reduction of a step, and return that of the step before."""
        self._waiting[work.step] = work
        if work.step == self._plan.first_step and self._world.size > 1:  # a library may have seeded the ranks
            require_own_random_numbers(self._world)
        agreed = self._control.finish()
        self._control.start(
            work.step,
            work.loss_sum,
            work.grad_norm,
            stop=self._plan.stop.asked,
            save=self._plan.saves.wanted() if self._plan.saves and self._world.is_first else 0,
            rows=work.rows_checksum,
            planned_rows=self._order.planned_checksum(work.step),
            router_sum=None if self._plan.router_loss is None else self._plan.router_loss.take(),
        )
        if work.step + 1 == WARMUP_STEPS:  # what is queued by then is not time of the steps that are counted
            self.count_queued_work()
        if (seconds := self._garbage.after_step(work.step)) is not None:
            work.times["gc_s"] = round(seconds, 6)
        return agreed

    def process_reduced(self, agreed: ReducedStep | None) -> bool:
        """Log a reduced step; return whether all ranks must stop.

        Raises:
            ProofFailed: on every rank; the ranks together trained other sequences than planned.
            NonFiniteLoss: on every rank; the weights are those before the named step.
        """
        if agreed is None:
            return False
        work = self._waiting.pop(agreed.step)
        if agreed.rows_differ:
            refuse_rows(self._world, agreed.step, work.sequences, self._order)
        if agreed.bad_ranks:
            self._fail(agreed, work)
        if self._check is not None:
            self._check(work, agreed)
        self._unlogged.append((work, agreed))
        if agreed.save and self._plan.saves:
            self._plan.saves.agreed = max(self._plan.saves.agreed, agreed.save)
        if (agreed.step + 1) % self._plan.log_every == 0:
            self._log()
        return agreed.stop

    def run_callbacks(self, done: int, stop: bool) -> bool:
        """Evaluate and save if due, when all ranks have done equally many steps; return whether all ranks must stop."""
        stop = self.drain() or stop
        with self._garbage.automatic():
            ended = self._plan.run_callbacks(done, stop and done < self._plan.total_steps)
        self._machine.restart()  # what they used of the machine is no training
        return stop or bool(ended)

    def drain(self) -> bool:
        """Finish all pending reductions; return whether all ranks must stop."""
        stop = False
        self.count_queued_work()
        for agreed in self._control.drain():
            stop = self.process_reduced(agreed) or stop
        if self._unlogged:
            self._log()
        self._machine.write_before_pause()
        self._events.sync()
        return stop

    def count_queued_work(self) -> None:
        """Add to the last step's time what the GPU still had to do once it was queued. A second call does nothing."""
        if self._world.device.type != "cuda" or not self._waiting or max(self._waiting) == self._counted:
            return
        self._counted = max(self._waiting)
        self._control.wait_for_device()
        times = self._waiting[self._counted].times
        times["step_time_s"] = round(times["step_time_s"] + self._clock.rest_of_step(), 6)

    def _log(self) -> None:
        steps, self._unlogged = self._unlogged, []
        works, (last, agreed) = [work for work, _ in steps], steps[-1]
        done, counts, trained = last.step + 1, TokenCounts(), max(sum(work.trained for work in works), 1)
        for work in works:
            counts.add(work.counts)
        parts: dict[str, Any] = {}
        for name in dict.fromkeys(name for work in works for name in work.times):
            measured = [work.times[name] for work in works if name in work.times]
            parts[name] = round(sum(measured) / len(measured), 6)
        if len(works) > 1:
            parts["step_times_s"] = [work.times["step_time_s"] for work in works]
        if self._plan.router_loss is not None:
            parts["router_aux_loss"] = sum(step.router_sum for _, step in steps) / trained
        self._events.write(
            "step",
            step=done,
            steps=len(works),
            loss=sum(step.loss_sum for _, step in steps) / trained,
            # this rank's part; the sum over ranks is the loss
            loss_share=sum(step.own_loss_sum for _, step in steps) / trained,
            lr=last.lr,
            grad_norm=agreed.grad_norm,
            tokens=counts.tokens,
            tokens_trained=counts.tokens_trained,
            tokens_padded=counts.tokens_padded,
            attention_pairs=counts.attention_pairs,
            rows_checksum=sum(work.rows_checksum for work in works) % CHECKSUM_MODULUS,
            epoch=round(done * self._plan.global_batch_size / self._order.n, 4),
            **parts,
            **memory_usage(self._world.device),
        )
        self._machine.write_if_due()

    def _fail(self, agreed: ReducedStep, work: StepWork) -> None:
        """Raise with the step and the ranks whose own loss was not finite; skipped updates have kept the weights."""
        everyone: list[Any] = [None] * self._world.size
        own = float(work.loss_sum), [int(row) for row in work.sequences[:8]]
        dist.all_gather_object(everyone, own, group=self._world.control)
        bad = [rank for rank, (loss, _) in enumerate(everyone) if not math.isfinite(loss)]
        if bad:
            loss, rows = everyone[bad[0]]
            what = (
                f"the loss of rank {', '.join(map(str, bad))} is not finite ({loss}) in step {agreed.step + 1}; rank "
                f"{bad[0]} trained sequences {rows}"
            )
        else:
            what = f"the gradient is not finite in step {agreed.step + 1}, though every rank's loss is"
        raise NonFiniteLoss(
            f"{what}. The weights are those before that step; try a lower train.lr, more warmup_steps, or float32",
            agreed.step,
        )


LOAD_INTERVAL_S = 0.5
LINKS_INTERVAL_S = 5.0
MIN_LOAD_S, MIN_LINKS_S = 0.1, 1.0  # before an evaluation or a save


class MachineSamples:
    """Write ``cpu_load`` and ``links`` events, each at most once per interval.

    Args:
        device: type of the device; on a CPU torch's threads compute beside the main thread.
    """

    def __init__(self, events: EventLog, device: str) -> None:
        self._events = events
        self._compute_threads = torch.get_num_threads() if device == "cpu" else None
        self._links_at = -LINKS_INTERVAL_S
        self.restart()

    def restart(self) -> None:
        """Leave out the CPU time since the last sample: it was no training."""
        self._last = sample_cpu()

    def write_if_due(self) -> None:
        """Write the events whose interval is over."""
        self._write(LOAD_INTERVAL_S, LINKS_INTERVAL_S)

    def write_before_pause(self) -> None:
        """Write the measurements since the last events, unless the interval is too short."""
        self._write(MIN_LOAD_S, MIN_LINKS_S)

    def _write(self, load_s: float, links_s: float) -> None:
        now = time.monotonic()
        if now - self._last.at_s >= load_s:
            first, self._last = self._last, sample_cpu()
            use = msgspec.to_builtins(use_between(first, self._last))
            self._events.write("cpu_load", compute_threads=self._compute_threads, **use)
        if now - self._links_at >= links_s:
            self._links_at = now
            own, links = tcp_links()
            if links:
                self._events.write("links", addresses=own, links=msgspec.to_builtins(links))
