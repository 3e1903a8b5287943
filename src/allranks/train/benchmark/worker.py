"""Run one rank of a comparison: prepare data, verify each strategy, then run timed repeats alternately.

Strategies are verified in short trials: their weights are compared with a single-process reference, and traffic, memory
and overlap are checked. A negative control without communication, which is not in the registry, must fail.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from allranks.errors import AllranksError
from allranks.planning.records import LaunchPlan, load_plan
from allranks.rundir.events import EventLog, open_event_log
from allranks.rundir.files import write_json
from allranks.rundir.heartbeat import FINISH_PHASE, PREPARE_PHASE, heartbeat
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.spec.records import CompareRequest, StrategyChoice
from allranks.train import strategies
from allranks.train.benchmark.baseline import UNEVEN_ACCUM, UNEVEN_CLIP_NORM, Baseline, TrialRunner, uneven_trial
from allranks.train.benchmark.measurements import (
    EXTRA_ROUNDS,
    CollectiveRecorder,
    MemoryUsage,
    ProfileWindow,
    was_disturbed,
    with_load,
)
from allranks.train.distributed import DistContext, join_process_group, leave_process_group
from allranks.train.engines import engine_of
from allranks.train.strategies.base import Sizes, Traffic
from allranks.train.strategies.data_parallel import SimpleDDP
from allranks.train.sync_proof import prove_ranks
from allranks.utils.inputs import read_regular

PARTS = ("step_time_s", "data_s", "forward_s", "backward_s", "optimizer_s")
FAILURES = (AllranksError, RuntimeError, ValueError, TypeError, KeyError, AssertionError, NotImplementedError)
VERIFY_STEPS = 6  # one plain, two recorded, three profiled
UNEVEN_STEPS = 5  # of 6 W rows each, from 6 W + 7: four epochs, none of which ends with a step


def run_benchmark_rank(run: RunDir, attempt: int, spec: RunSpec) -> int:
    """Run the comparison of a run folder, and return the exit code. `spec`: the run's, with paths of this node."""
    plan = load_plan(run)
    request = msgspec.json.decode(read_regular(run.compare), type=CompareRequest)
    with open_event_log(run, attempt, None) as events:
        world = join_process_group(plan)
        code = BenchmarkWorker(run, spec, plan, request, world, events).run()
        leave_process_group()
    return code


@dataclass
class StrategyResult:
    """Results of one strategy on this rank. ``undisturbed`` counts the repeats in which no machine was overloaded."""

    failed: str | None = None
    verified: dict[str, Any] = field(default_factory=dict)
    uneven: dict[str, Any] = field(default_factory=dict)
    repeats: list[dict[str, Any]] = field(default_factory=list)
    undisturbed: int = 0


