"""Copy each rank's state to host memory for a save in the background, while training goes on until its next update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from allranks.train.checkpoint.writer import MODEL, RankParts
from allranks.train.strategies.shards import TensorShard


@dataclass
class CpuCopies:
    """CPU memory for one checkpoint's parts, reused by the next: there is never more than one copy."""

    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, parts: RankParts) -> RankParts:
        """Return copies of the parts. On CUDA all copies run asynchronously on the current stream, with one synchronisation."""
        used: dict[str, torch.Tensor] = {}
        sources: list[torch.Tensor] = []

        def place_for(place: str, tensor: torch.Tensor) -> torch.Tensor:
            old = self._kept.get(place)
            if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
                old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            used[place] = old
            sources.append(tensor.detach())
            return old

        def shards(kind: str, given: Iterable[TensorShard]) -> tuple[TensorShard, ...]:
            return tuple(
                TensorShard(s.key, s.numel, s.offset, place_for(f"{kind}{s.key}@{s.offset}", s.tensor)) for s in given
            )

        out = RankParts(
            {n: place_for(f"owned {n}", t) for n, t in parts.owned.items()},
            shards("scattered ", parts.scattered),
            shards("state ", parts.state),
            parts.random,
        )
        _copy_all(list(used.values()), sources)
        self._kept = used
        return out


def _copy_all(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    on_host = [(p, s) for p, s in zip(places, sources, strict=True) if not s.is_cuda]
    if on_host:  # one call, which leaves the interpreter's lock to training
        torch._foreach_copy_([p for p, _ in on_host], [s for _, s in on_host])
    on_device = [(p, s) for p, s in zip(places, sources, strict=True) if s.is_cuda]
    for place, source in on_device:
        place.copy_(source, non_blocking=True)
    if on_device:
        torch.cuda.current_stream(on_device[0][1].device).synchronize()


def with_buffers_copied(parts: RankParts, module: nn.Module) -> RankParts:
    """Return the parts with copies of the module's buffers, which a forward pass may change."""
    buffers = {buffer.untyped_storage().data_ptr() for buffer in module.buffers()}

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in buffers else tensor

    def shards(given: Iterable[TensorShard]) -> tuple[TensorShard, ...]:
        return tuple(replace(s, tensor=kept(s.tensor)) if s.key.startswith(MODEL) else s for s in given)

    owned = {name: kept(tensor) for name, tensor in parts.owned.items()}
    return RankParts(owned, shards(parts.scattered), shards(parts.state), parts.random)


class UpdateGuard:
    """Hold back the updates of optimizers while their state is copied in another thread.

    Attributes:
        waited_s: how long the updates were held back for the current copy.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._copied = threading.Event()
        self._copied.set()
        self._guarded: list[torch.optim.Optimizer] = []

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Hold back updates of these optimizers from now on."""
        self.waited_s = 0.0
        self._copied.clear()
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._guarded):
                optimizer.register_step_pre_hook(self._before_update)
                self._guarded.append(optimizer)

    def end(self) -> None:
        """Allow updates again. Safe to call twice."""
        self._copied.set()

    def _before_update(self, *_: Any) -> None:
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self.waited_s += time.perf_counter() - began


def on_own_stream(device: torch.device, copy: Callable[[], RankParts]) -> Callable[[], RankParts]:
    """Return `copy` for another thread: on CUDA it runs on a stream of its own, after the work that was submitted until now."""
    if device.type != "cuda":
        return copy
    submitted = torch.cuda.Event()
    submitted.record(torch.cuda.current_stream(device))

    def run() -> RankParts:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(submitted)
            return copy()

    return run
