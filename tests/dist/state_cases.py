"""Cases of state: saved under one strategy, loaded under another, by other ranks, or by plain PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allranks.errors import ProofFailed
from allranks.rundir.paths import RunDir
from allranks.train.checkpoint import load_full, plan_published_files
from allranks.train.data.batches import collate
from allranks.train.data.prepared import TokenSet
from allranks.train.distributed import DistContext
from allranks.train.evaluation import Evaluator, evaluating
from allranks.train.models.lora import fuse_lora
from allranks.train.models.lora_experts import fuse_expert_lora
from allranks.train.strategies import shards
from allranks.train.strategies.shards import MASTER
from tests.dist import plants
from tests.dist.making import Collectives, built, go_on, prepared, saver_of, tokens_of, whole_state
from tests.dist.variants import VARIANTS


def save_shards(world: DistContext, args: dict[str, Any]) -> Any:
    """Each strategy's state after two steps, in parts and, for comparison, whole and without files."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    for name in args["names"]:
        strategy, _ = prepared(name, world, args["how"])
        go_on(strategy, world, tokens, args["how"], 0, 2, Path(args["folder"]))
        folder = Path(args["folder"]) / name
        with Collectives() as calls:
            parts = [*strategy.weight_shards(), *shards.state_shards(strategy.state_ranges())]
        assert not calls.seen, calls.seen
        own = [part for shard in parts if (part := shards.share_to_write(shard, world.rank, world.size)).tensor.numel()]
        folder.mkdir(exist_ok=True)
        shards.write_parts(own, folder / shards.shard_file(world.rank))
        dist.barrier(group=world.control)
        state = whole_state(strategy, world)
        if world.is_first:
            torch.save(state, Path(args["folder"]) / f"{name}.pt")


def load_shards(world: DistContext, args: dict[str, Any]) -> Any:
    """What differs once each strategy has read what each other one wrote: names by strategy and source."""
    wrong = []
    for name in args["names"]:
        for source in args["sources"]:
            strategy, _ = prepared(name, world, args["how"])
            folder = Path(args["folder"]) / source
            if args.get("trained"):  # another state, which must not show afterwards
                go_on(
                    strategy,
                    world,
                    tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37),
                    args["how"],
                    0,
                    1,
                    Path(args["folder"]),
                )
                if name == "deepspeed_zero3" and not all(p.numel() for p in strategy.module.parameters()):
                    wrong.append((name, source, "not all weights are whole"))
            ranges = strategy.state_ranges()
            room = shards.allocate_state(ranges, shards.stored_sizes(folder))
            shards.read_shards([*strategy.weight_shards(), *room], folder, world.control)
            strategy.finish_loading()
            saved = torch.load(Path(args["folder"]) / f"{source}.pt", weights_only=True)
            wrong += [(name, source, n) for n in _copies_that_differ(ranges, saved)]
            again = whole_state(strategy, world)
            wrong += [(name, source, n) for n in _state_that_differs(saved, again)]
            # DeepSpeed's stage 3 has small weights whole and in parts; it looks at the parts once it was asked for the
            # whole
            for whole in (strategy.weights(trained_only=True), strategy.weights(trained_only=True)):
                wrong += [
                    (name, source, n) for n, w in whole.items() if not torch.equal(w.flatten(), saved[f"model/{n}"])
                ]
    return wrong


