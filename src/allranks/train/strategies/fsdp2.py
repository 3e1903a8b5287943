"""What both FSDP2 strategies do: `fully_shard` per block, and an optimizer on this rank's plain local tensors.

Adapters may stay out of the sharding (``adapters: ignored``): every rank holds them whole, their gradients are averaged by
one flat all-reduce an optimizer step, and saving them needs no collective. ``auto`` does so while that is small.

``offload: optimizer`` keeps moments in the host's memory and updates there: gradients and weights of this rank's part travel
to the host, new weights back, each step. ``offload: all`` keeps the sharded weights there too (FSDP2's own offloading): a
block's part travels to the device whenever it is gathered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from allranks.errors import SpecError
from allranks.train.adapters import is_adapted
from allranks.train.loading.filler import Filler
from allranks.train.shards import Shard, StateRange, whole_states, whole_weights
from allranks.train.strategies.common import clip_and_update, load_states_by_name, states_by_name, trained
from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.fsdp2_adapters import average_together, keeps_whole
from allranks.train.strategies.fsdp2_parts import local_of, padded_bytes, part_of, shard_of
from allranks.train.strategies.fsdp2_units import (
    reach_all,
    require_one_dtype_in_each,
    require_own_weights,
    routers_apart,
)
from allranks.train.strategies.gradients import broadcast_from_first
from allranks.train.strategies.traffic import Sizes, Traffic
from allranks.train.strategies.units import blocks_of, entrances


class FSDP2:
    """Blocks are units of their own; what is in no block belongs to the whole."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicated, lockstep, rehearse = False, True, False
    claims_overlap = True
    reshard_after_forward: bool
    remarks: tuple[str, ...] = ()
    filler: Filler | None = None  # gives the model its weights, after it is sharded; None: it has them

    def __init__(self, find_unused_parameters: bool, adapters: str, offload: str) -> None:
        self._zeros, self._adapters, self._offload = find_unused_parameters, adapters, offload

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._group, self._clip_norm = model, group, clip_norm
        self._device = next(model.parameters()).device
        broadcast_from_first(model, group)
        blocks = blocks_of(model)
        require_own_weights(model, blocks)
        self._kept = trained(model) if self._keeps_whole(model, dist.get_world_size(group)) else []
        if self.filler:
            self.filler.whole(self._kept)
            self.filler.prepare_parts(model)
        ignored = {p for _, p in self._kept}
        blocks = [*routers_apart(blocks, ignored), *blocks]
        require_one_dtype_in_each(model, blocks, ignored)
        mesh = DeviceMesh.from_group(group, self._device.type)
        how: dict[str, Any] = {"mesh": mesh, "offload_policy": self._policy()}
        for block in blocks:
            own = ignored & set(block.parameters())
            fully_shard(block, reshard_after_forward=self.reshard_after_forward, ignored_params=own, **how)
        root = fully_shard(model, reshard_after_forward=False, ignored_params=ignored, **how)
        if self.filler:
            self.filler.parts(model, torch.device("cpu") if self._offload == "all" else self._device)
        self._root = cast(FSDPModule, root)
        # evaluation may be the first forward, and begins beneath the root; a block must not take itself for the root then
        self._root._get_fsdp_state()._lazy_init()
        if self._zeros and not self._kept:
            for unit in (*blocks, model):
                reach_all(unit)
        for entrance in entrances(model)[1:]:  # evaluation and generation begin beneath the loss
            entrance.register_forward_pre_hook(self._enter)
        self._named = [] if self._kept else trained(model)
        copied = self._offload == "optimizer"
        self._local = [
            (n, nn.Parameter(local_of(p.data).to("cpu", copy=True) if copied else local_of(p.data)))
            for n, p in self._named
        ]
        self.optimizer = make_optimizer([*self._local, *self._kept])
        if self._adapters == "auto" and is_adapted(getattr(model, "model", model)):
            chosen = "whole on every rank, averaged by one all-reduce a step" if self._kept else "sharded with the rest"
            self.remarks = (f"adapters: {chosen} (strategy.adapters: auto)",)

    def _keeps_whole(self, model: nn.Module, world: int) -> bool:
        if self._offload == "optimizer" and self._adapters == "auto":
            return False  # who wants moments on the host wants little on the device
        kept = keeps_whole(model, self._adapters, world)
        if kept and self._offload == "optimizer":
            raise SpecError(
                "strategy.offload: optimizer has nothing to keep on the host with strategy.adapters: ignored, which leaves adapters and "
                "their moments on every rank's device; set adapters: sharded, or offload: all for the frozen weights"
            )
        return kept

    def _policy(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self._device.type != "cpu") if self._offload == "all" else OffloadPolicy()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._root.unshard()

    def _reshard(self) -> None:
        """After an evaluation weights may still be whole, in blocks too: no backward has come to free them."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def accumulate(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> torch.Tensor:
        self._reshard()
        for (_, parameter), (_, local) in zip(self._named, self._local, strict=True):
            local.grad = None if parameter.grad is None else local_of(parameter.grad).to(local.device)
            parameter.grad = None
        if self._kept:
            kept = [p for _, p in self._kept]
            average_together(kept, self._group)
            return clip_and_update(self.optimizer, kept, self._clip_norm)
        own = [(local_of(p.data), local) for (_, p), (_, local) in zip(self._named, self._local, strict=True)]
        if self._offload == "optimizer":
            for there, local in own:
                local.data.copy_(there)
        norm = clip_and_update(self.optimizer, [p for _, p in own], self._clip_norm, self._group, self._device)
        if self._offload == "optimizer":
            for there, local in own:
                there.copy_(local.data)
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        kept = {p for _, p in self._kept}
        every = sum(padded_bytes(p, world) for p in self.module.parameters() if p not in kept)
        blocks = [p for block in blocks_of(self.module) for p in block.parameters() if p not in kept]
        in_blocks = sum(padded_bytes(p, world) for p in blocks)
        again = [Traffic("all_gather", "backward", None, in_blocks * accum)] if self.reshard_after_forward else []
        gathers = [Traffic("all_gather", "forward", None, every * accum), *again]
        if self._kept:
            dtypes = {p.dtype for p in kept}
            return [*gathers, Traffic("all_reduce", "step", len(dtypes), sizes.trained_bytes)]
        gradients = sum(padded_bytes(p, world) for _, p in self._named)
        return [
            *gathers,
            Traffic("reduce_scatter", "backward", None, gradients * accum),
            Traffic("all_reduce", "step", 1, 4),
        ]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        self._reshard()
        first = dist.get_rank(self._group) == 0
        whole = {}
        for name, p in self.module.named_parameters():
            if p.requires_grad or not trained_only:
                tensor = self._whole(local_of(p.data), p) if isinstance(p.data, DTensor) else p.data
                if first:
                    whole[name] = tensor.to("cpu", copy=True)
        return whole

    def weight_shards(self) -> list[Shard]:
        self._reshard()  # what is read into the parts must not leave older whole weights in use
        own = [shard_of(f"model/{name}", p, local_of(p.data)) for name, p in self._named]
        return [*own, *whole_weights([*self._kept, *self.module.named_buffers()])]

    def state_ranges(self) -> list[StateRange]:
        own = []
        for (name, p), (_, local) in zip(self._named, self._local, strict=True):
            part = shard_of(name, p, local)
            own.append(StateRange(self.optimizer, local, 0, part.tensor.numel(), name, part.numel, part.offset))
        return [*own, *whole_states(self._kept, self.optimizer, everywhere=True)]

    def _whole(self, local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """The whole of what lies like this parameter; parts on the host travel through the device. Every rank calls."""
        like = cast(DTensor, parameter.data)
        part = local.to(self._device)
        made = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return made.full_tensor()

    def state_dict(self) -> dict[str, Any]:
        first = dist.get_rank(self._group) == 0
        states: dict[str, Any] = states_by_name(self._kept, self.optimizer) if first else {}
        for (name, p), (_, local) in zip(self._named, self._local, strict=True):
            for key, value in self.optimizer.state.get(local, {}).items():
                whole = value if value.ndim == 0 else self._whole(value, p)
                if first:
                    states.setdefault(name, {})[key] = whole.cpu().clone()
        buffers = {n: b.to("cpu", copy=True) for n, b in self.module.named_buffers()}
        return {"model": self.weights(trained_only=True) | buffers, "optimizer": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reshard()
        buffers = dict(self.module.named_buffers())
        if odd := ({n for n, _ in [*self._named, *self._kept]} | buffers.keys()) ^ state["model"].keys():
            raise KeyError(f"state does not fit the model: {sorted(odd)[:3]}")
        for (name, p), (_, local) in zip(self._named, self._local, strict=True):
            local_of(p.data).copy_(part_of(state["model"][name], p))
            saved = state["optimizer"].get(name, {})
            if saved:
                self.optimizer.state[local] = {
                    k: v.to(local.device, copy=True) if v.ndim == 0 else part_of(v, p).to(local.device, copy=True)
                    for k, v in saved.items()
                }
        for name, p in self._kept:
            p.data.copy_(state["model"][name])
        load_states_by_name(self._kept, self.optimizer, state["optimizer"])
        for name, buffer in buffers.items():
            buffer.copy_(state["model"][name])
