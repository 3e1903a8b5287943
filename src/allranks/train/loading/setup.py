"""A strategy on a model, with its weights given on the way."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from allranks.train.loading.filler import Filler, Loaded
from allranks.train.proof import weights_digest
from allranks.train.strategies.contract import MakeOptimizer, Strategy


def set_up(
    strategy: Strategy,
    filler: Filler,
    module: nn.Module,
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    group: dist.ProcessGroup,
    clip_norm: float | None,
) -> tuple[bytes | None, Loaded]:
    """Call the strategy's `setup`. One with a ``filler`` asks for weights unit by unit, and keeps its part of each; the
    others get a model that has them all. Every rank calls.

    Args:
        module: what the strategy gets, around `model`, whose names digests have.

    Returns:
        The digest of the whole weights, where the strategy leaves no rank with them; and what loading did.
    """
    in_parts = hasattr(strategy, "filler")
    filler.begin(module, model, in_parts=in_parts)
    if in_parts:
        strategy.filler = filler  # type: ignore[attr-defined]
    else:
        filler.whole(module.named_parameters())
    whole = None if in_parts or strategy.replicated else weights_digest(model)
    strategy.setup(module, make_optimizer, group, clip_norm)
    parts, loaded = filler.finish()
    return parts if in_parts else whole, loaded
