"""Makes profiler traces whose analysis is known beforehand. Shares no code with ``allranks.analysis.trace``.

`generate` lays work out on an explicit schedule in whole microseconds of one true clock, reads the answer off that
schedule, and writes it as each rank's profiler would have seen it.
"""

import gzip
import json
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

ORIGIN = 100_000  # where the first step begins
GAP = 6  # between two pieces of work of a stream: the device idles
LEAD = 12  # a launch comes so much before its kernel
MAIN, SECOND, COPY, COMM, COMM2 = 7, 13, 9, 20, 24


@dataclass(frozen=True)
class Scenario:
    """One job and one way to trace it. Times in microseconds."""

    world: int = 8
    steps: int = 3
    layers: int = 4
    backend: Literal["nccl", "gloo"] = "nccl"
    names: Literal["dev", "old", "rccl"] = "dev"  # of the collective kernels
    metadata: Literal["full", "no_seq", "none"] = "full"
    # one a layer, in backward
    collectives: tuple[str, ...] = ("all_reduce", "all_reduce", "all_gather", "reduce_scatter")
    elements: int = 1_000_000  # of collective 0; each further one has as many more
    transfer_us: int = 700  # of collective 0; each further one takes 100 longer
    slow: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, step): this much longer in forward
    offset_us: dict[int, int] = field(default_factory=dict)  # rank: what its clock shows beyond the true one
    start_skew_us: dict[int, int] = field(default_factory=dict)  # rank: so much later its first step begins
    absent: frozenset[int] = frozenset()  # ranks whose file is missing
    dropped: tuple[int, int, int] | None = None  # (rank, step, index): this collective is not in that rank's trace
    second_group: bool = False  # each step one more all-reduce on another communicator, whose order differs by rank
    second_stream: bool = False  # compute kernels that overlap each other
    memcpy: bool = False
    step_marks: bool = True  # ProfilerStep#N
    part_marks: bool = True  # allranks.forward and so on
    twins: bool = False  # gpu_user_annotation over the same time as kernels
    syncs: bool = False  # cuda_sync events over the same time as collectives


class Piece(NamedTuple):
    """One stretch of work on one rank."""

    name: str
    what: str  # compute | memcpy
    stream: int
    start: int
    end: int
    part: str


class Member(NamedTuple):
    """One rank's share in a collective: it arrives, waits for the last, transfers."""

    launched: int
    arrived: int
    end: int


@dataclass
class Collective:
    """One collective of one step. ``key`` is its place in its group over all steps: NCCL's ``Seq``."""

    step: int
    index: int
    group: str
    key: int
    kind: str
    elements: int
    transfer: int
    part: str
    stream: int
    members: dict[int, Member] = field(default_factory=dict)


@dataclass
class StepOf:
    """One step of one rank, and where its parts lie."""

    start: int
    end: int = 0
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)


class Timeline(NamedTuple):
    steps: list[list[StepOf]]  # [step][rank]
    collectives: list[Collective]


def lay_out(s: Scenario) -> Timeline:
    """The schedule: forward, backward with a collective after each layer, optimizer once all is reduced."""
    starts = [ORIGIN + s.start_skew_us.get(r, 0) for r in range(s.world)]
    keys = {"0": 0, "1": 0}
    timeline = Timeline([], [])
    for number in range(s.steps):
        steps = [_forward_and_backward(s, r, number, starts[r]) for r in range(s.world)]
        made = _collectives(s, number, steps, keys)
        for r, step in enumerate(steps):
            _finish(step, s, max(c.members[r].end for c in made))
            step.parts = _parts(s, step, [c.members[r].launched for c in made])
            starts[r] = step.end + 40
        timeline.steps.append(steps)
        timeline.collectives.extend(made)
    return timeline


