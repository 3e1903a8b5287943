"""What the ranks of the loading tests do."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import AllranksError
from allranks.spec.records import AdapterSpec, ModelSpec, TrainSpec
from allranks.train import strategies
from allranks.train.checkpoint import plan_published_files
from allranks.train.distributed import DistContext
from allranks.train.loop import adamw
from allranks.train.models import weight_loader as filling
from allranks.train.models import weight_sources
from allranks.train.models.adapters import add_adapter
from allranks.train.models.build import load_model
from allranks.train.models.losses import LossModel
from allranks.train.models.moe import routers_of
from allranks.train.setup import set_up_strategy
from allranks.train.sync_proof import checksums, weights_digest
from tests.dist.making import build_model, main, model_of
from tests.dist.plants import instead

ADAPTER = AdapterSpec(type="lora", r=4, targets=["q_proj", "v_proj"], modules_to_save=["lm_head"])
NONE = AdapterSpec()


def loaded(world: DistContext, args: dict[str, Any], name: str) -> tuple[Any, Any, LossModel, bytes | None, Any, str]:
    _, tokenizer = model_of()
    name, _, option = name.partition(":")
    known = {"": {}, "sharded": {"adapters": "sharded"}, "nodes": {"replicate": "nodes"}}
    strategy = strategies.create(name, known[option])
    spec = ModelSpec(name=args["model"], config=args.get("config", {}))
    how = {"dtype": args.get("dtype", "float32"), "labels": {}, "seed": 1}
    model, filler = load_model(world, spec, tokenizer, **how)
    model = add_adapter(model, ADAPTER if args.get("lora") else NONE, classifier=False, base="b", seed=1)
    published = repr(plan_published_files(model, world.size))
    module = LossModel(model, classifier=False)
    digest, done = set_up_strategy(strategy, filler, module, model, adamw(TrainSpec()), world.group, 1.0)
    return strategy, model, module, digest, done, published


def plain(args: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    if args["model"].startswith("tiny:"):
        _, tokenizer = model_of()
        spec = ModelSpec(name=args["model"], config=args.get("config", {}))
        model: Any = build_model(spec, tokenizer, dtype="float32", labels={}, seed=1)
    else:
        dtype = getattr(torch, args.get("dtype", "float32"))
        model = AutoModelForCausalLM.from_pretrained(args["model"], dtype=dtype, attn_implementation="sdpa")
        exact = AutoModelForCausalLM.from_pretrained(args["model"], dtype=torch.float32)
        for name, router in routers_of(model).items():  # they stay in float32 here, whatever the rest is
            router.weight = torch.nn.Parameter(exact.get_submodule(name).weight.data)
    return add_adapter(model, ADAPTER if args.get("lora") else NONE, classifier=False, base="b", seed=1)


def loads(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: how its weights differ from those of a plain model, and what each rank read and kept."""
    wanted = plain(args)
    right = {f"model.{n}": p for n, p in wanted.named_parameters()}
    digest = weights_digest(wanted).hex()
    total = sum(p.numel() * p.element_size() for p in wanted.parameters())
    found = {}
    plant(args.get("plant"), world)
    world = replace(world, host=f"node{world.rank // args.get('ranks_per_host', world.size)}")
    if args.get("unseen") == world.rank:
        see_elsewhere(args["model"], args.get("there", "/nowhere"))
    for name, small in args.get("pieces", {}).items():
        setattr(weight_sources, name, small)
    for name in args["names"]:
        filling.dist = network = Network(world)  # type: ignore[assignment]
        try:
            strategy, model, module, own, done, published = loaded(world, args, name)
        except AllranksError as error:
            found[name] = {"error": str(error), "exit_code": error.exit_code}
            continue
        whole = strategy.weights(trained_only=False)
        compared = right.items() if whole else ()
        bad = [n for n, p in compared if not torch.equal(whole[n], p) or whole[n].dtype != p.dtype]
        buffers = dict(module.named_buffers())
        bad += [n for n, b in wanted.named_buffers() if not torch.equal(b, buffers[f"model.{n}"])]
        same = (own or weights_digest(model)).hex() == digest
        trained = {n for n, p in module.named_parameters() if p.requires_grad} if name == "pytorch_ddp" else None
        found[name] = {
            "bad": bad + sorted(right.keys() ^ whole.keys() if whole else []),
            "same_digest": same, "read": done.read_bytes, "sent": network.sent, "received": network.received,
            "kept": done.kept_bytes, "how": done.how, "readers": done.readers, "why": done.why, "base": done.digest,
            "from_config": args["model"].startswith("tiny:"), "total": total,
            "published": published == repr(plan_published_files(wanted, world.size)),
            "whole": sum(p.numel() * p.element_size() for _, p in getattr(strategy, "_kept", ()) if args.get("lora")),
            "trained_as": trained in (None, {f"model.{n}" for n, p in wanted.named_parameters() if p.requires_grad}),
        }  # fmt: skip
    return found


