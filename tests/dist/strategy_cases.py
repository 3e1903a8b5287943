"""Cases of strategies: the same weights as one process, the traffic and memory that they claim, what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.tuners.lora.layer import Linear, ParamWrapper

from allranks.errors import AllranksError
from allranks.experiments.gates import compare_traffic
from allranks.spec.records import TrainSpec
from allranks.train import strategies
from allranks.train.benchmark.baseline import update_error
from allranks.train.benchmark.measurements import CollectiveRecorder, MemoryUsage
from allranks.train.data.batches import IGNORE, Batch, collate
from allranks.train.data.prepared import TokenSet
from allranks.train.distributed import DistContext
from allranks.train.loop import adamw
from allranks.train.models import lora, lora_experts
from allranks.train.models.losses import LossModel
from allranks.train.strategies.base import Sizes, transformer_blocks
from tests.dist.making import (
    STEPS,
    a_salt,
    built,
    go_on,
    options_of,
    orders_of,
    prepared,
    run_steps,
    tokens_of,
    train_with,
)
from tests.dist.variants import ALONE, REPLICATED, UNUSED_OPTIONS, VARIANTS

FORMS = {**VARIANTS, **REPLICATED, **ALONE}


def parities(world: DistContext, args: dict[str, Any]) -> Any:
    """For each (strategy, variant): how far its weights after some steps are from those of one process that goes
    through the ranks' micro-batches in order. The first rank tells it."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = []
    references: dict[str, Any] = {}
    for name, variant in args["pairs"]:
        how = dict(FORMS[variant])
        if how.get("extra") in ("sometimes", "in_block"):
            how["salt"] = a_salt(world, tokens, how)
            if name in UNUSED_OPTIONS and "options" not in how:
                how["options"] = {"find_unused_parameters": True}
        if world.is_first and variant not in references:
            references[variant] = reference_of(world, tokens, how)
        ours, spread, norms, routers, losses = train_with(name, world, tokens, how, Path(args["folder"]))
        found.append({"strategy": name, "variant": variant, "error": None, "spread": spread, "routers": routers})
        if world.is_first:
            start, reference, right_norms, right_losses = references[variant]
            found[-1] |= {
                "error": update_error(ours, reference, start),
                "norm_error": max(abs(n - r) / r for n, r in zip(norms, right_norms, strict=True)),
                "loss_error": float(np.abs(np.subtract(losses, right_losses)).max()),
                "moved": max((float(v.abs().max()) for k, v in ours.items() if "lora_B" in k), default=None),
            }
    return found


def forwards_of_lora(world: DistContext, args: dict[str, Any]) -> Any:
    """For each (strategy, variant): what computed LoRA in a step, and the strategy's remarks.

    ``together``: linear layers of each call of the fused function; ``experts``: calls of that of experts; ``peft``:
    calls of PEFT's own
    forward of an adapted layer.
    """
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = []
    for name, variant in args["pairs"]:
        how = FORMS[variant]
        strategy, _ = prepared(name, world, how)
        with counted_lora() as counts:
            go_on(strategy, world, tokens, how, 0, 1, Path(args["folder"]))
        found.append({"strategy": name, "variant": variant, "remarks": list(strategy.remarks), **counts})
    return found


@contextmanager
def counted_lora() -> Iterator[dict[str, Any]]:
    """Count the calls of what computes LoRA. See `forwards_of_lora`."""
    counts: dict[str, Any] = {"together": [], "experts": 0, "peft": 0}
    fused, experts = lora.LoRALinears.apply, lora_experts.GroupedLoRA.apply
    usual = {kind: kind.forward for kind in (Linear, ParamWrapper)}  # called as `type(layer).forward`

    def linears(x: Any, scales: Any, *rest: Any) -> Any:
        counts["together"].append(len(scales))
        return fused(x, scales, *rest)

    def grouped(*rest: Any) -> Any:
        counts["experts"] += 1
        return experts(*rest)

    def counting(forward: Any) -> Any:
        def plain(self: Any, *rest: Any, **named: Any) -> Any:
            counts["peft"] += 1
            return forward(self, *rest, **named)

        return plain

    lora.LoRALinears.apply, lora_experts.GroupedLoRA.apply = linears, grouped  # type: ignore[method-assign,assignment]
    for kind, forward in usual.items():
        kind.forward = counting(forward)  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        del lora.LoRALinears.apply, lora_experts.GroupedLoRA.apply  # type: ignore[misc]
        for kind, forward in usual.items():
            kind.forward = forward  # type: ignore[method-assign]


