"""Registry of the strategies: options and memory model of each. No torch: `plan` reads it on machines without it."""

from __future__ import annotations

import json
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from allranks.errors import SpecError
from allranks.spec.strategies import data_parallel, deepspeed_zero, fsdp2, hf_trainer, zero
from allranks.spec.strategies.base import (
    ModelSizes,
    PlannedWork,
    StrategyInfo,
    StrategyPlanner,
    StrategyState,
    as_sharded,
)
from allranks.utils.plugins import PluginRegistry
from allranks.utils.text import did_you_mean, nearest_name, suggest

if TYPE_CHECKING:
    from allranks.spec.records import RunSpec


OPTION_DESCRIPTIONS = {
    "adapters": "FSDP2 with LoRA: sharded, or ignored = whole on every rank; auto chooses by their size",
    "args": "hf_trainer: arguments of transformers.TrainingArguments, by name or from a JSON file",
    "bucket_mb": "size of the buckets in which gradients are reduced, in MB",
    "config": "DeepSpeed: path of a JSON file, or its content",
    "config_from": "DeepSpeed: where the content of config came from; set by allranks",
    "find_unused_parameters": "allow weights that a step does not use; each step searches for them",
    "offload": "what is kept in host memory: none, optimizer, or all (FSDP2 only)",
    "replicate": (
        "FSDP2: nodes = a copy of the weights on every node, sharded over its ranks (HSDP); none; auto by memory"
    ),
    "static_graph": "DDP: the same weights are used in every step, which allows some optimizations",
}


BUILT_IN: dict[str, StrategyInfo] = {
    "single": data_parallel.SINGLE,
    "simple_ddp": data_parallel.SIMPLE_DDP,
    "simple_ddp_ga": data_parallel.SIMPLE_DDP_GA,
    "simple_ddp_hook": data_parallel.SIMPLE_DDP_HOOK,
    "simple_ddp_async": data_parallel.SIMPLE_DDP_ASYNC,
    "bucket_ddp_async": data_parallel.BUCKET_DDP_ASYNC,
    "zero1": zero.ZERO1,
    "zero2": zero.ZERO2,
    "zero3": zero.ZERO3,
    "pytorch_ddp": data_parallel.PYTORCH_DDP,
    "pytorch_zero1": data_parallel.PYTORCH_ZERO1,
    "pytorch_zero2": fsdp2.PYTORCH_ZERO2,
    "pytorch_zero3": fsdp2.PYTORCH_ZERO3,
    "deepspeed_zero1": deepspeed_zero.DEEPSPEED_ZERO1,
    "deepspeed_zero2": deepspeed_zero.DEEPSPEED_ZERO2,
    "deepspeed_zero3": deepspeed_zero.DEEPSPEED_ZERO3,
    "hf_trainer": hf_trainer.HF_TRAINER,
}
"""The strategies of this package. Each is described once, in the module of its family."""


REGISTRY = PluginRegistry(BUILT_IN, group="allranks.strategies", kind=StrategyInfo)
"""All strategies, also those of installed packages."""


_WORDS: dict[str, str] = json.loads((Path(__file__).parent / "synonyms.json").read_text())
STRATEGY_SYNONYMS = {word: names.split() for names, words in _WORDS.items() for word in words.split()}
"""Names of other tools (lower case, underscores) and the strategies that do the same, the most usual one first."""


def strategy_info(name: str) -> StrategyInfo:
    """Return the registry entry of a strategy.

    Raises:
        SpecError: unknown strategy; the message names the nearest ones.
        EnvironmentNotAble: the package of the strategy cannot be loaded.
    """
    return REGISTRY.require(name, "strategy.name", what="strategy", hint=lambda: strategy_hint(name))


def strategy_hint(name: str) -> str:
    """Return ``; did you mean 'pytorch_ddp'?`` for an unknown strategy; empty if nothing is near."""
    near = near_strategies(name, REGISTRY)
    return suggest(*(repr(one) if len(near) == 1 else f"{one!r} ({REGISTRY[one].summary})" for one in near))


def near_strategies(name: str, known: Collection[str]) -> list[str]:
    """Return the strategies that a wrong name may mean, likeliest first: by other tools' names, then by spelling."""
    plain = name.strip().lower().replace("-", "_").replace(" ", "_")
    meant = STRATEGY_SYNONYMS.get(plain) or STRATEGY_SYNONYMS.get(plain.replace("_", ""))
    if meant is None:
        near = nearest_name(plain.replace("stage_", "zero"), known)
        meant = [] if near is None else [near]
    return [strategy for strategy in meant if strategy in known]


def resolve_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the strategy's options with defaults; refuse unknown names and wrong types."""
    info = strategy_info(name)
    known = info.options
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(key, known)
            raise SpecError(f"strategy.{key}: {name} has no option {key!r}{hint} (known: {', '.join(known) or 'none'})")
        default = known[key]
        allowed = (int, float) if isinstance(default, float) else type(default)
        wrong = not isinstance(value, allowed) or isinstance(value, bool) != isinstance(default, bool)
        if default is not None and wrong:
            raise SpecError(f"strategy.{key}: expected {type(default).__name__}, got {value!r}")
        if key in info.choices and value not in info.choices[key]:
            raise SpecError(f"strategy.{key}: expected one of {', '.join(info.choices[key])}, got {value!r}")
    return {**known, **given}


def read_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the content of files that they name, so that every rank uses the same content."""
    known = REGISTRY.get(name)
    return _planner(known).read_options(given) if known and known.planner else given


def engine_param_dtype(spec: RunSpec) -> str | None:
    """Return the dtype of trained weights that another library's engine configuration sets; None if it sets none."""
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
    work = PlannedWork(
        strategy=name,
        micro_batch_size=micro_batch_size,
        grad_accum=grad_accum,
        world_size=world,
        dtype=dtype,
        device=device,
    )
    return _planner(known).plan_options(options, spec.train, work)


def _planner(known: StrategyInfo) -> StrategyPlanner:
    return cast(StrategyPlanner, import_module(known.planner))


def strategy_state(name: str, model: ModelSizes, options: dict[str, Any]) -> StrategyState | None:
    """Return the strategy's memory layout, or None if it is unknown."""
    known = REGISTRY.get(name)
    if known is None or known.memory is None:
        return None
    state = known.memory(as_sharded(model, options), options)
    state.offload = str(options.get("offload", "none"))
    return state
