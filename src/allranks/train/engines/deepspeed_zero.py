"""Implement the strategies deepspeed_zero1, deepspeed_zero2 and deepspeed_zero3.

Below: P parameters, T of them trained, of g bytes each; A micro-steps; W ranks; memory per rank with float32 AdamW.

``deepspeed_zero1``: sharded optimizer state. Communication per step: all-reduces of buckets after the last micro-step's
backward (T g bytes), an all-reduce of 4 bytes per parameter group for the gradient norm, an all-gather of the updated
weights per group (T g). Memory: 4P + 4T + 12T/W bytes; at the update itself 4P + 16T/W, because DeepSpeed updates a
copy of its part of the weights (4T/W), also in float32, and copies it back. Predecessor (``zero1``): the same without
that copy. DeepSpeed adds its JSON configuration and offloading.

``deepspeed_zero2``: sharded gradients, too. All-reduces of buckets after each micro-step's backward (A T g bytes;
DeepSpeed all-reduces a bucket of which several ranks own parts, the paper uses a reduce-scatter), then as above.
Memory: 4P + 16T/W bytes between backward and update, and a bucket of gradients. Predecessor (``deepspeed_zero1``): full
gradients until the last micro-step.

``deepspeed_zero3``: sharded weights, too. Per micro-step all-gathers of each module's weights before its forward and,
unless they are still gathered, before its backward (P g bytes each), reduce-scatters after backward (T g); per step an
all-reduce of 8 bytes per parameter group. Tensors below ``stage3_param_persistence_threshold`` (100,000 elements) are
not sharded and are gathered once per step; weights gathered in forward are kept until backward while fewer than
``stage3_max_live_parameters`` (10^9) are gathered. Memory: (4P + 16T)/W bytes, and the gathered weights of those two
limits. With LoRA, the weights of a block are gathered together, so that its layers can be computed together
(`train.models.lora`). Predecessor (``deepspeed_zero2``): full weights on every rank.
"""

from __future__ import annotations

from collections.abc import Set
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from allranks.errors import RunFailed
from allranks.spec.strategies.deepspeed_zero import MAX_LIVE_ELEMENTS
from allranks.train.engines.deepspeed_engine import (
    DeepSpeedReplicated,
    DeepSpeedZero,
    data_parallel_mpu,
    partition_ranges,
    partitions,
)
from allranks.train.strategies.base import MakeOptimizer, Sizes, Traffic, transformer_blocks
from allranks.train.strategies.shards import StateRange, TensorShard, whole_weights


class DeepSpeedZero1(DeepSpeedReplicated):
    """Reduce gradients once per optimizer step."""

    stage = 1
    reduces_each_micro_step = False


class DeepSpeedZero2(DeepSpeedReplicated):
    """Reduce gradients in each micro-step; each rank keeps its part."""

    stage = 2
    reduces_each_micro_step = True


