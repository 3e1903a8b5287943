"""What a rank does from start to end: join, prepare, build, prove, train, evaluate, save."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from allranks import checkpoints
from allranks.errors import NonFiniteLoss
from allranks.facts import host_name
from allranks.hang.pulse import pulse
from allranks.hang.watcher import Beating
from allranks.observe.events import EventLog
from allranks.observe.loggers import forward_event, make_loggers
from allranks.observe.window import window_warning
from allranks.planning import LaunchPlan
from allranks.rundir import RunDir, read_json, write_json
from allranks.spec import RunSpec, load_spec
from allranks.stage import spec_here
from allranks.train import adapters, checkpoint, rng, strategies
from allranks.train.checkpoint.loading import require_same_data
from allranks.train.checkpoint.saver import Saved
from allranks.train.control import StopRequest
from allranks.train.data.order import Order, steps_of_epochs
from allranks.train.data.prepared import Prepared
from allranks.train.evaluate import EvalResult, Evaluator
from allranks.train.generate import answer
from allranks.train.ledger import Plan
from allranks.train.loading.setup import set_up
from allranks.train.model import count_parameters
from allranks.train.moe import ExpertLoad
from allranks.train.optim import adamw
from allranks.train.proof import prove, weights_digest
from allranks.train.strategies.contract import Strategy
from allranks.train.tasks import task_of
from allranks.train.watching import StepWatcher, Unwatched
from allranks.train.world import World, join, leave


class AttemptArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What is special about one attempt; written by the launcher."""

    resume_step: int | None = None
    inexact: bool = False
    anew: bool = False  # an earlier attempt left no checkpoint: what it recorded does not count


