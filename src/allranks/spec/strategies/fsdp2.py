"""torch's FSDP2: ``pytorch_zero2`` and ``pytorch_zero3``."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

from allranks.spec.strategies.base import (
    ADAM_MOMENTS,
    ModelSizes,
    Options,
    Parts,
    ShardedWeights,
    StrategyInfo,
    StrategyState,
    UnitSizes,
    add_parts,
    as_sharded,
)

OPTIONS: Options = {"find_unused_parameters": False, "adapters": "auto", "offload": "none", "replicate": "auto"}
CHOICES = {
    "adapters": ("auto", "ignored", "sharded"),
    "offload": ("none", "optimizer", "all"),
    "replicate": ("auto", "nodes", "none"),
}
SMALL_BYTES = 64 << 20


def keeps_adapters_whole(*, adapters: str, offload: str, trained_bytes: int, frozen_bytes: int, shards: int) -> bool:
    """Return whether adapters stay whole on every rank, for planning and for training alike.

    Under ``auto`` they do if four times their bytes (weight, gradient, two moments) are at most 64 MiB, or a tenth of
    the rank's share of the frozen weights. With moments on the host, device memory is scarce, and ``auto`` shards them.

    Args:
        shards: number of ranks over which weights are sharded: those of a node under HSDP.
    """
    if adapters != "auto":
        return adapters == "ignored"
    return offload != "optimizer" and 4 * trained_bytes <= max(SMALL_BYTES, 0.1 * frozen_bytes / shards)


def sends_between_nodes(m: ModelSizes, o: Options, nodes: int, accum: int, *, reshard: bool) -> int:
    """Return the bytes that a node sends to other nodes per optimizer step, with rings in the order of ranks.

    In a ring of W ranks, each rank sends (W-1)/W of the full size in an all-gather or a reduce-scatter, twice that in
    an all-reduce, and one rank of a node sends to another node. Gloo's reduce-scatter is an all-reduce.

    Args:
        m: the model; ``m.world`` is the number of all ranks.
        o: the strategy's options, with ``replicate`` decided.
        accum: micro-steps per optimizer step.
    """
    ring, inner = 1 - 1 / m.world, _memory(as_sharded(m, o), o, reshard=reshard)
    if inner.copies_weights:
        gradients, weights = 0, [m.frozen_bytes_of(u) for u in (*m.blocks, m.rest)]
    else:
        gradients, weights = m.gradients, [m.gathered_bytes_of(u) for u in (*m.blocks, m.rest)]
    averaged = 2 * ring * (m.gradients - gradients)
    if o.get("replicate") == "nodes":
        return int(averaged + 2 * (1 - 1 / nodes) * gradients)
    gathered = sum(weights) + (sum(weights[:-1]) if reshard else 0)
    return int(averaged + accum * ring * (gathered + m.copies * gradients))


class FSDP2(ShardedWeights):
    """torch's fully_shard per block, the rest in the root; ``reshard`` False keeps blocks gathered until backward."""

    def __init__(self, model: ModelSizes, *, reshard: bool, adapters: str, offload: str) -> None:
        super().__init__(model)
        self._reshard = reshard
        self._kept_whole = model.has_adapters and keeps_adapters_whole(
            adapters=adapters,
            offload=offload,
            trained_bytes=model.gradients,
            frozen_bytes=model.base + model.adapters - model.gradients,
            shards=model.world,
        )
        self.copies_weights = self._kept_whole
        self._blocks = [self._unit(b) for b in model.blocks]
        self._largest = max(self._blocks, default=0)
        reduced = max((self._gradient(b) for b in model.blocks), default=0)
        self._reduced, self._fresh = reduced, self._as_computed(reduced)
        self._up_to = list(accumulate(self._blocks))
        self._root = self._unit(model.rest)

    def _unit(self, unit: UnitSizes) -> int:
        return self._m.frozen_bytes_of(unit) if self._kept_whole else self._m.gathered_bytes_of(unit)

    def _gradient(self, unit: UnitSizes) -> int:
        return 0 if self._kept_whole else self._m.gradient_of(unit)

    def _as_computed(self, gradients: int) -> int:
        """Return bytes of gradients before they are reduced: those of gathered weights are in the dtype of compute."""
        m = self._m
        return gradients // m.trained_element * m.autocast if m.autocast else gradients

    def kept(self) -> Parts:
        m = self._m
        own = m.gradients if self._kept_whole else m.share(m.gradients)
        adapters = m.adapters if self._kept_whole else m.share(m.adapters)
        return {"weights": m.share(m.base), "adapters": adapters, "optimizer_state": ADAM_MOMENTS * own}

    def _ready(self, gradients: int) -> int:
        """Return bytes of this rank's reduced gradients."""
        return gradients if self._kept_whole else self._m.share(gradients)

    def in_loss(self) -> Parts:
        gathered = self._root + (0 if self._reshard else sum(self._blocks))
        return {
            "gradients": self._ready(self._m.gradients) if self._m.accumulates else 0,
            "gathered_weights": gathered + self._largest,  # the buffer of the last block
        }

    def at_head(self) -> Parts:
        return add_parts(self.in_loss(), {"gradients": self._head()})

    def _head(self) -> int:
        return 0 if self._kept_whole else self._m.head_gradient(gathered=True)

    def in_backward(self, at: int) -> Parts:
        m = self._m
        done = m.gradient_bytes_before[at] - m.head_gradient_bytes
        # whole: the root, this block, the next one's all-gather; blocks behind have been freed
        blocks = (2 if at else 1) * self._largest if self._reshard else self._up_to[at]
        # the buffer in transfer, and the copy for the next transfer
        flying = self._reduced * (2 if at < len(m.blocks) - 1 else 1)
        return {
            "gradients": self._ready(m.gradients if m.accumulates else done) + self._fresh + self._head(),
            "gathered_weights": self._root + blocks,
            "communication": flying,
        }

    def at_end(self) -> Parts:
        m = self._m
        root = self._gradient(m.rest)
        # while they are copied into the buffer of the reduce-scatter; then that buffer, of which gloo reduces a copy
        flying = max(self._as_computed(root) + root, m.copies * root)
        return {
            "gradients": self._ready(m.gradients),
            "gathered_weights": 0 if root else self._root,
            "communication": flying + (m.gradients if self._kept_whole else 0),
        }

    def at_update(self) -> Parts:
        m = self._m
        whole = m.gradients if self._kept_whole else m.share(m.gradients)
        return {"gradients": whole, "communication": m.gradients if self._kept_whole else 0}


def _memory(m: ModelSizes, o: Options, *, reshard: bool) -> StrategyState:
    adapters, offload = str(o.get("adapters", "auto")), str(o.get("offload", "none"))
    return FSDP2(m, reshard=reshard, adapters=adapters, offload=offload)


PYTORCH_ZERO2 = StrategyInfo(
    "allranks.train.strategies.fsdp2:PyTorchZero2",
    "torch FSDP2, weights stay gathered until backward",
    OPTIONS,
    CHOICES,
    memory=partial(_memory, reshard=False),
    node_sends=partial(sends_between_nodes, reshard=False),
    shards_weights=True,
)
PYTORCH_ZERO3 = StrategyInfo(
    "allranks.train.strategies.fsdp2:PyTorchZero3",
    "torch FSDP2, weights gathered block by block",
    OPTIONS,
    CHOICES,
    memory=partial(_memory, reshard=True),
    node_sends=partial(sends_between_nodes, reshard=True),
    shards_weights=True,
)