def _state_that_differs(saved: dict[str, torch.Tensor], again: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose values were lost or changed; moments have the dtype of what they update, masters are not kept by
    all."""
    assert len(saved) > 20
    missing = [key for key in saved if key not in again and not key.endswith(f"/{MASTER}")]
    return missing + [
        key for key in saved.keys() & again.keys() if not torch.equal(saved[key].to(again[key].dtype), again[key])
    ]


def _copies_that_differ(ranges: Any, saved: dict[str, torch.Tensor]) -> list[str]:
    """Names of parameters of which an optimizer updates a copy that is not what was saved."""
    wrong = []
    for r in ranges:
        if r.copy_of is None:
            continue
        whole = saved.get(f"optimizer/{r.name}/{MASTER}", saved[f"model/{r.name}"]).float()
        if not torch.equal(r.of(r.parameter).cpu(), whole[r.offset : r.offset + r.length]):
            wrong.append(f"copy of {r.name}")
    return wrong


def states(world: DistContext, args: dict[str, Any]) -> Any:
    """For (saved under, loaded under, variant): how far two steps, a checkpoint, a load of it and two steps are from
    four steps.

    ``evaluations``: the held-out losses after two and after four steps, and those of one process with the same weights
    (on rank 0).
    """
    folder = Path(args["folder"])
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    found = []
    bugs = args.get("plants") or [None] * len(args["triples"])
    for i, ((saver, loader, variant), bug) in enumerate(zip(args["triples"], bugs, strict=True)):
        how = VARIANTS[variant]
        first, module = prepared(saver, world, how)
        go_on(first, world, tokens, how, 0, 2, folder)
        evaluator = Evaluator(world, module, tokens, pad_id=0, batch_size=4, classifier=False)
        losses, right = [evaluator.run().loss], [_loss_alone(how, first.weights(trained_only=True), tokens, world)]
        run = RunDir(folder / f"{saver}.{i}")
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        published = plan_published_files(built(how).model, world.size)
        saver_of(run, world, first, module, published).save(2, "full")
        go_on(first, world, tokens, how, 2, 4, folder)
        wanted = first.weights(trained_only=True)
        losses.append(evaluator.run().loss)
        right.append(_loss_alone(how, wanted, tokens, world))
        if bug:
            plants.plant(bug, world)
        second, _ = prepared(loader, world, how)
        load_full(run.checkpoint(2), second, published, world.rank)
        go_on(second, world, tokens, how, 2, 4, folder)
        ours = second.weights(trained_only=True)
        error = max((float((ours[n].double() - w.double()).abs().max()) for n, w in wanted.items()), default=0.0)
        evaluations = [losses, right]
        found.append({"saved": saver, "loaded": loader, "variant": variant, "error": error, "evaluations": evaluations})
    return found


def _loss_alone(how: dict[str, Any], weights: dict[str, torch.Tensor], tokens: TokenSet, world: DistContext) -> Any:
    """The held-out loss of a new model with these trained weights, by one process; None on other ranks than the
    first."""
    if not world.is_first:
        return None
    model = built(how)
    model.load_state_dict(weights, strict=False)
    with evaluating(model), torch.no_grad():
        sums = [
            (model(collate(tokens, np.array([row]), 0, None)), int(tokens.trained[row])) for row in range(len(tokens))
        ]
    return float(sum(loss.double() for loss, _ in sums)) / sum(count for _, count in sums)


def same_seeds(world: DistContext, args: dict[str, Any]) -> Any:
    """The error of each strategy that begins training with the same random numbers on all ranks."""
    tokens, found = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37), {}
    for name in args["names"]:
        strategy, _ = prepared(name, world, VARIANTS["lora"])
        try:
            go_on(strategy, world, tokens, VARIANTS["lora"], 0, 1, Path(args["folder"]), seed_of_rank=0)
            found[name] = ""
        except ProofFailed as error:
            found[name] = str(error)
    return found


def reloaded_adapter(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: trains an adapter, saves it, and compares its answers with those of plain PEFT that loads the
    files.

    ``changed`` compares them with PEFT's model whose forward is the run's.
    """
    from peft import PeftModel

    folder = Path(args["folder"])
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    batch = collate(tokens, np.arange(4), 0, None)
    found = []
    for i, one in enumerate(args["names"]):
        name, more = (one, {}) if isinstance(one, str) else one
        how = {"lora": True, "accum": 2, **more}
        strategy, module = prepared(name, world, how)
        go_on(strategy, world, tokens, how, 0, 3, folder)
        module.eval()
        with torch.no_grad():
            ours = module.model(input_ids=batch.input_ids).logits
        run = RunDir(folder / f"{name}.{i}")
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        saver_of(run, world, strategy, module, plan_published_files(built(how).model, world.size)).save(
            3, "weights_only"
        )
        if world.is_first:
            bare = built({**how, "lora": False}).model.eval()
            with torch.no_grad():
                without = bare(input_ids=batch.input_ids).logits
                plain = PeftModel.from_pretrained(bare, str(run.checkpoint(3))).eval()
                theirs = plain(input_ids=batch.input_ids).logits
                fuse_lora(plain)
                fuse_expert_lora(plain)
                fused = plain(input_ids=batch.input_ids).logits
            apart, learned, changed = (float((ours - other).abs().max()) for other in (theirs, without, fused))
            saved = sorted(
                {n.split(".lora_")[0].rsplit(".layers.", 1)[-1] for n, _ in plain.named_parameters() if ".lora_" in n}
            )
            found.append({"strategy": name, "apart": apart, "learned": learned, "changed": changed, "saved": saved})
    return found