def bad_gradient(world: DistContext, args: dict[str, Any]) -> Any:
    """For each strategy: two good steps, one whose loss is not finite on rank 1 alone, and a good one after it. The
    weights must be those of the two steps on all ranks until the host hears of it."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    order = orders_of(world, tokens, {})[world.rank]
    found = []
    for name in args["names"]:
        strategy, _ = prepared(name, world, {})
        norms, kept = [], {}
        for step in range(4):
            loss = strategy.module(collate(tokens, order.micro_batches(step)[0], 0, None))
            strategy.backward(loss * (float("nan") if step == 2 and world.rank == 1 else 1.0))
            norms.append(float(strategy.step()))
            if step == 1:
                kept = strategy.weights(trained_only=True)
        now = strategy.weights(trained_only=True)
        same = all(torch.equal(w, now[n]) for n, w in kept.items())
        found.append({"strategy": name, "finite": [bool(np.isfinite(n)) for n in norms], "same": same})
    return found


def refusals(world: DistContext, args: dict[str, Any]) -> Any:
    """What FSDP2 cannot do, said before anything is trained."""
    said = []
    for name in ("pytorch_zero2", "pytorch_zero3"):
        shared, mixed = built({"shared": True}), built({})
        mixed.model.lm_head.to(torch.bfloat16)  # type: ignore[union-attr]
        said += [_said(name, {}, module, world) for module in (shared, mixed)]
        said.append(_said(name, {"adapters": "ignored", "offload": "optimizer"}, built({"lora": True}), world))
        said.append(_said(name, {"adapters": "ignored"}, built({}), world))
    return said


def _said(name: str, options: dict[str, Any], module: LossModel, world: DistContext) -> str:
    try:
        strategies.create(name, options).setup(module, adamw(TrainSpec()), world.group, 1.0)
    except AllranksError as error:
        return str(error)
    return "nothing"


def gathered_at_once(world: DistContext, args: dict[str, Any]) -> Any:
    """The most blocks of `zero3` whose weights are whole at one time, and the most bytes of them, seen at every
    module's forward and at every gradient."""
    how = {"config": {"num_hidden_layers": args["blocks"]}}
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    strategy, module = prepared("zero3", world, how)
    units, seen = strategy._units, []

    def look(*_: Any) -> None:
        sizes = [sum(f.whole.untyped_storage().nbytes() for f in unit.flats) for unit in units]
        seen.append((sum(s > 0 for s in sizes), sum(sizes)))

    for part in module.modules():
        part.register_forward_hook(look)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    go_on(strategy, world, tokens, how, 0, 2, Path(args["folder"]))
    all_bytes = sum(flat.bytes for unit in units for flat in unit.flats)
    return {"blocks": max(n for n, _ in seen), "share": max(b for _, b in seen) / all_bytes, "looks": len(seen)}


def gathered_by_deepspeed(world: DistContext, args: dict[str, Any]) -> Any:
    """With LoRA under `deepspeed_zero3`: the largest share of the model's elements that is gathered at one time, seen
    in every block's forward and at every gradient; and how many weights are gathered after each step."""
    how = {"lora": True, "accum": 2, "config": {"num_hidden_layers": args["blocks"]}, **args["how"]}
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    strategy, module = prepared("deepspeed_zero3", world, how)
    every: list[Any] = list(module.parameters())
    whole, shares, left = sum(p.ds_numel for p in every), [], []

    def look(*_: Any) -> None:
        shares.append(sum(p.numel() for p in every) / whole)

    for block in transformer_blocks(module):
        block.mlp.register_forward_hook(look)  # type: ignore[union-attr]
    for parameter in every:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(look)
    for step in range(3):
        go_on(strategy, world, tokens, how, step, step + 1, Path(args["folder"]))
        left.append(sum(p.numel() > 0 for p in every))
    return {"share": max(shares), "looks": len(shares), "left": left}


