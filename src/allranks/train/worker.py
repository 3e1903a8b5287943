"""Run one rank from start to end: join, prepare, build, verify, train, evaluate, save."""

from __future__ import annotations

import signal
import time
from typing import Any

import msgspec
import torch.distributed as dist

from allranks.errors import AllranksError, NonFiniteLoss
from allranks.planning.records import load_plan
from allranks.rundir.events import open_event_log, read_events
from allranks.rundir.heartbeat import FINISH_PHASE, PREPARE_PHASE, heartbeat
from allranks.rundir.paths import RunDir
from allranks.spec.models import is_mlp
from allranks.spec.records import RunSpec
from allranks.spec.validation import batch_warning, warmup_warning, window_warning
from allranks.train.attempt import Attempt, load_attempt_args
from allranks.train.checkpoint.saver import CheckpointSchedule
from allranks.train.data.batches import SampleOrder, steps_of_epochs
from allranks.train.data.prepared import PreparedData
from allranks.train.distributed import from_first, join_process_group, leave_process_group
from allranks.train.engines import engine_of
from allranks.train.evaluation import EarlyStopping, evaluations_until, sample_answers
from allranks.train.loop import HeartbeatWatcher, StepWatcher
from allranks.train.models.float8 import LIMIT, verify_products
from allranks.train.replica_check import ReplicaCheck
from allranks.train.setup import TrainingSetup, build_training, log_end, log_experts, restore
from allranks.train.step_metrics import LoopPlan, StopRequest, TrainingRows
from allranks.train.sync_proof import prove_ranks
from allranks.train.tasks import TokenTask, task_of
from allranks.train.trackers import make_trackers
from allranks.utils.filesystem import cache_root


class StepCallbacks:
    """Run evaluations and checkpoints between steps. Every rank calls every method at the same step."""

    def __init__(
        self, attempt: Attempt, task: TokenTask, data: PreparedData, built: TrainingSetup, total_steps: int
    ) -> None:
        self._attempt, self._task, self._data, self._built, self._total = attempt, task, data, built, total_steps
        self._spec = attempt.spec.eval
        self._evaluator = task.evaluator(attempt.world, built.loss_model, data, attempt.plan.dtype)
        self._replicas = ReplicaCheck(attempt, built.strategy, built.model)
        self.saves = CheckpointSchedule(attempt, built.saver, self._replicas)
        self._stopping = EarlyStopping(self._spec.patience, self._spec.min_delta)
        self.ended_early = False

    def before(self, first_step: int) -> None:
        """Evaluate before the first step of a new run, if the spec asks. Continue the count of ``eval.patience``."""
        if first_step == 0 and (self._spec.baseline or self._total == 0):
            self._evaluate(0)
        if first_step and self._spec.patience is not None:
            world, events = self._attempt.world, self._attempt.run.events_of(0)
            earlier = evaluations_until(read_events(events), first_step) if world.is_first else []
            for step, loss in from_first(world, earlier):
                self._stopping.add(step, loss)

    def is_due(self, done: int) -> bool:
        """Return whether a callback is due after `done` steps; the final step is handled separately."""
        evaluates = self._evaluator is not None and self._spec.every and done % self._spec.every == 0
        return done < self._total and bool(evaluates or self.saves.is_due(done) or self._replicas.is_due(done))

    def run_callbacks(self, done: int, stopping: bool) -> bool:
        """Run the callbacks that are due after a step, or after the last step before a stop. Return whether the
        training ends with this step, because the held-out loss has stopped falling (``eval.patience``)."""
        log_experts(self._attempt, self._built, done)
        if stopping:
            self.saves.save_stop(done)
            return False
        if self._spec.every and done % self._spec.every == 0:
            self._evaluate(done)
            if reason := self._stopping.reason:
                self.ended_early, best = True, self._stopping
                if self._attempt.world.is_first:
                    facts = {"reason": reason, "best_step": best.best_step or None, "best_eval_loss": best.best_loss}
                    self._attempt.events.write("early_stop", step=done, **facts)
                self._attempt.say_once(f"training ends after step {done}: {reason}")
        self.saves.save_due(done)
        if self._replicas.is_due(done):  # after a save, which has compared more
            self._replicas.compare(done)
        return self.ended_early

    def at_end(self, first_step: int, done: int) -> None:
        """Evaluate and save after the last step, `done`."""
        if done > first_step:
            if not self.ended_early:
                log_experts(self._attempt, self._built, done)
            log_end(self._attempt, self._built, done)
        if self._spec.at_end and done > 0 and not self.ended_early:
            self._evaluate(done)
        self.saves.save_end(done)
        if done > first_step:
            self._replicas.compare(done)

    def _evaluate(self, done: int) -> None:
        if self._evaluator is None:
            return
        attempt = self._attempt
        attempt.phase("evaluate", step=done)
        result = self._evaluator.run()
        if self._spec.patience is not None:
            self._stopping.add(done, from_first(attempt.world, result.loss))
        self.saves.evaluated(done, result.loss)
        answers: dict[str, Any] = {}
        if self._data.questions and self._spec.samples and not self._task.classifier:
            started = time.perf_counter()
            model, lockstep = self._built.model, self._built.strategy.forward_has_collectives
            samples = sample_answers(
                attempt.world, model, self._data.tokenizer, self._data.questions, self._spec.samples, lockstep=lockstep
            )
            answers = {**msgspec.to_builtins(samples), "answers_s": round(time.perf_counter() - started, 3)}
        if attempt.world.is_first:
            attempt.events.write("eval", step=done, **msgspec.to_builtins(result), **answers)
        attempt.phase("train", step=done)


