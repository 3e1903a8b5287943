"""What a run's records say of its model: engine, size, versions, batches, experts, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from allranks.rundir import write_json
from allranks.train import strategies
from allranks.train.attempt import Attempt
from allranks.train.proof import weights_digest
from allranks.train.strategies.contract import Strategy

if TYPE_CHECKING:
    from allranks.train.building import Built

TOLD = ("torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "allranks")


def tell_remarks(here: Attempt, adapted: Sequence[str], strategy: Strategy) -> None:
    """What a reader should know of adapters and strategy as they were set up."""
    remarks = [("adapter", text) for text in adapted]
    remarks += [
        ("strategy", text) for text in strategies.remarks_on(here.plan.strategy_options, here.world.device.type)
    ]
    remarks += [("strategy", text) for text in getattr(strategy, "remarks", ())]
    for what, remark in remarks:
        here.events.write("remark", what=what, message=remark)
        here.say_once(remark)


def tell_engine(here: Attempt, strategy: Strategy) -> None:
    """Where another library's engine does the work: its version, the time it took to start, and its configuration."""
    facts, config = getattr(strategy, "facts", None), getattr(strategy, "config", None)
    if facts:
        here.events.write("engine", **facts)
    if config and here.world.is_first:
        write_json(here.run.engine_config, config)


def tell_model(here: Attempt, parameters: tuple[int, int], seconds: float) -> None:
    """Size, device, and what the numbers depend on. ``parameters``: all, and those that are trained."""
    device = here.world.device
    here.events.write(
        "model",
        parameters=parameters[0],
        parameters_trained=parameters[1],
        seconds=round(seconds, 3),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=str(torch.__version__),
        versions=versions(),
        threads=torch.get_num_threads(),
    )


def tell_batch(here: Attempt, batch: Any, model: torch.nn.Module) -> None:
    """What the model is given, beside what it computes in: layers refuse numbers of another dtype than their weights."""
    weights = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    inputs = batch.inputs
    here.events.write(
        "batch", shape=list(inputs.shape), dtype=str(inputs.dtype).removeprefix("torch."), weights=weights
    )


def tell_experts(here: Attempt, built: Built, done: int) -> None:
    """How many tokens each expert of a mixture was given since this was last told. Every rank calls."""
    if built.experts:
        counts = built.experts.counts(done, here.world.group)
        if here.world.is_first:
            here.events.write("experts", **msgspec.to_builtins(counts))


def tell_end(here: Attempt, built: Built, done: int) -> None:
    """Each rank's own, not agreed on: whoever compares them sees whether gradients were averaged and state was shared out."""
    if here.spec.observe.proof_at_end:
        digest = weights_digest(built.model).hex() if built.strategy.replicated else None
        elements = sum(r.length for r in built.strategy.state_ranges())
        here.events.write("end", step=done, weights_hash=digest, state_elements=elements)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {}
    for name in TOLD:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