def _forward_and_backward(s: Scenario, rank: int, number: int, start: int) -> StepOf:
    step, t = StepOf(start), start + 40
    if s.memcpy:
        step.pieces.append(Piece("Memcpy HtoD (Pinned -> Device)", "memcpy", MAIN, t, t + 100, "data"))
        t += 100 + GAP
    t += 20
    for layer in range(s.layers):
        longer = s.slow.get((rank, number), 0) if layer == 0 else 0
        end = t + 300 + 10 * layer + longer
        step.pieces.append(Piece(f"gemm_forward_{layer}", "compute", MAIN, t, end, "forward"))
        if s.second_stream:  # half of it beside the kernel, the rest beside the gap and the next one
            step.pieces.append(Piece("elementwise_forward", "compute", SECOND, end - 50, end + 50, "forward"))
        t = end + GAP
    t += 2 * GAP + (60 if s.second_stream else 0)
    for layer in reversed(range(s.layers)):
        end = t + 500 + 20 * layer
        step.pieces.append(Piece(f"gemm_backward_{layer}", "compute", MAIN, t, end, "backward"))
        if s.memcpy:  # partly under compute, partly in the gap
            step.pieces.append(Piece("Memcpy DtoD (Device -> Device)", "memcpy", COPY, end - 30, end + 4, "backward"))
        t = end + 30
    return step


def _ready(step: StepOf, s: Scenario, index: int) -> int:
    """A collective can start once its layer's backward is done; launches are apart, so that they do not overlap."""
    return [p for p in step.pieces if p.name.startswith("gemm_backward")][min(index, s.layers - 1)].end + LEAD


def _collectives(s: Scenario, number: int, steps: list[StepOf], keys: dict[str, int]) -> list[Collective]:
    made: list[Collective] = []
    last_end = 0

    def add(group: str, kind: str, elements: int, took: int, stream: int, arrived: list[int], ready: list[int]) -> int:
        end = max(arrived) + took
        members = {r: Member(ready[r] - LEAD + 2, arrived[r], end) for r in range(s.world)}
        key = keys[group]
        made.append(Collective(number, len(made), group, key, kind, elements, took, "backward", stream, members))
        keys[group] += 1
        return end

    for index, kind in enumerate(s.collectives):
        ready = [_ready(step, s, index) for step in steps]
        arrived = [max(at, last_end + 1) for at in ready]
        last_end = add("0", kind, s.elements * (index + 1), s.transfer_us + 100 * index, COMM, arrived, ready)
    if s.second_group:  # beside the others; even ranks launch it before the first, odd ranks after the second
        arrived = [_ready(step, s, r % 2) + (9 if r % 2 else -7) for r, step in enumerate(steps)]
        add("1", "all_reduce", 77_000, 150, COMM2, arrived, arrived)
    return made


def _finish(step: StepOf, s: Scenario, reduced: int) -> None:
    t = max(reduced, *(p.end for p in step.pieces)) + 30
    step.pieces.append(Piece("fused_adamw", "compute", MAIN, t, t + 400, "optimizer"))
    t += 400
    if s.memcpy:
        end = t + GAP + 20
        step.pieces.append(Piece("Memcpy DtoH (Device -> Pageable)", "memcpy", MAIN, t + GAP, end, "optimizer"))
        t += GAP + 20
    step.end = t + 30


def _parts(s: Scenario, step: StepOf, launches: list[int]) -> dict[str, tuple[int, int]]:
    """Where the host's parts lie: around its operators, which on a GPU only launch, and on a CPU are the work."""
    found = {"data": (step.start + 5, step.start + 15)}
    for part in ("data", "forward", "backward", "optimizer"):
        mine = [p for p in step.pieces if p.part == part]
        if not mine:
            continue
        lead, took = (LEAD + 2, 7) if s.backend == "nccl" else (0, None)
        begins = [p.start - lead for p in mine]
        ends = [p.start - lead + took if took else p.end for p in mine]
        if part == "backward":
            ends += [launched + 9 for launched in launches]
        found[part] = (min(begins) - 1, max(ends) + 1)
    return found


# the answer: time is painted into bit sets, one bit a microsecond: slow, plain, and no interval arithmetic

BYTES = 4  # float32


class StepTruth(NamedTuple):
    """Microseconds of one rank's step; together compute, exposed_comm, memcpy_alone and idle make ``duration``."""

    start: int
    duration: int
    compute: int
    comm: int
    exposed_comm: int
    overlapped_comm: int
    memcpy: int
    memcpy_alone: int  # neither under compute nor under communication
    idle: int
    parts: dict[str, int]


class CollectiveTruth(NamedTuple):
    """One collective. ``waits`` only of ranks that have it in their trace; ``bus_factor``: what a ring sends a rank."""

    step: int
    kind: str
    size_bytes: int
    transfer: int
    bus_factor: float
    waits: dict[int, int]
    last_rank: int | None  # None where several came last together


