"""Estimate the memory of one rank in each phase of a step, compared with the capacity of its device. Pure.

Memory outside tensors counts too: libraries, contexts, and unused memory of an allocator. On a CPU this is glibc's
heap: it contains tensors under 32 MiB (larger ones are mapped and returned at once), and the small pieces that backward
frees are too small for the larger gradients and optimizer state. With recomputation, blocks are recomputed between
tensors that stay, and the heap would grow to several times one block: such ranks map tensors from 1 MiB on by
themselves (`rank_environment.with_allocator`). The constants were fitted on models other than those of
``benchmarks/fit_cases.json``, except `HEAP_WITH_CHECKPOINTING`, which was fitted on that benchmark's first cases.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate

import msgspec

from allranks.planning.memory.activations import (
    BlockActivations,
    MicroBatch,
    kept_after_blocks,
    logits_bytes,
    loss_bytes,
)
from allranks.planning.memory.families import ENCODERS, MLP
from allranks.planning.memory.model_config import ConfigSource, ModelConfig
from allranks.planning.memory.weights import ModelMemory, model_memory, shapes_of, trained_weights_of
from allranks.planning.rank_environment import MAPPED_BYTES
from allranks.planning.records import LaunchPlan
from allranks.planning.slurm_request import parse_mem
from allranks.spec.models import dense_mask_reason, is_mlp
from allranks.spec.records import QUANTIZE_NONE, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RunSpec
from allranks.spec.strategies import strategy_info, strategy_state
from allranks.spec.strategies.base import Parts, StrategyState, add_parts
from allranks.utils.machine import MachineFacts
from allranks.utils.text import format_bytes


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank in one phase of training, by part."""

    name: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts.values())


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one rank may use. ``bytes`` None: unknown, and nothing is refused."""

    device: str
    bytes: int | None
    source: str


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the spec, and the memory that a rank would need with it."""

    change: str
    settings: list[str]
    needed_bytes: int
    fits: bool
    cost: str


FITS, CLOSE, TOO_LARGE, NOT_KNOWN = "fits", "close", "too large", "not known"
ESTIMATE_ERROR = 0.10
"""Relative error of the estimate: a run is only refused if it is too large even after subtracting it."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank. ``moments`` are phases in order; ``peak`` is the largest of them.

    ``verdict``: fits | close (within the estimate's error of the limit) | too large | not known. ``unknown`` says what
    is missing about the model (there are no numbers then), ``capacity.source`` what is missing about the device.
    """

    model: str
    model_source: str
    strategy: str
    world_size: int
    parameters: int
    parameters_trained: int
    moments: list[Moment]
    peak: str
    needed_bytes: int
    capacity: Capacity
    verdict: str
    fails_in: str | None = None
    unknown: str | None = None
    remedies: list[Remedy] = []
    notes: list[str] = []
    fixed_bytes: int = 0
    """What a rank needs with any model: interpreter and libraries, contexts and threads. Part of `needed_bytes`."""

    @property
    def refused(self) -> bool:
        """Return whether the run must not be started."""
        return self.verdict == TOO_LARGE


def verdict(needed_bytes: int, limit_bytes: int | None) -> str:
    """Return the verdict for a rank that needs this much on a device of this capacity."""
    if limit_bytes is None:
        return NOT_KNOWN
    if needed_bytes <= limit_bytes:
        return FITS
    return CLOSE if needed_bytes * (1 - ESTIMATE_ERROR) <= limit_bytes else TOO_LARGE


GIB = 1 << 30


