"""DeepSpeed's ZeRO, ``deepspeed_zero1``, ``deepspeed_zero2`` and ``deepspeed_zero3``: records, and JSON configuration.
No torch, no DeepSpeed.

It has flat weights, a bucket as large as all gradients, and its own master weights. Its configuration is completed from
the spec and checked against the spec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from allranks.errors import SpecError
from allranks.spec.strategies.base import (
    ADAM_BETAS,
    ADAM_EPS,
    ADAM_MOMENTS,
    ENGINE_SETTINGS,
    ModelSizes,
    Options,
    Parts,
    StrategyInfo,
    StrategyState,
    same_setting,
    sharded_setup,
)
from allranks.utils.inputs import read_json_object
from allranks.utils.text import did_you_mean

if TYPE_CHECKING:
    from allranks.spec.records import TrainSpec
    from allranks.spec.strategies.base import PlannedWork


Json = dict[str, Any]
AUTO = "auto"
STAGES = {"deepspeed_zero1": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3}
MAX_BYTES = 1 << 20
FILLED = {"betas": list(ADAM_BETAS), "eps": ADAM_EPS}

UNSUPPORTED = ENGINE_SETTINGS["deepspeed_unsupported"]
"""Sections that change what a step means, or who talks to whom, unknown to the loop; why they cannot be used."""
UNSUPPORTED_IN_ZERO = ENGINE_SETTINGS["deepspeed_unsupported_in_zero"]
UNSUPPORTED_OPTIMIZERS = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Muon")
KNOWN = (*UNSUPPORTED, *ENGINE_SETTINGS["deepspeed_supported"])
KNOWN_IN_ZERO = (*UNSUPPORTED_IN_ZERO, *ENGINE_SETTINGS["deepspeed_supported_in_zero"])


class DeepSpeedExpectations(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the spec. None means unknown: nothing is compared with it."""

    stage: int
    world_size: int
    micro_batch_size: int | None = None
    grad_accum: int | None = None
    dtype: str | None = None  # of the model: float32 | bfloat16
    clip_norm: float | None = None
    lr: float | None = None
    weight_decay: float | None = None
    device: str = "cpu"


def read_options(options: Json) -> Json:
    """Return the options with the file content in place of a path in `config`; `config_from` keeps the path for
    messages.

    Raises:
        SpecError: the file does not exist or is not a JSON object.
    """
    config = options.get("config")
    if config is None or isinstance(config, dict):
        return options
    if not isinstance(config, str):
        raise SpecError(f"strategy.config: expected a path or a mapping, got {config!r}")
    path = Path(config).expanduser()
    content = read_json_object(path, MAX_BYTES, "strategy.config", distinct=True)
    return {**options, "config": content, "config_from": str(path)}


def param_dtype(options: Json) -> str | None:
    """Return "bfloat16" for ``bf16.enabled: true`` (DeepSpeed casts; master weights stay float32), else None."""
    return "bfloat16" if _at(options["config"], "bf16.enabled") is True else None


def plan_options(options: Json, train: TrainSpec, work: PlannedWork) -> Json:
    """Return the options with a configuration that is complete except for values that only the ranks know.

    Raises:
        SpecError: the configuration contradicts the spec.
    """
    expected = DeepSpeedExpectations(
        stage=STAGES[work.strategy],
        world_size=work.world_size,
        micro_batch_size=work.micro_batch_size,
        grad_accum=work.grad_accum,
        dtype=work.dtype,
        clip_norm=train.max_grad_norm or 0.0,
        lr=train.lr,
        weight_decay=train.weight_decay,
        device=work.device,
    )
    return {
        **options,
        "config": complete_config(options["config"], expected, options["config_from"] or "strategy.config"),
    }


def complete_config(given: Json | None, expected: DeepSpeedExpectations, where: str) -> Json:
    """Return the configuration completed with all values that the spec determines.

    A value that is missing or ``"auto"`` comes from the spec. Values that stay ``"auto"`` are known only to the ranks
    (the dtype of trained weights), or left to DeepSpeed's default.

    Args:
        where: the file, for messages.

    Raises:
        SpecError: a value contradicts the spec, or is not supported; the message names file, key and both values.
    """
    config = json.loads(json.dumps(given or {}))
    problems = list(_unsupported(config))
    for path, ours, key, always in _rules(config, expected):
        theirs = _at(config, path)
        if ours is None:
            continue
        if theirs == AUTO or (theirs is None and always):
            _put(config, path, ours)
        elif theirs is not None and not same_setting(theirs, ours):
            shown = f"{path} is {json.dumps(theirs)}, but {key} is {json.dumps(ours)}"
            problems.append(f'{shown}; write "auto" or make them agree')
    problems += _of_optimizer(config, expected)
    if problems:
        raise SpecError(f"{where}: " + "; ".join(problems))
    return config


