"""What a rank does from start to end: join, prepare, build, prove, train, evaluate, save."""

from __future__ import annotations

import signal
import time
from functools import partial
from types import FrameType

import msgspec
import torch.distributed as dist

from allranks.caches import cache_root
from allranks.errors import NonFiniteLoss
from allranks.hang.watcher import Beating
from allranks.observe.loggers import forward_event, make_loggers
from allranks.observe.window import window_warning
from allranks.rundir import RunDir
from allranks.train import strategies
from allranks.train.attempt import Attempt, args_of, asked_of, begin_events
from allranks.train.building import Built, build, rehearse, restore
from allranks.train.control import StopRequest
from allranks.train.data.order import Order, steps_of_epochs
from allranks.train.data.prepared import Prepared
from allranks.train.edges import Edges
from allranks.train.ledger import Outcome, Plan
from allranks.train.proof import prove
from allranks.train.tasks import task_of
from allranks.train.telling import tell_batch
from allranks.train.watching import StepWatcher, Unwatched
from allranks.train.world import join, leave


def work(run: RunDir, attempt: int) -> int:
    """Train as the run folder says.

    Returns:
        The exit code: 0, also after a stop that was asked for (its event tells; torchrun takes anything else for a crash).
    """
    spec, plan = asked_of(run)
    args = args_of(run, attempt)
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, partial(_asked, stop))
    events = begin_events(run, attempt, args.resume_step)
    world = join(plan)
    try:
        here = Attempt(number=attempt, run=run, spec=spec, plan=plan, args=args, world=world, events=events, stop=stop)
        return Worker(here).run()
    finally:
        leave()
        events.close()


def _asked(stop: StopRequest, number: int, frame: FrameType | None) -> None:
    stop.ask(signal.Signals(number).name)


class Worker:
    """One rank's work. The parts are methods in the order in which they run."""

    def __init__(self, here: Attempt) -> None:
        self._here, self._task = here, task_of(here.spec)
        self._loggers = make_loggers(here.spec, here.run) if here.world.is_first else []
        if self._loggers:
            here.events.listener = partial(forward_event, self._loggers)

    def run(self) -> int:
        here = self._here
        data = self._prepare()
        order = Order(len(data.train), here.data.seed, here.batch, here.world.rank, here.world.size)
        here.phase("build")
        built = build(here, self._task, data)
        first_step = restore(here, built, len(data.train))
        self._prove(built, order)
        return self._train(data, order, built, first_step)

    def _prepare(self) -> Prepared:
        here = self._here
        here.phase("prepare")
        started = time.perf_counter()
        data = self._task.prepare(cache_root(here.spec.cluster.cache), here.say)
        prepare_s = time.perf_counter() - started
        here.events.write("data", how=data.how, seconds=round(prepare_s, 3), **msgspec.to_builtins(data.facts))
        return data

    def _prove(self, built: Built, order: Order) -> None:
        here = self._here
        here.phase("prove")
        proof = prove(here.world, here.plan.world_size, built.model, order, built.digest)
        here.events.write("proof", **msgspec.to_builtins(proof))
        here.say_once(
            f"proof: {proof.world_size} ranks, weights equal ({proof.weights_hash[:12]}), rows disjoint and complete ({proof.rows_checked})"
        )

    def _train(self, data: Prepared, order: Order, built: Built, first_step: int) -> int:
        total = self._total_steps(order)
        edges = Edges(self._here, self._task, data, built, total)
        edges.before(first_step)
        self._here.phase("train", total_steps=total, first_step=first_step)
        outcome = self._steps(data, order, built, edges, first_step, total)
        if outcome.stopped:
            return self._end_stopped(outcome.steps_done)
        edges.at_end(first_step)
        return self._finish()

    def _total_steps(self, order: Order) -> int:
        plan = self._here.plan
        if plan.epochs is not None:
            return steps_of_epochs(order.n, plan.epochs, self._here.batch.global_batch_size)
        assert plan.max_steps is not None
        return plan.max_steps

    def _steps(self, data: Prepared, order: Order, built: Built, edges: Edges, first: int, total: int) -> Outcome:
        """Steps from the `first` on, until `total` of them are done or a stop is agreed on."""
        here, spec = self._here, self._here.spec
        make_batch = self._task.batches(data, here.plan.dtype, here.world.device)
        if total > first:
            sample = make_batch(order.micro_batches(0)[0])
            tell_batch(here, sample, built.model)
            if built.strategy.rehearse:
                rehearse(built.strategy, sample)
        if built.experts:
            built.experts.begin(first)
        plan = Plan(
            first,
            total,
            spec.train,
            spec.observe.log_every,
            here.batch.global_batch_size,
            edges.is_due,
            edges.at_edge,
        )
        watcher = Beating(self._watcher(built, first, total))
        try:
            return strategies.loop_of(here.plan.strategy)(
                here.world, built.strategy, order, data.train, make_batch, plan, here.events, here.stop, watcher
            ).run()
        except NonFiniteLoss as error:
            edges.saves.save_last_good(getattr(error, "step", 0))
            raise
        finally:
            watcher.close()

    def _watcher(self, built: Built, first_step: int, total: int) -> StepWatcher:
        here, wanted = self._here, self._here.spec.observe.profile
        if wanted is None or (wanted.ranks is not None and here.world.rank not in wanted.ranks):
            return Unwatched()
        if (warning := window_warning(wanted, total - first_step)) and here.world.is_first:
            here.events.write("warning", what="profile", message=warning)
        from allranks.observe.profiler import Facts, Profiler

        facts = Facts(
            run=here.run.name,
            attempt=here.number,
            rank=here.world.rank,
            world_size=here.world.size,
            backend=here.plan.backend,
            device=here.world.device.type,
            strategy=here.plan.strategy,
            grad_accum=here.batch.grad_accum,
        )
        return Profiler(wanted, facts, here.run, built.loss_model, here.events, first_step)

    def _end_stopped(self, done: int) -> int:
        reason = self._here.stop.reason or "asked of another rank"
        self._here.events.write("stop", step=done, reason=reason)
        self._here.say(f"stopped after step {done} ({reason}); a full checkpoint was written")
        return self._finish()

    def _finish(self) -> int:
        self._here.phase("done")
        for logger in self._loggers:
            logger.close()
        dist.barrier(group=self._here.world.control)
        return 0
