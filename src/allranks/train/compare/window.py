"""A few profiled steps of one strategy: where time goes, how much communication is hidden, and the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from allranks.errors import RunFailed
from allranks.trace.rank import Unreadable, read_rank
from allranks.trace.records import PHASES

UNPHASED = PHASES.index("other")  # the loop's own small reduction is launched in no phase of training


def settle(quiet: Callable[[], None]) -> None:
    """Return when no collective runs on any rank: torch's profiler, started or stopped while threads of gloo are at
    work, has been seen to corrupt the heap, which ends the process some time later."""
    if dist.is_initialized():
        quiet()
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

    def attach(self, quiet: Callable[[], None]) -> None:
        self._quiet = quiet

    def step_begins(self, step: int) -> None:
        if step == self.first:
            cuda = self._device.type == "cuda"
            if cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            settle(self._quiet)
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
            settle(self._quiet)
            self._profile.stop()
            if self._device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            return True
        return False

    def close(self) -> None: ...

    def figures(self) -> dict[str, Any]:
        """What `allranks trace` says of this rank, in seconds a step; and collectives as (kind, bytes, seconds)."""
        return figures(self._path)


def figures(path: Path) -> dict[str, Any]:
    """Step, compute, communication (its exposed and overlapped part), idle; the collectives of training; the most bytes
    that were allocated within the window and not yet freed.

    Raises:
        RunFailed: the trace cannot be read.
    """
    found = read_rank(path)
    if isinstance(found, Unreadable):
        raise RunFailed(f"{path}: {found.message}")
    n, total = max(len(found.steps), 1), found.total
    training = [c for c in found.collectives if c.phase != UNPHASED]
    return {
        "step_s": total.span_s / n,
        "compute_s": total.compute_s / n,
        "comm_s": total.comm_s / n,
        "overlapped_comm_s": total.overlapped_comm_s / n,
        "exposed_comm_s": total.exposed_comm_s / n,
        "idle_s": total.idle_s / n,
        "collectives": [(c.kind, c.bytes or 0, c.duration / 1e6) for c in training],
        "peak_new_bytes": found.memory["cpu"][0] if "cpu" in found.memory else 0,
    }
