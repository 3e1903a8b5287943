"""The hand-written ZeRO strategies: ``zero1``, ``zero2`` and ``zero3``."""

from __future__ import annotations

from allranks.spec.strategies.base import (
    ADAM_MOMENTS,
    DEFAULT_BUCKET_MB,
    MB,
    OFFLOAD_NOTE,
    ONE_MICRO_STEP,
    ZERO_GRADIENTS,
    Bucketed,
    GradientBuffers,
    ModelSizes,
    Options,
    Parts,
    Replicated,
    StrategyInfo,
    StrategyPage,
    add_parts,
    bars,
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
    page=StrategyPage(
        new="sharded moments",
        idea="Each rank updates an exactly equal part of the weights and keeps moments only for that "
        "part; then the parts are gathered.",
        improves="In data parallelism every rank keeps the same moments and makes the same update.",
        bytes="2 T g: all-reduces in backward, all-gathers in the step",
        memory="4P + 4T + 8T/W",
        ratio="3/4",
        unused=ZERO_GRADIENTS,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 63), ("optimizer", 63, 67), ("wait", 67, 77)),
        communication=(*bars("all-reduce", 9, 33, 44), ("all-reduce", 55, 63), ("all-gather", 67, 77)),
        options={"offload": OFFLOAD_NOTE},
    ),
)
ZERO2 = StrategyInfo(
    "allranks.train.strategies.zero:Zero2",
    "sharded optimizer state and gradients",
    OPTIONS,
    CHOICES,
    memory=lambda m, o: ReduceScattered(m, float(o.get("bucket_mb", DEFAULT_BUCKET_MB)) * MB),
    page=StrategyPage(
        new="sharded gradients",
        idea="Gradients are reduced to the rank that needs them: one reduce-scatter per bucket, after "
        "which each rank keeps only its part.",
        improves="`zero1` reduces full gradients on every rank, although each rank uses only a part.",
        bytes="(A + 1) T g: reduce-scatters in each backward, all-gathers in the step",
        memory="4P + 12T/W, and up to three buckets in flight",
        ratio="5/8",
        unused=ZERO_GRADIENTS,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 62), ("optimizer", 62, 66), ("wait", 66, 76)),
        communication=(*bars("reduce-scatter", 5, 33, 44), ("reduce-scatter", 55, 62), ("all-gather", 66, 76)),
        options={"offload": OFFLOAD_NOTE},
    ),
)
ZERO3 = StrategyInfo(
    "allranks.train.strategies.zero:Zero3",
    "sharded weights, gradients and optimizer state; weights gathered block by block",
    {"offload": "none"},
    CHOICES,
    memory=lambda m, o: Zero3(m),
    page=StrategyPage(
        new="sharded weights, block by block",
        idea="Weights are sharded, too. A block's weights are gathered while the block before it "
        "computes, and freed after use; the same in backward. Weights outside of blocks (embeddings, "
        "head) stay gathered from forward to the end of backward.",
        improves="`zero2` keeps all weights on all ranks. Gathering the full model before forward would not "
        "reduce the peak.",
        bytes="A (2 P + T) g, nearly: all-gathers in forward and backward, reduce-scatters in backward",
        memory="(4P + 12T)/W, and two or three gathered blocks",
        ratio="1/2",
        unused=ZERO_GRADIENTS,
        compute=(("wait", 0, 5), ("forward", 5, 25), ("wait", 25, 30), ("backward", 30, 72), ("optimizer", 72, 76)),
        communication=(
            *bars("all-gather", 4, 0, 6, 12, 18, 26, 33, 44, 55),
            *bars("reduce-scatter", 4, 39, 50, 61, 68),
        ),
        options={"offload": OFFLOAD_NOTE},
    ),
)
