"""Small traces written by hand, as the profiler writes them: spans in microseconds."""

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PID, MAIN, AUTOGRAD, GLOO = 100, 100, 101, 111
BASE = 1_700_000_000_000_000_000  # nanoseconds


def span(cat: str, name: str, start: float, end: float, tid: Any = MAIN, pid: Any = PID, **args: Any) -> Event:
    """A complete event; `in_dims` and `in_types` stand for the profiler's names with spaces."""
    names = {"in_dims": "Input Dims", "in_types": "Input type", "sequence": "Sequence number"}
    told = {names.get(k, k): v for k, v in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": told}


def op(name: str, start: float, end: float, tid: Any = MAIN, **args: Any) -> Event:
    return span("cpu_op", name, start, end, tid, **args)


def mark(name: str, start: float, end: float, tid: Any = MAIN, **args: Any) -> Event:
    return span("user_annotation", name, start, end, tid, **args)


def step(number: int, start: float, end: float) -> Event:
    return mark(f"ProfilerStep#{number}", start, end)


def kernel(name: str, start: float, end: float, correlation: int = 0, stream: int = 7, **args: Any) -> Event:
    told = {"stream": stream, "device": 0, "correlation": correlation, **args}
    return span("kernel", name, start, end, stream, 0, **told)


def launch(correlation: int, at: float, tid: Any = MAIN) -> Event:
    return span("cuda_runtime", "cudaLaunchKernel", at, at + 2, tid, correlation=correlation)


def nccl(
    kind: str, start: float, end: float, seq: int | None, correlation: int = 0, elements: int = 1000, **args: Any
) -> Event:
    """A collective's kernel with NCCL's metadata, float32, of ranks 0 and 1 unless told otherwise."""
    group = {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    sizes = {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    told: dict[str, Any] = {"Collective name": kind, **sizes, **group, **args}
    if seq is not None:
        told["Seq"] = seq
    return kernel("ncclDevKernel_Generic", start, end, correlation, 20, **told)


def memory(at: float, allocated: int, reserved: int = 8192, device: int = 1) -> Event:
    where = {"Device Type": device, "Device Id": 0 if device else -1, "Bytes": 1}
    args = {**where, "Total Allocated": allocated, "Total Reserved": reserved}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": PID, "tid": MAIN, "ts": at, "args": args}


def gloo(kind: str, at: float, start: float, end: float, dims: list[Any], tid: Any = GLOO) -> list[Event]:
    """A collective of gloo: the call and what the backend runs, which calls a reduce-scatter an all-reduce."""
    gathers = {"all_gather": "_allgather_base_", "reduce_scatter": "_reduce_scatter_base_"}
    call = gathers.get(kind, f"{kind.replace('_', '')}_")
    own, runs = dims[1] if len(dims) == 2 else dims[0][0], kind.replace("reduce_scatter", "all_reduce")
    called = op(f"c10d::{call}", at, at + 5, in_dims=dims, in_types=["float"] * len(dims))
    return [called, mark(f"gloo:{runs}", start, end, tid, in_dims=[own], in_types=["float"])]


def thread(tid: Any, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "ts": 0, "args": {"name": name}}


def document(events: list[Event], rank: Any = 0, world: Any = 1, backend: str = "gloo", base: int = BASE) -> Event:
    info: dict[str, Any] = {"backend": backend}
    if rank is not None:
        info["rank"] = rank
    if world is not None:
        info["world_size"] = world
        info["pg_config"] = [{"pg_name": "0", "pg_size": world, "ranks": list(range(min(int(world), 4096)))}]
    known = info if rank is not None or world is not None else {}
    return {"distributedInfo": known, "baseTimeNanoseconds": base, "traceEvents": events, "traceName": "t.json"}


def write(path: Path, events: list[Event], rank: int | None = 0, world: int | None = 1, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document(events, rank, world, **more)).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def write_ranks(folder: Path, *ranks: list[Event], **more: Any) -> Path:
    for rank, events in enumerate(ranks):
        write(folder / f"rank{rank}.json.gz", events, rank, len(ranks), **more)
    return folder
