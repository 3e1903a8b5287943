"""Estimate the memory of one rank in each phase of a step, compared with the capacity of its device. Pure.

Memory outside tensors counts too: libraries, contexts, and unused memory of an allocator. On a CPU this is glibc's
heap: it contains tensors under 32 MiB (larger ones are mapped and returned at once), and the small pieces that backward
frees are too small for the larger gradients and optimizer state. With recomputation, blocks are recomputed between tensors that stay,
and the heap would grow to several times one block: such ranks map tensors from 1 MiB on by themselves
(`rank_environment.with_allocator`). The constants were fitted on models other than those of
``benchmarks/fit_cases.json``, except `HEAP_WITH_CHECKPOINTING`, which was fitted on that benchmark's first cases.
"""

from __future__ import annotations

import re
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
from allranks.planning.memory.weights import ElementBytes, ModelMemory, shapes_of, trained_weights_of
from allranks.planning.rank_environment import MAPPED_BYTES
from allranks.planning.records import LaunchPlan
from allranks.spec.models import dense_mask_reason, is_mlp
from allranks.spec.records import RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, ModelSpec, RunSpec
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
ESTIMATE_ERROR = (
    0.10  # relative error of the estimate: a run is only refused if it is too large even after subtracting it
)


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
    """What a rank needs whatever the model: the interpreter and libraries, contexts and threads. Part of `needed_bytes`."""

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
_MEM = r"(?i)(\d+(?:\.\d+)?)\s*([KMGT]?)B?"
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # sbatch: without a letter, megabytes


