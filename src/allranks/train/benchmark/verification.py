"""Verify strategies in short trials: compare weights with a single-process reference, and check traffic, memory and overlap.

A negative control without communication, which is not in the registry, must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from allranks.planning.records import LaunchPlan
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.train import strategies
from allranks.train.benchmark.baseline import Baseline, TrialRunner, uneven_trial
from allranks.train.benchmark.measurements import CollectiveRecorder, MemoryUsage, ProfileWindow, with_load
from allranks.train.distributed import DistContext
from allranks.train.engines import engine_of
from allranks.train.strategies.base import Sizes, Traffic
from allranks.train.strategies.data_parallel import SimpleDDP


class Unsynchronised(SimpleDDP):
    """`simple_ddp` without its all-reduce."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


VERIFY_STEPS = 6  # one plain, two recorded, three profiled
UNEVEN_STEPS = 5  # of 6 W rows each, from 6 W + 7: four epochs, none of which ends with a step


class Verifier:
    """Compare strategies with references that rank 0 computes first. All ranks call the same methods.

    ``verified`` trains the spec for a few recorded steps. ``uneven`` trains a small perceptron in float32 whose weights no number
    of ranks divides, with accumulation, clipping, weight decay and a schedule, on rows that do not fill the last batch of an epoch.
    ``timed`` is the work of the timed repeats.
    """

    def __init__(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, world: DistContext, timed_steps: int) -> None:
        self._world = world
        self.bench = TrialRunner(run, spec, plan, world)
        self._uneven = TrialRunner(run, *uneven_trial(spec, plan), world)
        self._model = self.bench.model()
        self.parameters = sum(p.numel() for p in self._model.parameters())
        self.sizes = Sizes(tuple(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad))
        self.timed_steps = timed_steps
        self.baselines = {
            "verified": Baseline(self.bench, "verified", VERIFY_STEPS),
            "uneven": Baseline(self._uneven, "uneven", UNEVEN_STEPS),
            "timed": Baseline(self.bench, "timed", timed_steps),
        }

    @property
    def model(self) -> Any:
        """The model without its loss."""
        return self._model.model

    def compute_references(self) -> None:
        """Compute the references on rank 0; the others wait on the control group."""
        self.baselines["verified"].compute(self._model)
        self.baselines["timed"].compute(self._model)
        del self._model
        self.baselines["uneven"].compute(self._uneven.model())

    def negative_control(self) -> dict[str, Any]:
        """Train without synchronisation: the parity check must fail, otherwise it proves nothing."""
        strategy = Unsynchronised()
        model = self.bench.setup(strategy)
        steps, work = self.bench.train(strategy, VERIFY_STEPS, self.bench.log("negative-control", "repeat0"), None)
        return self.baselines["verified"].judge(strategy, model, steps, work)

    def verify(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return what a strategy did in `VERIFY_STEPS` steps, and what it declares."""
        bench = self.bench
        strategy = strategies.create(name, options)
        model = bench.setup(strategy)
        held, recorder = MemoryUsage(strategy, model), CollectiveRecorder(1, 2)
        trace = bench.folder / name / "traces" / f"rank{self._world.rank}.json.gz"
        window = ProfileWindow(3, VERIFY_STEPS - 1, self._world.device, trace)
        watcher = _RecordThenProfile(recorder, window, held)
        (steps, work), load = with_load(
            self._world,
            lambda: bench.train(strategy, VERIFY_STEPS, bench.log(name, "repeat0"), watcher, engine_of(name)),
        )
        work.updates = held.updates
        expected: list[Traffic] = strategy.traffic(self.sizes, self._world.size, bench.batch.grad_accum)
        found = {
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
        return found | self.baselines["verified"].judge(strategy, model, steps, work)

    def verify_uneven(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return what a strategy did in `UNEVEN_STEPS` steps of the uneven trial."""
        bench, strategy = self._uneven, strategies.create(name, options)
        model = bench.setup(strategy)
        steps, work = bench.train(strategy, UNEVEN_STEPS, bench.log(name, "uneven"), None, engine_of(name))
        return self.baselines["uneven"].judge(strategy, model, steps, work)

    def time(self, name: str, options: dict[str, Any], repeat: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Run the timed steps once; return their events, the load meanwhile, and how far the weights are from the reference."""
        bench, strategy = self.bench, strategies.create(name, options)
        model = bench.setup(strategy)
        log = bench.log(name, f"repeat{repeat + 1}")
        (steps, work), load = with_load(
            self._world, lambda: bench.train(strategy, self.timed_steps, log, None, engine_of(name))
        )
        return steps, {"load": load, **self.baselines["timed"].judge(strategy, model, steps, work)}


class _RecordThenProfile:
    """Record collectives in the first steps and profile later ones."""

    def __init__(self, recorder: CollectiveRecorder, window: ProfileWindow, held: MemoryUsage) -> None:
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
