"""Registry of the strategies and their options. No torch, because `plan` reads it on machines without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from allranks.errors import SpecError
from allranks.spec.suggestions import near_strategies, suggest_strategies
from allranks.utils.nearest import did_you_mean

if TYPE_CHECKING:
    from allranks.spec.records import RunSpec


@dataclass(frozen=True)
class StrategyInfo:
    """Where a strategy is implemented, and its options with their defaults."""

    target: str
    """The class, as ``module:class`` in `allranks.train`."""
    summary: str
    options: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)  # options that are one of some words
    single_process: bool = False
    planner: str = ""  # the full name of a module without torch, with `read_options`, `param_dtype` and `plan_options`
    engine: str = "loop:TrainingLoop"
    """What runs the optimizer steps, as ``module:class`` in `allranks.train`."""


FSDP2_OPTIONS: dict[str, Any] = {"find_unused_parameters": False, "adapters": "auto", "offload": "none"}


FSDP2_CHOICES = {"adapters": ("auto", "ignored", "sharded"), "offload": ("none", "optimizer", "all")}


# offload: what is kept in the host's memory; the update is then computed there
ZERO_OPTIONS: dict[str, Any] = {"bucket_mb": 25.0, "offload": "none"}


OFFLOAD = {"offload": ("none", "optimizer")}


# config: a path to a JSON file, or its content; config_from: where the content came from, for messages
DEEPSPEED = {"config": None, "config_from": None, "find_unused_parameters": False}


OPTION_DESCRIPTIONS = {
    "adapters": "FSDP2 with LoRA: sharded, or ignored = whole on every rank; auto chooses by their size",
    "args": "hf_trainer: arguments of transformers.TrainingArguments, by name or from a JSON file",
    "bucket_mb": "size of the buckets in which gradients are reduced, in MB",
    "config": "DeepSpeed: path of a JSON file, or its content",
    "config_from": "DeepSpeed: where the content of config came from; set by allranks",
    "find_unused_parameters": "allow weights that a step does not use; each step searches for them",
    "offload": "what is kept in host memory: none, optimizer, or all (FSDP2 only)",
    "static_graph": "DDP: the same weights are used in every step, which allows some optimizations",
}


REGISTRY: dict[str, StrategyInfo] = {
    "single": StrategyInfo("strategies.single:Single", "one process, nothing to communicate", single_process=True),
    "simple_ddp": StrategyInfo("strategies.simple_ddp:SimpleDDP", "one all-reduce per gradient after every backward"),
    "simple_ddp_ga": StrategyInfo(
        "strategies.simple_ddp:SimpleDDPAccumulating", "one all-reduce per gradient after the last backward"
    ),
    "simple_ddp_hook": StrategyInfo(
        "strategies.simple_ddp:SimpleDDPHook", "one blocking all-reduce per gradient during backward"
    ),
    "simple_ddp_async": StrategyInfo(
        "strategies.simple_ddp:SimpleDDPAsync", "one asynchronous all-reduce per gradient during backward"
    ),
    "bucket_ddp_async": StrategyInfo(
        "strategies.bucket_ddp_async:BucketDDPAsync",
        "asynchronous all-reduces of buckets during backward",
        {"bucket_mb": 25.0},
    ),
    "zero1": StrategyInfo("strategies.zero1:Zero1", "sharded optimizer state", ZERO_OPTIONS, OFFLOAD),
    "zero2": StrategyInfo("strategies.zero2:Zero2", "sharded optimizer state and gradients", ZERO_OPTIONS, OFFLOAD),
    "zero3": StrategyInfo(
        "strategies.zero3:Zero3",
        "sharded weights, gradients and optimizer state; weights gathered block by block",
        {"offload": "none"},
        OFFLOAD,
    ),
    "pytorch_ddp": StrategyInfo(
        "strategies.pytorch_ddp:PyTorchDDP",
        "torch DistributedDataParallel",
        {"bucket_mb": 25.0, "find_unused_parameters": False, "static_graph": False},
    ),
    "pytorch_zero1": StrategyInfo(
        "strategies.pytorch_zero1:PyTorchZero1",
        "torch DistributedDataParallel with ZeroRedundancyOptimizer",
        {"bucket_mb": 25.0, "find_unused_parameters": False},
    ),
    "pytorch_zero2": StrategyInfo(
        "strategies.fsdp2:PyTorchZero2",
        "torch FSDP2, weights stay gathered until backward",
        FSDP2_OPTIONS,
        FSDP2_CHOICES,
    ),
    "pytorch_zero3": StrategyInfo(
        "strategies.fsdp2:PyTorchZero3",
        "torch FSDP2, weights gathered block by block",
        FSDP2_OPTIONS,
        FSDP2_CHOICES,
    ),
    "deepspeed_zero1": StrategyInfo(
        "strategies.deepspeed_zero:DeepSpeedZero1",
        "DeepSpeed, sharded optimizer state",
        DEEPSPEED,
        planner="allranks.spec.deepspeed",
    ),
    "deepspeed_zero2": StrategyInfo(
        "strategies.deepspeed_zero:DeepSpeedZero2",
        "DeepSpeed, sharded optimizer state and gradients",
        DEEPSPEED,
        planner="allranks.spec.deepspeed",
    ),
    "deepspeed_zero3": StrategyInfo(
        "strategies.deepspeed_zero:DeepSpeedZero3",
        "DeepSpeed, sharded weights, gradients and optimizer state",
        DEEPSPEED,
        planner="allranks.spec.deepspeed",
    ),
    "hf_trainer": StrategyInfo(
        "strategies.hf_trainer:HFTrainer",
        "Hugging Face Trainer and Accelerate in place of the loop",
        {"find_unused_parameters": False, "args": None},
        planner="allranks.spec.trainer_arguments",
        engine="engines.hf_trainer:TrainerLoop",
    ),
}


def strategy_info(name: str) -> StrategyInfo:
    """Return the registry entry of a strategy.

    Raises:
        SpecError: unknown strategy; the message names the nearest ones.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    raise SpecError(f"strategy.name: unknown strategy {name!r}{strategy_hint(name)} (known: {', '.join(REGISTRY)})")


