"""A rank of `benchmarks.strategies`: strategies in turns within one process, on one model and the same batches.

``torchrun -m benchmarks.strategies_ranks RESULT ARGS``; rank 0 writes RESULT, a JSON document.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.dist.making import build_model

from allranks.analysis.trace.rank import RankResult, read_rank
from allranks.experiments.compare import peak_new_bytes
from allranks.planning.planner import make_plan
from allranks.planning.records import BatchPlan
from allranks.rundir.events import EventLog
from allranks.spec import parse_spec
from allranks.spec.records import AdapterSpec, ModelSpec, TrainSpec
from allranks.train import strategies
from allranks.train.benchmark.measurements import MemoryUsage, ProfileWindow
from allranks.train.data.batches import Batch, Rows, SampleOrder, collate
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.data.tokenization import EncodedRow, train_tokenizer
from allranks.train.distributed import DistContext, join_process_group, leave_process_group
from allranks.train.engines import engine_of
from allranks.train.loop import StepWatcher, adamw
from allranks.train.models.adapters import add_adapter
from allranks.train.models.losses import LossModel
from allranks.train.step_metrics import LoopPlan, TrainingRows
from allranks.train.strategies.base import Strategy
from allranks.utils.machine import MachineFacts

TRAIN = TrainSpec(lr=1e-4, schedule="constant")
ROWS = 256


class Runner:
    """One strategy on its own copy of the model, which goes on from where it stopped."""

    def __init__(
        self, name: str, world: DistContext, tokens: TokenSet, args: dict[str, Any], how: dict[str, Any]
    ) -> None:
        self.name, self.world, self._tokens, self._folder = name, world, tokens, Path(args["folder"])
        micro, accum = args["micro_batch"], how["accum"]
        batch = BatchPlan(micro_batch_size=micro, grad_accum=accum, global_batch_size=micro * accum * world.size)
        self._order = SampleOrder(len(tokens), 5, batch, world.rank, world.size)
        self.model = built(args["config"], lora=how["lora"])
        self.strategy: Strategy = strategies.create(name, options_of(name, batch))
        self.strategy.setup(self.model, adamw(TRAIN), world.group, 1.0)
        self.done = 0
        self.strategy.warm_up(self._make(self._order.micro_batches(0)[0]), resumed=True)

    @property
    def log(self) -> Path:
        """Where this rank's steps are written down."""
        return self._folder / f"events{self.world.rank}.jsonl"

    def _make(self, rows: Rows) -> Batch:
        batch = collate(self._tokens, rows, 0, None)
        self.tokens += batch.tokens_real
        return batch

    tokens = 0

    def run(self, steps: int, watcher: StepWatcher | None = None) -> float:
        """Train on; tokens per second and rank. Every rank calls."""
        plan = LoopPlan(self.done, self.done + steps, TRAIN, 1, 1, lambda done: False, lambda done, stop: None)
        events = EventLog(self.log, self.world.rank)
        rows = TrainingRows(self._order, self._tokens, self._make)
        loop = engine_of(self.name)(self.world, self.strategy, rows, plan, events, watcher)
        dist.barrier(group=self.world.control)
        self.tokens, began = 0, time.perf_counter()
        loop.run()
        dist.barrier(group=self.world.control)
        took = time.perf_counter() - began
        events.close()
        self.done += steps
        return self.tokens / took


def options_of(name: str, batch: BatchPlan) -> dict[str, Any]:
    """The options, as a plan would have completed them. DeepSpeed has to be told to keep no tensor whole."""
    if not name.startswith("deepspeed"):
        return {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.grad_accum,
        "train_batch_size": batch.global_batch_size,
    }
    if name == "deepspeed_zero3":
        config["zero_optimization"] = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    return {"config": config}


def built(config: dict[str, Any], *, lora: bool) -> LossModel:
    """A small Mistral with random weights, the same on every rank; LoRA adapters on all linear layers if asked."""
    tokenizer = train_tokenizer(["hello"], 300, classifier=False)
    model: Any = build_model(
        ModelSpec(name="tiny:mistral", config=config), tokenizer, dtype="float32", labels={}, seed=1
    )
    if lora:
        model = add_adapter(model, AdapterSpec(type="lora", r=8, dropout=0.0), classifier=False, base="b", seed=1)
    return LossModel(model, classifier=False)