def _rules(config: Json, expected: DeepSpeedExpectations) -> Iterator[tuple[str, Any, str, bool]]:
    """Return (key in the JSON, our value, key in the spec, whether to write it if the JSON omits it)."""
    micro, accum = expected.micro_batch_size, expected.grad_accum
    yield "train_micro_batch_size_per_gpu", micro, "train.micro_batch_size", True
    yield "gradient_accumulation_steps", accum, "the accumulation of train.grad_accum or train.global_batch_size", True
    if micro is not None and accum is not None:
        product = f"micro-batch x accumulation x ranks = {micro} x {accum} x {expected.world_size}"
        yield "train_batch_size", micro * accum * expected.world_size, product, True
    yield "zero_optimization.stage", expected.stage, "the stage of strategy.name", True
    if expected.dtype is not None:
        yield "fp16.enabled", False, f"float16 (model.dtype: {expected.dtype})", False
        if expected.dtype != "bfloat16":
            yield "bf16.enabled", False, f"bfloat16 (model.dtype: {expected.dtype})", True
        elif _at(config, "bf16.enabled") is False:  # adapters may be float32: the ranks will see
            yield "bf16.enabled", AUTO, f"model.dtype: {expected.dtype}", True
    yield "gradient_clipping", expected.clip_norm, "train.max_grad_norm (0 is none)", True
    if isinstance(config.get("optimizer"), dict):
        yield "optimizer.params.lr", expected.lr, "train.lr", True
        yield "optimizer.params.weight_decay", expected.weight_decay, "train.weight_decay", True


def _unsupported(config: Json) -> Iterator[str]:
    for name in ("zero_optimization", "optimizer", "bf16", "fp16"):
        if not isinstance(config.get(name, {}), dict):
            yield f"{name} is {json.dumps(config[name])}, but must be a JSON object"
            del config[name]
    zero = config.get("zero_optimization", {})
    for name, why in UNSUPPORTED.items():
        if _is_on(config.get(name)):
            yield f"{name} cannot be used here: {why}"
    for name, why in UNSUPPORTED_IN_ZERO.items():
        value = zero.get(name)
        if _is_on(value) and value not in (1, -1) and not (isinstance(value, dict) and value.get("device") == "none"):
            yield f"zero_optimization.{name} cannot be used here: {why}"
    if zero.get("compute_grad_norm") is False:
        yield "zero_optimization.compute_grad_norm is false, but allranks needs the norm to detect non-finite gradients"
    for name in config:
        if name not in KNOWN and (hint := did_you_mean(name, KNOWN, 0.8)):
            yield f"DeepSpeed would ignore the key {name!r}{hint}"
    for name in zero:  # other versions may have other keys: only what is nearly one of these is refused here
        if name not in KNOWN_IN_ZERO and (hint := did_you_mean(name, KNOWN_IN_ZERO, 0.88)):
            yield f"DeepSpeed refuses the key {name!r} in zero_optimization{hint}"


