"""Run a comparison's trials on one rank, compute their reference on rank 0, and judge by it what strategies train."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from allranks.planning.records import BatchPlan, LaunchPlan
from allranks.rundir.events import EventLog, read_events
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.spec.models import MlpShape
from allranks.spec.records import QUANTIZE_NONE, AdapterSpec, DataSpec, ModelSpec, TrainSpec
from allranks.train import distributed
from allranks.train.benchmark.reference import (
    PlainSequence,
    PlainTrainer,
    PlainTraining,
    PlannedRows,
    Variant,
    plain_module,
    plain_sequences,
    without_random_numbers,
)
from allranks.train.data.batches import Batch, Rows, SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.engines import Engine
from allranks.train.loop import StepWatcher, TrainingLoop, adamw
from allranks.train.models import adapters
from allranks.train.models.losses import LossModel
from allranks.train.models.precision import DTYPES
from allranks.train.models.quantized_base import quantize_loaded
from allranks.train.setup import set_forward, stored_dtype
from allranks.train.step_metrics import LoopPlan, TrainingRows
from allranks.train.strategies.base import Strategy
from allranks.train.tasks import task_of, whole_model
from allranks.utils.filesystem import cache_root

Json = dict[str, Any]
UNEVEN_ACCUM, UNEVEN_MICRO_BATCH = 3, 2
UNEVEN_CLIP_NORM = 0.02  # far below the norm of each step, so that every step is clipped


class Baseline:
    """What one kind of trial must give. All ranks call the same methods; the results are those of rank 0.

    ``facts`` has ``spread``, the distances of two equivalent trainings in one process; ``planned``, the work per rank
    and step; ``problem``, how prepared data differ from the documented rules; and ``norms``, each step's gradient norm.
    """

    def __init__(self, bench: TrialRunner, name: str, steps: int) -> None:
        self._bench, self._world, self._steps = bench, bench.world, steps
        self._start_file = bench.folder / f"{name}-start.safetensors"
        self._trained_file = bench.folder / f"{name}-reference.safetensors"
        self.facts: Json = {}
        self.seconds = 0.0

    def compute(self, module: LossModel) -> None:
        """Train a copy of `module` twice on rank 0; the others wait on the control group.

        In float32 the copy is a model of transformers and PEFT alone; in other precisions it is `module` itself, which
        is left with its first weights.
        """
        began, bench = time.perf_counter(), self._bench
        if self._world.is_first:
            bench.folder.mkdir(parents=True, exist_ok=True)
            start = {
                n: p.detach().to("cpu", copy=True).contiguous() for n, p in module.named_parameters() if p.requires_grad
            }
            save_file(start, self._start_file)
            trainer = self._trainer()
            trained: nn.Module = module
            if (bench.plan.dtype, bench.plan.param_dtype) == ("float32", "float32"):
                trained = plain_module(module, bench.spec, classifier=bench.task.classifier)
            plain = trainer.run(trained, self._steps, Variant.PLAIN)
            _restore(trained, start)
            other = trainer.run(trained, self._steps, Variant.RANKS)
            _restore(trained, start)
            save_file(plain.weights, self._trained_file)
            self.facts |= {"spread": _distances(other, plain, start), "norms": plain.norms}
            self._plain = PlainTraining({}, plain.losses, plain.norms)  # its weights are read from the file
        dist.barrier(group=self._world.control)
        self.seconds = time.perf_counter() - began

    def _trainer(self) -> PlainTrainer:
        bench = self._bench
        spec, batch = bench.spec, bench.batch
        assert spec.data is not None
        sequences, problem = plain_sequences(spec, bench.data, classifier=bench.task.classifier)
        order = PlannedRows(len(sequences), spec.data.seed, batch, self._world.size)
        self.facts |= {"problem": problem, "planned": self._planned(sequences, order)}
        pad = bench.data.tokenizer.pad_token_id
        dtype = DTYPES[bench.plan.dtype]
        return PlainTrainer(spec, sequences, order, pad, self._world.device, dtype)

    def _planned(self, sequences: list[PlainSequence], order: PlannedRows) -> list[list[Json]]:
        trials = []
        for rank in range(self._world.size):
            steps = [order.of_rank(step, rank) for step in range(self._steps)]
            rows = [[row for part in parts for i in part for row in sequences[i]] for parts in steps]
            trials.append(
                [
                    {
                        "rows": rows_digest(parts),
                        "tokens": sum(row.tokens for row in own),
                        "tokens_trained": sum(row.targets for row in own),
                    }
                    for parts, own in zip(steps, rows, strict=True)
                ]
            )
        return trials

    def judge(self, strategy: Strategy, model: LossModel, steps: list[Json], work: TrialWork) -> Json:
        """Return this rank's work, and on rank 0 the distances from the reference. Collective."""
        accum, micro = self._bench.batch.grad_accum, work.micro_batches
        verdict: Json = {
            "updates": work.updates,
            "micro_batches": len(micro),
            "work": [
                {
                    "rows": rows_digest(micro[i * accum : (i + 1) * accum]),
                    "tokens": event["tokens"],
                    "tokens_trained": event["tokens_trained"],
                }
                for i, event in enumerate(steps)
            ],
        }
        whole = strategy.weights(trained_only=True)
        if self._world.is_first:
            ours = PlainTraining(whole, [e["loss"] for e in steps], [e["grad_norm"] for e in steps])
            plain = replace(self._plain, weights=load_file(self._trained_file))
            verdict |= _distances(ours, plain, load_file(self._start_file))
        if strategy.replicated:
            mine = torch.tensor([float(p.double().sum()) for p in model.parameters()], dtype=torch.float64)
            every = [torch.zeros_like(mine) for _ in range(self._world.size)]
            dist.all_gather(every, mine, group=self._world.control)
            verdict["ranks_differ"] = max(float((t - mine).abs().max()) for t in every)
        return verdict


