"""Cases of state: saved under one strategy, loaded under another, by other ranks, or by plain PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allranks.rundir.paths import RunDir
from allranks.train.checkpoint import plan_published_files
from allranks.train.data.batches import collate
from allranks.train.distributed import DistContext
from allranks.train.strategies import shards
from allranks.train.strategies.sharded_optimizer import FlatParameter
from allranks.train.strategies.shards import MASTER, fitted
from tests.dist import plants
from tests.dist.making import Collectives, built, go_on, prepared, saver_of, tokens_of
from tests.dist.variants import VARIANTS


def save_state(world: DistContext, args: dict[str, Any]) -> Any:
    """A state after two steps of each strategy, for ranks of another number."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    for name in args["names"]:
        strategy, _ = prepared(name, world, {})
        go_on(strategy, world, tokens, {}, 0, 2, Path(args["folder"]))
        state = strategy.state_dict()
        if world.is_first:
            torch.save(state, Path(args["folder"]) / f"{name}.pt")


def load_state(world: DistContext, args: dict[str, Any]) -> Any:
    """What of a loaded state is another one when it is saved again, and a step after it."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = {}
    for name in args["names"]:
        strategy, _ = prepared(name, world, {})
        saved = torch.load(Path(args["folder"]) / f"{name}.pt", weights_only=True)
        strategy.load_state_dict(saved)
        again = strategy.state_dict()
        if world.is_first:
            pairs = [(n, t, again["model"].get(n)) for n, t in saved["model"].items()]
            pairs += [
                (f"{n} {k}", t, again["optimizer"].get(n, {}).get(k))
                for n, s in saved["optimizer"].items()
                for k, t in s.items()
            ]
            found[name] = [n for n, a, b in pairs if b is None or not torch.equal(a, b)] + (
                [] if len(pairs) > 10 else ["nothing saved"]
            )
        go_on(strategy, world, tokens, {}, 2, 3, Path(args["folder"]))
    return found


def save_shards(world: DistContext, args: dict[str, Any]) -> Any:
    """Each strategy's state after two steps, in parts and, for comparison, whole."""
    plants.plant(args.get("plant", ""), world)
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    for name in args["names"]:
        strategy, _ = prepared(name, world, args["how"])
        go_on(strategy, world, tokens, args["how"], 0, 2, Path(args["folder"]))
        folder = Path(args["folder"]) / name
        with Collectives() as calls:
            parts = [*strategy.weight_shards(), *shards.state_shards(strategy.state_ranges())]
        assert not calls.seen, calls.seen
        shards.write_shards(parts, folder, world.control)
        state = strategy.state_dict()
        if world.is_first:
            torch.save(state, Path(args["folder"]) / f"{name}.pt")


def load_shards(world: DistContext, args: dict[str, Any]) -> Any:
    """What differs once each strategy has read what each other one wrote: names by strategy and source."""
    plants.plant(args.get("plant", ""), world)
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
            getattr(strategy, "loaded", lambda: None)()
            saved = torch.load(Path(args["folder"]) / f"{source}.pt", weights_only=True)
            wrong += [(name, source, n) for n in _copies_that_differ(ranges, saved)]
            saved = fitted(saved, keeps_master=getattr(strategy, "keeps_master", False))
            # DeepSpeed's stage 3 has small weights whole and in parts; it looks at the parts once it was asked for the whole
            for again in (strategy.state_dict(), strategy.state_dict()):
                if world.is_first:
                    wrong += [(name, source, n) for n in _state_that_differs(saved, again)]
    return wrong


def _state_that_differs(saved: dict[str, Any], again: dict[str, Any]) -> list[str]:
    pairs = [(n, t, again["model"].get(n)) for n, t in saved["model"].items()]
    pairs += [
        (f"{n} {k}", t, again["optimizer"].get(n, {}).get(k))
        for n, s in saved["optimizer"].items()
        for k, t in s.items()
    ]
    assert len(pairs) > 20
    return [n for n, a, b in pairs if b is None or not torch.equal(a.to(b.dtype), b)]


def _copies_that_differ(ranges: Any, saved: dict[str, Any]) -> list[str]:
    """Names of parameters of which an optimizer updates a copy that is not what was saved."""
    wrong = []
    for r in ranges:
        if r.copy_of is None:
            continue
        whole = saved["optimizer"][r.name].get(MASTER, saved["model"][r.name]).float().flatten()
        if not torch.equal(r.of(r.parameter).cpu(), whole[r.offset : r.offset + r.length]):
            wrong.append(f"copy of {r.name}")
    return wrong


def _spoil(plant: str | None, saved: dict[str, Any]) -> None:
    """A bug in loading; the last one stays in this process."""
    if plant == "other_parameter":
        names = sorted(saved["optimizer"])
        for name, other in zip(names, [*names[1:], names[0]], strict=True):
            state_of, of = saved["optimizer"][name], saved["optimizer"][other]
            if state_of["exp_avg"].shape == of["exp_avg"].shape:
                state_of["exp_avg"] = of["exp_avg"]
    if plant == "other_ranks_part":  # weights come whole to every rank; only moments are cut
        usual = FlatParameter.join

        def join(self: FlatParameter, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
            own, (self.low, self.high) = (self.low, self.high), (0, self.part)
            part = usual(self, tensors)
            self.low, self.high = own
            return part

        FlatParameter.join = join  # type: ignore[method-assign]


def states(world: DistContext, args: dict[str, Any]) -> Any:
    """For (saved under, loaded under, variant): how far two steps, a save, a load and two steps are from four steps."""
    folder = Path(args["folder"])
    tokens = tokens_of(folder / f"rank{world.rank}", 37)
    found = []
    plants_ = args.get("plants") or [None] * len(args["triples"])
    for (saver, loader, variant), planted in zip(args["triples"], plants_, strict=True):
        how = VARIANTS[variant]
        whole, _ = prepared(loader, world, how)
        go_on(whole, world, tokens, how, 0, 4, folder)
        wanted = whole.weights(trained_only=True)
        first, _ = prepared(saver, world, how)
        go_on(first, world, tokens, how, 0, 2, folder)
        state = first.state_dict()
        if world.is_first:
            torch.save(state, folder / "state.pt")
        dist.barrier()
        second, _ = prepared(loader, world, how)
        saved = torch.load(folder / "state.pt", weights_only=True)
        if world.rank == 1:
            _spoil(planted, saved)
        second.load_state_dict(fitted(saved, keeps_master=getattr(second, "keeps_master", False)))
        go_on(second, world, tokens, how, 2, 4, folder)
        ours = second.weights(trained_only=True)
        error = max((float((ours[n].double() - w.double()).abs().max()) for n, w in wanted.items()), default=0.0)
        found.append({"saved": saver, "loaded": loader, "variant": variant, "error": error})
    return found


def reloaded_adapter(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: trains an adapter, saves it, and compares its answers with those of plain PEFT that loads the files."""
    from peft import PeftModel

    if args.get("plant"):
        plants.plant(args["plant"], world)
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
            apart, learned = (float((ours - other).abs().max()) for other in (theirs, without))
            saved = sorted(
                {n.split(".lora_")[0].rsplit(".layers.", 1)[-1] for n, _ in plain.named_parameters() if ".lora_" in n}
            )
            found.append({"strategy": name, "apart": apart, "learned": learned, "saved": saved})
    return found
