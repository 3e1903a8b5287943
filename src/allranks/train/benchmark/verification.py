"""Verify strategies in short trials: compare weights with a single-process reference, and check traffic, memory and overlap.

The reference processes the ranks' micro-batches in order, without strategy and collectives. A negative control without
communication, which is not in the registry, must fail.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from allranks.planning.records import LaunchPlan
from allranks.rundir.events import EventLog, read_events
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.train import distributed, strategies
from allranks.train.benchmark.measurements import CollectiveRecorder, MemoryUsage, ProfileWindow
from allranks.train.data.batches import Batch
from allranks.train.data.prepared import TokenSet
from allranks.train.data.sampler import Rows, SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.loop import StepWatcher, TrainingLoop, loop_of
from allranks.train.models import adapters
from allranks.train.models.losses import LossModel
from allranks.train.optimizer import adamw, learning_rate
from allranks.train.setup import set_precision, stored_dtype, warmup
from allranks.train.step_metrics import LoopPlan, StopRequest
from allranks.train.strategies.base import MakeOptimizer, Sizes, Strategy, Traffic
from allranks.train.strategies.simple_ddp import SimpleDDP
from allranks.train.tasks import task_of, whole_model
from allranks.utils.caches import cache_root


def update_error(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Return the norm of the weights' difference divided by the norm of the reference's update.

    0 means bitwise equal, 1 as wrong as untrained weights. The norm covers all weights, because AdamW divides by the size of the
    gradient: if a gradient is rounding noise, a single weight may differ by a full learning rate.

    Raises:
        KeyError: the names differ.
    """
    if ours.keys() != reference.keys() or ours.keys() != start.keys():
        raise KeyError(f"the names of the weights differ: {sorted(ours.keys() ^ reference.keys())[:3]}")
    apart = moved = 0.0
    for name, wanted in reference.items():
        apart += float((ours[name].double() - wanted.double()).square().sum())
        moved += float((wanted.double() - start[name].double()).square().sum())
    if apart == 0.0:
        return 0.0
    return (apart / moved) ** 0.5 if moved else float("inf")


def norm_error(ours: Sequence[float | None], reference: Sequence[float]) -> float:
    """Return the largest relative difference of gradient norms over all steps.

    It complements `update_error`: AdamW's update does not depend on the size of the gradient, so sums that are not divided by
    the world size would go unnoticed. Infinite if a step is missing, or if its norm is None, NaN, or not 0 while the reference's is.
    """
    if len(ours) != len(reference):
        return math.inf
    return max((_relative_difference(n, r) for n, r in zip(ours, reference, strict=True)), default=0.0)


def _relative_difference(ours: float | None, reference: float) -> float:
    if ours is None or not math.isfinite(ours) or not math.isfinite(reference):
        return math.inf
    if ours == reference:
        return 0.0
    return abs(ours - reference) / reference if reference else math.inf


