"""Count the FLOPs of attention, which no parameter takes part in: products of queries with keys, and of weights with values.

For a pair of a query and a key that it attends to, a head of width d takes 2 d FLOPs for the score (Q K^T) and 2 d for the sum of the values
(P V). Backward has two products for each of them: dQ = dS K and dK = dS^T Q; dP = dO V^T and dV = P^T dO. That makes 12 d per pair and head, as in
Chowdhery et al. 2022 (PaLM), appendix B, which however counts all pairs of a sequence. Here a causal row of n tokens has n (n + 1) / 2.

Frozen weights do not change this where a trained weight lies below: the gradient passes through all four products. Only in the lowest
block with trained weights some may be missing, such as dK = dS^T Q if only the projection of queries has an adapter.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from torch import nn

OUTPUTS = {"o_proj", "out_proj", "out_lin", "c_proj", "dense", "wo"}  # after attention
NORMS_BEFORE = {"input_layernorm", "ln_1", "attn_norm", "attention_norm", "norm1"}  # in a block, before attention
FUSED = {"qkv_proj", "query_key_value", "wqkv", "c_attn", "qkv"}
KINDS = {"full_attention", "sliding_attention"}
OTHER = ("relative_attention", "global_head_dim", "attention_types")
"""Keys of configs whose attention has more products, heads of several widths, or local layers that ``layer_types`` does not tell."""
_BLOCK = re.compile(r"(.*?\.\d+)\.")


class AttentionCost(msgspec.Struct, frozen=True, kw_only=True):
    """What attention takes. ``flops_per_pair``: FLOPs of all layers for a query and a key, forward and backward, without recomputation.

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
    modules = _attention_modules(model)
    if len(modules) != layers or any(getattr(config, key, None) for key in OTHER):  # hybrid models, shared layers
        return None
    plain = getattr(config, "head_dim", None) or hidden // heads
    scores, values = (2 * heads * (getattr(config, key, None) or plain) for key in ("qk_head_dim", "v_head_dim"))
    total = 0
    for queries, keys, sums in _gradients(model, modules):
        total += scores * (1 + queries + keys) + values * (1 + (queries or keys) + sums)
    return AttentionCost(flops_per_pair=total, window=_window(config, kinds))


def _attention_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that compute attention, in order: the innermost ones whose class is called so."""
    names = [n for n, m in model.named_modules() if type(m).__name__.endswith("Attention")]
    return [n for n in names if not any(other.startswith(f"{n}.") for other in names)]


def _window(config: Any, kinds: list[str]) -> int | None:
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    used = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return window if used and isinstance(window, int) else None


def _gradients(model: nn.Module, modules: list[str]) -> list[tuple[bool, bool, bool]]:
    """Return for each attention module which of its queries, keys and values need a gradient."""
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    blocks = [match[1] if (match := _BLOCK.match(f"{name}.")) else name for name in modules]
    order = [n for n, _ in model.named_parameters()]
    start = next((i for i, n in enumerate(order) if n.startswith(f"{blocks[0]}.")), len(order)) if blocks else 0
    embeddings = set(order[:start])
    below = any(n in embeddings for n in trained)
    found: list[tuple[bool, bool, bool]] = []
    for module, block in zip(modules, blocks, strict=True):
        own = [n for n in trained if n.startswith(f"{block}.")]
        below = below or any(n.removeprefix(f"{block}.").split(".")[0] in NORMS_BEFORE for n in own)
        parts = [_parts(n.removeprefix(f"{module}.").split(".")[0]) for n in own if n.startswith(f"{module}.")]
        found.append((True, True, True) if below else tuple(any(p[i] for p in parts) for i in range(3)))  # type: ignore[arg-type]
        below = below or bool(own)
    return found


def _parts(projection: str) -> tuple[bool, bool, bool]:
    """Return whether the queries, keys and values depend on a submodule of attention. An unknown one counts for all."""
    name = projection.lower()
    if name in OUTPUTS:
        return False, False, False
    if name in FUSED or name[:1] not in ("q", "k", "v"):
        return True, True, True
    return name.startswith("q"), name.startswith("k"), name.startswith(("v", "kv"))
