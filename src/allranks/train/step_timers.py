"""Measure the time of each step, this rank's own compute time, and its time in communication waits.

Waits are measured in ``Work.wait``, which torch.distributed and the strategies call, so strategies need no code for it.
On a GPU ``wait`` does not block the host, and nothing is measured. Own compute time is data loading, forward and
backward passes, and the optimizer. A backward pass counts until the gradient of the model's first weight exists; what
follows is waiting for other ranks, and torch's DDP waits outside of Python. On a GPU, passes are timed by events that
are read one step later without blocking. The time in which the main thread had no core (run-queue wait) is measured
beside each of them: it is no work.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from allranks.train.patches import replace_work_wait
from allranks.utils.kernel_counters import RunQueueClock

_waited = 0.0
_queued_in_waits = 0.0
_waits = 0
_original_wait: Any = None
_run_queue: RunQueueClock | None = None


def waited_s() -> float:
    """Return the seconds waited so far; only differences are meaningful."""
    return _waited


def queued_s() -> float | None:
    """Return the seconds that the training thread had no core, except in waits for other ranks; None if unknown."""
    queued = _run_queue.read() if _run_queue is not None else None
    return None if queued is None else queued - _queued_in_waits


def start_wait_timer() -> None:
    """Start to measure waits. A second call does nothing."""
    global _original_wait, _run_queue  # noqa: PLW0603 - one per process, like the patched class
    if _original_wait is None:
        _run_queue = RunQueueClock()
        _original_wait = replace_work_wait(_timed_wait)


def _timed_wait(work: dist.Work, *args: Any, **more: Any) -> Any:
    global _waited, _queued_in_waits, _waits  # noqa: PLW0603
    began = _Moment()
    _waits += 1
    try:
        return _original_wait(work, *args, **more)
    finally:
        end = _Moment()
        _waited += end.at - began.at
        _queued_in_waits += end.queued_since(began) or 0.0


ComputeTimes = dict[str, float]
OWN = "own_s"  # data and forward passes
OWN_BACKWARD = "own_backward_s"
OWN_OPTIMIZER = "own_optimizer_s"
QUEUED = {OWN: "own_queued_s", OWN_BACKWARD: "own_backward_queued_s", OWN_OPTIMIZER: "own_optimizer_queued_s"}


class _Moment:
    """Clocks at one moment: time, waits for other ranks, and time without a core."""

    def __init__(self) -> None:
        self.at, self.waited, self.queued = time.perf_counter(), waited_s(), queued_s()

    def queued_since(self, began: _Moment) -> float | None:
        if self.queued is None or began.queued is None:
            return None
        return max(self.queued - began.queued, 0.0)


class CpuComputeTimer:
    """Measure this rank's own compute time in a step on a CPU.

    `lap` ends a part: ``data``, ``forward``, ``backward`` or another. `backward_over` records that the first weight's
    gradient exists. `end_step` returns the seconds of this rank's own work; kinds that cannot be measured are left out.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._mark = _Moment()
        self._own: ComputeTimes = {}
        self._over: _Moment | None = None
        self._backward_known = True

    def backward_over(self) -> None:
        self._over = _Moment()

    def lap(self, part: str) -> None:
        now = _Moment()
        if part in ("data", "forward"):
            self._add(OWN, now)
            self._over = None
        elif part == "backward" and self._over is not None:
            self._add(OWN_BACKWARD, self._over)
        elif part == "backward":
            self._backward_known = False  # it may contain waits
        elif part == "optimizer":
            self._add(OWN_OPTIMIZER, now)
        self._mark = now

    def _add(self, kind: str, until: _Moment) -> None:
        began = self._mark
        spent = until.at - began.at - (until.waited - began.waited)
        self._own[kind] = self._own.get(kind, 0.0) + spent
        queued = until.queued_since(began)
        if queued is not None:
            self._own[QUEUED[kind]] = self._own.get(QUEUED[kind], 0.0) + queued

    def end_step(self) -> ComputeTimes:
        hidden = () if self._backward_known else (OWN_BACKWARD, QUEUED[OWN_BACKWARD])
        return {k: v for k, v in self._own.items() if k not in hidden}


