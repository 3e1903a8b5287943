"""Implement the strategies pytorch_zero2 and pytorch_zero3 with torch FSDP2.

Both use `fully_shard` per block and an optimizer on this rank's local tensors.

Adapters may stay unsharded (``adapters: ignored``): every rank holds all of them, their gradients are averaged by
one flat all-reduce per optimizer step, and saving them needs no collective. ``auto`` does so while they are small.

``offload: optimizer`` keeps moments and a copy of this rank's shard of the weights in host memory, and updates there:
in each step, gradients are copied to the host, new weights back. ``offload: all`` keeps the sharded weights there too
(FSDP2's own offloading): a block's shard is copied to the device whenever it is gathered.

``replicate: nodes`` is hybrid sharding (HSDP): weights are sharded over the ranks of each node and replicated between
nodes, so W below is the number of ranks of a node. Every micro-step reduces gradients within nodes; the last one of an
optimizer step also averages them between nodes, by an all-reduce of each rank's shards (T g / W bytes).

Below: P parameters, T of them trained, of g bytes each; A micro-steps; memory with fp32 AdamW.

``pytorch_zero2``: keeps gathered weights until the backward. Communication per micro-step: an all-gather per block
before its forward, a reduce-scatter per block in backward: about A (P + T) g (W-1)/W sent by each rank. Memory per
rank: (4P + 12T)/W bytes between steps, and up to the full weights between forward and backward. Predecessor
(``pytorch_zero1``): every rank keeps full gradients.

``pytorch_zero3``: frees a block's weights after its forward and gathers them again before its backward: about
A (2 P + T) g (W-1)/W. Memory per rank: (4P + 12T)/W bytes, and two or three gathered blocks. Predecessor
(``pytorch_zero2``): all weights are gathered between forward and backward.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from allranks.errors import SpecError
from allranks.spec.strategies.fsdp2 import keeps_adapters_whole
from allranks.train.models.adapters import is_adapted
from allranks.train.models.moe import routers_of
from allranks.train.models.precision import compute_dtype, keeps_own_dtype
from allranks.train.models.weight_loader import to_meta
from allranks.train.strategies.base import (
    LoopStrategy,
    MakeOptimizer,
    Sizes,
    Traffic,
    clip_and_update,
    forward_entry_points,
    host_copy,
    require_one_dtype,
    trained_parameters,
    transformer_blocks,
    wait_for_host_copies,
)
from allranks.train.strategies.gradient_sync import broadcast_from_first, gradient_of
from allranks.train.strategies.shards import StateRange, TensorShard, whole_states, whole_weights


def shard_routers_separately(
    blocks: Sequence[nn.Module], ignored: Set[nn.Parameter], *, mixed: bool
) -> list[nn.Module]:
    """Return routers to shard as separate units: trained in another dtype (float32) than their block, or `mixed`, where
    blocks are cast to a lower dtype for their forward pass and routers are not."""

    def dtypes(parameters: Iterable[nn.Parameter]) -> set[torch.dtype]:
        return {p.dtype for p in parameters if p.requires_grad and p not in ignored}

    separate = []
    for block in blocks:
        for router in routers_of(block).values():
            own = set(router.parameters())
            if dtypes(own) and (mixed or dtypes(own) != dtypes(set(block.parameters()) - own)):
                separate.append(router)
    return separate


def require_own_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise `SpecError` for weights shared between a block and a module outside: `fully_shard` would untie them."""
    paths = {module: name for name, module in model.named_modules()}
    inside = [f"{paths[block]}." for block in blocks]
    home: dict[nn.Parameter, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        block = next((path for path in inside if name.startswith(path)), "")
        if home.setdefault(p, block) != block:
            raise SpecError(
                f"{name} is shared between a block and a module outside of it: FSDP2 would untie it; use zero3 or "
                "pytorch_ddp"
            )


def zero_missing_gradients(unit: nn.Module) -> None:
    """Give every parameter of a unit a gradient, zeros if necessary: all FSDP2 ranks must reduce the same ones."""

    def add_nothing(module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        inner = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
        nested = {p for child in inner for p in child.parameters()}
        own = (p for p in module.parameters() if p.requires_grad and p not in nested)
        # one element is enough for autograd to give the whole parameter a gradient
        nothing = cast(torch.Tensor, sum(p.flatten()[0].float() * 0.0 for p in own))

        def add(value: Any) -> Any:
            differentiable = isinstance(value, torch.Tensor) and value.requires_grad
            return value + nothing.to(value.dtype) if differentiable else value

        return tree_map(add, output)

    unit.register_forward_hook(add_nothing, prepend=True)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor of a `DTensor`."""
    return cast(DTensor, tensor).to_local()


def shard_of(key: str, parameter: nn.Parameter, local: torch.Tensor) -> TensorShard:
    """Return the shard record of a parameter: its local rows are a range of the flattened tensor."""
    like = cast(DTensor, parameter.data)
    _, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    rest = like.numel() // max(like.shape[0], 1) if like.ndim else 1
    offset = offsets[0] * rest if like.ndim else 0
    return TensorShard(key, like.numel(), offset, local.detach().view(-1))


def padded_bytes(parameter: nn.Parameter, world: int, dtype: torch.dtype | None = None) -> int:
    """Return a parameter's bytes communicated in `dtype` (None: its own), all ranks padded to the largest chunk."""
    rows = parameter.shape[0] if parameter.ndim else 1
    rest = parameter.numel() // max(rows, 1)
    dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return -(-rows // world) * world * rest * dtype.itemsize


def _mixed_precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Gather weights in `compute`, reduce gradients in float32; inputs keep their dtype: autocast casts them."""
    if compute is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)


def average_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over the ranks with one flat all-reduce per dtype. Collective."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for p in parameters:
        by_dtype.setdefault(p.dtype, []).append(gradient_of(p))
    for gradients in by_dtype.values():
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=group)
        flat.div_(dist.get_world_size(group))
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


class FSDP2(LoopStrategy):
    """Shard with FSDP2: each block is a unit, and the root unit holds all other parameters."""

    replicated, forward_has_collectives = False, True
    claims_overlap, loads_in_parts = True, True
    reshard_after_forward: bool

    def __init__(self, find_unused_parameters: bool, adapters: str, offload: str, replicate: str) -> None:
        self._zeros, self._adapters, self._offload = find_unused_parameters, adapters, offload
        self._replicated = replicate == "nodes"  # the plan decides what auto means

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._group, self._clip_norm = model, group, clip_norm
        self._device = next(model.parameters()).device
        broadcast_from_first(model, group)
        blocks = transformer_blocks(model)
        require_own_weights(model, blocks)
        mesh = self._make_mesh()
        self._kept = trained_parameters(model) if self._keeps_whole(model) else []
        if self.weight_loader:
            self.weight_loader.whole(self._kept)
            to_meta(model)
        ignored = {p for _, p in self._kept}
        compute = compute_dtype(model)
        routers = shard_routers_separately(blocks, ignored, mixed=compute is not None)
        blocks = [*routers, *blocks]
        done, names = set(ignored), {p: n for n, p in model.named_parameters()}
        unit_text = "a unit (a block, or all parameters outside of blocks), whose gradients are reduced together"
        for unit in (*blocks, model):  # inner ones first, then the parameters outside of all units
            own = [(names[p], p) for p in unit.parameters() if p.requires_grad and p not in done]
            require_one_dtype(own, where=unit_text, who="FSDP2", others="zero3")
            done |= set(unit.parameters())
        offload = OffloadPolicy()
        if self._offload == "all":
            offload = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")
        placement: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
        for block in blocks:
            own = ignored & set(block.parameters())
            policy = MixedPrecisionPolicy() if block in routers else _mixed_precision(compute)
            fully_shard(
                block,
                reshard_after_forward=self.reshard_after_forward,
                ignored_params=own,
                mp_policy=policy,
                **placement,
            )
        # backward begins in the root: freed after forward, its weights would be gathered again at once
        root = fully_shard(
            model, reshard_after_forward=False, ignored_params=ignored, mp_policy=_mixed_precision(compute), **placement
        )
        if self.weight_loader:
            self.weight_loader.parts(model, torch.device("cpu") if self._offload == "all" else self._device)
        self._root = cast(FSDPModule, root)
        # the first forward may be a generation, which starts below the root; no block may become the root then
        self._root._get_fsdp_state()._lazy_init()
        if self._zeros and not self._kept:
            for unit in (*blocks, model):
                zero_missing_gradients(unit)
        for entrance in forward_entry_points(model)[1:]:  # generation starts below the loss
            entrance.register_forward_pre_hook(lambda module, args: self._root.unshard())
        self._named = [] if self._kept else trained_parameters(model)
        copied = self._offload == "optimizer"
        self._local = [
            (n, nn.Parameter(host_copy(local_of(p.data)) if copied else local_of(p.data))) for n, p in self._named
        ]
        self.optimizer = make_optimizer([*self._local, *self._kept])
        if self._adapters == "auto" and is_adapted(getattr(model, "model", model)):
            whole = "whole on every rank, gradients averaged by one all-reduce per step"
            chosen = whole if self._kept else "sharded with the rest"
            self.remarks = (f"adapters: {chosen} (strategy.adapters: auto)",)

    def _make_mesh(self) -> DeviceMesh:
        """Return the mesh of ranks, and set over how many ranks a tensor is sharded, and in which group. Collective.
        Raise `SpecError` if nodes have different numbers of ranks."""
        world = dist.get_world_size(self._group)
        if not self._replicated:
            self._shards, self._shard_group, self._copy, self._copies = world, self._group, 0, 1
            return DeviceMesh.from_group(self._group, self._device.type)
        self._shards = int(os.environ["LOCAL_WORLD_SIZE"])
        if world % self._shards:
            raise SpecError(
                f"strategy.replicate: nodes needs nodes with equally many ranks, and {world} ranks are not a multiple "
                f"of {self._shards}"
            )
        self._copies = world // self._shards
        # init_device_mesh would give its groups the default timeout instead of cluster.timeout_s
        timeout = self._group._get_backend(self._device).options._timeout  # type: ignore[attr-defined]
        ranks = torch.arange(world).view(self._copies, self._shards)
        groups: list[Any] = [
            dist.new_subgroups_by_enumeration(lists.tolist(), timeout=timeout)[0] for lists in (ranks.t(), ranks)
        ]
        names = ("replicate", "shard")
        mesh = DeviceMesh.from_group(groups, self._device.type, mesh=ranks, mesh_dim_names=names)
        self._shard_group, self._copy = mesh.get_group("shard"), mesh.get_local_rank("replicate")
        return mesh

    def _keeps_whole(self, model: nn.Module) -> bool:
        if not is_adapted(model) and not is_adapted(getattr(model, "model", model)):
            if self._adapters == "ignored":
                raise SpecError("strategy.adapters: ignored keeps adapters on every rank, but this model has none")
            return False
        kept = keeps_adapters_whole(
            adapters=self._adapters,
            offload=self._offload,
            trained_bytes=sum(p.numel() * p.element_size() for _, p in trained_parameters(model)),
            frozen_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad),
            shards=self._shards,
        )
        if kept and self._offload == "optimizer":
            raise SpecError(
                "strategy.offload: optimizer has nothing to keep in host memory with strategy.adapters: ignored, which "
                "leaves adapters and their moments on every rank's device; set adapters: sharded, or offload: all for "
                "the frozen weights"
            )
        return kept

    def _reshard(self) -> None:
        """Free gathered weights: after an evaluation, no backward has freed them."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def update_times_comparable(self) -> bool:
        """False with sharded gradients: functional collectives, which do not call `Work.wait`, compute their norm."""
        return not self._named

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._root.set_requires_all_reduce(False)  # with copies on nodes: reduce gradients within nodes only
        try:
            yield
        finally:
            self._root.set_requires_all_reduce(True)

    def step(self) -> torch.Tensor:
        self._reshard()
        for (_, parameter), (_, local) in zip(self._named, self._local, strict=True):
            gradient = None if parameter.grad is None else local_of(parameter.grad)
            local.grad = host_copy(gradient) if gradient is not None and gradient.device != local.device else gradient
            parameter.grad = None
        if self._kept:
            kept = [p for _, p in self._kept]
            average_gradients(kept, self._group)
            return clip_and_update(self.optimizer, kept, self._clip_norm)
        own = [local for _, local in self._local]
        norm = clip_and_update(self.optimizer, own, self._clip_norm, self._shard_group, self._device)
        if self._offload == "optimizer":
            for there, local in self._with_updated():
                there.copy_(local.data, non_blocking=True)
        return norm

    def _with_updated(self) -> list[tuple[torch.Tensor, nn.Parameter]]:
        """Return this rank's shard of each weight and the tensor updated, another with ``offload: optimizer``."""
        return [(local_of(p.data), local) for (_, p), (_, local) in zip(self._named, self._local, strict=True)]

    def finish_loading(self) -> None:
        if self._offload == "optimizer":
            for there, local in self._with_updated():
                local.data.copy_(there, non_blocking=True)
            wait_for_host_copies(self._device)

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        kept, world = {p for _, p in self._kept}, self._shards
        compute, own_dtype = compute_dtype(self.module), keeps_own_dtype(self.module)

        def gathered(p: nn.Parameter) -> int:
            return padded_bytes(p, world, p.dtype if p in own_dtype else compute)

        every = sum(gathered(p) for p in self.module.parameters() if p not in kept)
        blocks = [p for block in transformer_blocks(self.module) for p in block.parameters() if p not in kept]
        in_blocks = sum(gathered(p) for p in blocks)
        again = [Traffic("all_gather", "backward", None, in_blocks * accum)] if self.reshard_after_forward else []
        gathers = [Traffic("all_gather", "forward", None, every * accum), *again]
        if self._kept:
            dtypes = {p.dtype for p in kept}
            return [*gathers, Traffic("all_reduce", "step", len(dtypes), sizes.trained_bytes)]
        gradients = sum(padded_bytes(p, world) for _, p in self._named)
        between = [Traffic("all_reduce", "backward", None, gradients // world)] if self._copies > 1 else []
        return [
            *gathers,
            Traffic("reduce_scatter", "backward", None, gradients * accum),
            *between,
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

    def weight_shards(self) -> list[TensorShard]:
        self._reshard()  # gathered weights would be outdated after shards are read
        own = [
            replace(shard_of(f"model/{name}", p, local_of(p.data)), copy=self._copy, copies=self._copies)
            for name, p in self._named
        ]
        return [*own, *whole_weights([*self._kept, *self.module.named_buffers()])]

    def state_ranges(self) -> list[StateRange]:
        own = []
        for (name, p), (_, local) in zip(self._named, self._local, strict=True):
            part = shard_of(name, p, local)
            held = StateRange(self.optimizer, local, 0, part.tensor.numel(), name, part.numel, part.offset)
            own.append(replace(held, copy=self._copy, copies=self._copies))
        return [*own, *whole_states(self._kept, self.optimizer, everywhere=True)]

    def _whole(self, local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Gather a tensor sharded like this parameter; host shards are copied through the device. Collective."""
        like = cast(DTensor, parameter.data)
        part = local.to(self._device)
        made = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return made.full_tensor()


class PyTorchZero2(FSDP2):
    """Use `fully_shard` with reshard_after_forward=False."""

    reshard_after_forward = False


class PyTorchZero3(FSDP2):
    """Use `fully_shard` with reshard_after_forward=True."""

    reshard_after_forward = True
