"""DeepSpeed's JSON: filled in from the spec, and checked against it. No torch, no DeepSpeed: `plan` does this."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from allranks.errors import SpecError
from allranks.train.settings import same_setting

if TYPE_CHECKING:
    from allranks.planning import BatchPlan
    from allranks.spec.records import TrainSpec

Json = dict[str, Any]
AUTO = "auto"
STAGES = {"deepspeed_zero1": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3}
MAX_BYTES = 1 << 20
FILLED = {"betas": [0.9, 0.999], "eps": 1e-8}  # as in `optim.adamw`

# Sections that would change what a step means, or who talks to whom, behind the loop's back.
NOT_OURS = {
    "scheduler": "the loop sets the learning rate: train.schedule and train.warmup_steps",
    "amp": "model.dtype says in which numbers the model computes",
    "torch_autocast": "model.dtype says in which numbers the model computes",
    "pipeline": "pipeline parallelism is not supported",
    "tensor_parallel": "tensor parallelism is not supported",
    "expert_parallel": "expert parallelism is not supported",
    "sequence_parallel_size": "sequence parallelism is not supported",
    "data_parallel_size": "all ranks are data parallel",
    "hybrid_engine": "it is for inference within training",
    "elasticity": "the batch is the spec's",
    "autotuning": "it starts processes of its own; `allranks compare` measures strategies",
    "curriculum_learning": "the order of the data is the spec's",
    "data_efficiency": "the order of the data is the spec's",
    "compression_training": "it changes the model while it trains",
    "sparse_gradients": "gradients of embeddings are dense",
    "zenflow": "updates that lag behind are no longer the reference's",
    "compile": "DeepSpeed's compiler changes the communication; use model.compile",
}
NOT_OURS_IN_ZERO = {
    "zenflow": "updates that lag behind are no longer the reference's",
    "offload_optimizer": "offloading by DeepSpeed is not supported",
    "offload_param": "offloading by DeepSpeed is not supported",
    "cpu_offload": "offloading by DeepSpeed is not supported",
    "cpu_offload_params": "offloading by DeepSpeed is not supported",
    "zero_quantized_weights": "quantized communication is not exact",
    "zero_quantized_nontrainable_weights": "quantized communication is not exact",
    "zero_quantized_gradients": "quantized communication is not exact",
    "zero_hpz_partition_size": "a second partition within nodes is not supported",
    "mics_shard_size": "shards within groups of ranks are not supported",
}
OWN_COMMUNICATION = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam", "Muon")
KNOWN = (
    *NOT_OURS, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "zero_optimization",
    "fp16", "bf16", "gradient_clipping", "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "activation_checkpointing", "comms_logger", "data_types",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "tensorboard", "wandb", "csv_monitor", "comet", "aio", "checkpoint",
    "timers", "seed", "log_level",
)  # fmt: skip


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the spec says. None is not known here: nothing is compared with it."""

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
    """The option `config`, where it is a path, as what the file holds; `config_from` keeps the path for messages."""
    config, where = read_config(options.get("config"), "strategy.config")
    return options if where is None else {**options, "config": config, "config_from": where}


def plan_options(
    name: str, options: Json, train: TrainSpec, batch: BatchPlan, world: int, dtype: str, device: str
) -> Json:
    """The options with a configuration that is complete but for what the ranks alone know.

    Raises:
        SpecError: the configuration contradicts the spec.
    """
    asked = Asked(
        stage=STAGES[name],
        world_size=world,
        micro_batch_size=batch.micro_batch_size,
        grad_accum=batch.grad_accum,
        dtype=dtype,
        clip_norm=train.clip_norm or 0.0,
        lr=train.lr,
        weight_decay=train.weight_decay,
        device=device,
    )
    return {**options, "config": completed(options["config"], asked, options["config_from"] or "strategy.config")}


def read_config(value: Any, key: str) -> tuple[Json | None, str | None]:
    """The option `config` as the JSON's content, and the name of the file it came from.

    Args:
        value: a path, a mapping (the content itself), or None.

    Raises:
        SpecError: no such file, or no JSON object.
    """
    if value is None or isinstance(value, dict):
        return value, None
    if not isinstance(value, str):
        raise SpecError(f"{key}: {value!r} is neither a path nor a mapping")
    path = Path(value).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{key}: {path} is larger than {MAX_BYTES} bytes; this is no DeepSpeed configuration")
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_twice)
    except FileNotFoundError:
        raise SpecError(f"{key}: there is no file {path}") from None
    except OSError as error:
        raise SpecError(f"{key}: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{key}: {path} is not JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{key}: {path} holds a {type(found).__name__}, not an object of keys")
    return found, str(path)


def _no_twice(pairs: list[tuple[str, Any]]) -> Json:
    """Of two equal keys JSON keeps the last, without a word."""
    keys = [k for k, _ in pairs]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        raise ValueError(f"the key {twice[0]!r} stands twice in one object")
    return dict(pairs)


def completed(given: Json | None, asked: Asked, where: str) -> Json:
    """The configuration with everything filled in that the spec knows.

    A value that is missing or ``"auto"`` is the spec's. What stays ``"auto"`` is known to the ranks alone (the dtype of what
    is trained), or is left to DeepSpeed's default.

    Args:
        where: the file, for messages.

    Raises:
        SpecError: a value contradicts the spec, or asks for what is not supported; names file, key and both values.
    """
    config = json.loads(json.dumps(given or {}))
    product = list(_product(config, asked))
    problems = [*_foreign(config), *product]
    for path, ours, key, always in _rules(config, asked):
        if not (product and path == "train_batch_size"):  # said already
            _settle(config, path, ours, key, always, problems)
    problems += _of_optimizer(config, asked)
    if problems:
        raise SpecError(f"{where}: " + "; ".join(problems))
    return config


