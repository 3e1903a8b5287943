"""Find where DeepSpeed keeps each parameter's weights and optimizer state, for checkpoints.

State is stored by parameter name and range, as for all other strategies, so that any world size can read it. In every stage
the optimizer updates a float32 copy of this rank's part of the weights, also for float32 models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.shards import StateRange, TensorShard


def partition_tensors(zero: Any) -> list[torch.Tensor]:
    """Return this rank's partitions, one per group: the tensors that the inner optimizer updates."""
    stage3 = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(stage3 if stage3 is not None else zero.single_partition_of_fp32_groups)


def counts_in_tensors(zero: Any) -> bool:
    """Torch's optimizers keep the step in a tensor, DeepSpeed's own in a number."""
    return type(zero.optimizer).__module__.startswith("torch.")


Named = Sequence[tuple[str, nn.Parameter]]


def fragment_ranges(zero: Any, named: Named) -> list[StateRange]:
    """Return ranges for stages 1 and 2: a group's parameters are concatenated and split evenly, with padding at the end."""
    names, out = {p: name for name, p in named}, []
    flat: Any
    for flat, group in zip(partition_tensors(zero), zero.bit16_groups, strict=True):
        own = [(p, p._hp_mapping) for p in group if p._hp_mapping is not None]
        for p, at in own:
            inner, outer = at.hp_fragment_address, at.lp_fragment_address
            out.append(
                StateRange(
                    zero.optimizer, flat, inner.start, inner.numel, names[p], p.numel(), outer.start, copy_of=p.dtype
                )
            )
        if not own:  # only padding: its state must exist, but holds no values
            p = group[-1]
            out.append(StateRange(zero.optimizer, flat, 0, 0, names[p], p.numel(), p.numel(), copy_of=p.dtype))
    return out


def partition_ranges(zero: Any, named: Named) -> list[StateRange]:
    """Return ranges for stage 3: each parameter is split evenly, with padding at its end; a group's parts are concatenated."""
    out = []
    for name, p in named:
        at, start, _ = zero.grad_position[zero.get_param_id(p)]
        offset, length = _own(p)
        out.append(
            StateRange(
                zero.optimizer, partition_tensors(zero)[at], start, length, name, _numel(p), offset, copy_of=p.dtype
            )
        )
    return out


def partitions(named: Named) -> list[TensorShard]:
    """Return this rank's parts of the weights in stage 3."""
    out = []
    for name, p in named:
        offset, length = _own(p)
        part: Any = p.ds_tensor  # type: ignore[attr-defined]
        out.append(TensorShard(f"model/{name}", _numel(p), offset, part.detach().view(-1)[:length]))
    return out


def renew_copies(weights: Sequence[TensorShard], ranges: Sequence[StateRange]) -> None:
    """Copy weights that were read into the tensors that the optimizers update, except master weights, which were read, too."""
    by_key = {shard.key: shard for shard in weights}
    for r in ranges:
        shard = by_key[f"model/{r.name}"]
        low = r.offset - shard.offset
        weight, copy = shard.tensor[low : low + r.length], r.of(r.parameter)
        copy.copy_(torch.where(copy.to(weight.dtype) == weight, copy, weight.to(copy.dtype)) if r.is_master else weight)


def plain_numbers(zero: Any) -> None:
    """Convert steps that were read as tensors to integers if the optimizer uses integers (DeepSpeed's own do)."""
    if counts_in_tensors(zero):
        return
    for flat in partition_tensors(zero):
        state = zero.optimizer.state[flat]
        state.update({k: int(v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim == 0})


def _own(p: Any) -> tuple[int, int]:
    """Return where this rank's part of a parameter begins, and its number of elements without padding."""
    part, numel = p.ds_tensor.numel(), _numel(p)
    low = min(dist.get_rank(p.ds_process_group) * part, numel)
    return low, min(part, numel - low)


def _numel(p: Any) -> int:
    return int(p.ds_numel)
