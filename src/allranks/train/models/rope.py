"""Give each row the rotary frequencies of its own length, where they depend on it (LongRoPE as in Phi-3, dynamic NTK).

transformers takes the largest position of the whole batch, padding included, and with dynamic NTK that of earlier
batches. So a row would be trained with other frequencies than those with which it is evaluated, or used alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from allranks.train.patches import replace_forward

Rotary = tuple[torch.Tensor, ...]


def use_row_lengths(model: nn.Module) -> bool:
    """Let the rotary embeddings of a model look at each row alone; return whether any of them depends on the length."""
    changed = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        each = kinds.values() if isinstance(kinds, dict) else [kinds]  # by the type of layer
        if not hasattr(module, "original_max_seq_len") or not any(map(_depends, each)):
            continue
        changed = True
        if not isinstance(module.forward, partial):
            replace_forward(module, partial(_forward, module, module.forward))
    return changed


def _depends(kind: Any) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def row_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return for each token of (..., L) its row's largest position plus 1; rows begin where positions do not go on."""
    rows = (position_ids.diff(prepend=position_ids[..., :1] - 1) != 1).cumsum(-1)
    return torch.zeros_like(position_ids).scatter_reduce_(-1, rows, position_ids, "amax").gather(-1, rows) + 1


def _forward(
    module: Any,
    plain: Callable[..., Rotary],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Rotary:
    more = {} if layer_type is None else {"layer_type": layer_type}
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if not _depends(kind):
        return plain(x, position_ids, **more)
    lengths = row_lengths(position_ids)
    if kind == "longrope":
        parameters = module.config.rope_parameters
        limit = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
        short, long = plain(x, position_ids.clamp(max=limit - 1), **more), plain(x, position_ids, **more)
        return _merged(lengths > limit, long, short)
    prefix, limit = "" if layer_type is None else f"{layer_type}_", module.original_max_seq_len
    lengths = lengths.clamp(min=limit)
    out: Rotary | None = None
    for length in lengths.unique().tolist():
        if length == limit:  # as in a new model
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").to(x.device))
        setattr(module, f"{prefix}max_seq_len_cached", limit if length == limit else 0)  # 0: computed anew
        part = plain(x, position_ids.clamp(max=length - 1), **more)
        out = part if out is None else _merged(lengths == length, part, out)
    assert out is not None
    return out


def _merged(where: torch.Tensor, some: Rotary, others: Rotary) -> Rotary:
    return tuple(torch.where(where.unsqueeze(-1), a, b) for a, b in zip(some, others, strict=True))
