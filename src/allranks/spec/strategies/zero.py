"""The hand-written ZeRO strategies: ``zero1``, ``zero2`` and ``zero3``."""

from __future__ import annotations

from allranks.spec.strategies.base import (
    ADAM_MOMENTS,
    DEFAULT_BUCKET_MB,
    MB,
    Bucketed,
    GradientBuffers,
    ModelSizes,
    Options,
    Parts,
    Replicated,
    StrategyInfo,
    add_parts,
    cut_into_buckets,
    sharded_moments,
    sharded_setup,
    share_per_rank,
)

# offload: what is kept in the host's memory; the update is then computed there
OPTIONS: Options = {"bucket_mb": DEFAULT_BUCKET_MB, "offload": "none"}
CHOICES = {"offload": ("none", "optimizer")}


class ReduceScattered(Replicated):
    """ZeRO 2: gradients are reduced bucket by bucket; this rank keeps only its shard."""

    def __init__(self, model: ModelSizes, bucket_bytes: float) -> None:
        super().__init__(model)
        flats = cut_into_buckets(model.trained_bytes()[::-1], bucket_bytes)
        self._largest = max(flats, default=0)
        self._buffers = GradientBuffers(flats, model.world, copies=model.copies)

    def kept(self) -> Parts:
        share = share_per_rank(self._m.gradients, self._m.world)
        return super().kept() | {"optimizer_state": ADAM_MOMENTS * share}

    def setup(self) -> Parts:
        return {"weights": self._m.base + self._largest, "adapters": self._m.adapters}

    def _all(self) -> int:
        return share_per_rank(self._m.gradients, self._m.world)

    def in_loss(self) -> Parts:
        """Return memory when the previous micro-step's buffers have arrived and are not yet reused."""
        if not self._m.accumulates:
            return {}
        return {"gradients": self._all(), "communication": self._buffers.at(self._m.gradients, filling=False)[1]}

    def at_head(self) -> Parts:
        m = self._m
        return add_parts(self.in_loss(), {"gradients": m.head_gradient(), "communication": m.head_gradient_bytes})

    def in_backward(self, at: int) -> Parts:
        m = self._m
        parts, buffers = self._buffers.at(m.gradient_bytes_before(at), filling=True)
        return {"gradients": self._all() if m.accumulates else parts, "communication": buffers + m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gradients": self._all(), "communication": self._buffers.after_last_launch()[1]}

    def at_update(self) -> Parts:
        return {"gradients": self._all()}


class Zero3:
    """Hand-written ZeRO 3: the current and next block are gathered, and all weights outside blocks."""

    copies_weights = False

    def __init__(self, model: ModelSizes) -> None:
        self._m = model
        self._block = max((model.gathered_bytes_of(b) for b in model.blocks), default=0)
        # while a block is gathered, this rank's shard exists in the dtype of compute, too
        self._cast_shard = share_per_rank(self._block, model.world) if model.autocast else 0
        before, behind = (cut_into_buckets(own, self._block) for own in model.trained_base_bytes())
        blocks = [model.gradient_of(b) for b in model.blocks[::-1] if model.gradient_of(b)]
        self._buffers = GradientBuffers([*behind[::-1], *blocks, *before[::-1]], model.world, copies=model.copies)

    def kept(self) -> Parts:
        m = self._m
        return {
            "weights": share_per_rank(m.base, m.world),
            "adapters": share_per_rank(m.adapters, m.world),
            "optimizer_state": ADAM_MOMENTS * share_per_rank(m.gradients, m.world),
        }

    def setup(self) -> Parts:
        return sharded_setup(self._m, max((self._m.bytes_of(b) for b in self._m.blocks), default=0))

    def _whole(self, blocks: int) -> int:
        return self._m.gathered_bytes_of(self._m.rest) + min(blocks, len(self._m.blocks)) * self._block

    def _all(self) -> int:
        return share_per_rank(self._m.gradients, self._m.world)

    def in_loss(self) -> Parts:
        """Return memory when the previous micro-step's buffers have arrived and are not yet reused."""
        if not self._m.accumulates:
            return {"gathered_weights": self._whole(0)}
        buffers = self._buffers.at(self._m.gradients, filling=False)[1]
        return {"gradients": self._all(), "gathered_weights": self._whole(0), "communication": buffers}

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
        parts, buffers = self._buffers.at(m.gradient_bytes_before(at), filling=True)
        return {
            "gradients": self._all() if m.accumulates else parts,
            "gathered_weights": self._whole(2 if at else 1),
            "communication": buffers + m.first_of(at, gathered=True) + (self._cast_shard if at else 0),
        }

    def at_end(self) -> Parts:
        buffers = self._buffers.after_last_launch()[1]
        return {"gradients": self._all(), "gathered_weights": self._whole(1), "communication": buffers}

    def at_update(self) -> Parts:
        return {"gradients": self._all()}


ZERO1 = StrategyInfo(
    "allranks.train.strategies.zero:Zero1",
    "sharded optimizer state",
    OPTIONS,
    CHOICES,
    memory=lambda m, o: Bucketed(m, state=sharded_moments(m)),
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
    memory=lambda m, o: Zero3(m),
)
