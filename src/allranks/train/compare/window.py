"""A few profiled steps of one strategy: where time goes, how much communication is hidden, and the peak of memory."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

Span = tuple[float, float]
WAITS = ("c10d::", "gloo:", "nccl:", "record_param_comms")


def settle() -> None:
    """Return when no collective runs on any rank: torch's profiler, started or stopped while threads of gloo are at
    work, has been seen to corrupt the heap, which ends the process some time later."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.2)  # what was launched before the barrier on another group has no part in it


class Window:
    """Watches steps and profiles those from `first` to `last`; `figures` afterwards. The trace stays in `path`."""

    def __init__(self, first: int, last: int, device: torch.device, path: Path) -> None:
        self.first, self._last, self._device, self._path = first, last, device, path
        self._profile: profile | None = None
        self._on = False
        self.peak_bytes = 0
        self.before_bytes = 0  # what the strategy holds when the window begins; on a CPU the profiler counts from there

    def step_begins(self, step: int) -> None:
        if step == self.first:
            cuda = self._device.type == "cuda"
            if cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            settle()
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profile.start()
            self._on = True
        if self._on:
            self._mark = record_function(f"ProfilerStep#{step + 1}")
            self._mark.__enter__()

    def part(self, name: str) -> AbstractContextManager[Any]:
        return record_function(f"allranks.{name}")

    def step_ends(self, step: int) -> bool:
        if self._on:
            self._mark.__exit__(None, None, None)
        if step == self._last and self._profile is not None:
            self._on = False
            settle()
            self._profile.stop()
            if self._device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            return True
        return False

    def close(self) -> None: ...

    def figures(self) -> dict[str, Any]:
        """Seconds a step; see `spans_of`."""
        with gzip.open(self._path, "rt") as f:
            return figures(json.load(f)["traceEvents"], self._last - self.first + 1)


def merged(spans: list[Span]) -> list[Span]:
    """Overlapping spans joined."""
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def shared(a: list[Span], b: list[Span]) -> float:
    """Length of what lies in both; each merged."""
    i = j = 0
    total = 0.0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def figures(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Per step, in seconds: step, compute, communication, exposed and overlapped; collectives as (name, bytes, seconds).

    On a GPU compute and communication are kernels. On a CPU communication is what gloo's threads do, and compute the
    operators of the training thread, collectives and waiting for them left out.
    """
    spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
    marks = [
        e for e in spans if e.get("name", "").startswith("ProfilerStep#") and e.get("cat") != "gpu_user_annotation"
    ]
    within = merged([_span(e) for e in marks])
    kernels = [e for e in spans if e.get("cat") == "kernel"]
    if kernels:
        comm_events = [e for e in kernels if "nccl" in e["name"].lower() or "rccl" in e["name"].lower()]
        compute = [_span(e) for e in kernels if e not in comm_events]
    else:
        comm_events = [e for e in spans if e.get("name", "").startswith("gloo:")]
        main = {e["tid"] for e in marks}
        compute = _operators([e for e in spans if e.get("cat") == "cpu_op" and e["tid"] in main])
    control = merged([_span(e) for e in spans if e.get("name") == "allranks.control"])
    busy, comm = merged(compute), merged([_span(e) for e in comm_events if not shared([_span(e)], control)])
    busy = _clipped(busy, within)
    comm = _clipped(comm, within)
    hidden = shared(busy, comm)
    n = max(steps, 1) * 1e6
    total, exposed = length(within), length(comm) - hidden
    return {
        "step_s": total / n,
        "compute_s": length(busy) / n,
        "comm_s": length(comm) / n,
        "overlapped_comm_s": hidden / n,
        "exposed_comm_s": exposed / n,
        "idle_s": max(0.0, total - length(busy) - exposed) / n,
        "collectives": [(e["name"], _bytes(e), e["dur"] / 1e6) for e in comm_events],
        "peak_new_bytes": _peak(events),
    }


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _operators(events: list[dict[str, Any]]) -> list[Span]:
    """Time of operators without that of collectives within them."""
    waits = merged([_span(e) for e in events if e["name"].startswith(WAITS)])
    leaves = merged([_span(e) for e in events if e["name"].startswith("aten::")])
    return _without(leaves, waits)


def _without(a: list[Span], b: list[Span]) -> list[Span]:
    out: list[Span] = []
    for start, stop in a:
        at = start
        for x, y in b:
            if y <= at or x >= stop:
                continue
            if x > at:
                out.append((at, x))
            at = max(at, y)
        if at < stop:
            out.append((at, stop))
    return out


def _clipped(a: list[Span], b: list[Span]) -> list[Span]:
    return [(max(s, x), min(e, y)) for s, e in a for x, y in b if max(s, x) < min(e, y)]


SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1}


def _bytes(event: dict[str, Any]) -> int:
    args = event.get("args", {})
    if "In msg nelems" in args:
        wide = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Int": 4, "Long": 8, "Byte": 1}
        return int(args["In msg nelems"]) * wide.get(args.get("dtype", ""), 4)
    total = 0
    for dims, kind in zip(args.get("Input Dims", []), args.get("Input type", []), strict=False):
        n = 1
        for d in dims if all(isinstance(d, int) for d in dims) else []:
            n *= d
        total += n * SIZES.get(kind, 0)
    return total


def _peak(events: list[dict[str, Any]]) -> int:
    """The most that was allocated within the window and not yet freed, in bytes, on the CPU."""
    found = (e.get("args", {}) for e in events if e.get("name") == "[memory]")
    return max((int(a.get("Total Allocated", 0)) for a in found if a.get("Device Type", 0) == 0), default=0)
