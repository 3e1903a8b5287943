"""A rank's part of a comparison: data once, then per strategy a verification, then timed repeats in alternation."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from allranks.compare.request import CompareRequest
from allranks.errors import AllranksError
from allranks.facts import host_name
from allranks.observe.events import EventLog, read_events
from allranks.planning import LaunchPlan
from allranks.rundir import RunDir, write_json
from allranks.spec import RunSpec, load_spec
from allranks.stage import spec_here
from allranks.train import adapters, rng, strategies
from allranks.train.compare.memory import Held
from allranks.train.compare.recorder import Recorder
from allranks.train.compare.reference import reference_weights
from allranks.train.compare.unsynchronised import Unsynchronised
from allranks.train.compare.window import Window
from allranks.train.control import StopRequest
from allranks.train.data.collate import Batch
from allranks.train.data.order import Order, Rows
from allranks.train.ledger import Plan
from allranks.train.loop import Loop
from allranks.train.losses import LossModel
from allranks.train.optim import adamw, learning_rate
from allranks.train.parity import norm_error, update_error
from allranks.train.proof import prove
from allranks.train.strategies.contract import Strategy
from allranks.train.strategies.traffic import Sizes, Traffic
from allranks.train.tasks import task_of, whole_model
from allranks.train.watching import StepWatcher
from allranks.train.worker import cache_root
from allranks.train.world import World, join, leave

VERIFY_STEPS = 6  # one plain, two recorded, three profiled


def work(run: RunDir, attempt: int) -> int:
    """Compare as the run folder says.

    Returns:
        The exit code.
    """
    spec = spec_here(load_spec(run.spec), run.stage)
    plan = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
    asked = msgspec.json.decode(run.compare.read_bytes(), type=CompareRequest)
    rank = int(os.environ["RANK"])
    events = EventLog(run.events_of(rank), rank)
    events.write(
        "start",
        host=host_name(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        attempt=attempt,
        pid=os.getpid(),
        world_size=int(os.environ["WORLD_SIZE"]),
        resumed_from=None,
    )
    world = join(plan)
    try:
        return Comparer(run, spec, plan, asked, world, events).run()
    finally:
        leave()
        events.close()


@dataclass
class Work:
    """What this rank was really given to do."""

    micro_batches: int = 0
    rows: int = 0
    tokens: int = 0
    updates: int = 0


@dataclass
class Found:
    """What is known of one strategy on this rank."""

    failed: str | None = None
    verified: dict[str, Any] = field(default_factory=dict)
    repeats: list[dict[str, Any]] = field(default_factory=list)


class Comparer:
    """One rank's comparison. Every method is called by all ranks."""

    def __init__(
        self, run: RunDir, spec: RunSpec, plan: LaunchPlan, asked: CompareRequest, world: World, events: EventLog
    ) -> None:
        assert spec.model is not None and spec.data is not None and plan.batch is not None
        self._run, self._spec, self._plan, self._asked = run, spec, plan, asked
        self._world, self._events, self._batch = world, events, plan.batch
        self._model_spec, self._data_spec = spec.model, spec.data
        self._task = task_of(spec)
        self._started = time.perf_counter()

    def run(self) -> int:
        self._events.write("phase", name="prepare")
        self._data = self._task.prepare(cache_root(self._spec), lambda text: None)
        self._orders = [
            Order(len(self._data.train), self._data_spec.seed, self._batch, r, self._world.size)
            for r in range(self._world.size)
        ]
        self._order = self._orders[self._world.rank]
        self._events.write("phase", name="prove")
        model = self._model()
        self._sizes = Sizes(tuple(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
        self._parameters = sum(p.numel() for p in model.parameters())
        proof = prove(self._world, self._plan.world_size, model.model, self._order)
        self._events.write("proof", **msgspec.to_builtins(proof))
        self._events.write("phase", name="train", total_steps=0)
        self._reference(model)
        del model
        control = self._negative_control()
        found = {entry.name: Found() for entry in self._asked.strategies}
        for entry in self._asked.strategies:
            self._tell(f"verifying {entry.name}")
            self._guarded(found[entry.name], lambda e=entry: self._verify(e.name, e.options, found[e.name]))
        self._rounds(found)
        self._write(found, control)
        self._events.write("phase", name="done")
        dist.barrier(group=self._world.control)
        return 0

    def _rounds(self, found: dict[str, Found]) -> None:
        """Repeats in alternation: what disturbs the machine for a while disturbs all alike."""
        names = self._asked.strategies
        for repeat in range(self._asked.repeats):
            turn = repeat % len(names)
            for entry in (*names[turn:], *names[:turn]):
                known = found[entry.name]
                if known.failed is None:
                    self._tell(f"repeat {repeat + 1} of {self._asked.repeats}: {entry.name}")
                    self._guarded(
                        known, lambda e=entry, k=known, r=repeat: k.repeats.append(self._time(e.name, e.options, r))
                    )

    def _guarded(self, found: Found, action: Callable[[], None]) -> None:
        """A strategy that fails on a rank is out of the comparison on all; the others go on."""
        problem = None
        try:
            action()
        except (
            AllranksError,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            AssertionError,
            NotImplementedError,
        ) as error:
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        problems: list[Any] = [None] * self._world.size
        dist.all_gather_object(problems, problem, group=self._world.control)
        bad = [(r, p) for r, p in enumerate(problems) if p]
        if bad:
            found.failed = f"rank {bad[0][0]}: {bad[0][1]}"
        gc.collect()

    def _tell(self, text: str) -> None:
        if self._world.is_first:
            self._events.write("compare", text=text, seconds=round(time.perf_counter() - self._started, 1))

    def _model(self) -> Any:
        spec = self._spec
        model = whole_model(self._task, self._data, self._plan.dtype)
        for module in model.modules():  # no random numbers: ranks and one process would draw others
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        still = msgspec.structs.replace(spec.adapter, dropout=0.0)
        model = adapters.add_adapter(
            model, still, classifier=self._task.classifier, base=self._model_spec.name, seed=spec.train.seed
        )
        model.to(self._world.device)
        return self._task.loss_model(model)

    def _make_batch(self, rows: Rows) -> Any:
        return self._task.batches(self._data, self._plan.dtype, self._world.device)(rows)

    def _rates(self, steps: int) -> list[float]:
        return [learning_rate(self._spec.train, s, steps) for s in range(steps)]

    @property
    def _reference_file(self) -> Path:
        return self._run.root / "compare" / "reference.safetensors"

    def _reference(self, model: LossModel) -> None:
        """Rank 0 computes; the others wait on the control group."""
        self._tell("one process computes the reference")
        began = time.perf_counter()
        if self._world.is_first:
            folder = self._reference_file.parent
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self._trained(model), folder / "start.safetensors")
            whole, self._norms = reference_weights(
                model,
                adamw(self._spec.train),
                self._orders,
                self._data.train,
                self._make_batch,
                VERIFY_STEPS,
                self._spec.train.clip_norm,
                self._rates(VERIFY_STEPS),
            )
            save_file({k: v.contiguous().clone() for k, v in whole.items()}, self._reference_file)
        dist.barrier(group=self._world.control)
        self._reference_s = time.perf_counter() - began

    def _trained(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {n: p.detach().to("cpu", copy=True).contiguous() for n, p in model.named_parameters() if p.requires_grad}

    def _setup(self, strategy: Strategy) -> LossModel:
        model = self._model()
        rng.seed_rank(self._spec.train.seed, self._world.rank)
        strategy.setup(model, adamw(self._spec.train), self._world.group, self._spec.train.clip_norm)
        if strategy.rehearse:
            strategy.module.train()
            strategy.backward(strategy.module(self._make_batch(self._order.micro_batches(0)[0])) * 0.0)
            strategy.optimizer.zero_grad(set_to_none=True)
        return model

    def _train(
        self,
        strategy: Strategy,
        steps: int,
        log: Path,
        watcher: StepWatcher | None,
        held: Held | None = None,
        loop: type[Loop] = Loop,
    ) -> tuple[list[dict[str, Any]], Work]:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        work = Work()

        def make(rows: Rows) -> Batch:
            work.micro_batches += 1
            work.rows += len(rows)
            batch = self._make_batch(rows)
            work.tokens += batch.tokens_real
            return batch

        plan = Plan(
            0, steps, self._spec.train, 1, self._batch.global_batch_size, lambda done: False, lambda done, stop: None
        )
        events = EventLog(log, self._world.rank)
        loop(self._world, strategy, self._order, self._data.train, make, plan, events, StopRequest(), watcher).run()
        events.close()
        work.updates = held.updates if held else 0
        return [e for e in read_events(log) if e["event"] == "step"], work

    def _negative_control(self) -> dict[str, Any]:
        """The same without synchronisation must be seen to be wrong, or the parity gate says nothing."""
        self._tell("negative control: no synchronisation")
        found = Found()
        strategy = Unsynchronised()
        model = self._setup(strategy)
        steps, _ = self._train(strategy, VERIFY_STEPS, self._log("negative-control", 0), None)
        self._parity(strategy, model, steps, found)
        return found.verified

    def _log(self, name: str, repeat: int) -> Path:
        return self._run.root / "compare" / name / f"repeat{repeat}" / f"rank{self._world.rank}.jsonl"

    def _parity(self, strategy: Strategy, model: LossModel, steps: list[dict[str, Any]], found: Found) -> None:
        whole = strategy.weights(trained_only=True)
        if self._world.is_first:
            wanted = load_file(self._reference_file)
            start = load_file(self._reference_file.with_name("start.safetensors"))
            found.verified["error"] = update_error(whole, wanted, start)
            found.verified["norm_error"] = norm_error([e["grad_norm"] for e in steps], self._norms)
        if strategy.replicated:
            mine = torch.tensor([float(p.double().sum()) for p in model.parameters()], dtype=torch.float64)
            every = [torch.zeros_like(mine) for _ in range(self._world.size)]
            dist.all_gather(every, mine, group=self._world.control)
            found.verified["ranks_differ"] = max(float((t - mine).abs().max()) for t in every)

    def _verify(self, name: str, options: dict[str, Any], found: Found) -> None:
        strategy = strategies.create(name, options)
        model = self._setup(strategy)
        held = Held(strategy, model)
        recorder = Recorder(1, 2)
        trace = self._run.root / "compare" / name / "traces" / f"rank{self._world.rank}.json.gz"
        window = Window(3, VERIFY_STEPS - 1, self._world.device, trace)
        watcher = _Both(recorder, window, held)
        loop = strategies.loop_of(name)
        steps, work = self._train(strategy, VERIFY_STEPS, self._log(name, 0), watcher, held, loop)
        expected: list[Traffic] = strategy.traffic(self._sizes, self._world.size, self._batch.grad_accum)
        found.verified |= {
            "work": vars(work),
            "losses": [e["loss"] for e in steps],
            "claims_overlap": strategy.claims_overlap,
            "expected": [vars(t) for t in expected],
            "measured": recorder.totals(),
            "memory": {
                "weights_bytes": held.weights(),
                "gradients_bytes": held.gradients,
                "optimizer_bytes": held.optimizer_state(),
            },
            "window": window.figures(),
        }
        new = found.verified["window"].pop("peak_new_bytes")
        found.verified["memory"]["peak_bytes"] = window.peak_bytes or window.before_bytes + new
        held.remove()
        self._parity(strategy, model, steps, found)

    def _time(self, name: str, options: dict[str, Any], repeat: int) -> dict[str, Any]:
        strategy = strategies.create(name, options)
        self._setup(strategy)
        wanted, log = self._asked.warmup_steps + self._asked.steps, self._log(name, repeat + 1)
        steps, work = self._train(strategy, wanted, log, None, loop=strategies.loop_of(name))
        counted = steps[self._asked.warmup_steps :]
        parts = ("step_time_s", "data_s", "forward_s", "backward_s", "optimizer_s")
        return {
            "work": vars(work),
            "losses": [e["loss"] for e in steps],
            "tokens": [e["tokens"] for e in counted],
            **{part: [e.get(part, 0.0) for e in counted] for part in parts},
        }

    def _write(self, found: dict[str, Found], control: dict[str, Any]) -> None:
        mine = {name: vars(f) for name, f in found.items()}
        every: list[Any] = [None] * self._world.size
        dist.all_gather_object(every, mine, group=self._world.control)
        if not self._world.is_first:
            return
        write_json(
            self._run.root / "compare" / "measured.json",
            {
                "world_size": self._world.size,
                "nodes": len(self._plan.nodes),
                "device": str(self._world.device.type),
                "dtype": self._plan.dtype,
                "model": self._model_spec.name,
                "parameters": self._parameters,
                "trained_bytes": self._sizes.trained_bytes,
                "grad_accum": self._batch.grad_accum,
                "global_batch_size": self._batch.global_batch_size,
                "steps": self._asked.steps,
                "warmup_steps": self._asked.warmup_steps,
                "verify_steps": VERIFY_STEPS,
                "repeats": self._asked.repeats,
                "reference_s": round(self._reference_s, 3),
                "negative_control": control,
                "ranks": every,
            },
        )


class _Both:
    """A recorder for some steps and a profiler for later ones."""

    def __init__(self, recorder: Recorder, window: Window, held: Held) -> None:
        self._recorder, self._window, self._held = recorder, window, held

    def attach(self, quiet: Callable[[], None]) -> None:
        self._window.attach(quiet)

    def step_begins(self, step: int) -> None:
        self._recorder.step_begins(step)
        if step == self._window.first:
            self._window.before_bytes = self._held.kept_between_steps()
        self._window.step_begins(step)

    def part(self, name: str) -> Any:
        return self._recorder.part(name) if self._recorder.inside else self._window.part(name)

    def step_ends(self, step: int) -> bool:
        self._recorder.step_ends(step)
        return self._window.step_ends(step)

    def close(self) -> None:
        self._recorder.close()
