"""Implement the strategies zero1, zero2 and zero3: optimizer state, then gradients, then weights are sharded evenly
over ranks (ZeRO stages 1 to 3, Rajbhandari et al. 2020).

Below: P parameters, T of them trained, of g bytes each; A micro-steps; W ranks; memory with fp32 AdamW. Each strategy
also sends one float32 for the gradient norm per step. Bytes are those that each rank sends on a ring; without sharding
2 T g (W-1)/W.

``zero1``: an asynchronous all-reduce per bucket in the last backward (T g bytes in total), then an all-gather of the
new weights per bucket (T g bytes): 3 T g (W-1)/W. Memory per rank: 4P + 4T + 8T/W bytes; at two ranks and T = P 3/4 of
plain data parallelism. Predecessor (``bucket_ddp_async``): every rank keeps the same moments and makes the same update.
Parts have exactly equal size; they are not full parameters.

``zero2``: a reduce-scatter per bucket in the backward of every micro-step (A T g bytes per step), then an all-gather of
the new weights per bucket (T g bytes): (A + 1) T g (W-1)/W. Memory per rank: 4P + 12T/W bytes, and up to three buckets
of gradients in flight; at two ranks and T = P 5/8 of plain data parallelism. Predecessor (``zero1``): every rank
reduces full gradients, but uses only one part.

``zero3``: per micro-step an all-gather per unit before its forward and again before its backward (the unit of
parameters outside of blocks stays gathered in between), and a reduce-scatter per unit in backward: nearly A (2 P + T) g
(W-1)/W. The next unit's weights are gathered while one computes. Memory per rank: (4P + 12T)/W bytes, and two or three
gathered units; at two ranks and T = P 1/2 of plain data parallelism. All collectives are called in one order on all
ranks, whatever parameters a rank's batch uses, as NCCL requires. The order of gathering follows FSDP, Zhao et al. 2023.
Predecessor (``zero2``): all weights on all ranks. Gathering the full model before forward would not reduce peak memory:
weights must be gathered and freed block by block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from allranks.train.models.precision import compute_dtype, keeps_own_dtype
from allranks.train.strategies.base import (
    LoopStrategy,
    MakeOptimizer,
    Sizes,
    Traffic,
    clip_and_update,
    forward_entry_points,
    transformer_blocks,
)
from allranks.train.strategies.gradient_sync import (
    BucketAllReduce,
    GradientBucket,
    all_gather,
    broadcast_from_first,
    queue_after_backward,
    require_same_order,
    split_into_buckets,
)
from allranks.train.strategies.sharded_optimizer import (
    FlatParameter,
    GradientReduceScatter,
    ShardedOptimizer,
    flat_states,
    flat_weights,
    make_flat_parameters,
    optimizer_pieces,
)
from allranks.train.strategies.shards import StateRange, TensorShard, whole_weights


class Zero1(ShardedOptimizer):
    """Shard optimizer state; every rank holds all gradients and weights.

    `BucketAllReduce` averages the gradients in the last backward of a step; each rank then updates its part from the
    averages, and the parts are gathered.
    """

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._buckets = [GradientBucket([p for _, p in flat.named], dist.get_world_size(group)) for flat in self._flats]
        self._gradients = BucketAllReduce(self._buckets, group)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._gradients.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.finish()

    def step(self) -> torch.Tensor:
        self._gradients.wait()
        for flat, bucket in zip(self._flats, self._buckets, strict=True):
            flat.give_gradient(bucket.flat[flat.low : flat.high])
        norm = self._update()
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self._share_update()
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        whole = sum(flat.bytes for flat in self._flats)
        return [
            Traffic("all_reduce", "backward", len(self._flats), whole),
            Traffic("all_reduce", "step", 1, 4),
            Traffic("all_gather", "step", len(self._flats), whole),
        ]


class Zero2(ShardedOptimizer):
    """Shard optimizer state and gradients; every rank holds all weights."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        super().setup(model, make_optimizer, group, clip_norm)
        self._gradients = GradientReduceScatter(self._flats, group)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.finish()

    def step(self) -> torch.Tensor:
        self._gradients.give()
        norm = self._update()
        self._share_update()
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        whole = sum(flat.bytes for flat in self._flats)
        return [
            Traffic("reduce_scatter", "backward", len(self._flats) * accum, whole * accum),
            Traffic("all_reduce", "step", 1, 4),
            Traffic("all_gather", "step", len(self._flats), whole),
        ]


