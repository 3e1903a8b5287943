"""Parameters laid end to end in one tensor, so that every rank can own an equal part of them, to the byte.

Parts of whole parameters would differ in size (by 1.3 with one large embedding); parts of the flat tensor differ by
less than W elements of padding, and one collective serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange
from allranks.train.strategies.gradients import all_gather

Named = tuple[str, nn.Parameter]


class Flat:
    """Some parameters of one dtype and device. ``whole`` (W n elements) holds their weights, and they are views of it;
    this rank owns ``whole[low:high]`` (n elements)."""

    def __init__(self, named: Sequence[Named], group: dist.ProcessGroup) -> None:
        # the optimizer decays matrices only: they come first, so that a part has at most one border between the two
        self.named = sorted(named, key=lambda item: item[1].ndim < 2)
        self.group, world = group, dist.get_world_size(group)
        sizes = [p.numel() for _, p in self.named]
        self.numel = sum(sizes)
        self.part = -(-self.numel // world)
        self.low = dist.get_rank(group) * self.part
        self.high = self.low + self.part
        self._matrices = sum(p.numel() for _, p in self.named if p.ndim >= 2)
        self.spans = [(stop - n, stop) for n, stop in zip(sizes, _running(sizes), strict=True)]
        first = self.named[0][1]
        self.trained = first.requires_grad
        self.whole = torch.zeros(self.part * world, dtype=first.dtype, device=first.device)
        for (_, p), (start, stop) in zip(self.named, self.spans, strict=True):
            self.whole[start:stop].copy_(p.data.flatten())
            p.data = self.whole[start:stop].view(p.shape)
        self.pieces: list[nn.Parameter] = []

    @property
    def bytes(self) -> int:
        """Of the whole, padding included."""
        return self.whole.numel() * self.whole.element_size()

    def own(self) -> torch.Tensor:
        """This rank's part of the weights, a view."""
        return self.whole[self.low : self.high]

    def cut(self, part: torch.Tensor) -> list[torch.Tensor]:
        """A part's matrices as (1, k) and the rest as (n-k,): what the optimizer sees keeps the number of dimensions
        by which it decides on weight decay."""
        border = min(max(self._matrices - self.low, 0), self.part)
        return [p for p in (part[:border].view(1, -1), part[border:]) if p.numel()]

    def make_pieces(self, part: torch.Tensor, *, on_host: bool = False) -> list[nn.Parameter]:
        """The parameters of this rank's optimizer: views of `part`, or copies of it in the host's memory."""
        self._own = part
        self._on_host = on_host
        self.pieces = [nn.Parameter(p.to("cpu", copy=True) if on_host else p) for p in self.cut(part)]
        return self.pieces

    def give_gradient(self, part: torch.Tensor) -> None:
        """`part` is this rank's share of the gradient. Pieces on the host get the weights as they are now, too."""
        for piece, gradient, own in zip(self.pieces, self.cut(part), self.cut(self._own), strict=True):
            piece.grad = gradient.to(piece.device)
            if self._on_host:
                piece.data.copy_(own)

    def take_update(self) -> None:
        """Weights that were updated on the host, back to the device."""
        if self._on_host:
            for piece, own in zip(self.pieces, self.cut(self._own), strict=True):
                own.copy_(piece.data)

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """A whole flat tensor by parameters."""
        return {
            name: whole[start:stop].view(p.shape)
            for (name, p), (start, stop) in zip(self.named, self.spans, strict=True)
        }

    def join(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The opposite: this rank's part of tensors by name, on the flat's device."""
        whole = torch.zeros(self.whole.numel(), dtype=tensors[self.named[0][0]].dtype)
        for (name, _), (start, stop) in zip(self.named, self.spans, strict=True):
            whole[start:stop] = tensors[name].flatten()
        return whole[self.low : self.high].to(self.whole.device)


def _running(sizes: Sequence[int]) -> list[int]:
    total, out = 0, []
    for n in sizes:
        total += n
        out.append(total)
    return out


def flats_of(groups: Sequence[Sequence[Named]], group: dist.ProcessGroup) -> list[Flat]:
    """Flats of parameters that belong together, several where dtypes, devices or being trained differ."""
    flats = []
    for named in groups:
        kinds: dict[Any, list[Named]] = {}
        for name, p in named:
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append((name, p))
        flats += [Flat(part, group) for part in kinds.values()]
    return flats


def all_pieces(flats: Sequence[Flat]) -> list[Named]:
    """What this rank's optimizer updates."""
    return [(f"flat{i}.{k}", piece) for i, flat in enumerate(flats) for k, piece in enumerate(flat.pieces)]


def gathered_states(flats: Sequence[Flat], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The sharded optimizer's state by parameter names, whole, on the CPU of rank 0; ``{}`` elsewhere, where it would be
    memory for nothing. Every rank calls."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for flat in flats:
        first = dist.get_rank(flat.group) == 0
        states = [optimizer.state.get(piece, {}) for piece in flat.pieces]
        if not all(states):
            continue
        for key, value in states[0].items():
            if value.ndim == 0:
                values = {name: value.cpu().clone() for name, _ in flat.named}
            else:
                own = torch.cat([state[key].flatten() for state in states]).to(flat.whole.device)
                whole = own.new_empty(flat.whole.numel())
                all_gather(whole, own, flat.group).wait()
                if not first:
                    continue
                values = {name: t.cpu().clone() for name, t in flat.split(whole).items()}
            for name, t in values.items() if first else ():
                out.setdefault(name, {})[key] = t
    return out


def scatter_states(flats: Sequence[Flat], optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
    """Take this rank's part of whole states by name."""
    for flat in flats:
        known = [name for name, _ in flat.named if name in states]
        if not known:
            continue
        for key, value in states[known[0]].items():
            if value.ndim == 0:
                parts = [value.to(piece.device, copy=True) for piece in flat.pieces]
            else:
                # a parameter that was never updated has no state; zeros are what it would begin with
                tensors = {n: states[n][key] if n in states else torch.zeros_like(p.data) for n, p in flat.named}
                parts = flat.cut(flat.join(tensors))
            for piece, part in zip(flat.pieces, parts, strict=True):
                optimizer.state.setdefault(piece, {})[key] = part.to(piece.device)


def flat_weights(flats: Sequence[Flat], parts: Sequence[torch.Tensor]) -> list[Shard]:
    """This rank's ranges of the weights, by parameter: `parts` are its parts of the flats."""
    out = []
    for flat, part in zip(flats, parts, strict=True):
        for name, numel, offset, start, length in _ranges(flat):
            out.append(Shard(f"model/{name}", numel, offset, part[start : start + length]))
    return out


def flat_states(flats: Sequence[Flat], optimizer: torch.optim.Optimizer) -> list[StateRange]:
    """Where the state of each parameter lies in this rank's pieces."""
    out = []
    for flat in flats:
        begin = 0
        for piece in flat.pieces:
            end = begin + piece.numel()
            for name, numel, offset, start, length in _ranges(flat):
                low, high = max(start, begin), min(start + length, end)
                if low < high:
                    out.append(StateRange(optimizer, piece, low - begin, high - low, name, numel, offset + low - start))
            if not out or out[-1].parameter is not piece:  # padding alone: its state holds nothing, but must be there
                name, p = flat.named[-1]
                out.append(StateRange(optimizer, piece, 0, 0, name, p.shape.numel(), p.shape.numel()))
            begin = end
    return out


def _ranges(flat: Flat) -> list[tuple[str, int, int, int, int]]:
    """(name, its elements, where in it this rank's range begins, where that lies in the part, length)."""
    out = []
    for (name, _), (start, stop) in zip(flat.named, flat.spans, strict=True):
        low, high = max(start, flat.low), min(stop, flat.high)
        if low < high:
            out.append((name, stop - start, low - start, low - flat.low, high - low))
    return out
