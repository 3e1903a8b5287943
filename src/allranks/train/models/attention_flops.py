"""Count the FLOPs of attention, which no parameter takes part in: products of queries with keys, and of weights with
values.

For a pair of a query and a key that it attends to, a head of width d takes 2 d FLOPs for the score (Q K^T) and 2 d for
the sum of the values (P V). Backward has two products for each of them: dQ = dS K and dK = dS^T Q; dP = dO V^T and dV =
P^T dO. That makes 12 d per pair and head, as in Chowdhery et al. 2022 (PaLM), appendix B, which however counts all
pairs of a sequence. Here a causal row of n tokens has n (n + 1) / 2.

Frozen weights do not change this where a trained weight lies below: the gradient passes through all four products.
Blocks below all trained weights have a forward pass only. (In the lowest block with trained weights some products may
be missing; they are counted.)
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from torch import nn

KINDS = {"full_attention", "sliding_attention"}
OTHER = ("relative_attention", "global_head_dim", "attention_types")
"""Keys of configs whose attention has more products, several head widths, or local layers not in ``layer_types``."""
_BLOCK = re.compile(r"(.*?\.\d+)\.")


class AttentionCost(msgspec.Struct, frozen=True, kw_only=True):
    """What attention takes. ``flops_per_pair``: FLOPs of all layers for a query and a key, forward and backward,
    without recomputation.

    ``window``: the smallest sliding window in tokens; None: none.
    """

    flops_per_pair: int
    window: int | None


def attention_cost(model: nn.Module) -> AttentionCost | None:
    """Return what attention of a transformers model takes; None if it is not known. Call before weights are sharded."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = [getattr(config, key, None) or 0 for key in ("num_attention_heads", "num_hidden_layers", "hidden_size")]
    kinds = getattr(config, "layer_types", None) or []
    if not all(isinstance(n, int) and n > 0 for n in sizes) or not KINDS.issuperset(kinds):
        return None
    heads, layers, hidden = sizes
    # the innermost modules whose class is called so, in order
    named = [n for n, m in model.named_modules() if type(m).__name__.endswith("Attention")]
    modules = [n for n in named if not any(other.startswith(f"{n}.") for other in named)]
    if len(modules) != layers or any(getattr(config, key, None) for key in OTHER):  # hybrid models, shared layers
        return None
    plain = getattr(config, "head_dim", None) or hidden // heads
    products = sum(2 * heads * (getattr(config, key, None) or plain) for key in ("qk_head_dim", "v_head_dim"))
    parameters = [(n, p.requires_grad) for n, p in model.named_parameters()]
    lowest = next((i for i, (_, trained) in enumerate(parameters) if trained), len(parameters))
    total = 0
    for module in modules:
        block = match[1] if (match := _BLOCK.match(f"{module}.")) else module
        end = max(i for i, (n, _) in enumerate(parameters) if n.startswith(f"{block}."))
        total += products * (3 if lowest <= end else 1)
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return AttentionCost(flops_per_pair=total, window=window if used and isinstance(window, int) else None)