def capacity(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> Capacity:
    """Return ``cluster.device_memory_gib``, else this machine's memory if the ranks run here, else Slurm's ``mem``.

    A device that only the nodes can report has unknown capacity, so nothing is refused.
    """
    given = spec.cluster.device_memory_gib
    on_gpu = plan.device == "cuda"
    if plan.device_is_provisional:
        return Capacity(device="device", bytes=None, source=f"cluster.device is auto and {plan.device_source}")
    if given is not None:
        return Capacity(
            device="GPU" if on_gpu else "host memory", bytes=int(given * GIB), source="cluster.device_memory_gib"
        )
    if not spec.cluster.launched_by.runs_here:
        return _elsewhere(spec, plan, on_gpu)
    if on_gpu:
        known = [g for g in facts.gpus if g.memory_bytes]
        if not known:
            return Capacity(device="GPU", bytes=None, source="the driver does not report the GPU's memory")
        least = min(known, key=lambda g: g.memory_bytes)
        sharing = -(-plan.procs_per_node // len(facts.gpus))
        shared = f", shared by {sharing} ranks" if sharing > 1 else ""
        return Capacity(device=least.name, bytes=least.memory_bytes // sharing, source=f"this machine's driver{shared}")
    each = facts.memory_bytes // plan.procs_per_node
    return Capacity(
        device="host memory",
        bytes=each,
        source=f"{format_bytes(facts.memory_bytes)} of this machine / {plan.procs_per_node} ranks",
    )


def _elsewhere(spec: RunSpec, plan: LaunchPlan, on_gpu: bool) -> Capacity:
    if on_gpu:
        return Capacity(device="GPU", bytes=None, source="set cluster.device_memory_gib to the memory of one GPU there")
    mem = parse_mem(spec.cluster.slurm.mem) if spec.cluster.slurm.mem else None
    if mem:
        return Capacity(
            device="host memory",
            bytes=mem // plan.procs_per_node,
            source=f"cluster.slurm.mem {spec.cluster.slurm.mem} / {plan.procs_per_node} ranks",
        )
    return Capacity(
        device="host memory",
        bytes=None,
        source="set cluster.device_memory_gib to what one rank may use there, or cluster.slurm.mem",
    )


def parse_mem(text: str) -> int | None:
    """Return the bytes of sbatch's ``--mem``; None for 0 (the full node) and for invalid values."""
    found = re.fullmatch(_MEM, text.strip())
    return int(float(found[1]) * _UNITS[found[2].upper()]) or None if found else None


SETUP, LOSS, BACKWARD, END_OF_BACKWARD, UPDATE = "set-up", "loss", "backward", "end of backward", "optimizer step"


class StepMoments:
    """Memory of one strategy, model and micro-batch in each phase of a step."""

    def __init__(self, model: ModelMemory, sharing: StrategyState, batch: MicroBatch, *, recomputation: str) -> None:
        self._m, self._s, self._b = model, sharing, batch
        shapes = model.shapes
        distinct = {id(block): block for block in shapes.blocks}  # equal blocks are one object
        layers = {key: BlockActivations(shapes.config, block, model.what, batch) for key, block in distinct.items()}
        whole = {key: layer.kept() for key, layer in layers.items()}
        passing = {key: layer.passing() for key, layer in layers.items()}
        output = batch.tokens * shapes.config.hidden * batch.stream
        self._whole = [whole[id(block)] for block in shapes.blocks]
        self._passing = [passing[id(block)] for block in shapes.blocks]
        products = {
            key: layer.products() if recomputation == RECOMPUTE_SELECTIVE else 0 for key, layer in layers.items()
        }
        self._checkpointing = recomputation != RECOMPUTE_NONE
        self._kept = [
            output + products[id(block)] if self._checkpointing else n
            for block, n in zip(shapes.blocks, self._whole, strict=True)
        ]
        self._kept_up_to = list(accumulate(self._kept))
        self._behind = kept_after_blocks(shapes, model.what, batch)
        self._logits = logits_bytes(shapes, batch)
        self._hidden = output
        copied = model.autocast is not None and sharing.copies_weights
        self._copies = [model.weight_copies_of(at) if copied else 0 for at in range(len(shapes.blocks))]
        self._copies_up_to = list(accumulate(self._copies))
        self._tied = {"gradients": model.tied_gradient(gathered=not sharing.copies_weights)}
        self._copies_behind = model.weight_copies_outside_blocks() + model.weight_copy_of_head() if copied else 0
        self._in_loss, self._head_gradient = loss_bytes(shapes, model.what, batch)

    def moments(self) -> list[Moment]:
        """Return the phases in order. ``backward`` is its worst block."""
        blocks = [self._in_block(at) for at in reversed(range(len(self._kept)))]
        return [
            Moment(name=SETUP, parts=_clean(self._s.setup())),
            self._loss(),
            max((self._head(), *blocks), key=lambda m: m.total_bytes),
            self._moment(END_OF_BACKWARD, add_parts(self._s.at_end(), self._tied), 2 * self._hidden, 0),
            self._moment(UPDATE, self._s.at_update(), 0, 0),
        ]

    def _loss(self) -> Moment:
        """Return the memory in the loss, at the end of forward: autocast keeps the copies of all weights until then, recomputed blocks' too."""
        kept = sum(self._kept) + self._behind + self._in_loss
        copies = sum(self._copies) + self._copies_behind
        parts = add_parts(self._s.in_loss(), {"gradients": self._head_gradient})
        return self._moment(LOSS, parts, kept, self._logits, copies)

    def _head(self) -> Moment:
        """Return the memory after backward of the output projection only."""
        kept = sum(self._kept) + self._behind + self._hidden
        return self._moment(
            BACKWARD, add_parts(self._s.at_head(), self._tied), kept, 0, 0 if self._checkpointing else sum(self._copies)
        )

    def _in_block(self, at: int) -> Moment:
        recomputed = self._whole[at] if self._checkpointing else 0
        kept = self._kept_up_to[at] + recomputed + self._passing[at]
        copies = self._copies[at] if self._checkpointing else self._copies_up_to[at]
        return self._moment(BACKWARD, add_parts(self._s.in_backward(at), self._tied), kept, 0, copies)

    def _moment(self, name: str, parts: Parts, activations: int, scores: int, copies: int = 0) -> Moment:
        own = add_parts(self._s.kept(), parts)
        more = {"activations": activations, "weight_copies": copies, "logits": scores}
        return Moment(name=name, parts=_clean(add_parts(own, more)))


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


class HostHeap(msgspec.Struct, frozen=True):
    """Heap usage of a CPU rank: where its tensors are allocated and how large they typically are."""

    device: str
    ranks: int
    narrow_bytes: int  # the hidden state of a micro-batch
    wide_bytes: int  # the widest tensor within a block
    recomputation: str
    engine_imports: int  # what another library's engine adds

    @property
    def imports(self) -> int:
        """Return the bytes of the interpreter and all libraries that a CPU rank imports."""
        return CPU_IMPORTS + self.engine_imports

    @property
    def recomputes_blocks(self) -> bool:
        """Return whether whole blocks are recomputed. Selective recomputation keeps the large tensors, each in a mapping of its own."""
        return self.recomputation not in (RECOMPUTE_NONE, RECOMPUTE_SELECTIVE)

    @property
    def small_share(self) -> float:
        """Return the approximate share of activations that is allocated on the heap."""
        recomputes = self.recomputation != RECOMPUTE_NONE
        limit = MAPPED_BYTES[recomputes]
        share = ((self.narrow_bytes < limit) + (self.wide_bytes < limit)) / 2
        return max(share, SMALL_TENSORS if recomputes else 0.0)


def with_runtime(moments: list[Moment], heap: HostHeap) -> list[Moment]:
    """Return the phases in order, with memory that the process holds outside tensors."""
    if heap.device == "cuda":
        fixed = CUDA_CONTEXT + (NCCL_BUFFERS if heap.ranks > 1 else 0)
        return [
            _more(
                m, {"runtime": fixed}, sum(m.parts.get(k, 0) for k in TEMPORARY_PARTS) * CUDA_SLACK + CUBLAS_WORKSPACES
            )
            for m in moments
        ]
    most, found = 0, []
    if heap.recomputes_blocks:  # later steps begin with the heap of the first one's backward
        most = max(m.parts.get("activations", 0) for m in moments)
    for moment in moments:
        now = moment.parts.get("activations", 0)
        most = max(most, now)
        fixed = {"imports": heap.imports, "runtime": CPU_RUNTIME}
        again = HEAP_WITH_CHECKPOINTING * most
        slack = (
            (again - now if moment.name == LOSS else again)  # forward fills what backward left
            if heap.recomputes_blocks and moment.name != SETUP
            else max(HEAP_FRAGMENTATION * now, HEAP_RETAINED * most - now)
        )
        found.append(_more(moment, fixed, slack * heap.small_share))
    return found


def _more(moment: Moment, fixed: dict[str, int], slack: float) -> Moment:
    more = fixed | {"slack": int(slack)} if slack >= 1 else fixed
    return msgspec.structs.replace(moment, parts={**moment.parts, **more})


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FIRST_STEP = "first step"


def estimate(spec: RunSpec, plan: LaunchPlan, found: ConfigSource, capacity: Capacity) -> Fit:
    """Return what one rank needs, and whether its device has it."""
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
    shares = strategy_state(plan.strategy, model, plan.strategy_options)
    if shares is None:
        return msgspec.structs.replace(empty, unknown=f"the memory use of {plan.strategy} is unknown")
    batch = batch_of(spec, plan, model)
    moments = StepMoments(model, shares, batch, recomputation=plan.recomputation).moments()
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
        fixed_bytes=sum(peak.parts.get(part, 0) for part in FIXED_PARTS),
        verdict=verdict(needed, capacity.bytes),
        fails_in=_fails_in(moments, capacity.bytes),
        notes=_notes(spec, plan, found.config.family),
    )


def model_of(spec: RunSpec, plan: LaunchPlan, config: ModelConfig) -> ModelMemory:
    """Return the model's shapes and trained weights in the form that strategies need."""
    shapes = shapes_of(config)
    what = trained_weights_of(spec.adapter, shapes)
    compute, trained = DTYPE_BYTES[plan.dtype], DTYPE_BYTES[plan.param_dtype]
    assert plan.batch is not None
    return ModelMemory(
        shapes,
        what,
        ElementBytes(
            frozen=compute if what.lora else trained,
            trained=trained,
            autocast=compute if trained != compute and not what.only_adapters else None,
        ),
        world=plan.world_size,
        node_ranks=plan.procs_per_node,
        accumulates=plan.batch.grad_accum > 1,
        gloo=plan.backend == "gloo",
        device=plan.device,
    )


def batch_of(spec: RunSpec, plan: LaunchPlan, model: ModelMemory) -> MicroBatch:
    """Return one micro-batch at its maximum length."""
    assert spec.model is not None and spec.data is not None and plan.batch is not None
    isolated = spec.data.packing == "isolated"
    masked = isolated and bool(dense_mask_reason(model.shapes.config.family, spec.model.attention))
    return MicroBatch(
        sequences=plan.batch.micro_batch_size,
        length=1 if is_mlp(spec.model.name) else spec.data.max_length,
        element=DTYPE_BYTES[plan.dtype],
        device=plan.device,
        packed=masked,
        within_rows=isolated and not masked,
        attention=spec.model.attention,
        autocast=model.autocast is not None,
        stream_element=4 if model.autocast and model.what.trains_embedding(model.shapes) else None,
        adapter_element=model.trained_element,
        plain_adapters=strategy_info(plan.strategy).gathers_in_layers
        and bool(plan.strategy_options.get("find_unused_parameters")),
        compiled=plan.compiled and spec.model.compile is True,  # auto: what fits must still fit if the compiler fails
    )


def _heap(model: ModelSpec, config: ModelConfig, batch: MicroBatch, plan: LaunchPlan) -> HostHeap:
    return HostHeap(
        batch.device,
        plan.world_size,
        batch.tokens * batch.stream * config.hidden,
        batch.tokens * batch.element * max(config.intermediate, config.expert_intermediate),
        plan.recomputation,
        strategy_info(plan.strategy).imports_bytes,
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
    if plan.compiled and spec.model.compile is True:
        notes.append("model.compile: compiled blocks keep less for backward, which was measured on a GPU only")
    elif plan.compiled:
        notes.append("model.compile auto: estimated without compiled blocks, which keep less for backward")
    why = dense_mask_reason(family, spec.model.attention) if spec.data.packing == "isolated" else ""
    if why and family not in (*ENCODERS, MLP):
        notes.append(f"packed rows need a dense mask of the sequence length squared: {why}")
    return notes
