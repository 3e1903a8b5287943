"""The schedule as a rank's profiler on a GPU shows it: launches on the host, kernels on streams, metadata of collectives."""

from __future__ import annotations

from itertools import count
from typing import Any

from tests.tracegen.common import Event, fillers, marks, span, thread_name
from tests.tracegen.scenario import Scenario
from tests.tracegen.schedule import LEAD, Collective, Piece, Timeline
from tests.tracegen.shapes import SHAPES, kernel_name
from tests.tracegen.truth import has


def events(s: Scenario, timeline: Timeline, rank: int, pid: int) -> list[Event]:
    """All events of one rank, on the true clock."""
    ids = count(1)
    made = [
        {"name": "process_name", "ph": "M", "ts": 0, "pid": pid, "tid": 0, "args": {"name": "python"}},
        {"name": "process_name", "ph": "M", "ts": 0, "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"name": "process_labels", "ph": "M", "ts": 0, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        thread_name(pid, pid, f"thread {pid} (python)"),
        thread_name(pid, pid + 1, f"thread {pid + 1} (pt_autograd_0)"),
    ]
    for number, row in enumerate(timeline.steps):
        step = row[rank]
        made += marks(s, step, number, pid) + fillers(s, step, pid)
        for piece in step.pieces:
            made += _piece(piece, pid, next(ids))
        for c in timeline.collectives:
            if c.step == number and has(s, rank, c):
                made += _collective(s, c, rank, pid, next(ids))
        made.append(span("cuda_runtime", "cudaDeviceSynchronize", pid, pid, step.end - 25, step.end - 2, cbid=165))
    return made


def _thread(part: str, pid: int) -> int:
    return pid + 1 if part == "backward" else pid  # autograd has a thread of its own


def _launch(call: str, start: int, pid: int, tid: int, id: int, to: tuple[int, int]) -> list[Event]:
    stream, kernel_start = to
    flow = {"cat": "ac2g", "name": "ac2g", "id": id}
    return [
        span("cuda_runtime", call, pid, tid, start, start + 4, correlation=id, cbid=211, **{"External id": id}),
        {**flow, "ph": "s", "pid": pid, "tid": tid, "ts": start},
        {**flow, "ph": "f", "pid": 0, "tid": stream, "ts": kernel_start, "bp": "e"},
    ]


def _piece(p: Piece, pid: int, id: int) -> list[Event]:
    tid, launched = _thread(p.part, pid), p.start - LEAD
    if p.stream != 7:
        tid = pid + 3  # not from the thread whose operators these would cut across
    where = {"device": 0, "stream": p.stream, "correlation": id, "External id": id}
    if p.what == "memcpy":
        device = span("gpu_memcpy", p.name, 0, p.stream, p.start, p.end, bytes=p.copied_bytes, **where)
        operator, call = "aten::copy_", "cudaMemcpyAsync"
    else:
        device = span("kernel", p.name, 0, p.stream, p.start, p.end, grid=[64, 1, 1], block=[256, 1, 1], **where)
        operator, call = f"aten::{p.name}", "cudaLaunchKernel"
    host = span(
        "cpu_op",
        operator,
        pid,
        tid,
        launched - 2,
        launched + 5,
        **{"External id": id, "Input Dims": [[64, 64]], "Input type": ["float"]},
    )
    return [host, *_launch(call, launched, pid, tid, id, (p.stream, p.start)), device]


def _collective(s: Scenario, c: Collective, rank: int, pid: int, id: int) -> list[Event]:
    m, shape, tid = c.members[rank], SHAPES[c.kind], _thread(c.part, pid)
    if c.group != "0":
        tid = pid + 4
    told = _metadata(s, c)
    dims = {"External id": id, "Input Dims": [[c.elements]], "Input type": ["float"]}
    where = {"device": 0, "stream": c.stream, "correlation": id, "External id": id}
    made = [
        span("cpu_op", shape.operator, pid, tid, m.launched - 1, m.launched + 8, **dims),
        span("cpu_op", "record_param_comms", pid, tid, m.launched, m.launched + 7, **{"External id": id}, **told),
        span("user_annotation", shape.annotation, pid, tid, m.launched + 1, m.launched + 6, **dims),
        *_launch("cudaLaunchKernelExC", m.launched + 1, pid, tid, id, (c.stream, m.arrived)),
        span(
            "kernel",
            kernel_name(c.kind, s.names),
            0,
            c.stream,
            m.arrived,
            m.end,
            grid=[24, 1, 1],
            block=[544, 1, 1],
            **where,
            **told,
        ),
    ]
    if s.twins:
        made.append(span("gpu_user_annotation", shape.annotation, 0, c.stream, m.arrived, m.end, **{"External id": id}))
        made.append(span("gpu_user_annotation", "allranks.backward", 0, 7, m.arrived - 5, m.end, **{"External id": id}))
    if s.syncs:  # waits of streams, which are no work
        sync = {"device": 0, "stream": 7, "correlation": id, "wait_on_stream": c.stream}
        made.append(span("cuda_sync", "Stream Wait Event", 0, 7, m.arrived, m.end, **sync))
        made.append(span("cuda_sync", "Context Sync", 0, 7, m.arrived + 1, m.end, **sync))
    return made


def _metadata(s: Scenario, c: Collective) -> dict[str, Any]:
    if s.metadata == "none":
        return {}
    shape, shard = SHAPES[c.kind], c.elements // s.world
    told: dict[str, Any] = {
        "Collective name": shape.metadata,
        "In msg nelems": shard if shape.shard_in else c.elements,
        "Out msg nelems": shard if shape.shard_out else c.elements,
        "Group size": s.world,
        "dtype": "Float",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": c.group,
        "Process Group Description": "default_pg" if c.group == "0" else "undefined",
        "Process Group Ranks": str(list(range(s.world))),
    }
    if s.metadata == "full":
        told["Seq"] = c.key
    return told
