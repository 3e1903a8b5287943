"""Times and token counts of the steps since the last logged one."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn

from allranks.train.ownwork import DeviceWork, HostWork, OwnWork, follow_backward


@dataclass
class StepClock:
    """Measures edge to edge; evaluation and checkpoints are taken out by `pause`.

    ``forward_s`` and so on are host times: on a GPU they say when work was queued, and only ``step_time_s`` is kept.
    ``own_s`` and ``own_backward_s`` are what this rank did without waiting for others (see `ownwork`).
    """

    device: torch.device
    edge: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)
    _mark: float = 0.0

    def __post_init__(self) -> None:
        self._own: OwnWork = DeviceWork() if self.device.type == "cuda" else HostWork()

    def follow(self, module: nn.Module) -> None:
        """Time backward passes of this module without what a rank waits at their end."""
        follow_backward(module, self._own.backward_over)

    def begin(self) -> None:
        """Start of a step's own work."""
        self._mark = time.perf_counter()
        self._own.begin()

    def lap(self, part: str) -> None:
        """Add the time since the last mark to a part of the step."""
        self._own.lap(part)
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._mark
        self._mark = now

    def end_step(self) -> dict[str, Any]:
        """Close the step: its time in seconds, and those of its parts on a CPU."""
        now = time.perf_counter()
        taken = {"step_time_s": round(now - self.edge, 6)}
        if self.device.type == "cpu":
            taken |= {f"{part}_s": round(seconds, 6) for part, seconds in self.parts.items()}
        taken |= {kind: round(seconds, 6) for kind, seconds in self._own.end_step().items()}
        self.edge, self.parts = now, {}
        return taken

    def pause(self) -> None:
        """What happened since the last edge was no training."""
        self.edge = time.perf_counter()


def memory_now(device: torch.device) -> dict[str, int]:
    """Memory in use and its peak: of the allocator on a GPU, of the process on a CPU, in bytes."""
    if device.type == "cuda":
        return {
            "memory_bytes": torch.cuda.memory_allocated(device),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        }
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_bytes": psutil.Process().memory_info().rss, "peak_memory_bytes": peak_kib * 1024}
