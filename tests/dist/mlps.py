"""What the ranks of the perceptrons' tests do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from allranks.planning.records import BatchPlan
from allranks.rundir.events import EventLog
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import TrainSpec
from allranks.train import checkpoint, strategies
from allranks.train.benchmark.baseline import update_error
from allranks.train.checkpoint import writer as module_of_files
from allranks.train.data.batches import SampleOrder
from allranks.train.distributed import DistContext, seed_rank
from allranks.train.engines import engine_of
from allranks.train.loop import adamw
from allranks.train.setup import set_up_strategy
from allranks.train.step_metrics import LoopPlan, TrainingRows
from allranks.train.tasks import NoiseTask, whole_model
from tests.dist.making import main, options_of, saver_of

ROWS, STEPS, LR = 3, 3, 1e-3
module_of_files.SMALL_BYTES = 500  # each rank writes a file of its own
SPEC = {
    "model": {"name": "mlp:8x3"},
    "data": {"source": "builtin:noise", "subset": 40, "eval_fraction": 0.1},
    "train": {"lr": LR, "schedule": "constant"},
}


def task_of(shape: str) -> NoiseTask:
    spec = {**SPEC, "model": {"name": "mlp:8x3", "config": {"shape": shape}}}
    return NoiseTask(parse_spec(spec))


def orders(world: DistContext, n: int) -> list[SampleOrder]:
    batch = BatchPlan(micro_batch_size=ROWS, grad_accum=1, global_batch_size=ROWS * world.size)
    return [SampleOrder(n, 5, batch, rank, world.size) for rank in range(world.size)]


def alone(task: NoiseTask, dtype: str) -> Any:
    """The whole model with its weights, in this process."""
    return task.loss_model(whole_model(task, task.prepare(Path(), print), dtype))


def reference(task: NoiseTask, world: DistContext, dtype: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Weights before and after, by one process that goes through the ranks' rows in order; and the loss of the rows held out."""
    data = task.prepare(Path(), print)
    module = alone(task, dtype).train()
    named = dict(module.named_parameters())
    start = {n: p.detach().clone() for n, p in named.items()}
    optimizer = torch.optim.AdamW(named.values(), lr=LR, weight_decay=0.0, fused=True)
    make = task.batches(data, dtype, torch.device("cpu"))
    for step in range(STEPS):
        for order in orders(world, len(data.train)):
            (module(make(order.micro_batches(step)[0])) / (ROWS * world.size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluator = task.evaluator(world, module, data, dtype)  # each rank scores its part with a whole model
    assert evaluator is not None
    return start, {n: p.detach().clone() for n, p in named.items()}, evaluator.run().loss


def made(name: str, task: NoiseTask, world: DistContext, dtype: str) -> tuple[Any, Any, Any]:
    """A strategy on a model that was loaded as the worker does it; and how its files will look."""
    data = task.prepare(Path(), print)
    strategy = strategies.create(name, options_of(name, {}))
    model, filler = task.load(world, data, dtype, lambda m: None)
    published = checkpoint.plan_published_files(model, world.size)
    module = task.loss_model(model)
    set_up_strategy(strategy, filler, module, model, adamw(TrainSpec(lr=LR)), world.group, None)
    return strategy, module, published


def every_strategy(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: how far its weights are from one process's, its loss of the rows held out beside that one's, and
    whether a checkpoint gives the same weights again."""
    found = []
    for name, shape, dtype in args["cases"]:
        task = task_of(shape)
        data = task.prepare(Path(), print)
        start, wanted, wanted_loss = reference(task, world, dtype)
        strategy, module, published = made(name, task, world, dtype)
        plan = LoopPlan(
            0,
            STEPS,
            TrainSpec(lr=LR, schedule="constant"),
            1,
            ROWS * world.size,
            lambda done: False,
            lambda done, stop: None,
        )
        folder = Path(args["folder"]) / f"{name}-{shape}-{dtype}"
        events = EventLog(folder / f"events{world.rank}.jsonl", world.rank)
        make = task.batches(data, dtype, world.device)
        order = orders(world, len(data.train))[world.rank]
        seed_rank(1, world.rank)
        engine_of(name)(world, strategy, TrainingRows(order, data.train, make), plan, events).run()
        evaluator = task.evaluator(world, module, data, dtype)
        assert evaluator is not None
        loss = evaluator.run().loss
        ours = strategy.weights(trained_only=True)
        run = RunDir(folder)
        saver_of(run, world, strategy, module, published).save(STEPS, "full")
        again, _, published = made(name, task, world, dtype)
        checkpoint.load_full(run.checkpoint(STEPS), again, published, world.rank)
        files = sorted(p.name for p in run.checkpoint(STEPS).glob("*.safetensors"))
        same = all(torch.equal(t, ours[n]) for n, t in again.weights(trained_only=True).items())
        error = update_error(ours, wanted, start) if ours else None
        found.append({"name": name, "error": error, "loss": loss, "wanted": wanted_loss, "same": same, "files": files})
    return found


if __name__ == "__main__":
    main(globals())