def run_rank(run: RunDir, attempt: int, spec: RunSpec) -> int:
    """Train the run of a run folder; `spec` has the paths of this node. Return the exit code: 0, also after a requested
    stop (the event records it; torchrun treats any other code as a crash)."""
    plan = load_plan(run)
    args = load_attempt_args(run, attempt)
    stop = StopRequest()
    # before anything takes long: Slurm's signal may come while the model is loaded
    for wanted in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(wanted, lambda number, frame: stop.ask(signal.Signals(number).name))
    with open_event_log(run, attempt, args.resume_step) as events:
        world = join_process_group(plan)
        own = Attempt(number=attempt, run=run, spec=spec, plan=plan, args=args, world=world, events=events, stop=stop)
        code = Worker(own).run()
        leave_process_group()
    return code


class Worker:
    """Run all phases of one rank. Methods are in execution order."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt, self._task = attempt, task_of(attempt.spec)
        self._trackers = None
        if attempt.world.is_first:
            self._trackers = make_trackers(attempt.spec, attempt.run, self._warn, attempt.args.resume_step)
        if self._trackers is not None:
            attempt.events.listener = self._trackers.event

    def _warn(self, text: str) -> None:
        self._attempt.say(text)
        self._attempt.events.write("warning", what="tracker", message=text)

    def run(self) -> int:
        attempt = self._attempt
        data = self._prepare()
        order = SampleOrder(len(data.train), attempt.data.seed, attempt.batch, attempt.world.rank, attempt.world.size)
        attempt.phase("build")
        built = build_training(attempt, self._task, data)
        first_step = restore(attempt, built)
        self._prove(built, order, data)
        # a resume trains on with the rounding that was verified at the start
        if attempt.model.float8 and first_step == 0:
            batch = self._task.batches(data, attempt.plan.dtype, attempt.world.device)(order.micro_batches(0)[0])
            off, where, change = verify_products(attempt.world, built.loss_model, batch.to(attempt.world.device))
            attempt.events.write("float8", difference=off, layer=where, loss_change=change, limit=LIMIT)
            attempt.say_once(
                f"model.float8: products differ by at most {off:.2%} ({where}) from those without, and the loss by "
                f"{change:+.2%}"
            )
        return self._train(data, order, built, first_step)

    def _prepare(self) -> PreparedData:
        attempt = self._attempt
        attempt.phase(PREPARE_PHASE)
        started = time.perf_counter()
        data = self._task.prepare(cache_root(attempt.spec.cluster.cache), attempt.say)
        prepare_s = time.perf_counter() - started
        attempt.events.write("data", how=data.origin, seconds=round(prepare_s, 3), **msgspec.to_builtins(data.facts))
        return data

    def _prove(self, built: TrainingSetup, order: SampleOrder, data: PreparedData) -> None:
        attempt = self._attempt
        attempt.phase("prove")
        proof = prove_ranks(attempt.world, attempt.plan.world_size, built.model, order, built.digest, data.train)
        attempt.events.write("proof", **msgspec.to_builtins(proof))
        attempt.say_once(
            f"proof: {proof.world_size} ranks, weights equal ({proof.weights_hash[:12]}), rows disjoint and complete "
            f"({proof.rows_checked})"
        )

    def _train(self, data: PreparedData, order: SampleOrder, built: TrainingSetup, first_step: int) -> int:
        attempt, plan = self._attempt, self._attempt.plan
        total = plan.max_steps
        if plan.epochs is not None:
            total = steps_of_epochs(order.n, plan.epochs, attempt.batch.global_batch_size)
        assert total is not None
        if attempt.world.is_first and total > 0:  # warnings that need the number of sequences
            if not is_mlp(attempt.model.name) and (text := batch_warning(attempt.batch.global_batch_size, order.n)):
                attempt.events.write("warning", what="batch", message=text)
            # with max_steps the plan has warned before the start
            if plan.epochs is not None and (text := warmup_warning(attempt.spec.train, total)):
                attempt.events.write("warning", what="schedule", message=text)
        callbacks = StepCallbacks(attempt, self._task, data, built, total)
        callbacks.before(first_step)
        attempt.phase("train", total_steps=total, first_step=first_step)
        done = self._steps(data, order, built, callbacks, first_step, total)
        if done < total and not callbacks.ended_early:
            reason = attempt.stop.reason or "requested on another rank"
            attempt.events.write("stop", step=done, reason=reason)
            attempt.say(f"stopped after step {done} ({reason}); a full checkpoint was written")
            return self._finish("stopped")
        callbacks.at_end(first_step, done)
        return self._finish("succeeded")

    def _steps(
        self,
        data: PreparedData,
        order: SampleOrder,
        built: TrainingSetup,
        callbacks: StepCallbacks,
        first: int,
        total: int,
    ) -> int:
        """Run steps from `first` until `total` are done or all ranks agree to stop."""
        attempt, spec = self._attempt, self._attempt.spec
        make_batch = self._task.batches(data, attempt.plan.dtype, attempt.world.device, compiled=attempt.plan.compiled)
        if total > first:
            sample = make_batch(order.micro_batches(0)[0]).to(attempt.world.device)
            # layers refuse inputs of another dtype than their weights
            weights = sorted({str(p.dtype).removeprefix("torch.") for p in built.model.parameters()})
            dtype = str(sample.inputs.dtype).removeprefix("torch.")
            attempt.events.write("batch", shape=list(sample.inputs.shape), dtype=dtype, weights=weights)
            built.strategy.warm_up(sample, resumed=first > 0)
        router_loss = getattr(built.loss_model, "router_loss", None)
        if router_loss is not None:
            router_loss.take()  # of the warm-up
        if built.experts:
            built.experts.begin(first)
        plan = LoopPlan(
            train=spec.train,
            first_step=first,
            total_steps=total,
            log_every=spec.observe.log_every,
            global_batch_size=attempt.batch.global_batch_size,
            is_due=callbacks.is_due,
            run_callbacks=callbacks.run_callbacks,
            stop=attempt.stop,
            saves=callbacks.saves.requests,
            router_loss=router_loss,
        )
        rows = TrainingRows(order, data.train, make_batch)
        watcher = HeartbeatWatcher(self._watcher(built, first, total))
        try:
            engine = engine_of(attempt.plan.strategy)
            done = engine(attempt.world, built.strategy, rows, plan, attempt.events, watcher).run()
        except NonFiniteLoss as error:
            try:
                callbacks.saves.save_last_good(error.step)
            except AllranksError as second:  # the first error is the cause, and the one to report
                attempt.say(f"the last good state could not be saved: {second}")
            raise
        # Only after success: writing a trace waits for communication, which would delay the report of an error.
        watcher.close()
        return done

    def _watcher(self, built: TrainingSetup, first_step: int, total: int) -> StepWatcher:
        attempt, wanted = self._attempt, self._attempt.spec.observe.profile
        if wanted is None or (wanted.ranks is not None and attempt.world.rank not in wanted.ranks):
            return StepWatcher()
        if (warning := window_warning(wanted, total - first_step)) and attempt.world.is_first:
            attempt.events.write("warning", what="profile", message=warning)
        from allranks.train.profiler import Profiler, TraceMetadata

        facts = TraceMetadata(
            run=attempt.run.name,
            attempt=attempt.number,
            rank=attempt.world.rank,
            world_size=attempt.world.size,
            backend=attempt.plan.backend,
            device=attempt.world.device.type,
            strategy=attempt.plan.strategy,
            grad_accum=attempt.batch.grad_accum,
        )
        return Profiler(wanted, facts, attempt.run, built.loss_model, attempt.events, first_step)

    def _finish(self, status: str) -> int:
        self._attempt.events.write("phase", name="done")
        heartbeat.phase(FINISH_PHASE)
        if self._trackers is not None:
            self._trackers.close(status)
        dist.barrier(group=self._attempt.world.control)
        return 0