def strategy_hint(name: str) -> str:
    """Return ``; did you mean 'pytorch_ddp'?`` for an unknown strategy; empty if nothing is near."""
    return suggest_strategies(
        near_strategies(name, REGISTRY), {known: info.summary for known, info in REGISTRY.items()}
    )


def resolve_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the strategy's options with defaults; refuse unknown names and wrong types."""
    known = strategy_info(name).options
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise SpecError(f"strategy.{key}: {name} has no option {key!r}{hint} (known: {', '.join(known) or 'none'})")
        default = known[key]
        allowed = (int, float) if isinstance(default, float) else type(default)
        if default is not None and (
            not isinstance(value, allowed) or isinstance(value, bool) != isinstance(default, bool)
        ):
            raise SpecError(f"strategy.{key}: expected {type(default).__name__}, got {value!r}")
        if key in strategy_info(name).choices and value not in strategy_info(name).choices[key]:
            raise SpecError(
                f"strategy.{key}: expected one of {', '.join(strategy_info(name).choices[key])}, got {value!r}"
            )
    return {**known, **given}


def read_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the content of files that they name, so that every rank uses the same content."""
    known = REGISTRY.get(name)
    return _planner(known).read_options(given) if known and known.planner else given


def engine_param_dtype(spec: RunSpec) -> str | None:
    """Return the dtype of trained weights that the configuration of another library's engine sets; None if it sets none."""
    known = strategy_info(spec.strategy.name)
    if not known.planner or spec.script is not None:
        return None
    return _planner(known).param_dtype(resolve_options(spec.strategy.name, spec.strategy.options))


def plan_options(
    spec: RunSpec, micro_batch_size: int, grad_accum: int, *, world: int, dtype: str, device: str
) -> dict[str, Any]:
    """Return the options for the ranks: completed with defaults and checked against the rest of the spec.

    Args:
        micro_batch_size: planned sequences per rank and micro-batch.
        grad_accum: planned micro-batches per rank and optimizer step.

    Raises:
        SpecError: an unknown option, or one that contradicts the spec.
    """
    name = spec.strategy.name
    options = resolve_options(name, spec.strategy.options)
    known = strategy_info(name)
    if not known.planner or spec.script is not None:
        return options
    return _planner(known).plan_options(name, options, spec.train, micro_batch_size, grad_accum, world, dtype, device)


def _planner(known: StrategyInfo) -> Any:
    return import_module(known.planner)


def offload_warnings(options: dict[str, Any], device: str) -> tuple[str, ...]:
    """Return a sentence for each option that is useless on this device (cpu, cuda)."""
    offload = options.get("offload", "none")
    if offload == "none" or device != "cpu":
        return ()
    return (
        f"strategy.offload: {offload} saves nothing: these ranks compute on CPUs, so everything is already in host memory",
    )