def work(run: RunDir, attempt: int) -> int:
    """Train as the run folder says.

    Returns:
        The exit code: 0, also after a stop that was asked for (its event tells; torchrun takes anything else for a crash).
    """
    spec = spec_here(load_spec(run.spec), run.stage)
    plan = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
    args = msgspec.convert(read_json(run.logs_of(attempt) / "args.json") or {}, AttemptArgs)
    events = EventLog(run.events_of(int(os.environ["RANK"])), int(os.environ["RANK"]))
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, partial(_asked, stop))
    events.write(
        "start",
        host=host_name(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        attempt=attempt,
        pid=os.getpid(),
        world_size=int(os.environ["WORLD_SIZE"]),
        resumed_from=args.resume_step,
    )
    world = join(plan)
    try:
        return Worker(run, spec, plan, args, world, events, stop, attempt).run()
    finally:
        leave()
        events.close()


def _asked(stop: StopRequest, number: int, frame: FrameType | None) -> None:
    stop.ask(signal.Signals(number).name)


@dataclass
class Built:
    """The model in all its forms."""

    model: torch.nn.Module
    loss_model: torch.nn.Module
    strategy: Strategy
    published: checkpoint.Published
    saver: checkpoint.Saver
    digest: bytes | None  # of the whole weights, where the strategy shards them
    experts: ExpertLoad | None  # of a mixture of experts


class Worker:
    """One rank's work. The parts are methods in the order in which they run."""

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        plan: LaunchPlan,
        args: AttemptArgs,
        world: World,
        events: EventLog,
        stop: StopRequest,
        attempt: int,
    ) -> None:
        self._attempt = attempt
        assert spec.model is not None and spec.data is not None
        self._run, self._spec, self._plan, self._args = run, spec, plan, args
        self._world, self._events, self._stop = world, events, stop
        self._model_spec, self._data_spec = spec.model, spec.data
        self._loggers = make_loggers(spec, run) if world.is_first else []
        if self._loggers:
            events.listener = partial(forward_event, self._loggers)

    def run(self) -> int:
        self._phase("prepare")
        started = time.perf_counter()
        self._task = task_of(self._spec)
        data = self._task.prepare(cache_root(self._spec), self._say)
        prepare_s = time.perf_counter() - started
        self._events.write("data", how=data.how, seconds=round(prepare_s, 3), **msgspec.to_builtins(data.facts))
        assert self._plan.batch is not None
        order = Order(len(data.train), self._data_spec.seed, self._plan.batch, self._world.rank, self._world.size)
        self._phase("build")
        built = self._build(data)
        first_step = self._restore(built, len(data.train))
        self._phase("prove")
        proof = prove(self._world, self._plan.world_size, built.model, order, built.digest)
        self._events.write("proof", **msgspec.to_builtins(proof))
        if self._world.is_first:
            self._say(
                f"proof: {proof.world_size} ranks, weights equal ({proof.weights_hash[:12]}), rows disjoint and complete ({proof.rows_checked})"
            )
        return self._train(data, order, built, first_step)

    def _build(self, data: Prepared) -> Built:
        spec, world = self._spec, self._world
        started = time.perf_counter()
        strategy = strategies.create(self._plan.strategy, dict(self._plan.strategy_options))  # a missing library: first
        base = self._model_spec.name
        if base.startswith("tiny:"):
            base = str(self._run.model)
        model, filler = self._task.load(world, data, self._plan.dtype, partial(self._keep_base, data.tokenizer))
        model = adapters.add_adapter(
            model, spec.adapter, classifier=self._task.classifier, base=base, seed=spec.train.seed
        )
        adapted = adapters.remarks_on(model, spec.adapter)
        published = checkpoint.published_of(model, world.size)
        model.to(world.device)
        if self._model_spec.compile:
            model.compile()
        loss_model = self._task.loss_model(model)
        experts = ExpertLoad(loss_model, data.tokenizer.pad_token_id, world.device)
        total, trained = count_parameters(model)  # whole: a strategy may leave nothing but empty tensors behind
        rng.seed_rank(spec.train.seed, world.rank)
        digest, loaded = set_up(
            strategy, filler, loss_model, model, adamw(spec.train), world.group, spec.train.clip_norm
        )
        self._events.write("load", **msgspec.to_builtins(loaded))
        remarks = [("adapter", text) for text in adapted]
        remarks += [
            ("strategy", text) for text in strategies.remarks_on(self._plan.strategy_options, world.device.type)
        ]
        remarks += [("strategy", text) for text in getattr(strategy, "remarks", ())]
        for what, remark in remarks:
            self._events.write("remark", what=what, message=remark)
            if world.is_first:
                self._say(remark)
        self._tell_engine(strategy)
        self._events.write(
            "model",
            parameters=total,
            parameters_trained=trained,
            seconds=round(time.perf_counter() - started, 3),
            device=torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
            torch=str(torch.__version__),
            versions=versions(),
            threads=torch.get_num_threads(),
        )
        saver = checkpoint.Saver(
            self._run,
            world,
            strategy,
            model,
            data.tokenizer,
            published,
            spec.checkpoint,
            {"strategy": self._plan.strategy, "run": self._run.name},
            partial(self._progress, len(data.train)),
            self._saved,
        )
        return Built(model, loss_model, strategy, published, saver, digest, experts if experts else None)

    def _keep_base(self, tokenizer: Any, model: Any) -> None:
        """What adapters of a model built from a config name as their base."""
        folder = self._run.model
        if self._spec.adapter.type != "none" and not (folder / "config.json").exists():
            model.save_pretrained(str(folder))
            tokenizer.save_pretrained(str(folder))

    def _tell_engine(self, strategy: Strategy) -> None:
        """Where another library's engine does the work: its version, the time it took to start, and its configuration."""
        facts, config = getattr(strategy, "facts", None), getattr(strategy, "config", None)
        if facts:
            self._events.write("engine", **facts)
        if config and self._world.is_first:
            write_json(self._run.engine_config, config)

    def _restore(self, built: Built, sequences: int) -> int:
        step = self._args.resume_step
        if step is None:
            if self._args.anew:
                self._events.write("resume", from_step=0, inexact=False)
            return 0
        folder = self._run.checkpoint(step)
        if self._args.inexact and not (folder / "state").is_dir():
            checkpoint.load_lite(folder, built.strategy, built.published, built.model)
        else:
            require_same_data(folder, sequences)
            checkpoint.load_full(folder, built.strategy, built.published, self._world.rank)
        if built.digest is not None:  # each rank read its ranges of these files, whose hashes were compared
            built.digest = hashlib.sha256(msgspec.json.encode(checkpoints.manifest(self._run, step)["files"])).digest()
        self._events.write("resume", from_step=step, inexact=self._args.inexact)
        return step

    def _train(self, data: Prepared, order: Order, built: Built, first_step: int) -> int:
        spec, batch = self._spec, self._plan.batch
        assert batch is not None
        total = (
            self._plan.max_steps
            if self._plan.epochs is None
            else steps_of_epochs(order.n, self._plan.epochs, batch.global_batch_size)
        )
        assert total is not None
        evaluator = self._task.evaluator(self._world, built.loss_model, data, self._plan.dtype)
        if first_step == 0 and (spec.eval.baseline or total == 0):
            self._evaluate(evaluator, data, built, 0)
        self._phase("train", total_steps=total, first_step=first_step)
        make_batch = self._task.batches(data, self._plan.dtype, self._world.device)
        if total > first_step:
            sample = make_batch(order.micro_batches(0)[0])
            self._tell_batch(sample, built)
            if built.strategy.rehearse:
                self._rehearse(built.strategy, sample)
        if built.experts:
            built.experts.begin(first_step)
        saved: set[tuple[int, str]] = set()

        def is_due(done: int) -> bool:
            return done < total and any(
                every and done % every == 0 for every in (spec.eval.every if evaluator else None, spec.checkpoint.every)
            )

        def at_edge(done: int, stopping: bool) -> None:
            self._tell_experts(built, done)
            if not stopping and evaluator and spec.eval.every and done % spec.eval.every == 0:
                self._evaluate(evaluator, data, built, done)
            if stopping:
                self._save(built, done, "full", saved, last=True)
            elif spec.checkpoint.mode != "none" and spec.checkpoint.every and done % spec.checkpoint.every == 0:
                self._save(built, done, spec.checkpoint.mode, saved)

        plan = Plan(first_step, total, spec.train, spec.observe.log_every, batch.global_batch_size, is_due, at_edge)
        watcher = Beating(self._watcher(built, first_step, total))
        try:
            outcome = strategies.loop_of(self._plan.strategy)(
                self._world, built.strategy, order, data.train, make_batch, plan, self._events, self._stop, watcher
            ).run()
        except NonFiniteLoss as error:
            self._keep_last_good(built, getattr(error, "step", 0), saved)
            raise
        finally:
            watcher.close()
        if outcome.stopped:
            return self._end_stopped(outcome.steps_done)
        if total > first_step:
            self._tell_experts(built, total)
            self._tell_end(built, total)
        if evaluator and spec.eval.at_end and total > 0:
            self._evaluate(evaluator, data, built, total)
        if spec.checkpoint.at_end and spec.checkpoint.mode != "none" and total > 0:
            self._save(built, total, spec.checkpoint.mode, saved, last=True)
        built.saver.finish()
        return self._finish()

    def _tell_experts(self, built: Built, done: int) -> None:
        if built.experts:
            counts = built.experts.counts(done, self._world.group)
            if self._world.is_first:
                self._events.write("experts", **msgspec.to_builtins(counts))

    def _tell_end(self, built: Built, done: int) -> None:
        """Each rank's own, not agreed on: whoever compares them sees whether gradients were averaged and state was shared out."""
        if self._spec.observe.proof_at_end:
            digest = weights_digest(built.model).hex() if built.strategy.replicated else None
            elements = sum(r.length for r in built.strategy.state_ranges())
            self._events.write("end", step=done, weights_hash=digest, state_elements=elements)

    def _watcher(self, built: Built, first_step: int, total: int) -> StepWatcher:
        wanted, rank = self._spec.observe.profile, self._world.rank
        if wanted is None or (wanted.ranks is not None and rank not in wanted.ranks):
            return Unwatched()
        if (warning := window_warning(wanted, total - first_step)) and self._world.is_first:
            self._events.write("warning", what="profile", message=warning)
        from allranks.observe.profiler import Facts, Profiler

        assert self._plan.batch is not None
        facts = Facts(
            run=self._run.name,
            attempt=self._attempt,
            rank=rank,
            world_size=self._world.size,
            backend=self._plan.backend,
            device=self._world.device.type,
            strategy=self._plan.strategy,
            grad_accum=self._plan.batch.grad_accum,
        )
        return Profiler(wanted, facts, self._run, built.loss_model, self._events, first_step)

    def _finish(self) -> int:
        self._phase("done")
        for logger in self._loggers:
            logger.close()
        dist.barrier(group=self._world.control)
        return 0

    def _tell_batch(self, batch: Any, built: Built) -> None:
        """What the model is given, beside what it computes in: layers refuse numbers of another dtype than their weights."""
        weights = sorted({str(p.dtype).removeprefix("torch.") for p in built.model.parameters()})
        inputs = batch.inputs
        self._events.write(
            "batch", shape=list(inputs.shape), dtype=str(inputs.dtype).removeprefix("torch."), weights=weights
        )

    def _rehearse(self, strategy: Strategy, batch: Any) -> None:
        state = rng.rng_state()
        strategy.module.train()
        strategy.backward(strategy.module(batch) * 0.0)
        strategy.optimizer.zero_grad(set_to_none=True)
        rng.set_rng_state(state)

    def _evaluate(self, evaluator: Evaluator | None, data: Prepared, built: Built, done: int) -> EvalResult | None:
        if evaluator is None:
            return None
        self._phase("evaluate", step=done)
        result = evaluator.run()
        started = time.perf_counter()
        more: dict[str, Any] = {}
        if not self._task.classifier and data.questions and self._spec.eval.samples:
            more = msgspec.to_builtins(
                answer(
                    self._world,
                    built.model,
                    data.tokenizer,
                    data.questions,
                    self._spec.eval.samples,
                    lockstep=built.strategy.lockstep,
                )
            )
            more["answers_s"] = round(time.perf_counter() - started, 3)
        if self._world.is_first:
            self._events.write("eval", step=done, **msgspec.to_builtins(result), **more)
        self._phase("train", step=done)
        return result

    def _save(self, built: Built, done: int, mode: str, saved: set[tuple[int, str]], *, last: bool = False) -> None:
        if (done, mode) in saved or (done, "full") in saved:
            return
        self._phase("save", step=done)
        self._events.sync()
        # what a stop or the end saves is waited for at once: nothing is left to go on with meanwhile
        built.saver.save(done, mode, behind=self._spec.checkpoint.async_ and not last)
        saved.add((done, mode))
        self._phase("train", step=done)

    def _progress(self, sequences: int, done: int) -> dict[str, Any]:
        """Schedule and data go on by the number of steps alone; the rest is what that number counts on."""
        batch = self._plan.batch
        assert batch is not None
        return {
            "step": done,
            "sequences": sequences,
            "sequences_done": done * batch.global_batch_size,
            "global_batch_size": batch.global_batch_size,
            "data_seed": self._data_spec.seed,
            "scaler": None,  # no dtype here needs one
        }

    def _saved(self, saved: Saved) -> None:
        if saved.removed and self._world.is_first:
            steps = ", ".join(str(step) for step in saved.removed)
            self._events.write(
                "warning",
                what="checkpoint",
                message=f"checkpoints of steps {steps} were removed to make room on the disk",
            )
        self._events.write(
            "checkpoint",
            step=saved.step,
            mode=saved.mode,
            seconds=round(saved.stalled_s, 4),
            written_s=round(saved.seconds, 4),
            bytes=saved.bytes,
            path=str(self._run.checkpoint(saved.step)),
        )

    def _keep_last_good(self, built: Built, done: int, saved: set[tuple[int, str]]) -> None:
        """After a loss that was not finite the weights are those before it: worth keeping, whatever the mode."""
        if done > 0 and self._spec.checkpoint.mode != "none" and not self._run.checkpoint(done).exists():
            self._save(built, done, "full", saved, last=True)

    def _end_stopped(self, done: int) -> int:
        self._events.write("stop", step=done, reason=self._stop.reason or "asked of another rank")
        self._say(
            f"stopped after step {done} ({self._stop.reason or 'asked of another rank'}); a full checkpoint was written"
        )
        return self._finish()

    def _phase(self, name: str, **more: Any) -> None:
        self._events.write("phase", name=name, **more)
        pulse.phase(name)

    def _say(self, text: str) -> None:
        print(f"[RANK {self._world.rank}] {text}", flush=True)  # noqa: T201 - the rank's own log


def cache_root(spec: RunSpec) -> Path:
    """Where prepared data lives: the spec's cache, HF_HOME, or the user's cache folder."""
    if spec.cluster.cache:
        return Path(spec.cluster.cache).expanduser()
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in (
        "torch",
        "transformers",
        "peft",
        "accelerate",
        "datasets",
        "tokenizers",
        "safetensors",
        "numpy",
        "allranks",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
