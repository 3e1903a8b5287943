"""Spec, plan and config to the memory of one rank. Pure."""

from __future__ import annotations

import msgspec

from allranks.fit.activations import Batch
from allranks.fit.adapters import adapted
from allranks.fit.config import ModelConfig
from allranks.fit.moments import SETUP, UPDATE, Step
from allranks.fit.records import NOT_KNOWN, Capacity, Fit, Moment, verdict
from allranks.fit.runtime import Heap, with_runtime
from allranks.fit.shapes import shapes_of
from allranks.fit.sharing import Model
from allranks.fit.source import Found
from allranks.fit.strategies import sharing
from allranks.mlp import is_mlp
from allranks.planning import LaunchPlan
from allranks.spec.records import ModelSpec, RunSpec

ELEMENT = {"float32": 4, "bfloat16": 2}
FIRST = "first step"


def estimate(spec: RunSpec, plan: LaunchPlan, found: Found, capacity: Capacity) -> Fit:
    """What one rank needs, and whether it has it."""
    empty = Fit(
        model=spec.model.name if spec.model else "script",
        model_source=found.source,
        strategy=plan.strategy,
        world_size=plan.world_size,
        parameters=0,
        parameters_trained=0,
        moments=[],
        peak="",
        needed_bytes=0,
        capacity=capacity,
        verdict=NOT_KNOWN,
        unknown=found.unknown,
    )
    if found.config is None or spec.model is None or spec.data is None or plan.batch is None:
        return empty
    model = model_of(spec, plan, found.config)
    shares = sharing(plan.strategy, model, plan.strategy_options)
    if shares is None:
        return msgspec.structs.replace(empty, unknown=f"how {plan.strategy} uses memory is not known here")
    batch = batch_of(spec, plan)
    moments = Step(model, shares, batch, checkpointing=spec.model.gradient_checkpointing).moments()
    moments = with_runtime(moments, _heap(spec.model, found.config, batch, plan))
    peak = max(moments, key=lambda m: m.total_bytes)
    needed = peak.total_bytes
    return msgspec.structs.replace(
        empty,
        parameters=model.parameters,
        parameters_trained=model.trained,
        moments=moments,
        peak=peak.name,
        needed_bytes=needed,
        verdict=verdict(needed, capacity.bytes),
        fails_in=_fails_in(moments, capacity.bytes),
        notes=_notes(spec, plan),
    )


def model_of(spec: RunSpec, plan: LaunchPlan, config: ModelConfig) -> Model:
    """The shapes, and what is trained of them, as sharing wants them."""
    shapes = shapes_of(config)
    what = adapted(spec.adapter, shapes)
    element = ELEMENT[plan.dtype]
    assert plan.batch is not None
    return Model(
        shapes,
        what,
        element=element,
        trained_element=4 if what.lora else element,  # PEFT makes new adapters float32
        world=plan.world_size,
        accumulates=plan.batch.grad_accum > 1,
        gloo=plan.backend == "gloo",
        device=plan.device,
    )


def batch_of(spec: RunSpec, plan: LaunchPlan) -> Batch:
    """One micro-batch at its longest."""
    assert spec.model is not None and spec.data is not None and plan.batch is not None
    return Batch(
        sequences=plan.batch.micro_batch_size,
        length=1 if is_mlp(spec.model.name) else spec.data.max_length,
        element=ELEMENT[plan.dtype],
        device=plan.device,
        packed=spec.data.packing == "isolated",
        attention=spec.model.attention,
    )


def _heap(model: ModelSpec, config: ModelConfig, batch: Batch, plan: LaunchPlan) -> Heap:
    one = batch.tokens * batch.element
    return Heap(
        batch.device,
        plan.world_size,
        one * config.hidden,
        one * max(config.intermediate, config.expert_intermediate),
        model.gradient_checkpointing,
        plan.strategy,
    )


def _fails_in(moments: list[Moment], limit: int | None) -> str | None:
    """The first moment of a run that is too large. In the first step the optimizer's state is not there before its update."""
    if limit is None:
        return None
    for moment in moments:
        early = moment.name not in (SETUP, UPDATE)
        own = moment.total_bytes - (moment.parts.get("optimizer_state", 0) if early else 0)
        if own > limit:
            return f"{moment.name} of the {FIRST}" if early else moment.name
    return next((f"{m.name} of the second step" for m in moments if m.total_bytes > limit), None)


def _notes(spec: RunSpec, plan: LaunchPlan) -> list[str]:
    assert spec.model is not None
    if spec.model.compile:
        return ["model.compile changes what is kept for backward; the numbers are those without it"]
    return []