def reference_weights(
    model: LossModel,
    make_optimizer: MakeOptimizer,
    orders: Sequence[SampleOrder],
    tokens: TokenSet,
    make_batch: Callable[[Rows], Batch],
    steps: int,
    clip_norm: float | None,
    rates: Sequence[float],
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the trained weights after `steps` on the CPU, and each step's gradient norm before clipping.

    `orders` has one entry per rank, `rates` one learning rate per step.
    """
    model.train()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = make_optimizer(named)
    norms = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        total = max(int(tokens.trained[orders[0].global_batch(step)].sum()), 1)
        for parts in zip(*(order.micro_batches(step) for order in orders), strict=True):
            for rows in parts:
                (model(make_batch(rows)) / total).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])))
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in named], clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().to("cpu", copy=True) for n, p in named}, norms


class Unsynchronised(SimpleDDP):
    """`simple_ddp` without its all-reduce."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@dataclass
class TrialWork:
    """Steps and rows that this rank trained."""

    micro_batches: int = 0
    rows: int = 0
    tokens: int = 0
    updates: int = 0


class TrialRunner:
    """Run trials on one rank. All ranks call the same methods."""

    def __init__(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, world: DistContext) -> None:
        assert spec.model is not None and spec.data is not None and plan.batch is not None
        self.run, self.spec, self.plan, self.world, self.batch = run, spec, plan, world, plan.batch
        self._model_spec, self._task = spec.model, task_of(spec)
        self.data = self._task.prepare(cache_root(spec.cluster.cache), lambda text: None)
        self.orders = [
            SampleOrder(len(self.data.train), spec.data.seed, self.batch, r, world.size) for r in range(world.size)
        ]
        self.order = self.orders[world.rank]

    @property
    def folder(self) -> Path:
        """Folder of the comparison's measurements."""
        return self.run.root / "compare"

    def model(self) -> Any:
        """Return the spec's model with its loss and without dropout: deterministic on every rank."""
        spec = self.spec
        model = whole_model(self._task, self.data, stored_dtype(self.plan, spec))
        for module in model.modules():  # no random numbers: ranks and the single process would draw different ones
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        still = msgspec.structs.replace(spec.adapter, dropout=0.0)
        model = adapters.add_adapter(
            model, still, classifier=self._task.classifier, base=self._model_spec.name, seed=spec.train.seed
        )
        model.to(self.world.device)
        set_precision(model, self.plan, self.world.device)
        return self._task.loss_model(model)

    def make_batch(self, rows: Rows) -> Any:
        """Return a micro-batch on the device."""
        return self._task.batches(self.data, self.plan.dtype, self.world.device)(rows)

    def rates(self, steps: int) -> list[float]:
        """Return the learning rate of each step."""
        return [learning_rate(self.spec.train, s, steps) for s in range(steps)]

    def setup(self, strategy: Strategy) -> LossModel:
        """Return a new model set up in the strategy."""
        model = self.model()
        distributed.seed_rank(self.spec.train.seed, self.world.rank)
        strategy.setup(model, adamw(self.spec.train), self.world.group, self.spec.train.max_grad_norm)
        if strategy.warmup:
            warmup(strategy, self.make_batch(self.order.micro_batches(0)[0]))
        return model

    def log(self, name: str, repeat: int) -> Path:
        """Return the path of this rank's step records."""
        return self.folder / name / f"repeat{repeat}" / f"rank{self.world.rank}.jsonl"

    def train(
        self,
        strategy: Strategy,
        steps: int,
        log: Path,
        watcher: StepWatcher | None,
        held: MemoryUsage | None = None,
        loop: type[TrainingLoop] = TrainingLoop,
    ) -> tuple[list[dict[str, Any]], TrialWork]:
        """Train and return the events of the steps and the work in them."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        work = TrialWork()

        def make(rows: Rows) -> Batch:
            work.micro_batches += 1
            work.rows += len(rows)
            batch = self.make_batch(rows)
            work.tokens += batch.tokens_real
            return batch

        plan = LoopPlan(
            0, steps, self.spec.train, 1, self.batch.global_batch_size, lambda done: False, lambda done, stop: None
        )
        with EventLog(log, self.world.rank) as events:
            loop(self.world, strategy, self.order, self.data.train, make, plan, events, StopRequest(), watcher).run()
        work.updates = held.updates if held else 0
        return [e for e in read_events(log) if e["event"] == "step"], work


VERIFY_STEPS = 6  # one plain, two recorded, three profiled


class Verifier:
    """Compare strategies with a reference that rank 0 computes first. All ranks call the same methods."""

    def __init__(self, bench: TrialRunner, model: LossModel) -> None:
        self._bench, self._world = bench, bench.world
        self.sizes = Sizes(tuple(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
        self._reference_file = bench.folder / "reference.safetensors"
        self._start_file = bench.folder / "start.safetensors"
        self.reference_s = 0.0

    def reference(self, model: LossModel) -> None:
        """Compute the reference on rank 0; the others wait on the control group."""
        began, bench = time.perf_counter(), self._bench
        if self._world.is_first:
            bench.folder.mkdir(parents=True, exist_ok=True)
            save_file(_trained_weights(model), self._start_file)
            whole, self._norms = reference_weights(
                model,
                adamw(bench.spec.train),
                bench.orders,
                bench.data.train,
                bench.make_batch,
                VERIFY_STEPS,
                bench.spec.train.max_grad_norm,
                bench.rates(VERIFY_STEPS),
            )
            save_file({k: v.contiguous().clone() for k, v in whole.items()}, self._reference_file)
        dist.barrier(group=self._world.control)
        self.reference_s = time.perf_counter() - began

    def negative_control(self) -> dict[str, Any]:
        """Train without synchronisation: the parity check must fail, otherwise it proves nothing."""
        strategy = Unsynchronised()
        model = self._bench.setup(strategy)
        steps, _ = self._bench.train(strategy, VERIFY_STEPS, self._bench.log("negative-control", 0), None)
        return self._parity(strategy, model, steps)

    def verify(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Return what a strategy did in `VERIFY_STEPS` steps, and what it declares."""
        bench = self._bench
        strategy = strategies.create(name, options)
        model = bench.setup(strategy)
        held, recorder = MemoryUsage(strategy, model), CollectiveRecorder(1, 2)
        trace = bench.folder / name / "traces" / f"rank{self._world.rank}.json.gz"
        window = ProfileWindow(3, VERIFY_STEPS - 1, self._world.device, trace)
        watcher = _RecordThenProfile(recorder, window, held)
        steps, work = bench.train(strategy, VERIFY_STEPS, bench.log(name, 0), watcher, held, loop_of(name))
        expected: list[Traffic] = strategy.traffic(self.sizes, self._world.size, bench.batch.grad_accum)
        found = {
            "work": vars(work),
            "losses": [e["loss"] for e in steps],
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
        }
        held.remove()
        return found | self._parity(strategy, model, steps)

    def _parity(self, strategy: Strategy, model: LossModel, steps: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the differences of weights and norms from the reference (on rank 0), and between ranks."""
        found: dict[str, Any] = {}
        whole = strategy.weights(trained_only=True)
        if self._world.is_first:
            found["error"] = update_error(whole, load_file(self._reference_file), load_file(self._start_file))
            found["norm_error"] = norm_error([e["grad_norm"] for e in steps], self._norms)
        if strategy.replicated:
            mine = torch.tensor([float(p.double().sum()) for p in model.parameters()], dtype=torch.float64)
            every = [torch.zeros_like(mine) for _ in range(self._world.size)]
            dist.all_gather(every, mine, group=self._world.control)
            found["ranks_differ"] = max(float((t - mine).abs().max()) for t in every)
        return found


def _trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().to("cpu", copy=True).contiguous() for n, p in model.named_parameters() if p.requires_grad}


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
