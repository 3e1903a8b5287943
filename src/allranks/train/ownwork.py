"""What a rank does in a step before it has to wait for anybody: its data, forward passes, and backward passes.

A backward pass ends for the rank itself when the gradient of the weight that the model uses first is there; what follows is
waiting for the others' gradients, and torch's DDP waits outside of Python. Waiting within Python is taken out by `waits`.
On a GPU the passes are timed by events that nobody waits for: they are read one step later, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from allranks.train.waits import waited_s

Own = dict[str, float]
OWN = "own_s"  # data and forward passes
OWN_BACKWARD = "own_backward_s"


class OwnWork(Protocol):
    """Is told when parts of a step end."""

    def begin(self) -> None:
        """A step begins."""
        ...

    def lap(self, part: str) -> None:
        """``data``, ``forward``, ``backward`` or another part is over."""
        ...

    def backward_over(self) -> None:
        """The first weight's gradient is there."""
        ...

    def end_step(self) -> Own:
        """Seconds of the rank's own work; a kind that cannot be told is left out."""
        ...


def follow_backward(module: nn.Module, over: Callable[[], None]) -> None:
    """Have `over` called near the end of each backward pass; never where all that is trained is kept in parts (FSDP2)."""
    for p in module.parameters():
        if p.requires_grad and not isinstance(p, DTensor):
            p.register_post_accumulate_grad_hook(lambda _: over())
            return


class HostWork:
    """On a CPU."""

    def __init__(self) -> None:
        self._own: Own = {}
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
            self._told = False  # it may hold any amount of waiting
        self._mark, self._waited = now

    def _add(self, kind: str, until: tuple[float, float]) -> None:
        spent = until[0] - self._mark - (until[1] - self._waited)
        self._own[kind] = self._own.get(kind, 0.0) + spent

    def end_step(self) -> Own:
        return {k: v for k, v in self._own.items() if k != OWN_BACKWARD or self._told}


class DeviceWork:
    """On a GPU: data by the host's clock, passes by the device's. Waiting within a forward pass counts there: strategies that
    gather within it show no straggler, and their backward passes are not told at all."""

    def __init__(self) -> None:
        self._mark = self._data = 0.0
        self._open: torch.cuda.Event | None = None
        self._over: torch.cuda.Event | None = None
        self._now: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._before: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._mark, self._data = time.perf_counter(), 0.0

    def backward_over(self) -> None:
        self._over = _event()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        if part == "data":
            self._data += now - self._mark
            self._open = _event()
        elif part == "forward" and self._open is not None:
            end = _event()
            self._now.append((OWN, self._open, end))
            self._open, self._over = end, None
        elif part == "backward":
            if self._open is not None and self._over is not None:
                self._now.append((OWN_BACKWARD, self._open, self._over))
            self._open = self._over = None
        self._mark = now

    def end_step(self) -> Own:
        before, self._before, self._now = self._before, self._now, []
        if not before or not all(end.query() for _, _, end in before):
            return {}
        own: Own = {OWN: self._data}
        for kind, begin, end in before:
            own[kind] = own.get(kind, 0.0) + begin.elapsed_time(end) / 1000
        return own


def _event() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