@dataclass(frozen=True)
class Truth:
    """All that the analysis should find."""

    ranks: tuple[int, ...]
    steps: dict[tuple[int, int], StepTruth]  # (rank, step)
    collectives: tuple[CollectiveTruth, ...]
    offset_us: dict[int, int]  # against the first rank that is there

    def total(self, rank: int, field: str) -> int:
        return sum(getattr(step, field) for (r, _), step in self.steps.items() if r == rank)


def answer(s: Scenario, timeline: Timeline) -> Truth:
    """Every figure of every rank that has a file."""
    ranks = tuple(r for r in range(s.world) if r not in s.absent)
    steps = {}
    for n, row in enumerate(timeline.steps):
        calls = [c for c in timeline.collectives if c.step == n]
        steps |= {(r, n): _step(s, r, step, calls) for r, step in enumerate(row) if r in ranks}
    first = s.offset_us.get(ranks[0], 0)
    collectives = tuple(_collective(s, c, ranks) for c in timeline.collectives)
    return Truth(ranks, steps, collectives, {r: s.offset_us.get(r, 0) - first for r in ranks})


def has(s: Scenario, rank: int, c: Collective) -> bool:
    """Whether a rank's trace shows the collective."""
    return (rank, c.step, c.index) != s.dropped


def _step(s: Scenario, rank: int, step: StepOf, collectives: list[Collective]) -> StepTruth:
    compute = comm = memcpy = 0
    for p in step.pieces:
        paint = _paint(step, p.start, p.end)
        compute |= paint if p.what == "compute" else 0
        memcpy |= paint if p.what == "memcpy" else 0
    for c in collectives:
        if has(s, rank, c):
            comm |= _paint(step, c.members[rank].arrived, c.members[rank].end)
    duration = step.end - step.start
    alone, busy = memcpy & ~compute & ~comm, compute | comm | memcpy
    parts = {name: end - start for name, (start, end) in step.parts.items()}
    masks = (compute, comm, comm & ~compute, comm & compute, memcpy, alone)
    return StepTruth(step.start, duration, *(m.bit_count() for m in masks), duration - busy.bit_count(), parts)


def _paint(step: StepOf, start: int, end: int) -> int:
    return ((1 << (end - start)) - 1) << (start - step.start)


def _collective(s: Scenario, c: Collective, ranks: tuple[int, ...]) -> CollectiveTruth:
    share = (s.world - 1) / s.world  # NVIDIA nccl-tests, doc/PERFORMANCE.md
    there = {r: c.members[r].arrived for r in ranks if has(s, r, c)}
    last = [r for r, at in there.items() if at == max(there.values())]
    factor = 2 * share if c.kind == "all_reduce" else share
    waits = {r: c.members[r].end - c.transfer - at for r, at in there.items()}
    only_last = last[0] if len(last) == 1 else None
    return CollectiveTruth(c.step, c.kind, c.elements * BYTES, c.transfer, factor, waits, only_last)


# the schedule as each rank's profiler shows it, on a GPU with NCCL or on a CPU with gloo

Event = dict[str, Any]
PID = 4000
BASE_NS = 1_700_000_000_000_000_000


class Shape(NamedTuple):
    """Names of one kind of collective: in kernels, metadata, operators. ``shard``: the side that holds 1/W of it."""

    kernel: str
    metadata: str
    operator: str
    annotation: str
    gloo: str  # which runs a reduce-scatter as an all-reduce, and calls it so
    shard: Literal["in", "out", ""] = ""


def _shape(kernel: str, name: str, kind: str, gloo: str, shard: Literal["in", "out", ""] = "") -> Shape:
    return Shape(kernel, name, f"c10d::{name}_", f"nccl:{kind}", f"gloo:{gloo}", shard)


SHAPES = {
    "all_reduce": _shape("AllReduce", "allreduce", "all_reduce", "all_reduce"),
    "all_gather": _shape("AllGather", "_allgather_base", "_all_gather_base", "all_gather", "in"),
    "reduce_scatter": _shape("ReduceScatter", "_reduce_scatter_base", "_reduce_scatter_base", "all_reduce", "out"),
}


