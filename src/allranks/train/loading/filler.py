"""Gives weights that one rank reads to all: whole, or to each its part.

For every tensor the reader first says whether it could be had, so that all ranks fail together, with the reason; then the
tensor travels, and is let go. So the reader's host holds one tensor at a time, and a device what its rank keeps and one
tensor more.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from allranks.errors import AllranksError, EnvironmentNotAble, ProofFailed
from allranks.train.checksums import checksums
from allranks.train.data.tokenizer import first_line
from allranks.train.loading.reader import READER, agree
from allranks.train.loading.skeleton import is_hollow, mark_filled, origin_of, to_meta
from allranks.train.loading.source import Source
from allranks.train.loading.tally import Tally
from allranks.train.world import World


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What loading did on this rank. ``how``: whole or parts; bytes are of weights that came from the source."""

    how: str
    tensors: int
    read_bytes: int
    kept_bytes: int
    seconds: float


class Filler:
    """The loading of one model. Every rank makes one and calls the same methods in the same order."""

    def __init__(self, world: World, source: Source | None) -> None:
        """`source` is None on ranks that do not read."""
        self._world, self._source = world, source
        self._origins: dict[str, str] = {}
        self._done: set[str] = set()
        self._tally: Tally | None = None
        self._layout: list[tuple[str, str, Any]] = []
        self._started = time.perf_counter()
        self._kept_bytes = 0

    def begin(self, module: nn.Module, model: nn.Module, *, in_parts: bool) -> None:
        """Find what waits for weights in `module`, whose inner `model` is what digests and checkpoints name.

        Args:
            in_parts: no rank will hold all of it: what arrives is summed as it comes.
        """
        named = dict(module.named_parameters())
        self._origins = {n: o for n, p in named.items() if (o := origin_of(p)) is not None}
        if not in_parts:
            return
        self._tally = Tally()
        names = {id(p): n for n, p in named.items()}
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            place = names.get(id(tensor), "")
            own = None if place in self._origins else checksums(tensor)
            self._layout.append((f"{name} {tuple(tensor.shape)} {tensor.dtype} ", place, own))

    def whole(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give every rank these parameters whole, to keep. Those without memory get it."""
        for name, parameter in named:
            if self._give_whole(name, parameter):
                self._keep(name, parameter.data, copies=self._world.size)

    def flat(
        self, named: Sequence[tuple[str, nn.Parameter]], spans: Sequence[tuple[int, int]], low: int, high: int
    ) -> None:
        """Give every rank these parameters whole, of which it keeps what lies in ``[low, high)`` when they are laid end to
        end at `spans`."""
        for (name, parameter), (start, stop) in zip(named, spans, strict=True):
            if self._give_whole(name, parameter):
                first = min(max(low, start), stop)
                part = parameter.data.flatten()[first - start : max(min(high, stop), first) - start]
                self._keep(name, part, first - start)

    def prepare_parts(self, module: nn.Module) -> None:
        """Before `fully_shard`, which takes parameters without content only from the ``meta`` device."""
        to_meta(module)

    def parts(self, module: nn.Module, device: torch.device) -> None:
        """After `fully_shard`: give each rank its rows, on `device`, of every parameter that still waits."""
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        for name, parameter in module.named_parameters():
            if isinstance(parameter.data, DTensor):
                self._give_rows(name, parameter.data)
            else:
                self.whole([(name, parameter)])

    def finish(self) -> tuple[bytes | None, Loaded]:
        """Show that all has arrived.

        Returns:
            Where ranks hold parts, the digest of the whole weights (`proof.weights_digest` of a whole copy); and what was done.

        Raises:
            ProofFailed: a parameter got nothing, or the parts of all ranks are not what was read; names the parameter.
        """
        lost = [n for n in self._origins if n not in self._done]
        if lost:
            raise ProofFailed(f"loading: {lost[0]} got no weights, nor did {len(lost) - 1} more")
        return self._digest(), Loaded(
            how="parts" if self._tally else "whole",
            tensors=len(self._origins),
            read_bytes=self._source.read_bytes if self._source else 0,
            kept_bytes=self._kept_bytes,
            seconds=round(time.perf_counter() - self._started, 3),
        )

    def waits(self, name: str) -> bool:
        """True until this parameter has got its weights."""
        return name in self._origins and name not in self._done

    def _give_whole(self, name: str, parameter: nn.Parameter) -> bool:
        """True if it had been waiting."""
        if not self.waits(name):
            return False
        tensor = self._turn(name)
        if is_hollow(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._world.device)
        if tensor is not None:
            parameter.data.copy_(tensor)
            self._send(name, parameter.data)
        if self._world.size > 1:
            dist.broadcast(parameter.data, src=READER, group=self._world.group)
        mark_filled(parameter)
        return True

    def _give_rows(self, name: str, parameter: DTensor) -> None:
        if not self.waits(name):
            return
        assert parameter.placements == (Shard(0),), f"{name}: {parameter.placements}"
        world, shape, local = self._world, parameter.shape, parameter.to_local()
        rows = -(-shape[0] // world.size)  # as `torch.chunk` cuts: the last parts may be short, or empty
        tensor = self._turn(name)
        chunks = None if tensor is None else [self._rows(name, tensor, r * rows, rows) for r in range(world.size)]
        own = torch.empty((rows, *shape[1:]), dtype=parameter.dtype, device=world.device)
        dist.scatter(own, chunks, src=READER, group=world.group)
        local.copy_(own[: local.shape[0]])
        self._keep(name, local, min(world.rank * rows, shape[0]) * shape[1:].numel())

    def _rows(self, name: str, tensor: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """On the device, filled up to `rows`."""
        part = tensor[first : first + rows].to(self._world.device).contiguous()
        self._send(name, part, min(first, tensor.shape[0]) * tensor.shape[1:].numel())
        missing = rows - part.shape[0]
        return torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) if missing else part

    def _turn(self, name: str) -> torch.Tensor | None:
        """The reader's tensor; None on the others. All fail where the reader cannot have it."""
        tensor, problem, origin = None, None, self._origins[name]
        if self._world.rank == READER:
            try:
                assert self._source is not None
                tensor = self._source.take(origin)
            except AllranksError as own:
                problem = own
            except (OSError, RuntimeError, KeyError, MemoryError) as other:
                problem = EnvironmentNotAble(f"{origin} cannot be had: {first_line(other)}")
        agree(self._world, problem)
        self._done.add(name)
        if self._source and not any(o == origin and n not in self._done for n, o in self._origins.items()):
            self._source.forget(origin)
        return tensor

    def _send(self, name: str, part: torch.Tensor, start: int = 0) -> None:
        if self._tally:
            self._tally.send(name, part, start)

    def _keep(self, name: str, part: torch.Tensor, start: int = 0, copies: int = 1) -> None:
        self._kept_bytes += part.numel() * part.element_size()
        if self._tally:
            self._tally.keep(name, part, start, copies)

    def _digest(self) -> bytes | None:
        if self._tally is None:
            return None
        sums, digest = self._tally.compare(self._world), hashlib.sha256()
        for facts, place, own in self._layout:
            digest.update(f"{facts}{own if own is not None else sums[place]}".encode())
        return digest.digest()