class GatheredUnit:
    """Flat parameters that are gathered and freed together. ``parts`` are this rank's own parts, which are always in
    memory. Trained weights are gathered in the dtype `compute` (None: their own), except those in `own_dtype`."""

    def __init__(
        self,
        flats: Iterable[FlatParameter],
        group: dist.ProcessGroup,
        compute: torch.dtype | None = None,
        own_dtype: Set[nn.Parameter] = frozenset(),
    ) -> None:
        self._group = group
        self.flats: list[FlatParameter] = []
        self.parts: list[torch.Tensor] = []
        for flat in flats:  # created one after the other, so that only one full tensor is in memory at a time
            self.flats.append(flat)
            self.parts.append(flat.own().clone())
            # the parameters are views of it: only its memory goes, so that they need not be set again
            flat.whole.untyped_storage().resize_(0)
            if compute is not None and flat.trained and not any(p in own_dtype for _, p in flat.named):
                flat.gather_in(compute)
        self._in_flight: list[dist.Work] = []
        self._whole = self.in_backward = False

    def gather(self) -> None:
        """Start to gather the weights, if they are not gathered."""
        if self._whole:
            return
        self._whole = True
        for flat in self.flats:
            flat.whole.untyped_storage().resize_(flat.bytes)
        self._in_flight = [
            all_gather(flat.whole, part.to(flat.whole.dtype), self._group)
            for flat, part in zip(self.flats, self.parts, strict=True)
        ]

    def use(self) -> None:
        """Wait until the weights are gathered."""
        self.gather()
        for work in self._in_flight:
            work.wait()
        self._in_flight = []

    def free(self) -> None:
        """Free the memory. The parameters stay views of the storage, which `gather` fills again."""
        for work in self._in_flight:
            work.wait()
        self._in_flight, self._whole, self.in_backward = [], False, False
        for flat in self.flats:
            flat.whole.untyped_storage().resize_(0)


