"""What the ranks of the distributed tests do. ``python -m tests.dist.cases CASE RESULT ARGS``, one process a rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allranks.errors import AllranksError
from allranks.facts import MachineFacts
from allranks.observe.events import EventLog
from allranks.planning import BatchPlan, make_plan
from allranks.rundir import RunDir
from allranks.spec import parse_spec
from allranks.spec.records import AdapterSpec, ModelSpec, TrainSpec
from allranks.train import strategies
from allranks.train.adapters import add_adapter
from allranks.train.checkpoint import Saver
from allranks.train.control import Control, StopRequest
from allranks.train.data.collate import Batch, collate
from allranks.train.data.encode import EncodedRow
from allranks.train.data.order import Order
from allranks.train.data.prepared import TokenSet, _map, _save
from allranks.train.data.tokenizer import train_tokenizer
from allranks.train.evaluate import Evaluator
from allranks.train.loop import Loop, Plan
from allranks.train.losses import LossModel
from allranks.train.model import build_model
from allranks.train.optim import adamw
from allranks.train.proof import prove, weights_digest
from allranks.train.world import World, join, leave

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def world_of(planned: int | None = None) -> World:
    facts = MachineFacts(host="h", cpus=2, memory_bytes=0, gpus=[], cpu_model="", system="")
    spec = parse_spec({"model": {"name": "tiny:mistral"}, "data": {"source": "x"}, "cluster": {"timeout_s": 60}})
    return join(make_plan(spec, facts))


def model_of(seed: int = 1, **config: Any) -> tuple[Any, Any]:
    tokenizer = train_tokenizer(["hello"], 300, classifier=False)
    return build_model(ModelSpec(name="tiny:mistral", config={**CONFIG, **config}), tokenizer, dtype="float32", labels={}, seed=seed), tokenizer


def tokens_of(folder: Path, n: int) -> TokenSet:
    """Rows of uneven length with uneven numbers of targets, the same on every rank."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    rows = []
    for i in range(n):
        length = int(rng.integers(4, 40))
        mask = np.ones(length, np.uint8)
        mask[: int(rng.integers(1, length))] = 0
        mask[-1] = 1
        rows.append(EncodedRow(ids=rng.integers(4, 255, length).astype(np.int32), mask=mask))
    _save(folder, "train", rows, [[i] for i in range(n)])
    return _map(folder, "train")


def batch_of(accum: int, world: int, micro: int = 2) -> BatchPlan:
    return BatchPlan(micro_batch_size=micro, grad_accum=accum, global_batch_size=micro * accum * world)


def proof(world: World, args: dict[str, Any]) -> Any:
    """The proof, with one fault planted on rank 1."""
    fault = args["fault"]
    model, _ = model_of(seed=2 if fault == "weights" and world.rank == 1 else 1)
    if fault == "one_weight" and world.rank == 1:
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
    reader = 0 if fault == "sampler" and world.rank == 1 else world.rank
    order = Order(21, 1, batch_of(1, world.size), reader, world.size)
    planned = world.size + 1 if fault == "absent" else world.size
    try:
        return {"hash": prove(world, planned, model, order).weights_hash}
    except AllranksError as error:
        return {"error": str(error), "exit_code": error.exit_code}


def evaluation(world: World, args: dict[str, Any]) -> Any:
    model, _ = model_of()
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 23)
    found = []
    for size in (1, 4, 16):
        evaluator = Evaluator(world, LossModel(model, classifier=False), tokens, pad_id=0, batch_size=size, classifier=False)
        result = evaluator.run()
        found.append([result.loss, result.perplexity, result.targets, result.rows])
    return found