def _is_on(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and value.get("enabled", True) is not False
    return value not in (None, False, AUTO)


def _of_optimizer(config: Json, expected: DeepSpeedExpectations) -> Iterator[str]:
    """Check the optimizer section. Without one, the project's AdamW is used, which works with every ZeRO stage."""
    optimizer = config.get("optimizer")
    if optimizer is None:
        return
    name = str(optimizer.get("type"))
    params = optimizer.setdefault("params", {})
    for key, value in FILLED.items():
        if params.get(key) == AUTO:
            params[key] = value
    if name.lower() in {n.lower() for n in UNSUPPORTED_OPTIMIZERS}:
        yield f"optimizer.type {name} uses its own communication, which differs from the reference's; use AdamW"
    elif expected.device == "cpu" and name.lower() in ("adam", "adamw") and params.get("torch_adam") is not True:
        yield (
            f"optimizer.type {name} would be compiled when the run starts, which is useless on a CPU; add "
            "params.torch_adam: true, or leave the section out for the project's own AdamW"
        )


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _put(config: Json, path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[last] = value


def without_auto(config: Json) -> Json:
    """Return the configuration without remaining ``"auto"`` values: DeepSpeed has defaults, but rejects "auto"."""
    kept = {k: without_auto(v) if isinstance(v, dict) else v for k, v in config.items()}
    return {k: v for k, v in kept.items() if not (isinstance(v, str) and v == AUTO)}


# config: a path to a JSON file, or its content; config_from: where the content came from, for messages
OPTIONS: Options = {"config": None, "config_from": None, "find_unused_parameters": False}
BUCKET_ELEMENTS = 500_000_000  # unless the configuration has less; never more than the trained ones
PREFETCH_ELEMENTS = 50_000_000  # stage 3: elements that are prefetched
MAX_LIVE_ELEMENTS = 1_000_000_000  # stage 3: gathered elements before any is freed


class DeepSpeedReplicated(StrategyState):
    """Stages 1 and 2: weights on every rank; float32 master weights and optimizer state sharded."""

    def __init__(self, model: ModelSizes, stage: int, *, bucket: int | None, foreach: bool) -> None:
        super().__init__(model)
        self._stage, self._foreach = stage, foreach
        self._bucket = min(bucket or BUCKET_ELEMENTS, model.trained) * model.trained_element
        self._part = model.share(model.trained)

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

    def in_loss(self) -> Parts:
        if not self._m.accumulates:
            return {}
        return {
            "gradients": self._m.gradients + self._m.share(self._m.gradients)
            if self._stage == 1
            else self._m.share(self._m.gradients),
            "communication": self._bucket,
        }

    def at_head(self) -> Parts:
        before = self.in_loss().get("gradients", 0)
        return {"gradients": before + self._m.head_gradient(), "communication": self._bucket}

    def in_backward(self, at: int) -> Parts:
        m = self._m
        before = self.in_loss().get("gradients", 0)
        come = m.gradient_bytes_before[at] if self._stage == 1 else m.share(m.gradient_bytes_before[at])
        return {"gradients": (before or come) + m.first_of(at), "communication": self._bucket}

    def at_end(self) -> Parts:
        m = self._m
        kept = m.gradients if self._stage == 1 else self._m.share(self._m.gradients)
        return {"gradients": kept + m.largest_gradient, "communication": self._bucket}

    def at_update(self) -> Parts:
        """Return memory with the shard's float32 gradient while the bucket still exists."""
        temporary = 4 * self._part if self._foreach else 0  # the square roots of all second moments at once
        return {"gradients": 4 * self._part, "communication": self._bucket, "optimizer_temporaries": temporary}


class DeepSpeedZero3(StrategyState):
    """Stage 3: weights are sharded too; weights gathered in forward stay while fewer than `MAX_LIVE_ELEMENTS` elements
    are gathered.

    Prefetched weights arrive in one tensor and are copied out of it; the tensor stays until the last of them is used.
    """

    def __init__(self, model: ModelSizes, *, live: int | None, bucket: int | None, prefetch: int | None) -> None:
        super().__init__(m := model)
        every = sum(b.base + b.adapters for b in (*m.blocks, m.rest))
        # with LoRA a block is gathered as a whole, whatever the limit is
        block = max((b.base + b.adapters for b in m.blocks), default=0) if m.adapters else 0
        self._live = max(block, min(live or MAX_LIVE_ELEMENTS, every)) * m.element
        self._fetched = min(prefetch or PREFETCH_ELEMENTS, every) * m.element
        self._bucket = min(bucket or BUCKET_ELEMENTS, m.trained) * m.trained_element
        self._part = m.share(m.trained)
        self._largest = m.largest_weight * m.element

    def kept(self) -> Parts:
        m = self._m
        return {
            "weights": m.share(m.base),
            "adapters": m.share(m.adapters),
            "optimizer_state": (1 + ADAM_MOMENTS) * 4 * self._part,
            "gradients": m.share(m.gradients),
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
    value = _at(options.get("config"), f"zero_optimization.{key}")
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15 else None


def _replicated(m: ModelSizes, o: Options, *, stage: int) -> StrategyState:
    params = _at(o.get("config"), "optimizer.params")
    # the foreach form of torch's Adam needs a temporary as large as a moment; ours is fused
    foreach = m.device == "cuda" and _at(params, "torch_adam") is True and _at(params, "fused") is not True
    return DeepSpeedReplicated(m, stage, bucket=_zero_setting(o, "reduce_bucket_size"), foreach=foreach)


_strategy = partial(
    StrategyInfo,
    options=OPTIONS,
    package="deepspeed",
    imports_bytes=66 << 20,  # measured with a model of almost no weights, compared with pytorch_ddp
    keeps_master_weights=True,
    refuses_quantized="has not been tested with weights in 4 bits",
    builds_extensions=True,
    cpu_environment={"DS_ACCELERATOR": ("cpu", "the ranks compute on the CPU; DeepSpeed would use a visible GPU")},
    planner="allranks.spec.strategies.deepspeed_zero",
)
DEEPSPEED_ZERO1 = _strategy(
    "allranks.train.engines.deepspeed_zero:DeepSpeedZero1",
    "DeepSpeed, sharded optimizer state",
    memory=partial(_replicated, stage=1),
)
DEEPSPEED_ZERO2 = _strategy(
    "allranks.train.engines.deepspeed_zero:DeepSpeedZero2",
    "DeepSpeed, sharded optimizer state and gradients",
    memory=partial(_replicated, stage=2),
)
DEEPSPEED_ZERO3 = _strategy(
    "allranks.train.engines.deepspeed_zero:DeepSpeedZero3",
    "DeepSpeed, sharded weights, gradients and optimizer state",
    memory=lambda m, o: DeepSpeedZero3(
        m,
        live=_zero_setting(o, "stage3_max_live_parameters"),
        bucket=_zero_setting(o, "reduce_bucket_size"),
        prefetch=_zero_setting(o, "stage3_prefetch_bucket_size"),
    ),
    gathers_in_layers=True,
    shards_weights=True,
)