class DeepSpeedZero3(DeepSpeedZero):
    """Shard the model, except small tensors."""

    stage = 3
    replicated, forward_has_collectives = False, True
    claims_overlap, loads_in_parts = True, True
    warmup = (
        "always"  # DeepSpeed records the order of modules in the first pass and compares it between ranks in the second
    )

    def _initialize(self, make_optimizer: MakeOptimizer) -> tuple[Any, Any]:
        blocks = [] if self._zeros else [b for b in transformer_blocks(self._model) if fused_layers(b)]
        for block in blocks:
            gather_together(block, self._deepspeed)
        within = {module for block in blocks for module in block.modules()}
        made = super()._initialize(make_optimizer)
        self._register_adapters_of_experts(within)
        linear = [m for m in fused_layers(self._model) if isinstance(m.base_layer, torch.nn.Linear)]
        if left := [layer for layer in linear if layer not in within]:
            why = "strategy.find_unused_parameters needs" if self._zeros else "outside of blocks DeepSpeed has"
            self.remarks = (
                f"adapters: {len(left)} layers use PEFT's forward, because {why} hooks of their inner layers",
            )
        return made

    def _register_adapters_of_experts(self, gathered: Set[torch.nn.Module]) -> None:
        """Register what PEFT's adapters of expert weights read outside of the modules that own it.

        DeepSpeed finds such parameters itself only in a forward of its engine, and an evaluation before the first step
        calls the model.

        Args:
            gathered: modules whose weights are gathered with their block.
        """
        for module in self._model.modules():
            if type(module).__name__ == "ParamWrapper" and module not in gathered:
                wrapper: Any = module
                for read in (*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters(), wrapper.get_param()):
                    self._deepspeed.zero.register_external_parameter(wrapper, read)

    def _take_weights(self) -> None:
        """Load and shard the weights one at a time, as DeepSpeed does with a loaded model."""
        load = self.weight_loader
        if load is None:
            return
        zero: Any = import_module("deepspeed.runtime.zero")
        self._deepspeed.init_distributed(dist_init_required=False, verbose=False)  # uses the existing process group
        cutter = zero.Init(
            data_parallel_group=self._group, mpu=data_parallel_mpu(self._group), config_dict_or_path=self._config
        )
        world, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        for name, p in self._model.named_parameters():
            if not load.waits(name):
                continue  # adapters: already loaded, sharded with the rest
            size = -(-p.numel() // world)
            low, high = (min(r * size, p.numel()) for r in (rank, rank + 1))
            load.flat([(name, p)], [(0, p.numel())], low, high, needs_whole="DeepSpeed divides full weights")
            cutter._convert_to_deepspeed_param(p)
            p.partition()  # type: ignore[attr-defined]

    def extra_weights(self) -> list[torch.Tensor]:
        return [*super().extra_weights(), *(p.ds_tensor for p in self._model.parameters())]  # type: ignore

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        whole = {p.ds_id for p in self._zero.persistent_parameters}
        each = {p: -(-p.ds_numel // world) * world * p.element_size() for p in self._model.parameters()}  # type: ignore
        once = [p for p in each if p.ds_id not in whole]  # type: ignore[attr-defined]
        zero = self._config["zero_optimization"]
        limit = min(
            zero.get("stage3_max_live_parameters", MAX_LIVE_ELEMENTS),
            zero.get("stage3_max_reuse_distance", MAX_LIVE_ELEMENTS),
        )
        freed = sum(p.ds_numel for p in once) > limit  # type: ignore[attr-defined]
        # a tied weight is gathered for each of its modules if it is freed after the first one
        used = [p for m in self._model.modules() for p in m.parameters(recurse=False) if p in set(once)]
        embedding: Any = getattr(self._model, "model", self._model)
        idle = embedding.get_input_embeddings().weight  # if it is frozen, it has no backward
        idle = None if idle.requires_grad else idle
        expected = [
            Traffic("all_gather", "forward", None, accum * sum(each[p] for p in (used if freed else once))),
            Traffic("all_gather", "backward", None, accum * sum(each[p] for p in used if p is not idle) * freed),
            Traffic("all_gather", "step", None, sum(s for p, s in each.items() if p.ds_id in whole)),  # type: ignore
            Traffic("reduce_scatter", "after_backward", None, accum * sum(each[p] for _, p in self._named)),
        ]
        groups = len(self._inner.param_groups)
        return [t for t in expected if t.bytes] + [Traffic("all_reduce", "step", groups, 8 * groups)]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        gathered: Any = import_module("deepspeed.runtime.zero").GatheredParameters
        first, whole = dist.get_rank(self._group) == 0, {}
        for name, p in self._model.named_parameters():
            if p.requires_grad or not trained_only:
                with gathered([p]):
                    if first:
                        whole[name] = p.detach().to("cpu", copy=True)
        return whole

    def weight_shards(self) -> list[TensorShard]:
        return [*partitions(self._named), *whole_weights(self._model.named_buffers())]

    def state_ranges(self) -> list[StateRange]:
        return partition_ranges(self._zero, self._named)

    def finish_loading(self) -> None:
        super().finish_loading()
        for _, p in self._named:
            p.partition(has_been_updated=False)  # type: ignore[attr-defined] - gathered weights are outdated
        if kept := self._zero.persistent_parameters:
            kept[0].all_gather(kept)


def fused_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers whose LoRA `train.models.lora` computes where it can."""
    replaced = [m for m in module.modules() if "forward" in vars(m)]
    return [m for m in replaced if isinstance(getattr(m, "lora_A", None), torch.nn.ModuleDict)]


def gather_together(block: torch.nn.Module, deepspeed: Any) -> None:
    """Let DeepSpeed gather the weights of a block when the block is called, and free them after it (a "leaf module" of
    stage 3).

    DeepSpeed gathers weights in hooks of the module that owns them. A product for several layers reads weights of
    layers that are not called yet, and hooks of inner layers that never run would be needed for it.

    DeepSpeed reduces the gradients of a leaf module in a backward hook, which torch calls when the gradient of the
    module's first input is there. Without such a gradient (the first block over frozen embeddings) torch would call it
    before the block's own backward, and gradients of that step would be lost: the input of a block always gets one.
    """
    deepspeed.utils.set_z3_leaf_modules(block, [type(block)])
    block.register_forward_pre_hook(_differentiate_input)


def _differentiate_input(block: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not torch.is_grad_enabled():
        return None
    if not args or not isinstance(args[0], torch.Tensor):
        raise RunFailed(
            f"{type(block).__name__} gets its input by name: DeepSpeed would reduce its gradients before they are "
            "computed; set strategy.find_unused_parameters: true, which gathers the weights of each layer separately, "
            "or use zero3"
        )
    return None if args[0].requires_grad else (args[0].detach().requires_grad_(), *args[1:])
