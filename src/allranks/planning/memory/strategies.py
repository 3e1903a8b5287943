"""Memory models of the sharded and DeepSpeed strategies, and the table from strategy names to memory models.

A new memory layout needs one class and one line in the table. A strategy that is not in the table is reported as unknown.
DeepSpeed uses flat weights, a bucket as large as all gradients, and its own master weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from allranks.planning.memory.strategy_state import (
    ADAM_MOMENTS,
    Bucketed,
    CopiedBuckets,
    GradientBuffers,
    ModelMemory,
    OffloadedState,
    Parts,
    ReduceScattered,
    Replicated,
    StrategyState,
    add_parts,
    cut_into_buckets,
    share_per_rank,
)
from allranks.planning.memory.weights import UnitSizes, Weight

SMALL_ADAPTERS = 64 << 20  # as in train/strategies/fsdp2.py


def sharded_setup(m: ModelMemory, unit: int) -> Parts:
    """Return the setup peak: a GPU receives weights one unit at a time; on CPUs the first rank builds the full model."""
    if m.device == "cpu":
        return {"weights": m.base, "adapters": m.adapters, "gathered_weights": share_per_rank(m.base, m.world)}
    return {
        "weights": share_per_rank(m.base, m.world),
        "adapters": share_per_rank(m.adapters, m.world),
        "gathered_weights": unit,
    }


class Zero3:
    """Hand-written ZeRO 3: the current and next block are gathered, and all weights outside blocks."""

    copies_weights = False

    def __init__(self, model: ModelMemory) -> None:
        self._m = model
        self._block = max((model.gathered_bytes_of(b) for b in model.blocks), default=0)
        # while a block is gathered, this rank's shard exists in the dtype of compute, too
        self._cast_shard = share_per_rank(self._block, model.world) if model.autocast else 0
        before, behind = (self._flats(weights) for weights in (model.shapes.before, model.shapes.behind))
        blocks = [model.gradient_of(b) for b in model.blocks[::-1] if model.gradient_of(b)]
        self._journey = GradientBuffers([*behind[::-1], *blocks, *before[::-1]], model.world, copies=model.copies)

    def _flats(self, weights: tuple[Weight, ...]) -> list[int]:
        own = [w.numel * self._m.trained_element for w in weights if self._m.what.is_trained(w)]
        return cut_into_buckets(own, self._block)

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
        buffers = self._journey.at(self._m.gradients, filling=False)[1]
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
        parts, buffers = self._journey.at(m.gradient_bytes_before(at), filling=True)
        return {
            "gradients": self._all() if m.accumulates else parts,
            "gathered_weights": self._whole(2 if at else 1),
            "communication": buffers + m.first_of(at, gathered=True) + (self._cast_shard if at else 0),
        }

    def at_end(self) -> Parts:
        buffers = self._journey.after_last_launch()[1]
        return {"gradients": self._all(), "gathered_weights": self._whole(1), "communication": buffers}

    def at_update(self) -> Parts:
        return {"gradients": self._all()}


class FSDP2:
    """torch's fully_shard per block, the rest in the root; ``reshard`` False keeps blocks gathered until backward."""

    def __init__(self, model: ModelMemory, *, reshard: bool, adapters: str) -> None:
        self._m, self._reshard = model, reshard
        self._kept_whole = model.what.lora and (adapters == "ignored" or (adapters == "auto" and self._small()))
        self.copies_weights = self._kept_whole
        self._blocks = [self._unit(b) for b in model.blocks]
        self._largest = max(self._blocks, default=0)
        reduced = max((self._gradient(b) for b in model.blocks), default=0)
        self._reduced, self._fresh = reduced, self._as_computed(reduced)
        self._up_to = list(accumulate(self._blocks))
        self._root = self._unit(model.rest)

    def _small(self) -> bool:
        held = 4 * self._m.gradients
        return held <= max(SMALL_ADAPTERS, 0.1 * self._m.base / self._m.world)

    def _unit(self, unit: UnitSizes) -> int:
        return unit.base * self._m.element if self._kept_whole else self._m.gathered_bytes_of(unit)

    def _gradient(self, unit: UnitSizes) -> int:
        return 0 if self._kept_whole else self._m.gradient_of(unit)

    def _as_computed(self, gradients: int) -> int:
        """Return bytes of gradients before they are reduced: those of gathered weights are in the dtype of compute."""
        m = self._m
        return gradients // m.trained_element * m.autocast if m.autocast else gradients

    def kept(self) -> Parts:
        m = self._m
        own = m.gradients if self._kept_whole else share_per_rank(m.gradients, m.world)
        adapters = m.adapters if self._kept_whole else share_per_rank(m.adapters, m.world)
        return {"weights": share_per_rank(m.base, m.world), "adapters": adapters, "optimizer_state": ADAM_MOMENTS * own}

    def setup(self) -> Parts:
        return sharded_setup(self._m, max((self._m.bytes_of(b) for b in self._m.blocks), default=0))

    def _whole(self) -> int:
        return self._root + (0 if self._reshard else sum(self._blocks))

    def _ready(self, gradients: int) -> int:
        """Return bytes of this rank's reduced gradients."""
        return gradients if self._kept_whole else share_per_rank(gradients, self._m.world)

    def in_loss(self) -> Parts:
        return {
            "gradients": self._ready(self._m.gradients) if self._m.accumulates else 0,
            "gathered_weights": self._whole() + self._largest,  # the buffer of the last block
        }

    def at_head(self) -> Parts:
        return add_parts(self.in_loss(), {"gradients": self._head()})

    def _head(self) -> int:
        return 0 if self._kept_whole else self._m.head_gradient(gathered=True)

    def in_backward(self, at: int) -> Parts:
        m = self._m
        done = m.gradient_bytes_before(at) - m.head_gradient_bytes
        # whole: the root, this block, the next one's all-gather; blocks behind have been freed
        blocks = (2 if at else 1) * self._largest if self._reshard else self._up_to[at]
        flying = self._reduced * (
            2 if at < len(m.blocks) - 1 else 1
        )  # the buffer in transfer, and the copy for the next transfer
        return {
            "gradients": self._ready(m.gradients if m.accumulates else done) + self._fresh + self._head(),
            "gathered_weights": self._root + blocks,
            "communication": flying,
        }

    def at_end(self) -> Parts:
        m = self._m
        root = self._gradient(m.rest)
        return {
            "gradients": self._ready(m.gradients) + self._as_computed(root),
            "gathered_weights": 0 if root else self._root,
            "communication": root + (m.gradients if self._kept_whole else 0),
        }

    def at_update(self) -> Parts:
        m = self._m
        whole = m.gradients if self._kept_whole else share_per_rank(m.gradients, m.world)
        return {"gradients": whole, "communication": m.gradients if self._kept_whole else 0}


