"""Times and token counts of the steps since the last logged one."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from allranks.train.waits import waited_s


@dataclass
class StepClock:
    """Measures edge to edge; evaluation and checkpoints are taken out by `pause`.

    ``forward_s`` and so on are host times: on a GPU they say when work was queued, and only ``step_time_s`` is kept.
    ``own_s`` is the time of data and forward passes without waiting for other ranks. On a GPU the forward passes are timed on
    the device (waiting there counts: strategies that gather within them show no straggler), and the number is that of the
    step before.
    """

    device: torch.device
    edge: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)
    _mark: float = 0.0
    _own: float = 0.0
    _waited: float = 0.0
    _spans: DeviceSpans | None = None

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            self._spans = DeviceSpans()

    def begin(self) -> None:
        """Start of a step's own work."""
        self._mark = time.perf_counter()
        self._waited = waited_s()

    def lap(self, part: str) -> None:
        """Add the time since the last mark to a part of the step."""
        now, waited = time.perf_counter(), waited_s()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._mark
        if part == "data" or (part == "forward" and self._spans is None):
            self._own += now - self._mark - (waited - self._waited)
        if self._spans is not None:
            self._spans.lap(part)
        self._mark, self._waited = now, waited

    def end_step(self) -> dict[str, Any]:
        """Close the step: its time in seconds, and those of its parts on a CPU."""
        now = time.perf_counter()
        taken = {"step_time_s": round(now - self.edge, 6)}
        if self.device.type == "cpu":
            taken |= {f"{part}_s": round(seconds, 6) for part, seconds in self.parts.items()}
        device_s = self._spans.end_step() if self._spans is not None else 0.0
        if device_s is not None:
            taken["own_s"] = round(self._own + device_s, 6)
        self.edge, self.parts, self._own = now, {}, 0.0
        return taken

    def pause(self) -> None:
        """What happened since the last edge was no training."""
        self.edge = time.perf_counter()


class DeviceSpans:
    """Time of forward passes on a GPU, by events that nobody waits for: they are read one step later, or not at all."""

    def __init__(self) -> None:
        self._open: torch.cuda.Event | None = None
        self._now: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._before: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def lap(self, part: str) -> None:
        """A part of the step has been queued; a forward pass begins after the data, and ends with its own lap."""
        if part not in ("data", "forward"):
            return
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        if part == "data":
            self._open = mark
        elif self._open is not None:
            self._now.append((self._open, mark))
            self._open = None

    def end_step(self) -> float | None:
        """Seconds of the step before; None where it has not ended on the device."""
        before, self._before, self._now = self._before, self._now, []
        if not before or not before[-1][1].query():
            return None
        return sum(begin.elapsed_time(end) for begin, end in before) / 1000


def memory_now(device: torch.device) -> dict[str, int]:
    """Memory in use and its peak: of the allocator on a GPU, of the process on a CPU, in bytes."""
    if device.type == "cuda":
        return {
            "memory_bytes": torch.cuda.memory_allocated(device),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        }
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_bytes": psutil.Process().memory_info().rss, "peak_memory_bytes": peak_kib * 1024}