def kernel_name(kind: str, names: str) -> str:
    """The collective's kernel as NCCL from 2.19 on, NCCL before, or RCCL calls it."""
    verb = SHAPES[kind].kernel
    if names == "rccl":
        return "rcclGenericKernel(ncclDevComm*, unsigned long, ncclWork*) [clone .kd]"
    if names == "old":
        return f"ncclKernel_{verb}_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
    return f"ncclDevKernel_{verb}{'_Sum_f32' if 'educe' in verb else ''}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def span(cat: str, name: str, pid: int, tid: int, start: int, end: int, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def marks(s: Scenario, step: StepOf, number: int, pid: int) -> list[Event]:
    made = [(f"ProfilerStep#{number + 1}", (step.start, step.end))] if s.step_marks else []
    made += [(f"allranks.{name}", times) for name, times in step.parts.items()] if s.part_marks else []
    return [span("user_annotation", name, pid, pid, *times) for name, times in made]


def write_traces(s: Scenario, timeline: Timeline, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in set(range(s.world)) - s.absent:
        text = json.dumps(document(s, timeline, rank))
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 1, mtime=0))


def document(s: Scenario, timeline: Timeline, rank: int) -> dict[str, Any]:
    events = (on_gpu if s.backend == "nccl" else on_cpu)(s, timeline, rank, PID + rank)
    for e in events:
        e["ts"] += s.offset_us.get(rank, 0)
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": s.world, "ranks": list(range(s.world))}]
    if s.second_group:
        groups.append({**groups[0], "pg_name": "1", "pg_desc": "undefined"})
    info = {"backend": s.backend, "rank": rank, "world_size": s.world, "pg_count": len(groups), "pg_config": groups}
    devices = [{"id": 0, "name": "Generated"}] if s.backend == "nccl" else []
    head = {"schemaVersion": 1, "deviceProperties": devices, "distributedInfo": info, "baseTimeNanoseconds": BASE_NS}
    return {**head, "traceEvents": events}


def on_gpu(s: Scenario, timeline: Timeline, rank: int, pid: int) -> list[Event]:
    """Launches on the host, kernels on streams, metadata of collectives; autograd has a thread of its own."""
    ids = count(1)
    made = [
        metadata("process_name", pid, 0, name="python"),
        metadata("process_name", 0, 0, name="python"),
        metadata("process_labels", 0, 0, labels="GPU 0"),
        metadata("thread_name", pid, pid, name=f"thread {pid} (python)"),
        metadata("thread_name", pid, pid + 1, name=f"thread {pid + 1} (pt_autograd_0)"),
    ]
    for number, row in enumerate(timeline.steps):
        step = row[rank]
        made += marks(s, step, number, pid)
        for piece in step.pieces:
            made += _piece(piece, pid, next(ids))
        for c in timeline.collectives:
            if c.step == number and has(s, rank, c):
                made += _nccl(s, c, rank, pid, next(ids))
        made.append(span("cuda_runtime", "cudaDeviceSynchronize", pid, pid, step.end - 25, step.end - 2, cbid=165))
    return made


def _launch(call: str, start: int, pid: int, tid: int, id: int, to: tuple[int, int]) -> list[Event]:
    flow = {"cat": "ac2g", "name": "ac2g", "id": id}
    return [
        span("cuda_runtime", call, pid, tid, start, start + 4, correlation=id, cbid=211),
        {**flow, "ph": "s", "pid": pid, "tid": tid, "ts": start},
        {**flow, "ph": "f", "pid": 0, "tid": to[0], "ts": to[1], "bp": "e"},
    ]


def _piece(p: Piece, pid: int, id: int) -> list[Event]:
    tid, launched = pid + (p.part == "backward"), p.start - LEAD
    if p.stream != MAIN:
        tid = pid + 3  # not from the thread whose operators these would cut across
    cat, operator, call = "kernel", f"aten::{p.name}", "cudaLaunchKernel"
    if p.what == "memcpy":
        cat, operator, call = "gpu_memcpy", "aten::copy_", "cudaMemcpyAsync"
    return [
        span("cpu_op", operator, pid, tid, launched - 2, launched + 5),
        *_launch(call, launched, pid, tid, id, (p.stream, p.start)),
        span(cat, p.name, 0, p.stream, p.start, p.end, device=0, stream=p.stream, correlation=id),
    ]