def rows_of_equal_length(folder: Path, length: int) -> TokenSet:
    """Random tokens: every micro-batch is as much work as any other."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    mask = np.ones(length, np.uint8)
    rows = [EncodedRow(ids=rng.integers(4, 255, length).astype(np.int32), mask=mask) for _ in range(ROWS)]
    _save(folder, "train", rows, [[i] for i in range(ROWS)])
    return _map(folder, "train")


def race(
    world: DistContext, tokens: TokenSet, args: dict[str, Any], pair: list[str], how: dict[str, Any]
) -> dict[str, Any]:
    """Rounds in which both of a pair train the same steps one after the other; who begins alternates."""
    runners = {name: Runner(name, world, tokens, args, how) for name in pair}
    for runner in runners.values():
        runner.run(args["warm_up"])
    rounds = []
    for number in range(args["rounds"]):
        turn = pair if number % 2 == 0 else pair[::-1]
        rounds.append({name: runners[name].run(args["steps"]) for name in turn})
    return {"ours": pair[0], "twin": pair[1], **how, "tokens_per_s_per_rank": rounds}


class _Looks:
    """A `Window` that also notes what was held before it began."""

    def __init__(self, window: ProfileWindow, held: MemoryUsage) -> None:
        self._window, self._held = window, held

    def attach(self, quiet: Callable[[], None]) -> None:
        self._window.attach(quiet)

    def step_begins(self, step: int) -> None:
        if step == self._window.first:
            self._window.before_bytes = self._held.kept_between_steps()
        self._window.step_begins(step)

    def part(self, name: str) -> AbstractContextManager[Any]:
        return self._window.part(name)

    def step_ends(self, step: int) -> bool:
        return self._window.step_ends(step)

    def close(self) -> None: ...


def memory_of(
    world: DistContext, tokens: TokenSet, args: dict[str, Any], name: str, how: dict[str, Any]
) -> dict[str, Any]:
    """Bytes of real tensors on this rank: at the moment of an update, and the most within two steps."""
    runner = Runner(name, world, tokens, args, how)
    held = MemoryUsage(runner.strategy, runner.model)
    runner.run(2)
    trace = Path(args["folder"]) / f"trace{world.rank}.json.gz"
    window = ProfileWindow(2, 3, world.device, trace)
    runner.run(2, _Looks(window, held))
    profiled = read_rank(trace)
    assert isinstance(profiled, RankResult), profiled.message
    mine = {
        "weights_bytes": held.weights(),
        "gradients_bytes": held.gradients,
        "optimizer_bytes": held.optimizer_state(),
        "peak_bytes": window.before_bytes + peak_new_bytes(profiled),
    }
    held.remove()
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, mine, group=world.control)
    return {"strategy": name, **how, "ranks": every}


def work(world: DistContext, args: dict[str, Any]) -> dict[str, Any]:
    """All races, then memory strategy by strategy."""
    tokens = rows_of_equal_length(Path(args["folder"]) / f"rank{world.rank}", args["length"])
    plain = built(args["config"], lora=False)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in plain.parameters()), "races": [], "memory": []}
    for how in args["forms"]:
        for pair in args["pairs"]:
            found["races"].append(race(world, tokens, args, pair, how))
            gc.collect()
            if world.is_first:
                print(json.dumps(found["races"][-1]), flush=True)
    for name in args["memory"]:
        found["memory"].append(memory_of(world, tokens, args, name, {"accum": 1, "lora": False}))
        gc.collect()
    return found


def on_ranks(task: Callable[[DistContext, dict[str, Any]], Any]) -> None:
    """What torchrun starts: joins, does the task with the arguments of the command line; rank 0 writes what it returned."""
    facts = MachineFacts(host="h", cpus=2, memory_bytes=0, gpus=[], cpu_model="", system="")
    spec = parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "x"}, "cluster": {"timeout_s": 120}})
    torch.manual_seed(0)
    world = join_process_group(make_plan(spec, facts))
    try:
        found = task(world, json.loads(sys.argv[2]))
        if world.is_first:
            Path(sys.argv[1]).write_text(json.dumps(found))
        dist.barrier(group=world.control)
    finally:
        leave_process_group()


if __name__ == "__main__":
    on_ranks(work)