def mechanism(world: DistContext, args: dict[str, Any]) -> Any:
    """For each (strategy, variant): what its process group did in two steps that its formula does not say, or None."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = []
    for name, variant in args["pairs"]:
        how = FORMS[variant]
        strategy, _ = prepared(name, world, how)
        sizes = Sizes(tuple(p.numel() * p.element_size() for p in built(how).parameters() if p.requires_grad))
        recorder = CollectiveRecorder(1, 2)
        run_steps(name, strategy, world, tokens, how, Path(args["folder"]), 3, watcher=_Watching(recorder))
        expected = [asdict(t) for t in strategy.traffic(sizes, world.size, how.get("accum", 1))]
        found.append(
            {
                "strategy": name,
                "variant": variant,
                "problem": compare_traffic(expected, recorder.totals()),
                "steps": recorder.steps,
            }
        )
    return found


class _Watching:
    """A recorder as the loop wants it."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        self._recorder = recorder

    def attach(self, quiet: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def memory(world: DistContext, args: dict[str, Any]) -> Any:
    """Bytes of weights, gradients and optimizer state that this rank really holds when it updates, by strategy."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found = {}
    for name in args["names"]:
        strategy, module = prepared(name, world, {})
        held = MemoryUsage(strategy, module)
        go_on(strategy, world, tokens, {}, 0, 2, Path(args["folder"]))
        found[name] = held.weights() + held.gradients + held.optimizer_state()
        held.remove()
    return found


def reference_of(
    world: DistContext, tokens: TokenSet, how: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[float], list[list[float]]]:
    """One process, no strategy, no allranks loop: the weights before and after, norms and losses that all of it must
    come to. A load-balancing loss is that of transformers, computed by the model itself from labels.

    The loss is scaled as DDP's mean over ranks needs it: in bfloat16 a factor that is no power of 2 rounds otherwise.
    """
    loss_model = built(how).train()
    named = [(n, p) for n, p in loss_model.named_parameters() if p.requires_grad]
    start = {n: p.detach().clone() for n, p in named}
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.0, fused=True)  # rounds as ours does
    orders = orders_of(world, tokens, how)
    norms, losses = [], []
    for step in range(STEPS):
        parts = [0.0, 0.0]
        total = int(tokens.trained[orders[0].global_batch(step)].sum())
        for micro in range(how.get("accum", 1)):
            for order in orders:
                batch = collate(tokens, order.micro_batches(step)[micro], 0, None)
                loss, router = (
                    plain_losses(loss_model.model, batch) if how.get("router_loss") else (loss_model(batch), 0.0)
                )
                (loss * world.size / total).backward()
                parts = [parts[0] + (float(loss.detach()) - router) / total, parts[1] + router / total]
        losses.append(parts)
        for _, p in named:
            if p.grad is not None:
                p.grad.div_(world.size)
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for _, p in named if p.grad is not None])))
        if how.get("clip", 1.0):
            torch.nn.utils.clip_grad_norm_([p for _, p in named], how.get("clip", 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return start, {n: p.detach().clone() for n, p in named}, norms, losses


def plain_losses(model: Any, batch: Batch) -> tuple[torch.Tensor, float]:
    """The loss of plain transformers with its load-balancing loss, and this part alone, times the trained tokens."""
    labels = torch.nn.functional.pad(batch.targets[:, :-1], (1, 0), value=IGNORE)
    out = model(batch.input_ids, attention_mask=batch.real_tokens().long(), labels=labels, output_router_logits=True)
    return out.loss * batch.tokens_trained, float(out.aux_loss) * model.router_aux_loss_coef * batch.tokens_trained


def trainer_bug(world: DistContext, args: dict[str, Any]) -> Any:
    """What the engine `hf_trainer` says of a bug that is planted into it, or None if it says nothing."""
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    try:
        train_with("hf_trainer", world, tokens, {"accum": 2}, Path(args["folder"]))
    except AllranksError as error:
        return {"said": str(error), "kind": type(error).__name__}
    return {"said": None, "kind": None}


def refused(world: DistContext, args: dict[str, Any]) -> Any:
    """What each (strategy, variant) says before anything is trained."""
    return [
        _said(name, options_of(name, FORMS[variant]), built(FORMS[variant]), world) for name, variant in args["pairs"]
    ]
