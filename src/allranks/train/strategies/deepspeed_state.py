"""Find where DeepSpeed keeps each parameter's weights and optimizer state, for checkpoints.

State is stored by parameter name and range, as for all other strategies, so that any world size can read it. In every stage
the optimizer updates a float32 copy of this rank's part of the weights, also for float32 models.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.strategies.shards import MASTER, StateRange, TensorShard


def optimizer_state(
    zero: Any, named: Sequence[tuple[str, nn.Parameter]], group: dist.ProcessGroup
) -> dict[str, dict[str, torch.Tensor]]:
    """``{name: {"exp_avg": ..., "step": ...}}`` on the CPU of rank 0, ``{}`` elsewhere. Every rank calls.

    Where the model is not in float32, ``"master"`` holds the weights that are really updated.
    """
    whole: Any = import_module("deepspeed.utils")
    first, states = dist.get_rank(group) == 0, {}
    sample = _sample(zero)
    _link(zero)
    for name, p in named:
        found: dict[str, torch.Tensor] = {}
        for key, value in sample.items():
            if _is_per_element(value):
                found[key] = whole.safe_get_full_optimizer_state(p, key)
            else:
                found[key] = torch.as_tensor(value, dtype=torch.float32)
        if p.dtype != torch.float32:
            found[MASTER] = whole.safe_get_full_fp32_param(p)
        if first and found:
            states[name] = {k: v.detach().to("cpu", copy=True) for k, v in found.items()}
    return states


def load_optimizer_state(
    zero: Any, named: Sequence[tuple[str, nn.Parameter]], states: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Take back what `optimizer_state`, or another strategy, gave. The weights are loaded already."""
    moments = {n: {k: v for k, v in s.items() if k != MASTER} for n, s in states.items()}
    pattern = next((s for s in moments.values() if s), None)
    if pattern is not None:
        _make_room(zero, pattern)
    device = partition_tensors(zero)[0].device
    for name, p in named:
        for key, value in moments.get(name, {}).items():
            if value.ndim:
                _put(p, value.to(device, torch.float32), key)
        if MASTER in states.get(name, {}) and p.dtype != torch.float32:
            _put(p, states[name][MASTER].to(device), None)


def _put(p: Any, value: torch.Tensor, key: str | None) -> None:
    """A whole moment, or the whole master weight (no key), into this rank's part of it."""
    tell: Any = import_module("deepspeed.utils")
    if hasattr(p, "ds_tensor"):
        # DeepSpeed's own way from whole tensors fails where a parameter does not divide by the ranks: the last part is padded
        part, rank = p.ds_tensor.numel(), dist.get_rank(p.ds_process_group)
        padded = torch.nn.functional.pad(
            value.flatten(), (0, part * dist.get_world_size(p.ds_process_group) - value.numel())
        )
        value = padded[rank * part : (rank + 1) * part]
        tell.safe_set_local_optimizer_state(p, value, key) if key else tell.safe_set_local_fp32_param(p, value)
    elif key:
        tell.safe_set_full_optimizer_state(p, value, key)
    else:
        tell.safe_set_full_fp32_param(p, value)


def partition_tensors(zero: Any) -> list[torch.Tensor]:
    """Return this rank's partitions, one per group: the tensors that the inner optimizer updates."""
    stage3 = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(stage3 if stage3 is not None else zero.single_partition_of_fp32_groups)


def counts_in_tensors(zero: Any) -> bool:
    """Torch's optimizers keep the step in a tensor, DeepSpeed's own in a number."""
    return type(zero.optimizer).__module__.startswith("torch.")


def _sample(zero: Any) -> dict[str, Any]:
    """Return the state of one partition; all have the same keys and the same step."""
    states = zero.optimizer.state
    return next((states[flat] for flat in partition_tensors(zero) if states.get(flat)), {})


def _is_per_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _make_room(zero: Any, pattern: dict[str, torch.Tensor]) -> None:
    """State in every partition, of zeros, with the step that was saved. DeepSpeed itself makes it in the first update."""
    state = zero.optimizer.state
    for flat in partition_tensors(zero):
        for key, value in pattern.items():
            if value.ndim:
                room = state[flat].setdefault(key, torch.zeros_like(flat, requires_grad=False))
                room.zero_()
            elif counts_in_tensors(zero):
                state[flat][key] = value.to(flat.device, copy=True)
            else:
                state[flat][key] = int(value)
    _link(zero)


def _link(zero: Any) -> None:
    """Tell the parameters of stages 1 and 2 where their state is. DeepSpeed does so once, after the update of the first group,
    when the others have no state yet."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


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
