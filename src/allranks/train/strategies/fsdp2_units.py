"""What `fully_shard` can take as one unit, and what is refused before it would spoil a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from allranks.errors import SpecError
from allranks.train.moe import routers_of


def routers_apart(blocks: Sequence[nn.Module], ignored: Set[nn.Parameter]) -> list[nn.Module]:
    """Routers that are trained in another dtype (float32) than the rest of their block: they become units of their own."""

    def dtypes(parameters: Iterable[nn.Parameter]) -> set[torch.dtype]:
        return {p.dtype for p in parameters if p.requires_grad and p not in ignored}

    found = []
    for block in blocks:
        for router in routers_of(block).values():
            own = set(router.parameters())
            if dtypes(own) and dtypes(own) != dtypes(set(block.parameters()) - own):
                found.append(router)
    return found


def require_one_dtype_in_each(model: nn.Module, units: Sequence[nn.Module], ignored: Set[nn.Parameter]) -> None:
    """`require_one_dtype` for each unit, inner ones first, and for what is in none of them."""
    done = set(ignored)
    for unit in (*units, model):
        require_one_dtype(model, [p for p in unit.parameters() if p not in done])
        done |= set(unit.parameters())


def require_one_dtype(model: nn.Module, unit: Sequence[nn.Parameter]) -> None:
    """Gradients of a unit travel in one tensor.

    Raises:
        SpecError: names the parameter whose dtype is another one.
    """
    names = {p: n for n, p in model.named_parameters()}
    ours = [p for p in unit if p.requires_grad]
    for p in ours:
        if p.dtype != ours[0].dtype:
            raise SpecError(
                f"{names[p]} is {p.dtype}, {names[ours[0]]} beside it {ours[0].dtype}: FSDP2 reduces the gradients of a block, and of "
                "what is in no block, together and needs one dtype; set model.dtype so that base and adapters agree, or take zero3"
            )


def require_own_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """`fully_shard` of one block would replace its weight and leave another block's with the old one: no longer tied.

    Raises:
        SpecError: names a parameter that a block shares with what is outside it.
    """
    paths = {module: name for name, module in model.named_modules()}
    inside = [f"{paths[block]}." for block in blocks]
    home: dict[nn.Parameter, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        block = next((path for path in inside if name.startswith(path)), "")
        if home.setdefault(p, block) != block:
            raise SpecError(
                f"{name} is shared between a block and what is outside it: FSDP2 would untie it; take zero3 or pytorch_ddp"
            )


def reach_all(unit: nn.Module) -> None:
    """Give every parameter of a unit a gradient, of zeros if need be: FSDP2's ranks must all reduce the same ones."""

    def add_nothing(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        nested = {
            id(p)
            for child in module.modules()
            if child is not module and isinstance(child, FSDPModule)
            for p in child.parameters()
        }
        own = [p for p in module.parameters() if p.requires_grad and id(p) not in nested]
        nothing = sum(p.flatten()[0].float() * 0.0 for p in own)
        return tree_map(lambda t: t + cast(torch.Tensor, nothing).to(t.dtype) if _differentiable(t) else t, output)

    unit.register_forward_hook(add_nothing, prepend=True)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
