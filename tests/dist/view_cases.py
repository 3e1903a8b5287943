"""Cases about checkpoints that follow each other in one run; `test_kept_views.py` starts them on ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allranks.rundir.events import EventLog
from allranks.rundir.paths import RunDir
from allranks.spec.records import TrainSpec
from allranks.train.checkpoint import PublishedFiles, load_full, load_weights_only, plan_published_files
from allranks.train.data.batches import collate
from allranks.train.distributed import DistContext, seed_rank
from allranks.train.engines import engine_of
from allranks.train.step_metrics import LoopPlan, TrainingRows
from tests.dist import making
from tests.dist.making import main, orders_of, prepared, saver_of, tokens_of, whole_state

TURNS = [
    ("full", True), ("full", True), ("weights_only", False), ("full", True), ("weights_only", True), ("full", False), ("full", True),
]  # fmt: skip
LATE = 3  # the step in which a weight takes part for the first time


def in_turns(world: DistContext, args: dict[str, Any]) -> Any:
    """Checkpoints after each step, of both modes, in the foreground and in the background: what each holds, and how often views were made."""
    folder, found = Path(args["folder"]), []
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    usual = making.built
    for i, (name, how) in enumerate(args["cases"]):
        making.built = lambda given: _with_buffers(usual(given)) if given.get("buffers") else usual(given)
        done = [0]
        if how.get("late"):
            making.takes_part = lambda ids, salt, done=done: done[0] >= LATE
        published = plan_published_files(making.built(how).model, world.size)
        strategy, module = prepared(name, world, how)
        run = RunDir(folder / f"{name}.{i}")
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        keeper = saver_of(run, world, strategy, module, published, keep=len(TURNS))
        made, moments = _count(keeper), []
        copied = keeper._copies.of
        keeper._copies.of = lambda parts, copied=copied: (time.sleep(0.2), copied(parts))[1]

        def after(
            step: int,
            stop: bool,
            *,
            strategy: Any = strategy,
            keeper: Any = keeper,
            moments: Any = moments,
            done: Any = done,
        ) -> None:
            mode, behind = TURNS[step - 1]
            moments.append(_copied((whole_state(strategy, world), strategy.weights(trained_only=True))))
            keeper.save(step, mode, behind=behind)
            done[0] = step

        _train(strategy, world, tokens, how, 0, folder, after)
        wanted = _copied(strategy.weights(trained_only=True))
        keeper.finish()
        wrong = []
        for step, ((mode, _), (state, weights)) in enumerate(zip(TURNS, moments, strict=True), 1):
            fresh, module = prepared(name, world, how)
            if mode == "full":
                load_full(run.checkpoint(step), fresh, published, world.rank)
                again = whole_state(fresh, world)
                wrong += [(step, k) for k in state.keys() | again.keys() if not _same(state.get(k), again.get(k))]
            else:
                load_weights_only(run.checkpoint(step), fresh, published, module.model)
            again = fresh.weights(trained_only=True)
            inside = [k for k in weights if mode == "full" or k != "extra"]  # which is outside of the published model
            wrong += [(step, k) for k in inside if not _same(weights[k], again.get(k))]
        fresh, _ = prepared(name, world, how)
        done[0] = 2  # a full one, before the state of what takes part late
        load_full(run.checkpoint(done[0]), fresh, published, world.rank)
        _train(fresh, world, tokens, how, done[0], folder, lambda step, stop, done=done: done.__setitem__(0, step))
        resumed = fresh.weights(trained_only=True)
        wrong += [("resumed", k) for k in wanted if not _same(wanted[k], resumed[k])]
        keys = [len(state) for state, _ in moments]
        found.append({"name": name, "how": how, "wrong": wrong, "made": made, "keys": keys})
    return found


def without_state(world: DistContext, args: dict[str, Any]) -> Any:
    """Rank 1 has no optimizer state, but writes half of the only trained weight, while rank 0 goes on: how far each checkpoint is from it."""
    folder, usual = Path(args["folder"]), making.built

    def one_trained(how: dict[str, Any]) -> Any:
        module = usual(how)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name == "extra")
        return module

    making.built = one_trained
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    how = {"extra": "always", "lora": True}
    published = PublishedFiles(((),), {}, {}, adapted=True)  # what is trained is outside of the model
    strategy, module = prepared("pytorch_zero1", world, how)
    run = RunDir(folder / "run")
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    keeper, moments = saver_of(run, world, strategy, module, published, keep=len(TURNS)), []
    copied = keeper._copies.of
    keeper._copies.of = lambda parts: (time.sleep(world.rank * 0.5), copied(parts))[1]

    def after(step: int, stop: bool) -> None:
        moments.append(dict(module.named_parameters())["extra"].detach().clone())
        keeper.save(step, "full", behind=True)

    _train(strategy, world, tokens, how, len(TURNS) - 2, folder, after)
    keeper.finish()
    apart = []
    for step, then in enumerate(moments, len(TURNS) - 1):
        fresh, loaded = prepared("pytorch_zero1", world, how)
        load_full(run.checkpoint(step), fresh, published, world.rank)
        apart.append(float((dict(loaded.named_parameters())["extra"] - then).abs().max()))
    return {
        "apart": apart,
        "ranges": len(strategy.state_ranges()),
        "moved": float((moments[0] - moments[1]).abs().max()),
    }


def _train(
    strategy: Any, world: DistContext, tokens: Any, how: dict[str, Any], first: int, folder: Path, after: Any
) -> None:
    """Train without a pause; `after` is called between steps."""
    order = orders_of(world, tokens, how)[world.rank]
    rows = TrainingRows(order, tokens, lambda rows: collate(tokens, rows, 0, None))
    train = TrainSpec(lr=1e-2, schedule="constant")
    last = len(TURNS) + 1
    plan = LoopPlan(first, last, train, 1, 1, lambda done: done < last, after)
    events = EventLog(folder / f"events{world.rank}.jsonl", world.rank)
    strategy.warm_up(rows.make_batch(order.micro_batches(0)[0]), resumed=True)
    seed_rank(1, world.rank)
    engine_of(strategy.named_here)(world, strategy, rows, plan, events).run()


def _count(keeper: Any) -> list[bool]:
    """Return a list that grows whenever views are made anew, by whether in mode full."""
    made: list[bool] = []
    collector, usual = keeper._collector, keeper._collector._make_views
    collector._make_views = lambda full: (made.append(full), usual(full))[1]
    return made


def _copied(given: Any) -> Any:
    if isinstance(given, dict):
        return {k: t.clone() for k, t in given.items()}
    return tuple(_copied(part) for part in given)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a.cpu(), b.cpu())


def _with_buffers(module: Any) -> Any:
    """Add buffers that each forward pass changes in place, and replaces."""
    for persistent in (True, False):
        for kind in ("counted", "replaced"):
            module.model.register_buffer(f"{kind}_{persistent}", torch.zeros(5), persistent=persistent)

    def change(model: nn.Module, *_: Any) -> None:
        for persistent in (True, False):
            getattr(model, f"counted_{persistent}").add_(1)
            setattr(model, f"replaced_{persistent}", getattr(model, f"replaced_{persistent}") + 1)

    module.model.register_forward_pre_hook(change, with_kwargs=True)
    return module


if __name__ == "__main__":
    main(globals())