def _nccl(s: Scenario, c: Collective, rank: int, pid: int, id: int) -> list[Event]:
    m, shape = c.members[rank], SHAPES[c.kind]
    tid = pid + 4 if c.group != "0" else pid + (c.part == "backward")
    told = _told(s, c, shape)
    dims = {"Input Dims": [[c.elements]], "Input type": ["float"]}
    where = {"device": 0, "stream": c.stream, "correlation": id}
    made = [
        span("cpu_op", shape.operator, pid, tid, m.launched - 1, m.launched + 8, **dims),
        span("cpu_op", "record_param_comms", pid, tid, m.launched, m.launched + 7, **told),
        span("user_annotation", shape.annotation, pid, tid, m.launched + 1, m.launched + 6, **dims),
        *_launch("cudaLaunchKernelExC", m.launched + 1, pid, tid, id, (c.stream, m.arrived)),
        span("kernel", kernel_name(c.kind, s.names), 0, c.stream, m.arrived, m.end, **where, **told),
    ]
    if s.twins:
        made.append(span("gpu_user_annotation", shape.annotation, 0, c.stream, m.arrived, m.end))
        made.append(span("gpu_user_annotation", "allranks.backward", 0, 7, m.arrived - 5, m.end))
    if s.syncs:  # waits of streams, which are no work
        made.append(span("cuda_sync", "Stream Wait Event", 0, 7, m.arrived, m.end, correlation=id))
        made.append(span("cuda_sync", "Context Sync", 0, 7, m.arrived + 1, m.end, correlation=id))
    return made


def _told(s: Scenario, c: Collective, shape: Shape) -> dict[str, Any]:
    shard = c.elements // s.world
    sizes = {"In msg nelems": shard if shape.shard == "in" else c.elements, "dtype": "Float"}
    group = {"Group size": s.world, "Process Group Name": c.group, "Process Group Ranks": str(list(range(s.world)))}
    told = {"Collective name": shape.metadata, **sizes, **group}
    told["Out msg nelems"] = shard if shape.shard == "out" else c.elements
    return {"none": {}, "no_seq": told, "full": {**told, "Seq": c.key}}[s.metadata]


def on_cpu(s: Scenario, timeline: Timeline, rank: int, pid: int) -> list[Event]:
    """Operators on the caller's threads; gloo tells neither group nor number, and takes its two threads in turn."""
    made = [metadata("thread_name", pid, pid, name=f"thread {pid} (python)")]
    for i in (11, 12):
        names = (f"thread {pid + i} (python)", f"thread {pid + i} (pt_gloo_runloop)")
        made += [metadata("thread_name", pid, pid + i, name=name) for name in names]
    turns = count()
    for number, row in enumerate(timeline.steps):
        step = row[rank]
        made += marks(s, step, number, pid)
        for p in step.pieces:
            tid = pid if p.stream == MAIN else pid + 3
            made.append(span("cpu_op", f"aten::{p.name}", pid, tid, p.start, p.end))
            nested = (p.start + 2, (p.start + p.end) // 2)  # counts once
            made.append(span("cpu_op", "aten::mm", pid, tid, *nested))
        for c in timeline.collectives:
            if c.step == number and has(s, rank, c):
                made += _gloo(c, rank, pid, pid + 11 + next(turns) % 2, s.world)
    return made


def _gloo(c: Collective, rank: int, pid: int, runloop: int, world: int) -> list[Event]:
    m, shape = c.members[rank], SHAPES[c.kind]
    whole, shard = [c.elements], [c.elements // world]
    dims, types = [[whole], [], []], ["TensorList", "", "", "Scalar"]
    if shape.shard:
        dims = [*([whole, shard] if shape.shard == "in" else [shard, whole]), [], []]
        types = ["float", "float", "", "Scalar"]
    given = {"Input Dims": [shard if shape.shard == "in" else whole], "Input type": ["float"]}
    call = {"Input Dims": dims, "Input type": types}
    calls = span("cpu_op", shape.operator, pid, pid, m.launched, m.launched + 3, **call)
    return [calls, span("user_annotation", shape.gloo, pid, runloop, m.arrived, m.end, **given)]


def generate(scenario: Scenario, folder: Path) -> Truth:
    """Write ``rank<R>.json.gz`` of all ranks that are not absent into a folder, and return what is true of them."""
    timeline = lay_out(scenario)
    write_traces(scenario, timeline, folder)
    return answer(scenario, timeline)
