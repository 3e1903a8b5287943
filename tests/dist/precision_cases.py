"""How far mixed precision is from float64, beside plain ``torch.autocast`` with float32 AdamW on the same batches."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from allranks.train.data.batches import IGNORE, collate
from allranks.train.distributed import DistContext
from allranks.train.loop import StepWatcher
from tests.dist.making import built, orders_of, prepared, run_steps, tokens_of, warm_up

LOOKS = (1, 20, 100)
LR = 3e-4
Weights = dict[str, torch.Tensor]


def precisions(world: DistContext, args: dict[str, Any]) -> Any:
    """For each (strategy, form): the relative L2 distance of the update to float64's, and that of plain autocast."""
    how_far = args.get("looks", LOOKS)
    tokens = tokens_of(Path(args["folder"]) / f"rank{world.rank}", 37)
    found, plain = [], {}
    for name, form in args["pairs"]:
        how = {**FORMS[form], "clip": 1.0, "looks": how_far}
        if world.is_first and form not in plain:
            exact, usual = (_reference(world, tokens, how, kind) for kind in (torch.float64, torch.bfloat16))
            plain[form] = exact, [distance(u, e) for u, e in zip(usual, exact, strict=True)]
        _plant(args.get("plant"))
        updates = _trained(name, world, tokens, how, Path(args["folder"]))
        if world.is_first:
            exact, limits = plain[form]
            found.append([name, form, [distance(u, e) for u, e in zip(updates, exact, strict=True)], limits])
    return found


FORMS: dict[str, dict[str, Any]] = {
    "whole": {"mixed": True, "accum": 2},
    "lora": {"lora": True, "base_dtype": "bfloat16", "mixed": True},
    "experts": {"moe": True, "mixed": True},
}
FORMS["lora_and_head"] = {**FORMS["lora"], "modules_to_save": ["embed_tokens", "lm_head"]}


def _plant(bug: str | None) -> None:
    """Change this process for good: the reference must have been computed before."""
    if bug == "stored_in_bfloat16":

        def round_weights(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.data.copy_(p.data.bfloat16())

        register_optimizer_step_post_hook(round_weights)
    else:
        assert bug is None, bug


# of the elements: their gradient is as small as its rounding, so that chance decides the sign of AdamW's first updates
CHANCE = 0.02


def distance(update: Weights, exact: Weights) -> float:
    """The relative L2 distance of all but the elements that are furthest away."""
    assert update.keys() == exact.keys()
    off = torch.cat([(update[n].double() - exact[n]).square().flatten() for n in exact]).sort().values
    return float(off[: len(off) - int(CHANCE * len(off))].sum() / sum(e.square().sum() for e in exact.values())) ** 0.5


def _trained(name: str, world: DistContext, tokens: Any, how: dict[str, Any], folder: Path) -> list[Weights]:
    strategy, _ = prepared(name, world, how, LR)
    start = {n: w.double() for n, w in strategy.weights(trained_only=True).items()}
    warm_up(strategy, world, tokens, how)
    looks = _Looks(strategy, start, how["looks"])
    run_steps(name, strategy, world, tokens, how, folder, how["looks"][-1], lr=LR, watcher=looks)
    return looks.updates


class _Looks(StepWatcher):
    """Takes the update of the weights after some steps; on every rank, because sharded weights are gathered."""

    def __init__(self, strategy: Any, start: Weights, looks: Sequence[int]) -> None:
        self._strategy, self._start, self._looks = strategy, start, looks
        self.updates: list[Weights] = []

    def step_ends(self, step: int) -> bool:
        if step + 1 in self._looks:
            now = self._strategy.weights(trained_only=True)
            self.updates.append({n: now[n].double() - w for n, w in self._start.items() if n in now})
        return step + 1 in self._looks


def _reference(world: DistContext, tokens: Any, how: dict[str, Any], kind: torch.dtype) -> list[Weights]:
    """Plain torch in one process: the loss, the sums over tokens, clipping and AdamW are written out here.

    The loss is scaled as DDP's mean over ranks needs it: a factor that is no power of 2 rounds otherwise.
    """
    module = copy.deepcopy(built({**how, "mixed": False, "base_dtype": "float32"}).model)
    if how.get("moe"):
        module.set_experts_implementation("eager")  # of plain products, which exist in float64 and which autocast knows
    _as_stored(module, how)
    if kind == torch.float64:
        module.double()
    else:
        for p in module.parameters():
            if how.get("lora") and not p.requires_grad:
                p.data = p.data.to(torch.bfloat16)
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    start = {f"model.{n}": p.detach().double().clone() for n, p in named}
    optimizer = torch.optim.AdamW([p for _, p in named], lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    orders, out = orders_of(world, tokens, how), []
    for step in range(how["looks"][-1]):
        total = int(tokens.trained[orders[0].global_batch(step)].sum())
        for parts in zip(*(order.micro_batches(step) for order in orders), strict=True):
            for rows in parts:
                batch = collate(tokens, rows, 0, None)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == torch.bfloat16):
                    logits = module(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
                logits = logits if kind == torch.float64 else logits.float()
                each = {"ignore_index": IGNORE, "reduction": "sum"}
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), **each)
                (loss * world.size / total).backward()
        for _, p in named:
            assert p.grad is not None
            p.grad.div_(world.size)
        torch.nn.utils.clip_grad_norm_([p for _, p in named], how["clip"])
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in how["looks"]:
            out.append({f"model.{n}": p.detach().double() - start[f"model.{n}"] for n, p in named})
    return out


def _as_stored(module: Any, how: dict[str, Any]) -> None:
    """A frozen base is stored in bfloat16 in every form that is compared."""
    for p in module.parameters():
        if how.get("lora") and not p.requires_grad:
            p.data = p.data.to(torch.bfloat16).float()
