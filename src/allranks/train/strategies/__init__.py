"""The registry of strategies. No torch here: `plan` reads it on machines without torch.

A new strategy is one file beside this one and one line below.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from allranks.errors import SpecError

if TYPE_CHECKING:
    from allranks.planning import BatchPlan
    from allranks.spec.records import RunSpec
    from allranks.train.loop import Loop
    from allranks.train.strategies.contract import Strategy


@dataclass(frozen=True)
class Entry:
    """Where a strategy lives, and its options with their defaults."""

    target: str
    summary: str
    options: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)  # options that are one of some words
    single_process: bool = False
    planner: str = ""  # a module without torch, with `read_options` and `plan_options`
    engine: str = ".loop:Loop"  # what runs the optimizer steps


FSDP2_OPTIONS: dict[str, Any] = {"find_unused_parameters": False, "adapters": "auto", "offload": "none"}
FSDP2_CHOICES = {"adapters": ("auto", "ignored", "sharded"), "offload": ("none", "optimizer", "all")}
# offload: what is kept in the host's memory; the update is then computed there
ZERO_OPTIONS: dict[str, Any] = {"bucket_mb": 25.0, "offload": "none"}
OFFLOAD = {"offload": ("none", "optimizer")}
# config: a path to a JSON file, or its content; config_from: where the content came from, for messages
DEEPSPEED = {"config": None, "config_from": None, "find_unused_parameters": False}

REGISTRY: dict[str, Entry] = {
    "single": Entry("single:Single", "one process, nothing to communicate", single_process=True),
    "simple_ddp": Entry("simple_ddp:SimpleDDP", "an all-reduce a gradient after every backward"),
    "simple_ddp_ga": Entry("simple_ddp_ga:SimpleDDPAccumulating", "an all-reduce a gradient after the last backward"),
    "simple_ddp_hook": Entry("simple_ddp_hook:SimpleDDPHook", "a blocking all-reduce a gradient within backward"),
    "simple_ddp_async": Entry("simple_ddp_async:SimpleDDPAsync", "an asynchronous all-reduce a gradient in backward"),
    "bucket_ddp_async": Entry(
        "bucket_ddp_async:BucketDDPAsync", "asynchronous all-reduces of buckets in backward", {"bucket_mb": 25.0}
    ),
    "zero1": Entry("zero1:Zero1", "optimizer state in parts", ZERO_OPTIONS, OFFLOAD),
    "zero2": Entry("zero2:Zero2", "optimizer state and gradients in parts", ZERO_OPTIONS, OFFLOAD),
    "zero3": Entry(
        "zero3:Zero3",
        "weights, gradients and optimizer state in parts, gathered block by block",
        {"offload": "none"},
        OFFLOAD,
    ),
    "pytorch_ddp": Entry(
        "pytorch_ddp:PyTorchDDP",
        "torch DistributedDataParallel",
        {"bucket_mb": 25.0, "find_unused_parameters": False, "static_graph": False},
    ),
    "pytorch_zero1": Entry(
        "pytorch_zero1:PyTorchZero1",
        "torch DistributedDataParallel with ZeroRedundancyOptimizer",
        {"bucket_mb": 25.0, "find_unused_parameters": False},
    ),
    "pytorch_zero2": Entry(
        "pytorch_zero2:PyTorchZero2", "torch FSDP2, weights whole until backward", FSDP2_OPTIONS, FSDP2_CHOICES
    ),
    "pytorch_zero3": Entry(
        "pytorch_zero3:PyTorchZero3", "torch FSDP2, weights gathered block by block", FSDP2_OPTIONS, FSDP2_CHOICES
    ),
    "deepspeed_zero1": Entry(
        "deepspeed_zero1:DeepSpeedZero1",
        "DeepSpeed, optimizer state in parts",
        DEEPSPEED,
        planner="deepspeed_config",
    ),
    "deepspeed_zero2": Entry(
        "deepspeed_zero2:DeepSpeedZero2",
        "DeepSpeed, optimizer state and gradients in parts",
        DEEPSPEED,
        planner="deepspeed_config",
    ),
    "deepspeed_zero3": Entry(
        "deepspeed_zero3:DeepSpeedZero3", "DeepSpeed, everything in parts", DEEPSPEED, planner="deepspeed_config"
    ),
    "hf_trainer": Entry(
        ".hf.strategy:HFTrainer",
        "Hugging Face Trainer and Accelerate in place of the loop",
        {"find_unused_parameters": False, "args": None},
        planner=".hf.arguments",
        engine=".hf.engine:TrainerLoop",
    ),
}


def entry(name: str) -> Entry:
    """The registry line of a strategy.

    Raises:
        SpecError: there is no such strategy; the message names the nearest ones.
    """
    if name in REGISTRY:
        return REGISTRY[name]
    near = difflib.get_close_matches(name, REGISTRY, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise SpecError(f"strategy.name: there is no strategy {name!r}{hint} (known: {', '.join(REGISTRY)})")


def resolve_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The strategy's options with defaults filled in, unknown names and wrong types refused."""
    known = entry(name).options
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SpecError(f"strategy.{key}: {name} has no option {key!r}{hint} (known: {', '.join(known) or 'none'})")
        default = known[key]
        allowed = (int, float) if isinstance(default, float) else type(default)
        if default is not None and (
            not isinstance(value, allowed) or isinstance(value, bool) != isinstance(default, bool)
        ):
            raise SpecError(f"strategy.{key}: {value!r} is no {type(default).__name__}")
        if key in entry(name).choices and value not in entry(name).choices[key]:
            raise SpecError(f"strategy.{key}: {value!r} is none of {', '.join(entry(name).choices[key])}")
    return {**known, **given}


def read_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options with the content of files that they name, so that every rank sees what was read here."""
    known = REGISTRY.get(name)
    return _planner(known).read_options(given) if known and known.planner else given


def plan_options(spec: RunSpec, batch: BatchPlan | None, *, world: int, dtype: str, device: str) -> dict[str, Any]:
    """The options as the ranks get them: defaults filled in, and checked against the rest of the spec.

    Raises:
        SpecError: an unknown option, or one that contradicts the spec.
    """
    name = spec.strategy.name
    options = resolve_options(name, spec.strategy.options)
    known = entry(name)
    if not known.planner or batch is None:
        return options
    return _planner(known).plan_options(name, options, spec.train, batch, world, dtype, device)


def _planner(known: Entry) -> Any:
    return import_module(f".{known.planner}", __name__)


def _named(target: str) -> Any:
    """What stands in the registry as ``module:attribute``; a dot before the module leads out of this folder."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(f".{module}", __name__), attribute)


def remarks_on(options: dict[str, Any], device: str) -> tuple[str, ...]:
    """A sentence for each option that is of no use on such a device (cpu, cuda)."""
    offload = options.get("offload", "none")
    if offload == "none" or device != "cpu":
        return ()
    return (
        f"strategy.offload: {offload} saves nothing here: these ranks compute on CPUs, so all is on the host already",
    )


def create(name: str, options: dict[str, Any]) -> Strategy:
    """Import and build a strategy (imports torch)."""
    return _named(entry(name).target)(**resolve_options(name, options))


def loop_of(name: str) -> type[Loop]:
    """The engine that runs a strategy's optimizer steps: `train.loop.Loop`, or one that is made and run like it."""
    return _named(entry(name).engine)