class CudaComputeTimer:
    """Measure compute time on a GPU: data by the host's clock, passes by CUDA events.

    Waits within a forward pass count as compute time: strategies that gather there show no straggler, and their
    backward passes are not measured. An optimizer that waits for other ranks is not measured either. The time without a
    core is that of the host, until it has queued data and forward pass.
    """

    def __init__(self) -> None:
        self._host_before: ComputeTimes = {}
        self._open: torch.cuda.Event | None = None
        self._over: torch.cuda.Event | None = None
        self._waits = 0
        self._now: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._before: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.begin()

    def begin(self) -> None:
        self._mark = _Moment()
        self._host: ComputeTimes = {OWN: 0.0}

    def backward_over(self) -> None:
        self._over = _record_event()

    def lap(self, part: str) -> None:
        now = _Moment()
        if part == "data":
            self._host[OWN] += now.at - self._mark.at
            self._open = _record_event()
        elif part == "forward" and self._open is not None:
            end = _record_event()
            self._now.append((OWN, self._open, end))
            self._open, self._over = end, None
        elif part == "backward":
            if self._open is not None and self._over is not None:
                self._now.append((OWN_BACKWARD, self._open, self._over))
            self._open, self._over, self._waits = _record_event(), None, _waits
        elif part == "optimizer":
            if self._open is not None and self._waits == _waits:
                self._now.append((OWN_OPTIMIZER, self._open, _record_event()))
            self._open = None
        queued = now.queued_since(self._mark)
        if part in ("data", "forward") and queued is not None:
            self._host[QUEUED[OWN]] = self._host.get(QUEUED[OWN], 0.0) + queued
        self._mark = now

    def end_step(self) -> ComputeTimes:
        before, self._before, self._now = self._before, self._now, []
        own, self._host_before = self._host_before, self._host
        if not before or not all(end.query() for _, _, end in before):
            return {}
        for kind, begin, end in before:
            own[kind] = own.get(kind, 0.0) + begin.elapsed_time(end) / 1000
        return own


def _record_event() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


@dataclass
class StepTimer:
    """Measure from the end of one step to the end of the next; `pause` excludes evaluation and checkpoints.

    On a GPU the host ends a step when it is queued. It is at most one step ahead (`step_metrics`), so that the times of
    several steps add up to those of the GPU if the last one includes `rest_of_step`. ``forward_s`` and the other parts
    are host times; on a GPU they only show when work was queued, so only ``step_time_s`` is kept. ``own_s``,
    ``own_backward_s`` and ``own_optimizer_s`` are this rank's compute times without waits for other ranks, and
    ``own_queued_s`` etc. the part of each in which the main thread had no core.
    """

    device: torch.device
    edge: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)
    _mark: float = 0.0
    _optimizer_hidden: bool = False

    def __post_init__(self) -> None:
        self._own = CudaComputeTimer() if self.device.type == "cuda" else CpuComputeTimer()

    def follow(self, module: nn.Module, *, update_times_comparable: bool = True) -> None:
        """Measure backward passes of this module without the wait at their end, and its updates if comparable."""
        trained = (p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor))
        if (first := next(trained, None)) is not None:  # None: all are sharded (FSDP2), and no pass is measured
            first.register_post_accumulate_grad_hook(lambda _: self._own.backward_over())
        self._optimizer_hidden = not update_times_comparable

    def begin(self) -> None:
        """Start a step."""
        self._mark = time.perf_counter()
        self._own.begin()

    def lap(self, part: str) -> None:
        """Add the time since the last call to a part of the step."""
        self._own.lap(part)
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._mark
        self._mark = now

    def end_step(self) -> dict[str, Any]:
        """End the step; return its time in seconds and, on a CPU, those of its parts."""
        now = time.perf_counter()
        taken = {"step_time_s": round(now - self.edge, 6)}
        if self.device.type == "cpu":
            taken |= {f"{part}_s": round(seconds, 6) for part, seconds in self.parts.items()}
        own = self._own.end_step()
        hidden = (OWN_OPTIMIZER, QUEUED[OWN_OPTIMIZER]) if self._optimizer_hidden else ()
        taken |= {kind: round(seconds, 6) for kind, seconds in own.items() if kind not in hidden}
        self.edge, self.parts = now, {}
        return taken

    def rest_of_step(self) -> float:
        """Return the seconds since the last step ended for the host: its rest, if the GPU has just ended it."""
        now = time.perf_counter()
        rest, self.edge = now - self.edge, now
        return rest

    def pause(self) -> None:
        """Exclude the time since the last step from the measurement."""
        self.edge = time.perf_counter()


def memory_usage(device: torch.device) -> dict[str, int]:
    """Return memory in use and its peak in bytes: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return {
            "memory_bytes": torch.cuda.memory_allocated(device),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        }
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_bytes": psutil.Process().memory_info().rss, "peak_memory_bytes": peak_kib * 1024}
