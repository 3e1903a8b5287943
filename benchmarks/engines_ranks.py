"""A rank of `benchmarks.engines`: all engines in turns within one process, on copies of one model and the same batches.

``torchrun -m benchmarks.engines_ranks RESULT ARGS``; rank 0 writes RESULT, a JSON document.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from allranks.rundir.events import read_events
from allranks.train.data.prepared import TokenSet
from allranks.train.distributed import DistContext
from benchmarks.strategies_ranks import Runner, on_ranks, rows_of_equal_length


def trained(runner: Runner, steps: int) -> dict[str, Any]:
    """Train on: this rank's tokens and seconds from step edge to step edge, and the steps' losses. The time to make an
    engine's own trainer before the first step is in no step."""
    log = runner.log
    log.unlink(missing_ok=True)
    runner.run(steps)
    events = [e for e in read_events(log) if e["event"] == "step"]
    return {
        "tokens": sum(e["tokens"] for e in events),
        "seconds": sum(e["step_time_s"] for e in events),
        "losses": [e["loss"] for e in events],
    }


def side_by_side(world: DistContext, tokens: TokenSet, args: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """Rounds in which each engine trains the same steps, each round beginning with another one."""
    names = args["engines"]
    runners = {name: Runner(name, world, tokens, args, how) for name in names}
    losses: dict[str, list[float]] = {name: trained(runners[name], args["warm_up"])["losses"] for name in names}
    rounds = []
    for number in range(args["rounds"]):
        turn = number % len(names)
        mine = {}
        for name in (*names[turn:], *names[:turn]):
            one = trained(runners[name], args["steps"])
            losses[name] += one.pop("losses")
            mine[name] = one["tokens"] / one["seconds"]
        every: list[Any] = [None] * world.size
        dist.all_gather_object(every, mine, group=world.control)
        rounds.append({name: sum(r[name] for r in every) / world.size for name in names})
    runners.clear()
    gc.collect()
    return {**how, "tokens_per_s_per_rank": rounds, "losses": losses}


def work(world: DistContext, args: dict[str, Any]) -> list[dict[str, Any]]:
    """All forms."""
    tokens = rows_of_equal_length(Path(args["folder"]) / f"rank{world.rank}", args["length"])
    found = []
    for how in args["forms"]:
        found.append(side_by_side(world, tokens, args, how))
        if world.is_first:
            print(json.dumps(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    on_ranks(work)