def capacity(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> Capacity:
    """Return ``cluster.device_memory_gib``, else this machine's memory if the ranks run here, else Slurm's ``mem``.

    A device that only the nodes can report has unknown capacity, so nothing is refused.
    """
    given, mem, procs = spec.cluster.device_memory_gib, spec.cluster.slurm.mem, plan.procs_per_node
    device = "GPU" if plan.device == "cuda" else "host memory"
    known, source = None, ""
    if plan.device_is_provisional:
        device, source = "device", f"cluster.device is auto and {plan.device_source}"
    elif given is not None:
        known, source = int(given * GIB), "cluster.device_memory_gib"
    elif not spec.cluster.launched_by.runs_here:
        if plan.device == "cuda":
            source = "set cluster.device_memory_gib to the memory of one GPU there"
        elif (of_node := parse_mem(mem or "")) is not None:
            known, source = of_node // procs, f"cluster.slurm.mem {mem} / {procs} ranks"
        else:
            source = "set cluster.device_memory_gib to what one rank may use there, or cluster.slurm.mem"
    elif plan.device != "cuda":
        known = facts.memory_bytes // procs
        source = f"{format_bytes(facts.memory_bytes)} of this machine / {procs} ranks"
    elif not (gpus := [g for g in facts.gpus if g.memory_bytes]):
        source = "the driver does not report the GPU's memory"
    else:
        least, sharing = min(gpus, key=lambda g: g.memory_bytes), -(-procs // len(facts.gpus))
        device, known = least.name, least.memory_bytes // sharing
        source = f"this machine's driver{f', shared by {sharing} ranks' if sharing > 1 else ''}"
    return Capacity(device=device, bytes=known, source=source)


SETUP, LOSS, BACKWARD, END_OF_BACKWARD, UPDATE = "set-up", "loss", "backward", "end of backward", "optimizer step"


def step_moments(model: ModelMemory, state: StrategyState, batch: MicroBatch, *, recomputation: str) -> list[Moment]:
    """Return the memory in the phases of a step, in order; ``backward`` is its worst block."""
    shapes, what, blocks = model.shapes, model.what, model.shapes.blocks
    recomputes = recomputation != RECOMPUTE_NONE
    hidden = batch.tokens * shapes.config.hidden * batch.stream
    # equal blocks are one object
    layers = {id(block): BlockActivations(shapes.config, block, what, batch) for block in blocks}
    whole = {key: layer.kept() for key, layer in layers.items()}
    passing = {key: layer.passing() for key, layer in layers.items()}
    if recomputation == RECOMPUTE_SELECTIVE:
        kept_of = {key: hidden + layer.products() for key, layer in layers.items()}
    else:
        kept_of = dict.fromkeys(layers, hidden) if recomputes else whole
    kept = [kept_of[id(block)] for block in blocks]
    behind = kept_after_blocks(shapes, what, batch)
    copied = model.autocast is not None and state.copies_weights
    copies = [model.weight_copies_of(at) if copied else 0 for at in range(len(blocks))]
    copies_behind = model.weight_copies_outside_blocks() if copied else 0
    kept_up_to, copies_up_to = list(accumulate(kept)), list(accumulate(copies))
    tied = {"gradients": model.tied_gradient(gathered=not state.copies_weights)}
    loss_activations, head_gradient = loss_bytes(shapes, what, batch)
    on_device = state.kept_on_device()

    def moment(name: str, *parts: Parts, activations: int = 0, weight_copies: int = 0, logits: int = 0) -> Moment:
        more = {"activations": activations, "weight_copies": weight_copies, "logits": logits}
        return Moment(name=name, parts=_clean(reduce(add_parts, parts, add_parts(on_device, more))))

    def in_block(at: int) -> Moment:
        key = id(blocks[at])
        return moment(
            BACKWARD,
            state.in_backward(at),
            tied,
            activations=kept_up_to[at] + (whole[key] if recomputes else 0) + passing[key],
            weight_copies=(copies[at] if recomputes else copies_up_to[at])
            + model.dequantized_of(at, batch.element)
            + (model.cast_of(at, batch.tokens) if batch.float8 else 0),
        )

    # autocast keeps the copies of all weights until the end of forward, recomputed blocks' too
    loss = moment(
        LOSS,
        state.in_loss(),
        {"gradients": head_gradient},
        activations=sum(kept) + behind + loss_activations,
        weight_copies=sum(copies) + copies_behind,
        logits=logits_bytes(shapes, batch),
    )
    after_head = moment(  # backward of the output projection only
        BACKWARD,
        state.at_head(),
        tied,
        activations=sum(kept) + behind + hidden,
        weight_copies=0 if recomputes else sum(copies),
    )
    return [
        Moment(name=SETUP, parts=_clean(state.setup())),
        loss,
        max((after_head, *map(in_block, reversed(range(len(blocks))))), key=lambda m: m.total_bytes),
        moment(END_OF_BACKWARD, state.at_end(), tied, activations=2 * hidden),
        moment(UPDATE, state.at_update()),
    ]


def _clean(parts: Parts) -> Parts:
    return {key: n for key, n in parts.items() if n}


CUDA_CONTEXT = 600 << 20  # an H100 with torch's kernels; from reports, not measured here
NCCL_BUFFERS = 400 << 20  # buffers of its channels; grows with the number of peers
CUDA_SLACK = 0.05  # share of temporary memory
CUBLAS_WORKSPACES = 64 << 20  # 32 MiB on Hopper, for forward's thread and for backward's
CPU_IMPORTS = 350 << 20  # Python, torch, transformers and PEFT as imported; ranks share some of these pages
CPU_RUNTIME = 30 << 20  # pages of libraries that the first steps touch, and threads
HEAP_FRAGMENTATION = 0.45  # share of the activations while they exist
HEAP_RETAINED = 1.2  # share of the peak activations after they are freed
HEAP_WITH_CHECKPOINTING = 2.5  # share of the peak activations on the heap if blocks are recomputed
SMALL_TENSORS = 0.1  # share of the activations in tensors that are much smaller than the hidden state
FIXED_PARTS = ("imports", "runtime")
TEMPORARY_PARTS = ("activations", "weight_copies", "logits", "gathered_weights", "communication")


def with_runtime(moments: list[Moment], config: ModelConfig, batch: MicroBatch, plan: LaunchPlan) -> list[Moment]:
    """Return the phases in order, with memory that the process holds outside tensors."""
    if plan.device == "cuda":
        fixed = CUDA_CONTEXT + (NCCL_BUFFERS if plan.world_size > 1 else 0)
        temporary = [sum(m.parts.get(k, 0) for k in TEMPORARY_PARTS) for m in moments]
        slacks = [n * CUDA_SLACK + CUBLAS_WORKSPACES for n in temporary]
        return [_with(m, {"runtime": fixed}, slack) for m, slack in zip(moments, slacks, strict=True)]
    fixed = {"imports": CPU_IMPORTS + strategy_info(plan.strategy).imports_bytes, "runtime": CPU_RUNTIME}
    recomputes = plan.recomputation != RECOMPUTE_NONE
    # selective recomputation keeps the large tensors, each in a mapping of its own
    recomputes_blocks = recomputes and plan.recomputation != RECOMPUTE_SELECTIVE
    hidden = batch.tokens * batch.stream * config.hidden
    widest = batch.tokens * batch.element * max(config.intermediate, config.expert_intermediate)
    on_heap = ((hidden < MAPPED_BYTES[recomputes]) + (widest < MAPPED_BYTES[recomputes])) / 2  # share of activations
    share = max(on_heap, SMALL_TENSORS if recomputes else 0.0)
    most, phases = 0, []
    if recomputes_blocks:  # later steps begin with the heap of the first one's backward
        most = max(m.parts.get("activations", 0) for m in moments)
    for moment in moments:
        now = moment.parts.get("activations", 0)
        most = max(most, now)
        if recomputes_blocks and moment.name != SETUP:
            filled = now if moment.name == LOSS else 0  # forward fills what backward left
            slack = HEAP_WITH_CHECKPOINTING * most - filled
        else:
            slack = max(HEAP_FRAGMENTATION * now, HEAP_RETAINED * most - now)
        phases.append(_with(moment, fixed, slack * share))
    return phases


def _with(moment: Moment, fixed: Parts, slack: float) -> Moment:
    return msgspec.structs.replace(moment, parts=moment.parts | fixed | _clean({"slack": int(slack)}))


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FIRST_STEP = "first step"


def estimate(spec: RunSpec, plan: LaunchPlan, source: ConfigSource, capacity: Capacity) -> Fit:
    """Return what one rank needs, and whether its device has it."""
    empty = Fit(
        model=spec.model.name if spec.model else "script",
        model_source=source.source,
        strategy=plan.strategy,
        world_size=plan.world_size,
        parameters=0,
        parameters_trained=0,
        moments=[],
        peak="",
        needed_bytes=0,
        capacity=capacity,
        verdict=NOT_KNOWN,
        unknown=source.unknown,
    )
    if source.config is None or spec.model is None or spec.data is None or plan.batch is None:
        return empty
    model = model_of(spec, plan, source.config)
    state = strategy_state(plan.strategy, model, plan.strategy_options)
    if state is None:
        return msgspec.structs.replace(empty, unknown=f"the memory use of {plan.strategy} is unknown")
    batch = batch_of(spec, plan, model)
    moments = step_moments(model, state, batch, recomputation=plan.recomputation)
    moments = with_runtime(moments, source.config, batch, plan)
    peak = max(moments, key=lambda m: m.total_bytes)
    needed = peak.total_bytes
    return msgspec.structs.replace(
        empty,
        parameters=model.parameters,
        parameters_trained=model.trained,
        moments=moments,
        peak=peak.name,
        needed_bytes=needed,
        fixed_bytes=sum(peak.parts.get(part, 0) for part in FIXED_PARTS),
        verdict=verdict(needed, capacity.bytes),
        fails_in=_fails_in(moments, capacity.bytes),
        notes=_notes(spec, plan, source.config.family),
    )


def model_of(spec: RunSpec, plan: LaunchPlan, config: ModelConfig) -> ModelMemory:
    """Return the model's shapes and trained weights in the form that strategies need."""
    shapes = shapes_of(config)
    what = trained_weights_of(spec.adapter, shapes, spec.model.quantize if spec.model else QUANTIZE_NONE)
    compute, trained = DTYPE_BYTES[plan.dtype], DTYPE_BYTES[plan.param_dtype]
    assert plan.batch is not None
    return model_memory(
        shapes,
        what,
        element=compute if what.lora else trained,
        trained_element=trained,
        autocast=compute if trained != compute and not what.only_adapters else None,
        world=plan.world_size,
        node_ranks=plan.procs_per_node,
        accumulates=plan.batch.grad_accum > 1,
        copies=2 if plan.backend == "gloo" else 1,
        device=plan.device,
    )


def batch_of(spec: RunSpec, plan: LaunchPlan, model: ModelMemory) -> MicroBatch:
    """Return one micro-batch at its maximum length."""
    assert spec.model is not None and spec.data is not None and plan.batch is not None
    isolated = spec.data.packing == "isolated"
    masked = isolated and bool(dense_mask_reason(model.shapes.config.family, spec.model.implementation))
    return MicroBatch(
        sequences=plan.batch.micro_batch_size,
        length=1 if is_mlp(spec.model.name) else spec.data.max_length,
        element=DTYPE_BYTES[plan.dtype],
        device=plan.device,
        packed=masked,
        within_rows=isolated and not masked,
        attention=spec.model.implementation,
        float8=spec.model.float8,
        autocast=model.autocast is not None,
        stream_element=4 if model.autocast and model.what.trains_embedding(model.shapes) else None,
        adapter_element=model.trained_element,
        plain_adapters=strategy_info(plan.strategy).gathers_in_layers
        and bool(plan.strategy_options.get("find_unused_parameters")),
    )


def _fails_in(moments: list[Moment], limit: int | None) -> str | None:
    """Return the first phase that is too large. In the first step, the optimizer state is created in its update."""
    if limit is None:
        return None
    for moment in moments:
        early = moment.name not in (SETUP, UPDATE)
        own = moment.total_bytes - (moment.parts.get("optimizer_state", 0) if early else 0)
        if own > limit:
            return f"{moment.name} of the {FIRST_STEP}" if early else moment.name
    return next((f"{m.name} of the second step" for m in moments if m.total_bytes > limit), None)


def _notes(spec: RunSpec, plan: LaunchPlan, family: str) -> list[str]:
    assert spec.model is not None and spec.data is not None
    notes = []
    if plan.recomputation_reason:
        notes.append(f"model.gradient_checkpointing auto: {plan.recomputation}, because {plan.recomputation_reason}")
    if plan.compiled:
        notes.append("model.compile: estimated without compiled blocks, which keep less for backward")
    why = dense_mask_reason(family, spec.model.implementation) if spec.data.packing == "isolated" else ""
    if why and family not in (*ENCODERS, MLP):
        notes.append(f"packed rows need a dense mask of the sequence length squared: {why}")
    return notes