class Network:
    """`torch.distributed` as the loader uses it, with the bytes of weights that this rank sends and receives in it."""

    def __init__(self, world: DistContext) -> None:
        self._world, self.sent, self.received = world, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any) -> None:
        dist.broadcast(tensor, src=src, group=group)
        self._count(tensor, src, group)

    def scatter(self, own: torch.Tensor, chunks: Any, src: int, group: Any) -> None:
        dist.scatter(own, chunks, src=src, group=group)
        self._count(own, src, group)

    def _count(self, tensor: torch.Tensor, src: int, group: Any) -> None:
        if group is self._world.control:
            return
        if src == self._world.rank:
            self.sent += tensor.nbytes * (dist.get_world_size(group) - 1)
        else:
            self.received += tensor.nbytes


def see_elsewhere(model: str, there: str) -> None:
    """On this rank the folder of the weights is another one, which may not exist."""
    instead(weight_sources, "open_regular", lambda usual, path: usual(Path(there) / Path(path).relative_to(model)))


def plant(what: str | None, world: DistContext) -> None:
    """A bug in loading; it stays in this process."""
    reads: list[Any] = []

    def give(usual: Any, self: Any, name: str, parameter: Any) -> None:
        usual(self, name, parameter)
        if "gate_proj" in name:
            parameter.to_local().zero_()
            self._tally._kept[name] = checksums(parameter.to_local(), 0)

    def neighbours(usual: Any, own: torch.Tensor, chunks: Any, **how: Any) -> None:
        usual(own, None if chunks is None else [*chunks[1:], chunks[0]], **how)

    def preadv(usual: Any, descriptor: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        if len(reads) > 5 and what == "failing":
            raise OSError(5, "Input/output error")
        if len(reads) > 5 and what == "ended":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(reads) == 5 and what == "changed":
            os.utime(descriptor)
        return 0 if len(reads) > 5 and what == "short" else usual(descriptor, buffers, offset)

    def unkept(usual: Any, self: Any, name: str, own: torch.Tensor, *more: Any, **named: Any) -> None:
        usual(self, name, own, *more, **named)
        if "gate_proj" in name and world.rank == 1:
            own.zero_()

    def fewer(usual: Any, self: Any, name: str, start: int, stop: int) -> Any:
        return usual(self, name, start, stop - ("gate_proj" in name))

    def tensor(usual: Any, self: Any, part: str, dtype: torch.dtype) -> torch.Tensor:
        reads.append(part)
        if len(reads) > 5 and what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(reads) > 5:
            raise OSError(5, "Input/output error", str(self._stored[part].file))
        return usual(self, part, dtype)

    if what == "dropped" and world.rank == 1:  # a rank that keeps nothing of one parameter
        instead(filling.WeightLoader, "_give_rows", give)
    if what == "other_rows":  # each rank gets its neighbour's rows
        instead(dist, "scatter", neighbours)
    if what in ("short", "failing", "ended", "changed") and world.rank == 1:  # where each rank reads
        instead(os, "preadv", preadv)
    if what == "unkept":  # a rank that does not keep what it read of one parameter
        instead(filling.WeightLoader, "_read_part", unkept)
    if what == "unread":  # no rank reads the last element of its part of a parameter
        instead(weight_sources.DirectReads, "pieces", fewer)
    if what in ("unreadable", "killed"):  # after some tensors the file cannot be read; or the reader is no more
        instead(weight_sources.FileSource, "_read", tensor)


def refusal(world: DistContext, args: dict[str, Any]) -> Any:
    try:
        loaded(world, args, args["name"])
        return None
    except AllranksError as error:
        return {"error": str(error), "exit_code": error.exit_code}


if __name__ == "__main__":
    main(globals())