BUCKET_ELEMENTS = (
    500_000_000  # elements, unless the configuration has less; never more than the trained ones (deepspeed_engine.py)
)
PREFETCH_ELEMENTS = 50_000_000  # stage 3: elements that are prefetched
MAX_LIVE_ELEMENTS = 1_000_000_000  # stage 3: gathered elements before any is freed


class DeepSpeedReplicated:
    """Stages 1 and 2: weights on every rank; float32 master weights and optimizer state sharded."""

    copies_weights = True

    def __init__(self, model: ModelMemory, stage: int, *, bucket: int | None, foreach: bool) -> None:
        self._m, self._stage, self._foreach = model, stage, foreach
        self._bucket = min(bucket or BUCKET_ELEMENTS, model.trained) * model.trained_element
        self._part = share_per_rank(model.trained, model.world)

    def kept(self) -> Parts:
        m = self._m
        return {"weights": m.base, "adapters": m.adapters, "optimizer_state": (1 + ADAM_MOMENTS) * 4 * self._part}

    def setup(self) -> Parts:
        m = self._m
        return {
            "weights": m.base,
            "adapters": m.adapters,
            "optimizer_state": 3 * 4 * self._part,
            "gathered_weights": m.gradients,
        }

    def _own(self) -> int:
        """Return bytes of this rank's gradient shard."""
        return share_per_rank(self._m.gradients, self._m.world)

    def in_loss(self) -> Parts:
        if not self._m.accumulates:
            return {}
        return {
            "gradients": self._m.gradients + self._own() if self._stage == 1 else self._own(),
            "communication": self._bucket,
        }

    def at_head(self) -> Parts:
        before = self.in_loss().get("gradients", 0)
        return {"gradients": before + self._m.head_gradient(), "communication": self._bucket}

    def in_backward(self, at: int) -> Parts:
        m = self._m
        before = self.in_loss().get("gradients", 0)
        come = m.gradient_bytes_before(at) if self._stage == 1 else share_per_rank(m.gradient_bytes_before(at), m.world)
        return {"gradients": (before or come) + m.first_of(at), "communication": self._bucket}

    def at_end(self) -> Parts:
        m = self._m
        kept = m.gradients if self._stage == 1 else self._own()
        return {"gradients": kept + m.largest_gradient, "communication": self._bucket}

    def at_update(self) -> Parts:
        """Return memory with the shard's float32 gradient while the bucket still exists."""
        temporary = 4 * self._part if self._foreach else 0  # the square roots of all second moments at once
        return {"gradients": 4 * self._part, "communication": self._bucket, "optimizer_temporaries": temporary}