def parity(world: World, args: dict[str, Any]) -> Any:
    """Weights after some steps of a strategy, and of one process that goes through the ranks' micro-batches in order."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    ours = train_with(args["strategy"], world, tokens, args, world.rank)
    reference = reference_of(world, tokens, args)
    differs = max(float((ours[k] - reference[k]).abs().max()) for k in reference)
    moved = max(float(v.abs().max()) for k, v in ours.items() if "lora_B" in k) if args.get("lora") else None
    digest = torch.tensor([sum(float(v.double().sum()) for v in ours.values())], dtype=torch.float64)
    every = [torch.zeros_like(digest) for _ in range(world.size)]
    dist.all_gather(every, digest)
    return {"differs": differs, "moved": moved, "ranks_equal": len({float(t) for t in every}) == 1}


def built(args: dict[str, Any]) -> torch.nn.Module:
    model, _ = model_of(tie_word_embeddings=bool(args.get("tied")))
    if args.get("lora"):
        return add_adapter(model, AdapterSpec(type="lora", r=4, targets=["q_proj", "v_proj"]), classifier=False, base="b", seed=1)
    if args.get("frozen"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0" not in name)
    return model


def train_with(name: str, world: World, tokens: TokenSet, args: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    accum = args.get("accum", 1)
    model = built(args)
    strategy = strategies.create(name, args.get("options", {}))
    strategy.setup(LossModel(model, classifier=False), adamw(TrainSpec(lr=1e-2)), world.group, args.get("clip", 1.0))
    order = Order(len(tokens), 5, batch_of(accum, world.size), rank, world.size)
    plan = Plan(0, args.get("steps", 3), TrainSpec(lr=1e-2, schedule="constant"), 1, 1, lambda done: False, lambda done, stop: None)
    events = EventLog(Path(args["folder"]) / f"events{world.rank}.jsonl", world.rank)

    def make(rows: Any) -> Batch:
        return collate(tokens, rows, 0, None)

    Loop(world, strategy, order, tokens, make, plan, events, StopRequest()).run()
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def reference_of(world: World, tokens: TokenSet, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One process, no strategy, no allranks loop: the arithmetic that all of it must come to."""
    accum = args.get("accum", 1)
    model = built(args)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.0)
    loss_model = LossModel(model, classifier=False).train()
    orders = [Order(len(tokens), 5, batch_of(accum, world.size), r, world.size) for r in range(world.size)]
    for step in range(args.get("steps", 3)):
        total = int(tokens.trained[orders[0].global_batch(step)].sum())
        for micro in range(accum):
            for order in orders:
                (loss_model(collate(tokens, order.micro_batches(step)[micro], 0, None)) / total).backward()
        if args.get("clip", 1.0):
            torch.nn.utils.clip_grad_norm_([p for _, p in named], args.get("clip", 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in named}


def stop_agreement(world: World, args: dict[str, Any]) -> Any:
    """Only rank 1 is asked to stop; all must hear of it for the same step."""
    control = Control(world)
    heard = []
    for step in range(5):
        agreed = control.finish()
        heard.append(agreed.stop if agreed else None)
        control.start(step, torch.tensor(1.0), torch.tensor(2.0), stop=world.rank == 1 and step == 2)
    last = control.drain()
    return {"heard": heard, "loss": last[-1].loss_sum, "norm": last[-1].grad_norm}


def save_failure(world: World, args: dict[str, Any]) -> Any:
    """Rank 1 cannot write its part: every rank must hear that rank 1 failed, and nothing may be published."""
    run = RunDir(Path(args["folder"]))
    model, tokenizer = model_of()
    strategy = strategies.create("pytorch_ddp", {})
    loss_model = LossModel(model, classifier=False)
    strategy.setup(loss_model, adamw(TrainSpec()), world.group, 1.0)
    saver = Saver(run, world, strategy, model, tokenizer, 2, {})
    saver.save(1, "full")

    class Broken(Saver):
        def _write_rank(self, aside: Path) -> None:
            if self.world.rank == 1:
                raise OSError(28, "No space left on device", str(aside))
            super()._write_rank(aside)

    broken = Broken(run, world, strategy, model, tokenizer, 2, {})
    try:
        broken.save(2, "full")
        said = None
    except AllranksError as error:
        said = str(error)
    for step in (3, 4):
        saver.save(step, "lite")
    return {"said": said, "steps": run.checkpoint_steps(), "digest": weights_digest(model).hex()}


def main() -> None:
    case, result, args = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    world = world_of()
    try:
        value = globals()[case](world, args)
        result.write_text(json.dumps(value))
        dist.barrier()
    finally:
        leave()


if __name__ == "__main__":
    main()
