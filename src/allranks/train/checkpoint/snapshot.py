"""Take a snapshot of what a rank must save: find the parts in memory, and copy them to the host while training goes on.

For a save in the background, the state is copied in another thread; the next update of the optimizer waits for the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from allranks.train.checkpoint.writer import MODEL, PublishedFiles, RankParts, bytes_in, bytes_of, weight_name
from allranks.train.strategies.base import Strategy
from allranks.train.strategies.shards import StateRange, TensorShard, share_to_write, state_shards


@dataclass(frozen=True)
class _KeptViews:
    """Views that are valid for the next checkpoint, too.

    Attributes:
        parts: without the states of the random generators.
        owned_buffers, state_buffers: which of them belong to buffers.
        addresses: of the tensors that the views belong to.
    """

    parts: RankParts
    owned_buffers: tuple[str, ...]
    state_buffers: tuple[int, ...]
    addresses: list[int]


class PartCollector:
    """Find what this rank must write.

    Making some hundred views takes milliseconds, so they are kept for the next checkpoint. They are made anew if one of the tensors
    has moved in memory. (A kept view holds its memory, so that no other tensor can have its address.)
    """

    def __init__(self, strategy: Strategy, published: PublishedFiles, rank: int, world: int) -> None:
        self._strategy, self._published, self._rank, self._world = strategy, published, rank, world
        self._kept: dict[bool, _KeptViews] = {}
        self._ranges: list[StateRange] = []
        self._buffers: list[dict[str, torch.Tensor | None]] = []

    def collect(self, random: dict[str, Any] | None, *, copy_buffers: bool = False) -> RankParts:
        """Return views of what this rank must write. Not collective.

        Args:
            random: states of the random generators; given in mode full.
            copy_buffers: return copies of buffers, which a forward pass may change.
        """
        views = self._views(random is not None)
        owned, state = views.parts.owned, views.parts.state
        if copy_buffers:
            owned = {**owned, **{name: owned[name].clone() for name in views.owned_buffers}}
            copied = {i: replace(state[i], tensor=state[i].tensor.clone()) for i in views.state_buffers}
            state = tuple(copied.get(i, shard) for i, shard in enumerate(state)) if copied else state
        return RankParts(owned, views.parts.scattered, state, random)

    def optimizers(self) -> set[torch.optim.Optimizer]:
        """Return the optimizers whose updates change what was collected.

        A rank without optimizer state has one, too: its weights change when it receives those of other ranks.
        """
        return {self._strategy.updating_optimizer, *(r.optimizer for r in self._ranges)}

    def _views(self, full: bool) -> _KeptViews:
        # outdated views of the other mode go, too: they would hold memory that nothing else needs
        self._kept = {mode: kept for mode, kept in self._kept.items() if kept.addresses == self._addresses(mode)}
        if full in self._kept:
            return self._kept[full]
        self._ranges = self._strategy.state_ranges()
        self._buffers = [module._buffers for module in self._strategy.module.modules()]
        parts = self._make_views(full)
        places = {_place(buffer) for buffer in self._current_buffers()}
        tensors = self._tensors(full)
        made = _KeptViews(
            parts,
            tuple(name for name, tensor in parts.owned.items() if _place(tensor) in places),
            tuple(i for i, s in enumerate(parts.state) if s.key.startswith(MODEL) and _place(s.tensor) in places),
            self._addresses(full),
        )
        every = (*parts.owned.values(), *(s.tensor for s in (*parts.scattered, *parts.state)))
        if tensors is not None and {_place(t) for t in every if t.numel()} <= {_place(t) for t in tensors}:
            self._kept[full] = made  # not if something is a copy, which the next update does not change
        return made

    def _current_buffers(self) -> list[torch.Tensor]:
        return [buffer for own in self._buffers for buffer in own.values() if buffer is not None]

    def _addresses(self, full: bool) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors(full) or ()]

    def _tensors(self, full: bool) -> list[torch.Tensor] | None:
        """Return the tensors that views belong to; None if the strategy does not tell, or if a value of the state is not a tensor."""
        weights = self._strategy.weight_tensors()
        if weights is None:
            return None
        found = [*weights, *self._current_buffers()]
        for r in self._ranges if full else ():
            found.append(r.parameter)
            for value in r.optimizer.state.get(r.parameter, {}).values():
                if not isinstance(value, torch.Tensor):
                    return None
                found.append(value)
        return found

    def _make_views(self, full: bool) -> RankParts:
        owners = self._published.owners(self._world)
        owned, scattered, state = {}, [], []
        for shard in self._strategy.weight_shards():
            name = weight_name(shard.key)
            if name in owners:
                if not shard.everywhere:
                    own = share_to_write(shard, self._rank, self._world)
                    scattered.append(TensorShard(MODEL + name, own.numel, own.offset, own.tensor))
                elif owners[name] == self._rank:
                    owned[name] = shard.tensor
            if full and name not in self._published.keys:
                state.append(shard)
        if full:
            state += state_shards(self._ranges)
        everywhere = sum(bytes_in(s.tensor) for s in state if s.everywhere)
        ends = ends_of_shares(self._published, self._world, everywhere)
        mine = (share_to_write(shard, self._rank, self._world, ends) for shard in state)
        return RankParts(owned, tuple(scattered), tuple(s for s in mine if s.tensor.numel()), None)


def _place(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def ends_of_shares(published: PublishedFiles, world: int, state_bytes: int) -> list[int] | None:
    """Return for `share_to_write` how the state that every rank holds is divided so that all ranks write the same number of bytes.

    A rank that writes published files writes less of the state.

    Args:
        state_bytes: bytes of the state that every rank holds.
    """
    load = [0] * world
    for i, names in enumerate(published.files):
        load[i % world] += sum(bytes_of(*published.whole[name]) for name in names)
    target = -(-(sum(load) + state_bytes) // world)
    ends, end = [], 0
    for own in load:
        end += max(target - own, 0)
        ends.append(end)
    return ends if end else None


def on_cpu(parts: RankParts) -> RankParts:
    """Return the parts themselves if they are on the CPU, else copies."""
    shards = (*parts.scattered, *parts.state)
    if not any(tensor.is_cuda for tensor in (*parts.owned.values(), *(s.tensor for s in shards))):
        return parts
    return RankParts(
        {n: t.detach().cpu() for n, t in parts.owned.items()},
        tuple(TensorShard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.scattered),
        tuple(TensorShard(s.key, s.numel, s.offset, s.tensor.detach().cpu()) for s in parts.state),
        parts.random,
    )


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
