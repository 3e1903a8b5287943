"""The hand-written ZeRO strategies: ``zero1``, ``zero2`` and ``zero3``."""

from __future__ import annotations

from allranks.spec.strategies.base import (
    DEFAULT_BUCKET_MB,
    MB,
    Bucketed,
    GradientBuffers,
    ModelSizes,
    Options,
    Parts,
    ShardedGradients,
    ShardedWeights,
    StrategyInfo,
    add_parts,
    bucket_sizes,
    sharded_moments,
)

# offload: what is kept in the host's memory; the update is then computed there
OPTIONS: Options = {"bucket_mb": DEFAULT_BUCKET_MB, "offload": "none"}
CHOICES = {"offload": ("none", "optimizer")}


class ReduceScattered(ShardedGradients):
    """ZeRO 2: gradients are reduced bucket by bucket; this rank keeps only its shard."""

    def __init__(self, model: ModelSizes, bucket_bytes: float) -> None:
        super().__init__(model)
        flats = bucket_sizes([n * model.trained_element for n in model.trained_elements[::-1]], bucket_bytes)
        self._largest = max(flats, default=0)
        self._buffers = GradientBuffers(flats, model.world, copies=model.copies)

    def kept(self) -> Parts:
        return super().kept() | {"optimizer_state": sharded_moments(self._m)}

    def setup(self) -> Parts:
        return {"weights": self._m.base + self._largest, "adapters": self._m.adapters}

    def in_loss(self) -> Parts:
        """Return memory when the previous micro-step's buffers have arrived and are not yet reused."""
        if not self._m.accumulates:
            return {}
        return {
            "gradients": self._m.share(self._m.gradients),
            "communication": self._buffers.at(self._m.gradients, filling=False)[1],
        }

    def at_head(self) -> Parts:
        m = self._m
        return add_parts(self.in_loss(), {"gradients": m.head_gradient(), "communication": m.head_gradient_bytes})

    def in_backward(self, at: int) -> Parts:
        m = self._m
        parts, buffers = self._buffers.at(m.gradient_bytes_before[at], filling=True)
        return {
            "gradients": self._m.share(self._m.gradients) if m.accumulates else parts,
            "communication": buffers + m.first_of(at),
        }

    def at_end(self) -> Parts:
        return {"gradients": self._m.share(self._m.gradients), "communication": self._buffers.after_last_launch()[1]}


class Zero3(ShardedWeights):
    """Hand-written ZeRO 3: the current and next block are gathered, and all weights outside blocks."""

    copies_weights = False

    def __init__(self, model: ModelSizes) -> None:
        super().__init__(model)
        self._block = max((model.gathered_bytes_of(b) for b in model.blocks), default=0)
        # while a block is gathered, this rank's shard exists in the dtype of compute, too
        self._cast_shard = model.share(self._block) if model.autocast else 0
        before, behind = (
            bucket_sizes([n * model.trained_element for n in own], self._block) for own in model.trained_outside
        )
        blocks = [model.gradient_of(b) for b in model.blocks[::-1] if model.gradient_of(b)]
        self._buffers = GradientBuffers([*behind[::-1], *blocks, *before[::-1]], model.world, copies=model.copies)

    def kept(self) -> Parts:
        m = self._m
        return {"weights": m.share(m.base), "adapters": m.share(m.adapters), "optimizer_state": sharded_moments(m)}

    def _whole(self, blocks: int) -> int:
        return self._m.gathered_bytes_of(self._m.rest) + min(blocks, len(self._m.blocks)) * self._block

    def in_loss(self) -> Parts:
        """Return memory when the previous micro-step's buffers have arrived and are not yet reused."""
        if not self._m.accumulates:
            return {"gathered_weights": self._whole(0)}
        buffers = self._buffers.at(self._m.gradients, filling=False)[1]
        return {
            "gradients": self._m.share(self._m.gradients),
            "gathered_weights": self._whole(0),
            "communication": buffers,
        }

    def at_head(self) -> Parts:
        m = self._m
        more = {
            "gathered_weights": self._block,
            "gradients": m.head_gradient(gathered=True),
            "communication": m.head_gradient_bytes,
        }
        return add_parts(self.in_loss(), more)

    def in_backward(self, at: int) -> Parts:
        m = self._m
        parts, buffers = self._buffers.at(m.gradient_bytes_before[at], filling=True)
        return {
            "gradients": self._m.share(self._m.gradients) if m.accumulates else parts,
            "gathered_weights": self._whole(2 if at else 1),
            "communication": buffers + m.first_of(at, gathered=True) + (self._cast_shard if at else 0),
        }

    def at_end(self) -> Parts:
        buffers = self._buffers.after_last_launch()[1]
        return {
            "gradients": self._m.share(self._m.gradients),
            "gathered_weights": self._whole(1),
            "communication": buffers,
        }


ZERO1 = StrategyInfo(
    "allranks.train.strategies.zero:Zero1",
    "sharded optimizer state",
    OPTIONS,
    CHOICES,
    memory=lambda m, o: Bucketed(m, shards_moments=True),
)
ZERO2 = StrategyInfo(
    "allranks.train.strategies.zero:Zero2",
    "sharded optimizer state and gradients",
    OPTIONS,
    CHOICES,
    memory=lambda m, o: ReduceScattered(m, float(o.get("bucket_mb", DEFAULT_BUCKET_MB)) * MB),
)
ZERO3 = StrategyInfo(
    "allranks.train.strategies.zero:Zero3",
    "sharded weights, gradients and optimizer state; weights gathered block by block",
    {"offload": "none"},
    CHOICES,
    refuses_quantized="keeps a block's weights in one tensor of one dtype",
    memory=lambda m, o: Zero3(m),
    shards_weights=True,
)
