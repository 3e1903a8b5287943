"""A rank of `benchmarks.evaluation`: our evaluation and the Trainer's in turns, on one model and the same rows.

``torchrun -m benchmarks.evaluation_ranks RESULT ARGS``; rank 0 writes RESULT, a JSON document.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allranks.train.data.batches import collate
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.data.tokenization import EncodedRow
from allranks.train.distributed import DistContext
from allranks.train.evaluation import Evaluator
from allranks.train.models.losses import LossModel
from benchmarks.strategies_ranks import built, on_ranks
from benchmarks.trainer_evaluation import Collectives, trainer


def rows_of_two_kinds(folder: Path, rows: int, longest: int) -> TokenSet:
    """Long rows that repeat three tokens, and short ones that are random; the first third of a row carries no loss, as a
    prompt does not. A model that has learned to repeat is good at the long ones and bad at the short ones."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    encoded = []
    for row in range(rows):
        length = int(rng.integers(longest // 2, longest + 1) if row % 2 else rng.integers(8, 25))
        ids = np.tile(rng.integers(4, 255, 3), longest)[:length] if row % 2 else rng.integers(4, 255, length)
        mask = np.ones(length, np.uint8)
        mask[: length // 3] = 0
        encoded.append(EncodedRow(ids=ids.astype(np.int32), mask=mask))
    _save(folder, "eval", encoded, [[i] for i in range(rows)])
    return _map(folder, "eval")


def taught(model: LossModel, tokens: TokenSet, steps: int) -> LossModel:
    """The model after some steps on the long rows; the same on every rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step in range(steps):
        batch = collate(tokens, (np.arange(8) * 2 + 1 + 16 * step) % len(tokens), 0, None)
        (model(batch) / batch.tokens_trained).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def timed(world: DistContext, evaluate: Callable[[], float]) -> tuple[float, float]:
    """(loss, seconds until all ranks are done)."""
    dist.barrier(group=world.control)
    began = time.perf_counter()
    loss = evaluate()
    dist.barrier(group=world.control)
    return loss, time.perf_counter() - began


def counted(evaluate: Callable[[], float]) -> list[str]:
    """The collectives that this rank calls in one evaluation."""
    with Collectives() as calls:
        evaluate()
    return calls.seen


def of_size(world: DistContext, tokens: TokenSet, model: Any, args: dict[str, Any], size: int) -> dict[str, Any]:
    """Both at one batch size: warmed up, counted, then timed in turns."""
    evaluator = Evaluator(world, model, tokens, pad_id=0, batch_size=size, classifier=False)
    peer = trainer(model.model, tokens, size, Path(args["folder"]) / "trainer")
    if peer.accelerator.num_processes != world.size:
        raise RuntimeError(f"the Trainer counts {peer.accelerator.num_processes} processes of {world.size}")
    both: dict[str, Callable[[], float]] = {
        "ours": lambda: evaluator.run().loss,
        "trainer": lambda: float(peer.evaluate()["eval_loss"]),
    }
    found: dict[str, Any] = {"ranks": world.size, "batch_size": size, "rounds": []}
    for name, evaluate in both.items():
        evaluate()
        calls = counted(evaluate)
        found[name] = {"collectives": len(calls), "kinds": sorted(set(calls))}
    for number in range(args["rounds"]):
        turn = list(both) if number % 2 == 0 else list(both)[::-1]
        took = {}
        for name in turn:
            found[name]["loss"], took[name] = timed(world, both[name])
        found["rounds"].append(took)
    return found


def work(world: DistContext, args: dict[str, Any]) -> list[dict[str, Any]]:
    """All batch sizes."""
    tokens = rows_of_two_kinds(Path(args["folder"]) / f"rank{world.rank}", args["rows"], args["longest"])
    model = taught(built(args["config"], lora=False), tokens, args["taught_steps"])
    return [of_size(world, tokens, model, args, size) for size in args["batch_sizes"]]


if __name__ == "__main__":
    on_ranks(work)
