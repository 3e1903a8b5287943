"""Where DeepSpeed's partitions lie in the parameters: what a rank writes of them, and reads again at another number of ranks.

In every stage an optimizer updates a float32 copy of this rank's part of the weights, in float32 models too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange
from allranks.train.strategies.deepspeed_state import counts_in_tensors, flats

Named = Sequence[tuple[str, nn.Parameter]]


def fragment_ranges(zero: Any, named: Named) -> list[StateRange]:
    """Stages 1 and 2: a group's parameters lie end to end and are cut into equal parts, with padding at the end."""
    names, out = {p: name for name, p in named}, []
    flat: Any
    for flat, group in zip(flats(zero), zero.bit16_groups, strict=True):
        own = [(p, p._hp_mapping) for p in group if p._hp_mapping is not None]
        for p, at in own:
            inner, outer = at.hp_fragment_address, at.lp_fragment_address
            out.append(
                StateRange(
                    zero.optimizer, flat, inner.start, inner.numel, names[p], p.numel(), outer.start, copy_of=p.dtype
                )
            )
        if not own:  # padding alone: its state holds nothing, but must be there
            p = group[-1]
            out.append(StateRange(zero.optimizer, flat, 0, 0, names[p], p.numel(), p.numel(), copy_of=p.dtype))
    return out


def partition_ranges(zero: Any, named: Named) -> list[StateRange]:
    """Stage 3: each parameter is cut into equal parts, with padding at its end; the parts of a group lie end to end."""
    out = []
    for name, p in named:
        at, start, _ = zero.grad_position[zero.get_param_id(p)]
        offset, length = _own(p)
        out.append(StateRange(zero.optimizer, flats(zero)[at], start, length, name, _numel(p), offset, copy_of=p.dtype))
    return out


def partitions(named: Named) -> list[Shard]:
    """Stage 3: this rank's parts of the weights."""
    out = []
    for name, p in named:
        offset, length = _own(p)
        part: Any = p.ds_tensor  # type: ignore[attr-defined]
        out.append(Shard(f"model/{name}", _numel(p), offset, part.detach().view(-1)[:length]))
    return out


def renew_copies(weights: Sequence[Shard], ranges: Sequence[StateRange]) -> None:
    """The weights were read: what the optimizers update becomes what they are, but for master weights that they are rounded from,
    which were read too."""
    by_key = {shard.key: shard for shard in weights}
    for r in ranges:
        shard = by_key[f"model/{r.name}"]
        low = r.offset - shard.offset
        weight, copy = shard.tensor[low : low + r.length], r.of(r.parameter)
        copy.copy_(torch.where(copy.to(weight.dtype) == weight, copy, weight.to(copy.dtype)) if r.is_master else weight)


def plain_numbers(zero: Any) -> None:
    """Steps that were read as tensors become whole numbers where the optimizer counts so (DeepSpeed's own do)."""
    if counts_in_tensors(zero):
        return
    for flat in flats(zero):
        state = zero.optimizer.state[flat]
        state.update({k: int(v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim == 0})


def _own(p: Any) -> tuple[int, int]:
    """Where this rank's part of a parameter begins, and how many of its elements are not padding."""
    part, numel = p.ds_tensor.numel(), _numel(p)
    low = min(dist.get_rank(p.ds_process_group) * part, numel)
    return low, min(part, numel - low)


def _numel(p: Any) -> int:
    return int(p.ds_numel)
