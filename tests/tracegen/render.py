"""The schedule as each rank's profiler shows it, on a GPU with NCCL or on a CPU with gloo, written to files."""

from __future__ import annotations

import gzip
import json
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tests.tracegen.schedule import LEAD, MAIN, Collective, Piece, Scenario, StepOf, Timeline
from tests.tracegen.truth import has

Event = dict[str, Any]
PID = 4000
BASE_NS = 1_700_000_000_000_000_000


class Shape(NamedTuple):
    """Names of one kind of collective; ``shard_in`` and ``shard_out`` say which side holds 1/W of the elements."""

    kernel: str
    metadata: str
    operator: str
    annotation: str
    gloo: str
    shard_in: bool = False
    shard_out: bool = False


# gloo runs a reduce-scatter as an all-reduce, and calls it so
SHAPES = {
    "all_reduce": Shape("AllReduce", "allreduce", "c10d::allreduce_", "nccl:all_reduce", "gloo:all_reduce"),
    "all_gather": Shape(
        "AllGather", "_allgather_base", "c10d::_allgather_base_", "nccl:_all_gather_base", "gloo:all_gather", True
    ),
    "reduce_scatter": Shape(
        "ReduceScatter", "_reduce_scatter_base", "c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base",
        "gloo:all_reduce", False, True,
    ),
    "broadcast": Shape("Broadcast", "broadcast", "c10d::broadcast_", "nccl:broadcast", "gloo:broadcast"),
}  # fmt: skip


def kernel_name(kind: str, names: str) -> str:
    """The collective's kernel as NCCL from 2.19 on, NCCL before, or RCCL calls it."""
    verb = SHAPES[kind].kernel
    if names == "rccl":
        return "rcclGenericKernel(ncclDevComm*, unsigned long, ncclWork*) [clone .kd]"
    if names == "old":
        return f"ncclKernel_{verb}_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"
    return f"ncclDevKernel_{verb}{'_Sum_f32' if 'educe' in verb else ''}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def span(cat: str, name: str, pid: int, tid: int, start: int, end: int, **args: Any) -> Event:
    """A complete event."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def metadata(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def marks(s: Scenario, step: StepOf, number: int, pid: int) -> list[Event]:
    """The step and its parts, on the main thread."""
    made = [(f"ProfilerStep#{number + 1}", (step.start, step.end))] if s.step_marks else []
    made += [(f"allranks.{name}", times) for name, times in step.parts.items()] if s.part_marks else []
    return [span("user_annotation", name, pid, pid, *times) for name, times in made]


def write_traces(s: Scenario, timeline: Timeline, folder: Path) -> None:
    """Write one ``rank<R>.json.gz`` a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in set(range(s.world)) - s.absent:
        text = json.dumps(document(s, timeline, rank))
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 1, mtime=0))


def document(s: Scenario, timeline: Timeline, rank: int) -> dict[str, Any]:
    """One rank's trace as JSON."""
    events = (on_gpu if s.backend == "nccl" else on_cpu)(s, timeline, rank, PID + rank)
    for e in events:
        e["ts"] += s.offset_us.get(rank, 0)
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": s.world, "ranks": list(range(s.world))}]
    if s.second_group:
        groups.append({**groups[0], "pg_name": "1", "pg_desc": "undefined"})
    info = {"backend": s.backend, "rank": rank, "world_size": s.world, "pg_count": len(groups), "pg_config": groups}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Generated"}] if s.backend == "nccl" else [],
        "distributedInfo": info,
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": events,
    }


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
    stream, kernel_start = to
    flow = {"cat": "ac2g", "name": "ac2g", "id": id}
    return [
        span("cuda_runtime", call, pid, tid, start, start + 4, correlation=id, cbid=211),
        {**flow, "ph": "s", "pid": pid, "tid": tid, "ts": start},
        {**flow, "ph": "f", "pid": 0, "tid": stream, "ts": kernel_start, "bp": "e"},
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
    told: dict[str, Any] = {
        "Collective name": shape.metadata,
        "In msg nelems": shard if shape.shard_in else c.elements,
        "Out msg nelems": shard if shape.shard_out else c.elements,
        "Group size": s.world,
        "dtype": "Float",
        "Process Group Name": c.group,
        "Process Group Ranks": str(list(range(s.world))),
    }
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
            made.append(
                span("cpu_op", "aten::mm", pid, tid, p.start + 2, (p.start + p.end) // 2)
            )  # nested: counts once
        for c in timeline.collectives:
            if c.step == number and has(s, rank, c):
                made += _gloo(c, rank, pid, pid + 11 + next(turns) % 2, s.world)
    return made


def _gloo(c: Collective, rank: int, pid: int, runloop: int, world: int) -> list[Event]:
    m, shape = c.members[rank], SHAPES[c.kind]
    whole, shard = [c.elements], [c.elements // world]
    dims, types = [[whole], [], []], ["TensorList", "", "", "Scalar"]
    if c.kind in ("all_gather", "reduce_scatter"):
        dims = [*([whole, shard] if shape.shard_in else [shard, whole]), [], []]
        types = ["float", "float", "", "Scalar"]
    given = {"Input Dims": [shard if shape.shard_in else whole], "Input type": ["float"]}
    call = {"Input Dims": dims, "Input type": types}
    return [
        span("cpu_op", shape.operator, pid, pid, m.launched, m.launched + 3, **call),
        span("user_annotation", shape.gloo, pid, runloop, m.arrived, m.end, **given),
    ]
