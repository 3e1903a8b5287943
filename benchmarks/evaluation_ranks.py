"""A rank of `benchmarks.evaluation`: our evaluation and the Trainer's in turns, on one model and the same rows.

``torchrun -m benchmarks.evaluation_ranks RESULT ARGS``; rank 0 writes RESULT, a JSON document.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from allranks.train.data.encode import EncodedRow
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.evaluate import Evaluator
from allranks.train.world import World
from benchmarks.strategies_ranks import built, on_ranks
from benchmarks.trainer_evaluation import Collectives, trainer


def uneven_rows(folder: Path, rows: int, longest: int) -> TokenSet:
    """Random rows of 8 to `longest` tokens, of which a random prefix carries no loss, as prompts do not."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    encoded = []
    for length in rng.integers(8, longest + 1, rows):
        mask = np.ones(length, np.uint8)
        mask[: int(rng.integers(1, length))] = 0
        mask[-1] = 1
        encoded.append(EncodedRow(ids=rng.integers(4, 255, length).astype(np.int32), mask=mask))
    _save(folder, "eval", encoded, [[i] for i in range(rows)])
    return _map(folder, "eval")


def timed(world: World, evaluate: Callable[[], float]) -> tuple[float, float]:
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


def of_size(world: World, tokens: TokenSet, model: Any, args: dict[str, Any], size: int) -> dict[str, Any]:
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


def work(world: World, args: dict[str, Any]) -> list[dict[str, Any]]:
    """All batch sizes."""
    tokens = uneven_rows(Path(args["folder"]) / f"rank{world.rank}of{world.size}", args["rows"], args["longest"])
    model = built(args["config"], lora=True)
    return [of_size(world, tokens, model, args, size) for size in args["batch_sizes"]]


if __name__ == "__main__":
    on_ranks(work)
