"""Which parameters of a model are gathered together: one unit a transformer block, and one for the rest."""

from __future__ import annotations

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks in the order in which they run: the children of its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks_of(child)
    return found


def entrances(model: nn.Module) -> list[nn.Module]:
    """Modules through which a forward may begin: the loss, the model, and what generation calls beneath an adapter."""
    inner = getattr(model, "model", model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # type: ignore[operator]
    return list(dict.fromkeys([model, inner, base]))
