"""Run trials of a comparison on one rank: models, rows and steps of the spec, or of the uneven trial derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from allranks.planning.records import BatchPlan, LaunchPlan
from allranks.rundir.events import EventLog, read_events
from allranks.rundir.paths import RunDir
from allranks.spec import RunSpec
from allranks.spec.models import MlpShape
from allranks.spec.records import AdapterSpec, DataSpec, ModelSpec, TrainSpec
from allranks.train import distributed
from allranks.train.data.batches import Batch
from allranks.train.data.sampler import Rows, SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.engines import Engine
from allranks.train.loop import StepWatcher, TrainingLoop
from allranks.train.models import adapters
from allranks.train.models.losses import LossModel
from allranks.train.optimizer import adamw
from allranks.train.setup import set_precision, stored_dtype
from allranks.train.step_metrics import LoopPlan, StopRequest
from allranks.train.strategies.base import Strategy
from allranks.train.tasks import task_of, whole_model
from allranks.utils.caches import cache_root

UNEVEN_ACCUM, UNEVEN_MICRO_BATCH = 3, 2


def uneven_trial(spec: RunSpec, plan: LaunchPlan) -> tuple[RunSpec, LaunchPlan]:
    """Return spec and plan of a trial on a small perceptron, with uneven weights and rows, accumulation and active clipping."""
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


UNEVEN_CLIP_NORM = 0.02  # far below the norm of each step, so that every step is clipped


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
        """Return the spec's model with its loss and without dropout: deterministic on every rank."""
        spec = self.spec
        model = whole_model(self.task, self.data, stored_dtype(self.plan, spec))
        for module in model.modules():  # no random numbers: ranks and the single process would draw different ones
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        still = msgspec.structs.replace(spec.adapter, dropout=0.0)
        model = adapters.add_adapter(
            model, still, classifier=self.task.classifier, base=self._model_spec.name, seed=spec.train.seed
        )
        model.to(self.world.device)
        set_precision(model, self.plan, self.world.device)
        return self.task.loss_model(model)

    def make_batch(self, rows: Rows) -> Any:
        """Return a micro-batch on the device."""
        return self.task.batches(self.data, self.plan.dtype, self.world.device)(rows)

    def setup(self, strategy: Strategy) -> LossModel:
        """Return a new model set up in the strategy."""
        model = self.model()
        distributed.seed_rank(self.spec.train.seed, self.world.rank)
        strategy.setup(model, adamw(self.spec.train), self.world.group, self.spec.train.max_grad_norm)
        strategy.warm_up(self.make_batch(self.order.micro_batches(0)[0]))
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
            0, steps, self.spec.train, 1, self.batch.global_batch_size, lambda done: False, lambda done, stop: None
        )
        with EventLog(log, self.world.rank) as events:
            engine(self.world, strategy, self.order, self.data.train, make, plan, events, StopRequest(), watcher).run()
        return [e for e in read_events(log) if e["event"] == "step"], work
