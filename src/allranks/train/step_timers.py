"""Measure the time of each step, this rank's own compute time, and its time in communication waits.

Waits are measured in ``Work.wait``, which torch.distributed and the strategies call, so strategies need no code for it.
On a GPU ``wait`` does not block the host, and nothing is measured. Own compute time is data loading, forward and backward
passes. A backward pass counts until the gradient of the model's first weight exists; what follows is waiting for other ranks,
and torch's DDP waits outside of Python. On a GPU, passes are timed by events that are read one step later without blocking.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

_waited = 0.0
_original_wait: Any = None


def waited_s() -> float:
    """Return the seconds waited so far; only differences are meaningful."""
    return _waited


def start_wait_timer() -> None:
    """Start to measure waits. A second call does nothing."""
    global _original_wait  # noqa: PLW0603 - one per process, like the patched class
    if _original_wait is None:
        _original_wait = dist.Work.wait
        dist.Work.wait = _timed_wait  # pyright: ignore[reportAttributeAccessIssue]


def _timed_wait(work: dist.Work, *args: Any, **more: Any) -> Any:
    global _waited  # noqa: PLW0603
    began = time.perf_counter()
    try:
        return _original_wait(work, *args, **more)
    finally:
        _waited += time.perf_counter() - began


ComputeTimes = dict[str, float]
OWN = "own_s"  # data and forward passes
OWN_BACKWARD = "own_backward_s"


class ComputeTimer(Protocol):
    """Measure this rank's own compute time in a step."""

    def begin(self) -> None:
        """Start a step."""
        ...

    def lap(self, part: str) -> None:
        """End a part: ``data``, ``forward``, ``backward`` or another one."""
        ...

    def backward_over(self) -> None:
        """Record that the gradient of the first weight exists."""
        ...

    def end_step(self) -> ComputeTimes:
        """Return the seconds of this rank's own work; kinds that cannot be measured are left out."""
        ...


def hook_end_of_backward(module: nn.Module, over: Callable[[], None]) -> None:
    """Call `over` near the end of each backward pass; never if all trained weights are sharded (FSDP2)."""
    for p in module.parameters():
        if p.requires_grad and not isinstance(p, DTensor):
            p.register_post_accumulate_grad_hook(lambda _: over())
            return


class CpuComputeTimer:
    """Measure compute time on a CPU."""

    def __init__(self) -> None:
        self._own: ComputeTimes = {}
        self._mark = self._waited = 0.0
        self._over: tuple[float, float] | None = None
        self._told = True

    def begin(self) -> None:
        self._mark, self._waited = time.perf_counter(), waited_s()
        self._own, self._over, self._told = {}, None, True

    def backward_over(self) -> None:
        self._over = time.perf_counter(), waited_s()

    def lap(self, part: str) -> None:
        now = time.perf_counter(), waited_s()
        if part in ("data", "forward"):
            self._add(OWN, now)
            self._over = None
        elif part == "backward" and self._over is not None:
            self._add(OWN_BACKWARD, self._over)
        elif part == "backward":
            self._told = False  # it may contain waits
        self._mark, self._waited = now

    def _add(self, kind: str, until: tuple[float, float]) -> None:
        spent = until[0] - self._mark - (until[1] - self._waited)
        self._own[kind] = self._own.get(kind, 0.0) + spent

    def end_step(self) -> ComputeTimes:
        return {k: v for k, v in self._own.items() if k != OWN_BACKWARD or self._told}


class CudaComputeTimer:
    """Measure compute time on a GPU: data by the host's clock, passes by CUDA events.

    Waits within a forward pass count as compute time: strategies that gather there show no straggler, and their backward
    passes are not measured.
    """

    def __init__(self) -> None:
        self._mark = self._data = 0.0
        self._open: torch.cuda.Event | None = None
        self._over: torch.cuda.Event | None = None
        self._now: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._before: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._mark, self._data = time.perf_counter(), 0.0

    def backward_over(self) -> None:
        self._over = _record_event()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        if part == "data":
            self._data += now - self._mark
            self._open = _record_event()
        elif part == "forward" and self._open is not None:
            end = _record_event()
            self._now.append((OWN, self._open, end))
            self._open, self._over = end, None
        elif part == "backward":
            if self._open is not None and self._over is not None:
                self._now.append((OWN_BACKWARD, self._open, self._over))
            self._open = self._over = None
        self._mark = now

    def end_step(self) -> ComputeTimes:
        before, self._before, self._now = self._before, self._now, []
        if not before or not all(end.query() for _, _, end in before):
            return {}
        own: ComputeTimes = {OWN: self._data}
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

    ``forward_s`` and the other parts are host times. On a GPU they only show when work was queued, so only ``step_time_s`` is
    kept. ``own_s`` and ``own_backward_s`` are this rank's compute times without waits for other ranks.
    """

    device: torch.device
    edge: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)
    _mark: float = 0.0

    def __post_init__(self) -> None:
        self._own: ComputeTimer = CudaComputeTimer() if self.device.type == "cuda" else CpuComputeTimer()

    def follow(self, module: nn.Module) -> None:
        """Measure backward passes of this module without the wait at their end."""
        hook_end_of_backward(module, self._own.backward_over)

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
        taken |= {kind: round(seconds, 6) for kind, seconds in self._own.end_step().items()}
        self.edge, self.parts = now, {}
        return taken

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
