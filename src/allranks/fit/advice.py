"""Changes of the spec that make it fit, the cheapest first: first those that cost nothing, last those that change what is trained."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from allranks.errors import AllranksError
from allranks.facts import MachineFacts
from allranks.fit.estimate import estimate
from allranks.fit.records import CLOSE, FITS, TOO_LARGE, Fit, Remedy
from allranks.fit.source import Found
from allranks.planning import LaunchPlan, make_plan
from allranks.spec.records import RunSpec

WANTED = 3
CHECKPOINTING, LORA = "model.gradient_checkpointing=true", "adapter.type=lora"

Change = tuple[str, list[str], RunSpec, str]


def with_remedies(found: Fit, spec: RunSpec, plan: LaunchPlan, facts: MachineFacts, config: Found) -> Fit:
    """The same with up to three changes that make it fit; or, if none does alone, with all of them together."""
    if found.verdict not in (CLOSE, TOO_LARGE):
        return found
    good: list[Remedy] = []
    nearest: Remedy | None = None
    for change in _changes(spec, plan):
        tried = _try(change, facts, config, found)
        if tried is None:
            continue
        if tried.fits:
            good.append(tried)
        elif nearest is None or tried.needed_bytes < nearest.needed_bytes:
            nearest = tried
        if len(good) == WANTED:
            break
    if not good and nearest:
        good = [nearest]
    return msgspec.structs.replace(found, remedies=good)


def _try(change: Change, facts: MachineFacts, config: Found, before: Fit) -> Remedy | None:
    what, settings, spec, cost = change
    try:
        plan = make_plan(spec, facts)
    except AllranksError:
        return None
    got = estimate(spec, plan, config, before.capacity)
    if got.unknown or got.needed_bytes >= before.needed_bytes:
        return None
    return Remedy(change=what, settings=settings, needed_bytes=got.needed_bytes, fits=got.verdict == FITS, cost=cost)


def _changes(spec: RunSpec, plan: LaunchPlan) -> Iterator[Change]:
    """Those that leave alone what is trained, then LoRA; each first alone, then together with the smallest activations."""
    assert spec.model is not None
    lean, settings = spec, []
    smaller = _smaller_batch(spec, plan)
    if smaller is not None:
        yield smaller
        lean, settings = smaller[2], smaller[1]
    if not spec.model.gradient_checkpointing:
        change = "recompute activations in backward"
        yield change, [CHECKPOINTING], _checkpointed(spec), "about a third more computing"
        lean, settings = _checkpointed(lean), [*settings, CHECKPOINTING]
    if (narrow := _narrow(spec, plan)) is not None:
        yield narrow
    yield from _sharded(spec, plan, spec, [], "")
    full = spec.adapter.type == "none"
    if full:
        yield "train LoRA adapters alone", [LORA], _lora(spec), "another kind of training; often as good"
    if lean is not spec:
        yield from _sharded(spec, plan, lean, settings, ", with the least activations")
        if full:
            yield "LoRA, with the least activations", [LORA, *settings], _lora(lean), "another kind of training"
    if full:
        yield from _sharded(spec, plan, _lora(lean), [LORA, *settings], " and LoRA, with the least activations")
    if plan.device == "cuda" and plan.world_size > 1:
        yield _on_host(lean, settings)


def _smaller_batch(spec: RunSpec, plan: LaunchPlan) -> Change | None:
    assert plan.batch is not None
    micro = plan.batch.micro_batch_size
    if micro == 1:
        return None
    settings, train = ["train.micro_batch_size=1"], msgspec.structs.replace(spec.train, micro_batch_size=1)
    if spec.train.global_batch_size is None:  # else the accumulation follows from it, and both together are refused
        accum = plan.batch.grad_accum * micro
        settings, train = [*settings, f"train.grad_accum={accum}"], msgspec.structs.replace(train, grad_accum=accum)
    return (
        "one sequence a micro-batch, the same global batch",
        settings,
        msgspec.structs.replace(spec, train=train),
        "smaller matrix products",
    )


def _narrow(spec: RunSpec, plan: LaunchPlan) -> Change | None:
    assert spec.model is not None
    if plan.dtype != "float32" or plan.device != "cuda":
        return None
    model = msgspec.structs.replace(spec.model, dtype="bfloat16")
    return (
        "weights in bfloat16",
        ["model.dtype=bfloat16"],
        msgspec.structs.replace(spec, model=model),
        "less exact weights and moments",
    )


def _sharded(spec: RunSpec, plan: LaunchPlan, base: RunSpec, settings: list[str], more: str) -> Iterator[Change]:
    if plan.world_size == 1:
        return
    for name, cost in (
        ("zero1", "one and a half times the traffic"),
        ("zero2", "gradients are reduced in every micro-step"),
        ("pytorch_zero3", "weights are gathered twice in every micro-step"),
    ):
        if name != spec.strategy.name:
            strategy = msgspec.structs.replace(spec.strategy, name=name, options={})
            changed = msgspec.structs.replace(base, strategy=strategy)
            yield f"strategy {name}{more}", [_strategy_setting(spec, name), *settings], changed, cost


def _strategy_setting(spec: RunSpec, name: str, **options: str) -> str:
    """The spec's own options are another strategy's, which may not know them."""
    if spec.strategy.options or options:
        return f"strategy={{{', '.join(f'{k}: {v}' for k, v in {'name': name, **options}.items())}}}"
    return f"strategy.name={name}"


def _on_host(base: RunSpec, settings: list[str]) -> Change:
    strategy = msgspec.structs.replace(base.strategy, name="pytorch_zero3", options={"offload": "all"})
    return (
        "weights and optimizer state in the host's memory",
        [_strategy_setting(base, "pytorch_zero3", offload="all"), *settings],
        msgspec.structs.replace(base, strategy=strategy),
        "they travel to the device and back in every step",
    )


def _checkpointed(spec: RunSpec) -> RunSpec:
    assert spec.model is not None
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, gradient_checkpointing=True))


def _lora(spec: RunSpec) -> RunSpec:
    return msgspec.structs.replace(spec, adapter=msgspec.structs.replace(spec.adapter, type="lora"))
