"""Cases beside training: the proof, evaluation, and the agreement to stop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from allranks.errors import AllranksError
from allranks.train.data.batches import Rows, SampleOrder
from allranks.train.distributed import DistContext
from allranks.train.evaluation import Evaluator
from allranks.train.models.losses import LossModel
from allranks.train.step_metrics import AsyncStepReduction
from allranks.train.sync_proof import prove_ranks
from tests.dist.making import Collectives, batch_of, model_of, prepared, tokens_of


class LateSampler(SampleOrder):
    """Gives every rank the rows of rank 0 from the fourth step on."""

    def micro_batches(self, step: int) -> list[Rows]:
        cells = self.global_batch(step).reshape(1, self._world, -1)
        return list(cells[:, self._rank if step < 3 else 0])


def proof(world: DistContext, args: dict[str, Any]) -> Any:
    """The proof, with one fault planted on rank 1."""
    fault = args["fault"]
    model, _ = model_of(seed=2 if fault == "weights" and world.rank == 1 else 1)
    if fault == "one_weight" and world.rank == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
    reader = 0 if fault == "sampler" and world.rank == 1 else world.rank
    kind = LateSampler if fault == "late_sampler" else SampleOrder
    order = kind(21, 1, batch_of(1, world.size), reader, world.size)
    planned = world.size + 1 if fault == "absent" else world.size
    try:
        return {"hash": prove_ranks(world, planned, model, order).weights_hash}
    except AllranksError as error:
        return {"error": str(error), "exit_code": error.exit_code}


def evaluation(world: DistContext, args: dict[str, Any]) -> Any:
    model, _ = model_of()
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 23)
    found = []
    for size in (1, 4, 16):
        evaluator = Evaluator(
            world, LossModel(model, classifier=False), tokens, pad_id=0, batch_size=size, classifier=False
        )
        result = evaluator.run()
        found.append([result.loss, result.perplexity, result.targets, result.rows])
    return found


def evaluation_collectives(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: how often an evaluation of 23 rows calls which collective, by torch's name; and of FSDP2, which
    modules the forward passes of its units begin with."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 23)
    calls_of, roots = {}, set()
    for name in args["names"]:
        _, module = prepared(name, world, {"lora": True, "moe": True})
        for unit in (m for m in module.modules() if isinstance(m, FSDPModule) and m is not module):
            own, state = module._get_fsdp_state(), unit._get_fsdp_state()._state_ctx
            unit.register_forward_pre_hook(lambda *_, own=own, s=state: roots.add(s.iter_forward_root is own))
        with Collectives() as calls:
            Evaluator(world, module, tokens, pad_id=0, batch_size=2, classifier=False).run()
        calls_of[name] = dict(Counter(calls.seen))
    return {"calls": calls_of, "roots": list(roots)}


def stop_agreement(world: DistContext, args: dict[str, Any]) -> Any:
    """Only rank 1 is asked to stop; all must hear of it for the same step."""
    control = AsyncStepReduction(world)
    heard = []
    for step in range(5):
        agreed = control.finish()
        heard.append(agreed.stop if agreed else None)
        control.start(step, torch.tensor(1.0), torch.tensor(2.0), stop=world.rank == 1 and step == 2)
    last = control.drain()
    return {"heard": heard, "loss": last[-1].loss_sum, "norm": last[-1].grad_norm}
