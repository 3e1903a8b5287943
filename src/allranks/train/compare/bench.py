"""Where strategies are tried: one task's data, a fresh model for each, real steps of the real loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from allranks.caches import cache_root
from allranks.observe.events import EventLog, read_events
from allranks.planning import LaunchPlan
from allranks.rundir import RunDir
from allranks.spec import RunSpec
from allranks.train import adapters, rng
from allranks.train.building import rehearse
from allranks.train.compare.memory import Held
from allranks.train.control import StopRequest
from allranks.train.data.collate import Batch
from allranks.train.data.order import Order, Rows
from allranks.train.ledger import Plan
from allranks.train.loop import Loop
from allranks.train.losses import LossModel
from allranks.train.optim import adamw, learning_rate
from allranks.train.strategies.contract import Strategy
from allranks.train.tasks import task_of, whole_model
from allranks.train.watching import StepWatcher
from allranks.train.world import World


@dataclass
class Work:
    """What this rank was really given to do."""

    micro_batches: int = 0
    rows: int = 0
    tokens: int = 0
    updates: int = 0


class Bench:
    """One rank's. All ranks call the same methods."""

    def __init__(self, run: RunDir, spec: RunSpec, plan: LaunchPlan, world: World) -> None:
        assert spec.model is not None and spec.data is not None and plan.batch is not None
        self.run, self.spec, self.plan, self.world, self.batch = run, spec, plan, world, plan.batch
        self._model_spec, self._task = spec.model, task_of(spec)
        self.data = self._task.prepare(cache_root(spec.cluster.cache), lambda text: None)
        self.orders = [
            Order(len(self.data.train), spec.data.seed, self.batch, r, world.size) for r in range(world.size)
        ]
        self.order = self.orders[world.rank]

    @property
    def folder(self) -> Path:
        """Of all that the comparison measures."""
        return self.run.root / "compare"

    def model(self) -> Any:
        """The spec's model without dropout, with its loss: the same numbers at every call and on every rank."""
        spec = self.spec
        model = whole_model(self._task, self.data, self.plan.dtype)
        for module in model.modules():  # no random numbers: ranks and one process would draw others
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        still = msgspec.structs.replace(spec.adapter, dropout=0.0)
        model = adapters.add_adapter(
            model, still, classifier=self._task.classifier, base=self._model_spec.name, seed=spec.train.seed
        )
        model.to(self.world.device)
        return self._task.loss_model(model)

    def make_batch(self, rows: Rows) -> Any:
        """A micro-batch, on the device."""
        return self._task.batches(self.data, self.plan.dtype, self.world.device)(rows)

    def rates(self, steps: int) -> list[float]:
        """The learning rate of each step."""
        return [learning_rate(self.spec.train, s, steps) for s in range(steps)]

    def setup(self, strategy: Strategy) -> LossModel:
        """A fresh model, within the strategy."""
        model = self.model()
        rng.seed_rank(self.spec.train.seed, self.world.rank)
        strategy.setup(model, adamw(self.spec.train), self.world.group, self.spec.train.clip_norm)
        if strategy.rehearse:
            rehearse(strategy, self.make_batch(self.order.micro_batches(0)[0]))
        return model

    def log(self, name: str, repeat: int) -> Path:
        """Where this rank's steps are recorded."""
        return self.folder / name / f"repeat{repeat}" / f"rank{self.world.rank}.jsonl"

    def train(
        self,
        strategy: Strategy,
        steps: int,
        log: Path,
        watcher: StepWatcher | None,
        held: Held | None = None,
        loop: type[Loop] = Loop,
    ) -> tuple[list[dict[str, Any]], Work]:
        """The events of so many steps, and the work that was in them."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        work = Work()

        def make(rows: Rows) -> Batch:
            work.micro_batches += 1
            work.rows += len(rows)
            batch = self.make_batch(rows)
            work.tokens += batch.tokens_real
            return batch

        plan = Plan(
            0, steps, self.spec.train, 1, self.batch.global_batch_size, lambda done: False, lambda done, stop: None
        )
        events = EventLog(log, self.world.rank)
        loop(self.world, strategy, self.order, self.data.train, make, plan, events, StopRequest(), watcher).run()
        events.close()
        work.updates = held.updates if held else 0
        return [e for e in read_events(log) if e["event"] == "step"], work