class Zero3(LoopStrategy):
    """Shard weights, gradients and optimizer state."""

    replicated, forward_has_collectives = False, True
    claims_overlap, loads_in_parts = True, True

    def __init__(self, offload: str) -> None:
        self._on_host = offload == "optimizer"

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self.module, self._group, self._clip_norm = model, group, clip_norm
        require_same_order(list(model.named_parameters()), group)
        broadcast_from_first(model, group)
        blocks = transformer_blocks(model)
        self._root, self._units = self._make_units(model, blocks, group)
        place = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        flats = [flat for unit in (*self._units, self._root) for flat in unit.flats if flat.trained]
        # in the order of backward: the head's gradient must not wait for that of the embeddings
        flats.sort(key=lambda flat: -min(place[name] for name, _ in flat.named))
        self._complete = _complete_before(flats, self._units, place)
        units = (*self._units, self._root)
        self._parts = {id(f): part for unit in units for f, part in zip(unit.flats, unit.parts, strict=True)}
        for flat in flats:
            flat.make_pieces(self._parts[id(flat)], on_host=self._on_host)
        self._trained = flats
        self.optimizer = make_optimizer(optimizer_pieces(flats))
        # see `_before_backward`, which launches them
        self._gradients = GradientReduceScatter(flats, group, when_ready=False)
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_forward, i))
            block.register_forward_hook(partial(self._after_forward, i))
        for entrance in forward_entry_points(model):
            entrance.register_forward_pre_hook(self._enter)
            entrance.register_forward_hook(self._leave)

    def _make_units(
        self, model: nn.Module, blocks: list[nn.Module], group: dist.ProcessGroup
    ) -> tuple[GatheredUnit, list[GatheredUnit]]:
        named = {p: n for n, p in model.named_parameters()}
        places = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
        # a weight shared by two blocks would be freed by one while the other needs it: it stays outside of blocks
        groups = [[(named.pop(p), p) for p in block.parameters() if places[p] == 1] for block in blocks]
        dtype, own_dtype = compute_dtype(model), keeps_own_dtype(model)
        units = [GatheredUnit(self._flats(_apart([part], own_dtype)), group, dtype, own_dtype) for part in groups]
        # parameters outside of blocks (embeddings, head) are gathered together; their gradients are reduced in
        # block-sized pieces
        largest = max((flat.bytes for unit in units for flat in unit.flats), default=0)
        rest = [[(named[p], p) for p in part] for part in split_into_buckets(list(named), largest)]
        return GatheredUnit(self._flats(_apart(rest, own_dtype)), group, dtype, own_dtype), units

    def _flats(self, parts: Iterable[list[tuple[str, nn.Parameter]]]) -> Iterator[FlatParameter]:
        for part in parts:
            for flat in make_flat_parameters([part], self._group):
                if self.weight_loader:
                    self.weight_loader.flat(flat.named, flat.spans, flat.low, flat.high)
                yield flat

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._root.use()
        if self._units and not self._root.in_backward:
            self._units[0].gather()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() and module is not self.module:
            self._root.free()

    def _before_forward(self, i: int, module: nn.Module, args: Any) -> None:
        unit = self._units[i]
        unit.use()
        if not unit.in_backward and i + 1 < len(self._units):  # a recomputation in backward needs only this unit
            self._units[i + 1].gather()

    def _after_forward(self, i: int, module: nn.Module, args: Any, output: Any) -> None:
        unit = self._units[i]
        if unit.in_backward:
            return
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if torch.is_grad_enabled() and outputs:
            register_multi_grad_hook(outputs, lambda gradient: self._before_backward(i), mode="any")
        unit.free()

    def _before_backward(self, i: int) -> None:
        """Free block i+1 when the gradient reaches block i: its backward is complete."""
        unit = self._units[i]
        unit.in_backward = self._root.in_backward = True
        unit.use()
        if i + 1 < len(self._units):
            self._units[i + 1].free()
        # gathers and reduce-scatters share a communicator, so that all ranks must call them in one order: not when a
        # gradient is ready, which differs between ranks (unused experts), but between the blocks
        self._gradients.launch(self._complete[i])
        if i > 0:
            self._units[i - 1].gather()

    def extra_weights(self) -> list[torch.Tensor]:
        """Return this rank's parts of all weights, also of frozen ones."""
        return list(self._parts.values())

    def backward(self, loss: torch.Tensor) -> None:
        # the last reduce-scatters are launched by autograd's engine when its work is done, as torch's FSDP does
        loss.register_hook(lambda gradient: queue_after_backward(self._gradients.finish))
        loss.backward()
        for unit in (*self._units, self._root):
            unit.free()

    def step(self) -> torch.Tensor:
        self._gradients.give()
        pieces = [p for flat in self._trained for p in flat.pieces]
        norm = clip_and_update(self.optimizer, pieces, self._clip_norm, self._group, self._trained[0].whole.device)
        for flat in self._trained:
            flat.take_update()
        return norm

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        blocks = [flat.bytes for unit in self._units for flat in unit.flats]
        root = [flat.bytes for flat in self._root.flats]
        gradients = [flat.whole.numel() * flat.dtype.itemsize for flat in self._trained]
        return [
            Traffic("all_gather", "forward", (len(blocks) + len(root)) * accum, (sum(blocks) + sum(root)) * accum),
            Traffic("all_gather", "backward", len(blocks) * accum, sum(blocks) * accum),
            Traffic("reduce_scatter", "backward", len(gradients) * accum, sum(gradients) * accum),
            Traffic("all_reduce", "step", 1, 4),
        ]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = {}
        for unit in (*self._units, self._root):
            for flat, part in zip(unit.flats, unit.parts, strict=True):
                if flat.trained or not trained_only:
                    gathered = part.new_empty(flat.whole.numel())
                    all_gather(gathered, part, self._group).wait()
                    if dist.get_rank(self._group) == 0:
                        whole |= {n: t.to("cpu", copy=True) for n, t in flat.split(gathered).items()}
        return whole

    def weight_shards(self) -> list[TensorShard]:
        own = flat_weights(self._trained, [self._parts[id(flat)] for flat in self._trained])
        return [*own, *whole_weights(self.module.named_buffers())]

    def state_ranges(self) -> list[StateRange]:
        return flat_states(self._trained, self.optimizer)

    def finish_loading(self) -> None:
        for flat in self._trained:
            flat.give_weights()


def _complete_before(flats: list[FlatParameter], units: list[GatheredUnit], place: dict[str, int]) -> list[int]:
    """Return for each block how many of the `flats`, in their order, have all their gradients when backward reaches the
    block's end: those of later blocks, and those behind the last block (the head)."""
    blocks = [[place[name] for flat in unit.flats for name, _ in flat.named] for unit in units]
    complete = []
    for i in range(len(units)):
        last = max((at for block in blocks[: i + 1] for at in block), default=-1)
        early = (at for at, flat in enumerate(flats) if min(place[name] for name, _ in flat.named) <= last)
        complete.append(next(early, len(flats)))
    return complete


def _apart(
    parts: Iterable[list[tuple[str, nn.Parameter]]], others: Set[nn.Parameter]
) -> list[list[tuple[str, nn.Parameter]]]:
    """Split each part into parameters that are cast for a forward pass, and others."""
    split = ([item for item in part if (item[1] in others) is other] for part in parts for other in (False, True))
    return [part for part in split if part]