def _rules(config: Json, asked: Asked) -> Iterator[tuple[str, Any, str, bool]]:
    """(key in the JSON, our value, key in the spec, whether to write it where the JSON leaves it out)."""
    micro, accum = asked.micro_batch_size, asked.grad_accum
    both = micro is not None and accum is not None
    yield "train_micro_batch_size_per_gpu", micro, "train.micro_batch_size", True
    yield "gradient_accumulation_steps", accum, "the accumulation of train.grad_accum or train.global_batch_size", True
    total = micro * accum * asked.world_size if micro is not None and accum is not None else None
    product = f"micro-batch x accumulation x ranks = {micro} x {accum} x {asked.world_size}" if both else ""
    yield "train_batch_size", total, product, True
    yield "zero_optimization.stage", asked.stage, "the stage of strategy.name", True
    if asked.dtype is not None:
        yield "fp16.enabled", False, f"float16 (model.dtype: {asked.dtype})", False
        if asked.dtype != "bfloat16":
            yield "bf16.enabled", False, f"bfloat16 (model.dtype: {asked.dtype})", True
        elif _at(config, "bf16.enabled") is False:  # adapters may be float32: the ranks will see
            yield "bf16.enabled", AUTO, f"model.dtype: {asked.dtype}", True
    yield "gradient_clipping", asked.clip_norm, "train.clip_norm (0 is none)", True
    if isinstance(config.get("optimizer"), dict):
        yield "optimizer.params.lr", asked.lr, "train.lr", True
        yield "optimizer.params.weight_decay", asked.weight_decay, "train.weight_decay", True


def _settle(config: Json, path: str, ours: Any, key: str, always: bool, problems: list[str]) -> None:
    theirs = _at(config, path)
    if theirs is None or theirs == AUTO:
        if ours is not None and (always or theirs == AUTO):
            _put(config, path, ours)
        return
    if ours is None or same_setting(theirs, ours):
        return
    problems.append(f'{path} is {json.dumps(theirs)}, but {key} is {json.dumps(ours)}; write "auto" or make them agree')


def _product(config: Json, asked: Asked) -> Iterator[str]:
    """The JSON's own three numbers must agree among themselves (with the ranks) before they are compared with the spec."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, accum = (config.get(name) for name in names)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in (total, micro, accum)):
        return
    if total != micro * accum * asked.world_size:  # type: ignore[operator]
        yield (
            f"train_batch_size is {total}, but train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks is "
            f"{micro} x {accum} x {asked.world_size} = {micro * accum * asked.world_size}; "  # type: ignore[operator]
            'write "auto" or make them agree'
        )


def _foreign(config: Json) -> Iterator[str]:
    for name, why in NOT_OURS.items():
        if _is_on(config.get(name)):
            yield f"{name} cannot be used here: {why}"
    zero = config.get("zero_optimization")
    if zero is not None and not isinstance(zero, dict):
        yield f"zero_optimization is {json.dumps(zero)}, but must be an object of keys"
        del config["zero_optimization"]
        zero = None
    for name, why in NOT_OURS_IN_ZERO.items():
        value = (zero or {}).get(name)
        if _is_on(value) and value not in (1, -1) and not (isinstance(value, dict) and value.get("device") == "none"):
            yield f"zero_optimization.{name} cannot be used here: {why}"
    if (zero or {}).get("compute_grad_norm") is False:
        yield "zero_optimization.compute_grad_norm is false, but the norm tells whether a gradient is finite"
    for name in ("optimizer", "bf16", "fp16"):
        if name in config and not isinstance(config[name], dict):
            yield f"{name} is {json.dumps(config[name])}, but must be an object of keys"
            del config[name]
    for name in config:
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
        if name not in KNOWN and near:
            yield f"DeepSpeed would ignore the key {name!r}; did you mean {near[0]!r}?"


def _is_on(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and value.get("enabled", True) is not False
    return value not in (None, False, AUTO)


def _of_optimizer(config: Json, asked: Asked) -> Iterator[str]:
    """Without one the project's AdamW is used, which every ZeRO stage takes."""
    optimizer = config.get("optimizer")
    if optimizer is None:
        return
    name = optimizer.get("type")
    if not isinstance(name, str):
        yield "optimizer.type is missing; leave the section out for the project's own AdamW"
        return
    params = optimizer.setdefault("params", {})
    for key, value in FILLED.items():
        if params.get(key) == AUTO:
            params[key] = value
    if name.lower() in {n.lower() for n in OWN_COMMUNICATION}:
        yield f"optimizer.type {name} communicates in a way of its own, which is not the reference's; use AdamW"
    elif asked.device == "cpu" and name.lower() in ("adam", "adamw") and params.get("torch_adam") is not True:
        yield (
            f"optimizer.type {name} would be compiled when the run starts, on a CPU for nothing; add params.torch_adam: true, "
            "or leave the section out for the project's own AdamW"
        )


def _at(config: Json, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put(config: Json, path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for part in outer:
        config = config.setdefault(part, {})
    config[last] = value


def without_auto(config: Json) -> Json:
    """What is still ``"auto"`` left out: DeepSpeed has a default for it, but does not know the word."""
    kept = {k: without_auto(v) if isinstance(v, dict) else v for k, v in config.items()}
    return {k: v for k, v in kept.items() if not (isinstance(v, str) and v == AUTO)}