def rows_digest(micro_batches: list[list[int]]) -> str:
    """Return a short digest of the rows of a step's micro-batches, in order."""
    return hashlib.sha256(msgspec.json.encode(micro_batches)).hexdigest()[:16]


def _distances(ours: PlainTraining, reference: PlainTraining, start: dict[str, torch.Tensor]) -> Json:
    return {
        "error": update_error(ours.weights, reference.weights, start),
        "norm_error": relative_error(ours.norms, reference.norms),
        "loss_error": relative_error(ours.losses, reference.losses),
    }


def _restore(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])


def update_error(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Return the norm of the weights' difference divided by the norm of the reference's update.

    0 means bitwise equal, 1 as wrong as untrained weights. The norm covers all weights: AdamW divides by the
    gradient's size, so a single weight may differ by a full learning rate where its gradient is rounding noise.

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


def relative_error(ours: Sequence[float | None], reference: Sequence[float]) -> float:
    """Return the largest relative difference of a figure, such as the gradient's norm, over all steps.

    Norms complement `update_error`: AdamW's update does not depend on the gradient's size, so sums not divided by the
    world size would go unnoticed. Infinite if a step is missing, or is None, NaN, or not 0 while the reference's is.
    """
    if len(ours) != len(reference):
        return math.inf
    worst = 0.0
    for own, wanted in zip(ours, reference, strict=True):
        if own is None or not math.isfinite(own) or not math.isfinite(wanted) or (wanted == 0 != own):
            return math.inf
        worst = max(worst, abs(own - wanted) / (abs(wanted) or 1.0))
    return worst


def uneven_trial(spec: RunSpec, plan: LaunchPlan) -> tuple[RunSpec, LaunchPlan]:
    """Return spec and plan of a trial: small perceptron, uneven weights and rows, accumulation, active clipping."""
    world = plan.world_size
    shape = uneven_shape(world)
    batch = BatchPlan(
        micro_batch_size=UNEVEN_MICRO_BATCH,
        grad_accum=UNEVEN_ACCUM,
        global_batch_size=UNEVEN_MICRO_BATCH * UNEVEN_ACCUM * world,
    )
    train = TrainSpec(
        micro_batch_size=batch.micro_batch_size,
        grad_accum=batch.grad_accum,
        lr=2e-3,
        schedule="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=UNEVEN_CLIP_NORM,
        seed=spec.train.seed,
    )
    name = f"mlp:{shape.width}x{shape.layers}"
    seed = spec.data.seed if spec.data else 42
    rows = batch.global_batch_size + 7
    return (
        msgspec.structs.replace(
            spec,
            model=ModelSpec(name=name, config={"expansion": shape.expansion}),
            data=DataSpec(source="builtin:noise", subset=rows, eval_fraction=0.0, seed=seed),
            adapter=AdapterSpec(type="none"),
            train=train,
        ),
        msgspec.structs.replace(plan, dtype="float32", param_dtype="float32", batch=batch),
    )


def uneven_shape(world: int) -> MlpShape:
    """Return a perceptron whose parameters, and those of each block, the number of ranks does not divide."""
    for width in range(2 * world + 1, 40 * world + 41, 2):
        for layers in (3, 2, 4):
            shape = MlpShape(width=width, layers=layers, expansion=2)
            block = shape.parameters // layers
            if block % world and shape.parameters % world:
                return shape
    raise ValueError(f"no uneven shape for {world} ranks")


@dataclass
class TrialWork:
    """Steps and rows that this rank trained."""

    micro_batches: list[list[int]] = field(default_factory=list)
    """The rows of each, in order."""
    updates: int | None = None


class TrialRunner:
    """Run trials on one rank. All ranks call the same methods."""

    def __init__(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, world: DistContext) -> None:
        assert spec.model is not None and spec.data is not None and plan.batch is not None
        self.run, self.spec, self.plan, self.world, self.batch = run, spec, plan, world, plan.batch
        self._model_spec, self.task = spec.model, task_of(spec)
        self.data = self.task.prepare(cache_root(spec.cluster.cache), lambda text: None)
        self.order = SampleOrder(len(self.data.train), spec.data.seed, self.batch, world.rank, world.size)

    @property
    def folder(self) -> Path:
        """Folder of the comparison's measurements."""
        return self.run.root / "compare"

    def model(self) -> Any:
        """Return the spec's model with its loss and without random numbers: deterministic on every rank."""
        spec = self.spec
        model = whole_model(self.task, self.data, stored_dtype(self.plan, spec))
        without_random_numbers(model)
        still = msgspec.structs.replace(spec.adapter, dropout=0.0)
        model = adapters.add_adapter(
            model, still, classifier=self.task.classifier, base=self._model_spec.name, seed=spec.train.seed
        )
        model.to(self.world.device)
        set_forward(model, self.plan, self.world.device)
        if self._model_spec.quantize != QUANTIZE_NONE:
            quantize_loaded(model, self._model_spec.quantize)
        return self.task.loss_model(model)

    def make_batch(self, rows: Rows) -> Any:
        """Return a micro-batch in host memory."""
        return self.task.batches(self.data, self.plan.dtype, self.world.device)(rows)

    def setup(self, strategy: Strategy) -> LossModel:
        """Return a new model set up in the strategy."""
        model = self.model()
        distributed.seed_rank(self.spec.train.seed, self.world.rank)
        strategy.setup(model, adamw(self.spec.train), self.world.group, self.spec.train.max_grad_norm)
        strategy.warm_up(self.make_batch(self.order.micro_batches(0)[0]).to(self.world.device), resumed=True)
        return model

    def log(self, name: str, trial: str) -> Path:
        """Return the path of this rank's step records."""
        return self.folder / name / trial / f"rank{self.world.rank}.jsonl"

    def train(
        self,
        strategy: Strategy,
        steps: int,
        log: Path,
        watcher: StepWatcher | None,
        engine: type[Engine] = TrainingLoop,
    ) -> tuple[list[dict[str, Any]], TrialWork]:
        """Train and return the events of the steps and the work in them."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        work = TrialWork()

        def make(rows: Rows) -> Batch:
            work.micro_batches.append(rows.tolist())
            return self.make_batch(rows)

        plan = LoopPlan(
            train=self.spec.train, total_steps=steps, global_batch_size=self.batch.global_batch_size, settled=True
        )
        with EventLog(log, self.world.rank) as events:
            engine(self.world, strategy, TrainingRows(self.order, self.data.train, make), plan, events, watcher).run()
        return [e for e in read_events(log) if e["event"] == "step"], work
