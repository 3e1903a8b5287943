"""DeepSpeed's ZeRO: ``deepspeed_zero1``, ``deepspeed_zero2`` and ``deepspeed_zero3``.

It has flat weights, a bucket as large as all gradients, and its own master weights.
"""

from __future__ import annotations

from functools import partial

from allranks.spec.strategies.base import (
    ADAM_MOMENTS,
    ONE_MICRO_STEP,
    ModelSizes,
    Options,
    Parts,
    StrategyInfo,
    StrategyPage,
    StrategyState,
    bars,
    sharded_setup,
    share_per_rank,
)

# config: a path to a JSON file, or its content; config_from: where the content came from, for messages
OPTIONS: Options = {"config": None, "config_from": None, "find_unused_parameters": False}
OPTION_NOTES = {
    "config": "a JSON file, or its content",
    "config_from": "set by allranks, the file from which `config` was read",
}
OR_NAMED_ERROR = (
    "With `find_unused_parameters: true`, as zeros and in the same order on all ranks; without it the run ends with an error that "
    "names the parameter."
)
BUCKET_ELEMENTS = 500_000_000  # unless the configuration has less; never more than the trained ones
PREFETCH_ELEMENTS = 50_000_000  # stage 3: elements that are prefetched
MAX_LIVE_ELEMENTS = 1_000_000_000  # stage 3: gathered elements before any is freed


class DeepSpeedReplicated:
    """Stages 1 and 2: weights on every rank; float32 master weights and optimizer state sharded."""

    copies_weights = True

    def __init__(self, model: ModelSizes, stage: int, *, bucket: int | None, foreach: bool) -> None:
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
    """Stage 3: weights are sharded too; weights gathered in forward stay while fewer than `MAX_LIVE_ELEMENTS` elements are gathered.

    Prefetched weights arrive in one tensor and are copied out of it; the tensor stays until the last of them is used.
    """

    copies_weights = True

    def __init__(self, model: ModelSizes, *, live: int | None, bucket: int | None, prefetch: int | None) -> None:
        m = self._m = model
        every = sum(b.base + b.adapters for b in (*m.blocks, m.rest))
        self._live = min(live or MAX_LIVE_ELEMENTS, every) * m.element
        self._fetched = min(prefetch or PREFETCH_ELEMENTS, every) * m.element
        self._bucket = min(bucket or BUCKET_ELEMENTS, m.trained) * m.trained_element
        self._part = share_per_rank(m.trained, m.world)
        self._largest = m.largest_weight * m.element

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


def _zero_setting(options: Options, key: str) -> int | None:
    """Return a number of the DeepSpeed configuration, or None if it is not set."""
    config = options.get("config")
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    value = section.get(key) if isinstance(section, dict) else None
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15 else None


def _torch_adam(options: Options) -> bool:
    """Return whether the configuration uses torch's Adam; its foreach form needs a temporary as large as a moment, ours is fused."""
    config = options.get("config")
    section = config.get("optimizer") if isinstance(config, dict) else None
    params = section.get("params") if isinstance(section, dict) else None
    return isinstance(params, dict) and params.get("torch_adam") is True and params.get("fused") is not True


def _replicated(m: ModelSizes, o: Options, *, stage: int) -> StrategyState:
    bucket = _zero_setting(o, "reduce_bucket_size")
    return DeepSpeedReplicated(m, stage, bucket=bucket, foreach=m.device == "cuda" and _torch_adam(o))


def _stage3(m: ModelSizes, o: Options) -> StrategyState:
    return DeepSpeedZero3(
        m,
        live=_zero_setting(o, "stage3_max_live_parameters"),
        bucket=_zero_setting(o, "reduce_bucket_size"),
        prefetch=_zero_setting(o, "stage3_prefetch_bucket_size"),
    )


_strategy = partial(
    StrategyInfo,
    options=OPTIONS,
    package="deepspeed",
    imports_bytes=66 << 20,  # measured by benchmarks/engine_memory.py
    keeps_master_weights=True,
    builds_extensions=True,
    cpu_environment={"DS_ACCELERATOR": ("cpu", "the ranks compute on the CPU; DeepSpeed would use a visible GPU")},
    planner="allranks.spec.deepspeed",
)
DEEPSPEED_ZERO1 = _strategy(
    "allranks.train.engines.deepspeed_zero:DeepSpeedZero1",
    "DeepSpeed, sharded optimizer state",
    memory=partial(_replicated, stage=1),
    page=StrategyPage(
        new="DeepSpeed's stage 1",
        idea="DeepSpeed's engine, stage 1. Its JSON is filled in from the spec and checked against it; "
        "see [DeepSpeed](../deepspeed.md).",
        improves="Nothing; the method of `zero1` with DeepSpeed's own configuration.",
        bytes="2 T g: all-reduces after the last backward, one all-gather per parameter group in the step",
        memory="4P + 4T + 12T/W; at the update 4P + 16T/W (a float32 copy of the rank's part of the weights)",
        ratio="3/4",
        unused=OR_NAMED_ERROR,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 68), ("optimizer", 68, 74), ("wait", 74, 84)),
        communication=(("all-reduce", 60, 68), ("all-gather", 74, 84)),
        options=OPTION_NOTES,
    ),
)
DEEPSPEED_ZERO2 = _strategy(
    "allranks.train.engines.deepspeed_zero:DeepSpeedZero2",
    "DeepSpeed, sharded optimizer state and gradients",
    memory=partial(_replicated, stage=2),
    page=StrategyPage(
        new="DeepSpeed's stage 2",
        idea="DeepSpeed's engine, stage 2.",
        improves="`deepspeed_zero1` keeps full gradients until the last micro-step.",
        bytes="(A + 1) T g: all-reduces after each backward, one all-gather per parameter group in the step",
        memory="4P + 16T/W, and a bucket of gradients",
        ratio="3/4",
        unused=OR_NAMED_ERROR,
        compute=(*ONE_MICRO_STEP, ("wait", 60, 68), ("optimizer", 68, 74), ("wait", 74, 84)),
        communication=(("all-reduce", 60, 68), ("all-gather", 74, 84)),
        options=OPTION_NOTES,
    ),
)
DEEPSPEED_ZERO3 = _strategy(
    "allranks.train.engines.deepspeed_zero:DeepSpeedZero3",
    "DeepSpeed, sharded weights, gradients and optimizer state",
    memory=_stage3,
    gathers_in_layers=True,
    page=StrategyPage(
        new="DeepSpeed's stage 3",
        idea="DeepSpeed's engine, stage 3: sharded weights, gathered module by module. Tensors with fewer "
        "than 100,000 elements are not sharded, and weights gathered in forward are kept until "
        "backward while fewer than 10^9 elements are gathered; both limits are keys of its JSON.",
        improves="`deepspeed_zero2` keeps all weights on all ranks.",
        bytes="A (2 P + T) g above those limits: all-gathers in forward and backward, reduce-scatters after backward",
        memory="(4P + 16T)/W, and the gathered weights of the two limits",
        ratio="5/8",
        unused=OR_NAMED_ERROR,
        compute=(
            ("wait", 0, 5),
            ("forward", 5, 25),
            ("wait", 25, 30),
            ("backward", 30, 72),
            ("wait", 72, 78),
            ("optimizer", 78, 82),
        ),
        communication=(*bars("all-gather", 4, 0, 6, 12, 18, 26, 33, 44, 55), ("reduce-scatter", 72, 78)),
        options=OPTION_NOTES,
    ),
)