class DeepSpeedZero3:
    """Stage 3: weights are sharded too; weights gathered in forward stay while fewer than `LIVE` elements are gathered.

    Prefetched weights arrive in one tensor and are copied out of it; the tensor stays until the last of them is used.
    """

    copies_weights = True

    def __init__(self, model: ModelMemory, *, live: int | None, bucket: int | None, prefetch: int | None) -> None:
        m = self._m = model
        every = sum(b.base + b.adapters for b in (*m.blocks, m.rest))
        self._live = min(live or MAX_LIVE_ELEMENTS, every) * m.element
        self._fetched = min(prefetch or PREFETCH_ELEMENTS, every) * m.element
        self._bucket = min(bucket or BUCKET_ELEMENTS, m.trained) * m.trained_element
        self._part = share_per_rank(m.trained, m.world)
        self._largest = max(w.numel for w in m.shapes.weights()) * m.element

    def kept(self) -> Parts:
        m = self._m
        return {
            "weights": share_per_rank(m.base, m.world),
            "adapters": share_per_rank(m.adapters, m.world),
            "optimizer_state": (1 + ADAM_MOMENTS) * 4 * self._part,
            "gradients": share_per_rank(m.gradients, m.world),
            "communication": self._bucket,
        }

    def setup(self) -> Parts:
        """Return the setup peak: each weight is sharded as it arrives; adapters are unsharded until then."""
        own = {"adapters": self._m.adapters, "optimizer_state": 4 * self._part}
        return {**sharded_setup(self._m, self._largest), **own}

    def in_loss(self) -> Parts:
        return {"gathered_weights": self._live}

    def at_head(self) -> Parts:
        """Return memory just before the last weights are used, when prefetched weights still exist twice."""
        return {"gathered_weights": self._live + self._fetched}

    def in_backward(self, at: int) -> Parts:
        return {"gathered_weights": self._live, "gradients": self._m.first_of(at)}

    def at_end(self) -> Parts:
        return {"gathered_weights": self._live, "gradients": self._m.largest_gradient}

    def at_update(self) -> Parts:
        """Return memory with a float32 copy of the shard's gradients."""
        return {"gradients": 4 * self._part}


Options = dict[str, Any]
MB = 1 << 20


def _sharded_state(m: ModelMemory) -> int:
    return ADAM_MOMENTS * share_per_rank(m.gradients, m.world)


def _zero_setting(options: Options, key: str) -> int | None:
    """Return a number of the DeepSpeed configuration, or None if it is not set."""
    config = options.get("config")
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    value = section.get(key) if isinstance(section, dict) else None
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15 else None


def _deepspeed(stage: int) -> Callable[[ModelMemory, Options], StrategyState]:
    return lambda m, o: DeepSpeedReplicated(
        m, stage, bucket=_zero_setting(o, "reduce_bucket_size"), foreach=m.device == "cuda" and _torch_adam(o)
    )


def _torch_adam(options: Options) -> bool:
    """Return whether the configuration uses torch's Adam; its foreach form needs a temporary as large as a moment, ours is fused."""
    config = options.get("config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    params = section.get("params") if isinstance(section, dict) else None
    return isinstance(params, dict) and params.get("torch_adam") is True and params.get("fused") is not True


def _trainer(m: ModelMemory, o: Options) -> StrategyState:
    return Replicated(m) if m.world == 1 else CopiedBuckets(m)


def _replicated(m: ModelMemory, o: Options) -> StrategyState:
    return Replicated(m)


STRATEGY_STATES: dict[str, Callable[[ModelMemory, Options], StrategyState]] = {
    "single": _replicated,
    "simple_ddp": _replicated,
    "simple_ddp_ga": _replicated,
    "simple_ddp_hook": _replicated,
    "simple_ddp_async": _replicated,
    "bucket_ddp_async": lambda m, o: Bucketed(m),
    "pytorch_ddp": lambda m, o: Bucketed(m, keeps_local_gradients=True),
    "zero1": lambda m, o: Bucketed(m, state=_sharded_state(m)),
    "pytorch_zero1": lambda m, o: Bucketed(m, keeps_local_gradients=True, state=_sharded_state(m)),
    "zero2": lambda m, o: ReduceScattered(m, float(o.get("bucket_mb", 25.0)) * MB),
    "zero3": lambda m, o: Zero3(m),
    "pytorch_zero2": lambda m, o: FSDP2(m, reshard=False, adapters=str(o.get("adapters", "auto"))),
    "pytorch_zero3": lambda m, o: FSDP2(m, reshard=True, adapters=str(o.get("adapters", "auto"))),
    "deepspeed_zero1": _deepspeed(1),
    "deepspeed_zero2": _deepspeed(2),
    "deepspeed_zero3": lambda m, o: DeepSpeedZero3(
        m,
        live=_zero_setting(o, "stage3_max_live_parameters"),
        bucket=_zero_setting(o, "reduce_bucket_size"),
        prefetch=_zero_setting(o, "stage3_prefetch_bucket_size"),
    ),
    "hf_trainer": _trainer,
}


def strategy_state(name: str, model: ModelMemory, options: Options) -> StrategyState | None:
    """Return the strategy's memory model, or None if it is unknown."""
    make = STRATEGY_STATES.get(name)
    if make is None:
        return None
    offload = str(options.get("offload", "none"))
    made = make(model, options)
    return made if offload == "none" else OffloadedState(made, offload, model)