class Unsynchronised(SimpleDDP):
    """`simple_ddp` without its all-reduce."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class BenchmarkWorker:
    """Run one rank's part of a comparison: compare strategies with references that rank 0 computes first, then time
    them.

    ``verified`` trains the spec for a few recorded steps. ``uneven`` trains a small perceptron in float32 whose weights
    no number of ranks divides, with accumulation, clipping, weight decay and a schedule, on rows that do not fill the
    last batch of an epoch. ``timed`` is the work of the timed repeats. All ranks call every method.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        plan: LaunchPlan,
        request: CompareRequest,
        world: DistContext,
        events: EventLog,
    ) -> None:
        self._run, self._spec, self._plan, self._asked = run, spec, plan, request
        self._world, self._events = world, events
        self._started = time.perf_counter()

    def run(self) -> int:
        self._phase(PREPARE_PHASE)
        self._timed_steps = self._asked.warmup_steps + self._asked.steps
        bench = self._bench = TrialRunner(self._run, self._spec, self._plan, self._world)
        uneven = self._uneven = TrialRunner(self._run, *uneven_trial(self._spec, self._plan), self._world)
        model = bench.model()
        self._parameters = sum(p.numel() for p in model.parameters())
        self._sizes = Sizes(tuple(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
        self._phase("prove")
        proof = prove_ranks(self._world, self._plan.world_size, model.model, bench.order, tokens=bench.data.train)
        self._events.write("proof", **msgspec.to_builtins(proof))
        self._phase("train", total_steps=0)
        self._tell("one process computes the references")
        self._verified = Baseline(bench, "verified", VERIFY_STEPS)
        self._timed = Baseline(bench, "timed", self._timed_steps)
        self._verified.compute(model)
        self._timed.compute(model)
        del model
        self._uneven_baseline = Baseline(uneven, "uneven", UNEVEN_STEPS)
        self._uneven_baseline.compute(uneven.model())
        self._tell("negative control: no synchronisation")
        control = self._negative_control()
        results = {entry.name: StrategyResult() for entry in self._asked.strategies}
        for entry in self._asked.strategies:
            self._tell(f"verifying {entry.name}")
            self._guarded(results[entry.name], lambda e=entry: self._verify(e, results[e.name]))
        self._rounds(results)
        self._write(results, control)
        self._events.write("phase", name="done")
        heartbeat.phase(FINISH_PHASE)
        dist.barrier(group=self._world.control)
        return 0

    def _phase(self, name: str, **more: Any) -> None:
        self._events.write("phase", name=name, **more)
        heartbeat.phase(name)

    def _rounds(self, results: dict[str, StrategyResult]) -> None:
        """Run the repeats alternately, so that a temporary disturbance of the machine affects all strategies equally.

        Strategies with disturbed repeats are timed again afterwards, when the disturbance may be over.
        """
        names, repeats = self._asked.strategies, self._asked.repeats
        for repeat in range(repeats):
            turn = repeat % len(names)
            for entry in (*names[turn:], *names[:turn]):
                self._repeat(entry, results[entry.name], f"repeat {repeat + 1} of {repeats}: {entry.name}")
        for extra in range(EXTRA_ROUNDS):
            for entry in names:
                if results[entry.name].undisturbed < repeats:
                    text = (
                        f"the machine was overloaded, once more ({extra + 1} of at most {EXTRA_ROUNDS}): {entry.name}"
                    )
                    self._repeat(entry, results[entry.name], text)

    def _repeat(self, entry: StrategyChoice, known: StrategyResult, text: str) -> None:
        if known.failed is not None:
            return
        self._tell(text)
        self._guarded(known, lambda: known.repeats.append(self._time(entry, len(known.repeats))))
        if known.failed is None:
            known.undisturbed += not was_disturbed(self._world, known.repeats[-1]["load"])

    def _guarded(self, result: StrategyResult, action: Callable[[], None]) -> None:
        """Run an action; if it fails on any rank, exclude the strategy on all ranks and continue with the others."""
        problem = None
        try:
            action()
        except FAILURES as error:
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        problems: list[Any] = [None] * self._world.size
        dist.all_gather_object(problems, problem, group=self._world.control)
        bad = [(r, p) for r, p in enumerate(problems) if p]
        if bad:
            result.failed = f"rank {bad[0][0]}: {bad[0][1]}"
        gc.collect()

    def _tell(self, text: str) -> None:
        if self._world.is_first:
            self._events.write("compare", text=text, seconds=round(time.perf_counter() - self._started, 1))

    def _negative_control(self) -> dict[str, Any]:
        """Train without synchronisation: the parity check must fail, otherwise it proves nothing."""
        bench, strategy = self._bench, Unsynchronised()
        model = bench.setup(strategy)
        steps, work = bench.train(strategy, VERIFY_STEPS, bench.log("negative-control", "repeat0"), None)
        return self._verified.judge(strategy, model, steps, work)

    def _verify(self, entry: StrategyChoice, result: StrategyResult) -> None:
        result.verified = self._record(entry)
        gc.collect()
        bench, strategy = self._uneven, strategies.create(entry.name, entry.options)
        model = bench.setup(strategy)
        log = bench.log(entry.name, "uneven")
        steps, work = bench.train(strategy, UNEVEN_STEPS, log, None, engine_of(entry.name))
        result.uneven = self._uneven_baseline.judge(strategy, model, steps, work)

    def _record(self, entry: StrategyChoice) -> dict[str, Any]:
        """Return what a strategy did in `VERIFY_STEPS` steps, and what it declares."""
        bench, name = self._bench, entry.name
        strategy = strategies.create(name, entry.options)
        model = bench.setup(strategy)
        held, recorder = MemoryUsage(strategy, model), CollectiveRecorder(1, 2)
        trace = bench.folder / name / "traces" / f"rank{self._world.rank}.json.gz"
        window = ProfileWindow(recorder, held, 3, VERIFY_STEPS - 1, self._world.device, trace)
        (steps, work), load = with_load(
            self._world,
            lambda: bench.train(strategy, VERIFY_STEPS, bench.log(name, "repeat0"), window, engine_of(name)),
        )
        work.updates = held.updates
        expected: list[Traffic] = strategy.traffic(self._sizes, self._world.size, bench.batch.grad_accum)
        measured = {
            "claims_overlap": strategy.claims_overlap,
            "expected": [vars(t) for t in expected],
            "measured": recorder.totals(),
            "memory": {
                "weights_bytes": held.weights(),
                "gradients_bytes": held.gradients,
                "optimizer_bytes": held.optimizer_state(),
                "peak_bytes": window.peak_bytes,  # 0 on a CPU: the peak is in the trace, counted from before_bytes
            },
            "before_bytes": window.before_bytes,
            "load": load,
        }
        held.remove()
        return measured | self._verified.judge(strategy, model, steps, work)

    def _time(self, entry: StrategyChoice, repeat: int) -> dict[str, Any]:
        """Run the timed steps once; return figures, load meanwhile, and the weights' distance from the reference."""
        bench, strategy = self._bench, strategies.create(entry.name, entry.options)
        model = bench.setup(strategy)
        log = bench.log(entry.name, f"repeat{repeat + 1}")
        (steps, work), load = with_load(
            self._world, lambda: bench.train(strategy, self._timed_steps, log, None, engine_of(entry.name))
        )
        counted = steps[self._asked.warmup_steps :]
        return {
            "load": load,
            **self._timed.judge(strategy, model, steps, work),
            "tokens": [e["tokens"] for e in counted],
            **{part: [e.get(part, 0.0) for e in counted] for part in PARTS},
        }

    def _write(self, results: dict[str, StrategyResult], control: dict[str, Any]) -> None:
        mine = {name: vars(f) for name, f in results.items()}
        every: list[Any] = [None] * self._world.size
        dist.all_gather_object(every, mine, group=self._world.control)
        if not self._world.is_first:
            return
        model, batch = self._spec.model, self._bench.batch
        baselines = {"verified": self._verified, "uneven": self._uneven_baseline, "timed": self._timed}
        write_json(
            self._bench.folder / "measured.json",
            {
                "world_size": self._world.size,
                "nodes": len(self._plan.nodes),
                "device": str(self._world.device.type),
                "dtype": self._plan.dtype,
                "param_dtype": self._plan.param_dtype,
                "model": model.name if model else None,
                "parameters": self._parameters,
                "trained_bytes": self._sizes.trained_bytes,
                "grad_accum": batch.grad_accum,
                "global_batch_size": batch.global_batch_size,
                "steps": self._asked.steps,
                "warmup_steps": self._asked.warmup_steps,
                "verify_steps": VERIFY_STEPS,
                "uneven_steps": UNEVEN_STEPS,
                "uneven_accum": UNEVEN_ACCUM,
                "uneven_clip_norm": UNEVEN_CLIP_NORM,
                "repeats": self._asked.repeats,
                "reference_s": round(sum(b.seconds for b in baselines.values()), 3),
                "negative_control": control,
                "references": {name: b.facts for name, b in baselines.items()},
                "ranks": every,
            },
        )
