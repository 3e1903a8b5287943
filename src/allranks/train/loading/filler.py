"""Gives weights that one rank reads to all: whole, or to each its part.

One rank of the world has the `Source`. For every tensor it first says whether it could be had, so that all ranks fail
together, with the reason; then the tensor travels, and is let go. What a rank keeps is summed (`checksums`), and in the end
the parts of all ranks must sum to what was read.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from allranks import errors
from allranks.errors import AllranksError, EnvironmentNotAble, ProofFailed
from allranks.train.checksums import MODULUS, Sums, add, checksums
from allranks.train.data.tokenizer import first_line
from allranks.train.loading.skeleton import is_hollow, origin_of, to_meta
from allranks.train.loading.source import Source
from allranks.train.world import World

READER = 0
BUSY_S = 5.0  # how often the reader tells the others that it is still at work: far below any timeout of collectives


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What loading did on this rank. ``how``: whole, parts or mapped."""

    how: str
    tensors: int
    read_bytes: int
    kept_bytes: int
    seconds: float


class Filler:
    """The loading of one model. Every rank makes one and calls the same methods in the same order."""

    def __init__(self, world: World, source: Source | None, *, mapped: bool = False) -> None:
        """`source` is None on ranks that do not read; with `mapped` every rank has one of its own, of equal files."""
        self._world, self._source, self._mapped = world, source, mapped
        self._origins: dict[str, str] = {}
        self._read: dict[str, Sums] = {}
        self._kept: dict[str, Sums] = {}
        self._layout: list[tuple[str, str, Sums | None]] = []
        self._parts = False
        self._started = time.perf_counter()
        self._kept_bytes = 0

    @property
    def device(self) -> torch.device:
        """Where weights are put."""
        return self._world.device

    def begin(self, module: nn.Module, model: nn.Module) -> None:
        """Find what waits for weights in `module`, whose inner `model` is what digests and checkpoints name."""
        named = dict(module.named_parameters())
        self._origins = {n: o for n, p in named.items() if (o := origin_of(p)) is not None}
        names = {id(p): n for n, p in named.items()}
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            facts = f"{name} {tuple(tensor.shape)} {tensor.dtype} "
            waiting = names.get(id(tensor), "")
            self._layout.append((facts, waiting, None if waiting in self._origins else checksums(tensor)))

    def whole(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give these parameters their weights, on every rank. Hollow ones get memory, others are filled in place."""
        for name, parameter in named:
            origin = self._origins.get(name)
            if origin is not None and name not in self._read:
                self._give_whole(name, origin, parameter)

    def _give_whole(self, name: str, origin: str, parameter: nn.Parameter) -> None:
        shared = self._source.mapped(origin) if self._mapped and self._source and is_hollow(parameter) else None
        if shared is not None:
            parameter.data = shared
            self._read[name] = (0, 0, 0)
            return
        tensor = self._turn(name, origin)
        if is_hollow(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
        if tensor is not None:
            parameter.data.copy_(tensor)
        self._send(parameter.data)
        self._kept_bytes += parameter.numel() * parameter.element_size()

    def _send(self, tensor: torch.Tensor) -> None:
        if self._world.size > 1:
            dist.broadcast(tensor, src=READER, group=self._world.group)

    def prepare_parts(self, module: nn.Module) -> None:
        """Before `fully_shard`: hollow parameters lose even their shape's first element."""
        to_meta(module)

    def parts(self, module: nn.Module) -> None:
        """After `fully_shard`: give each rank its rows of every parameter that waits."""
        module._apply(lambda t: torch.empty_like(t, device=self.device) if t.is_meta else t)
        for name, parameter in module.named_parameters():
            origin = self._origins.get(name)
            if origin is None or name in self._read:
                continue
            if isinstance(parameter.data, DTensor):
                self._give_rows(name, origin, cast(DTensor, parameter.data))
            else:
                self._give_whole(name, origin, parameter)

    def _give_rows(self, name: str, origin: str, parameter: DTensor) -> None:
        world, rank = self._world.size, self._world.rank
        shape, local = parameter.shape, parameter.to_local()
        rows = -(-shape[0] // world)
        tensor = self._turn(name, origin)
        chunks = None if tensor is None else [self._rows(tensor, r * rows, rows) for r in range(world)]
        own = local.new_empty((rows, *shape[1:]))
        dist.scatter(own, chunks, src=READER, group=self._world.group)
        local.copy_(own[: local.shape[0]])
        self.kept(name, local, min(rank * rows, shape[0]) * shape[1:].numel())

    def _rows(self, tensor: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        part = tensor[first : first + rows]
        if part.shape[0] < rows:
            part = torch.cat([part, part.new_zeros((rows - part.shape[0], *part.shape[1:]))])
        return part.contiguous().to(self.device)

    def kept(self, name: str, part: torch.Tensor, start: int) -> None:
        """This rank keeps `part` of parameter `name`, from element `start` on of it flattened."""
        self._parts = True
        if name in self._origins:
            self._kept[name] = add(self._kept.get(name, (0, 0, 0)), checksums(part, start))
            self._kept_bytes += part.numel() * part.element_size()

    def kept_spans(
        self, named: Sequence[tuple[str, Any]], spans: Sequence[tuple[int, int]], part: torch.Tensor, low: int
    ) -> None:
        """The same for a flat tensor of several parameters at `spans`, of which this rank keeps `part`, from `low` on."""
        high = low + part.numel()
        for (name, _), (start, stop) in zip(named, spans, strict=True):
            first, last = max(start, low), min(stop, high)
            if first < last:
                self.kept(name, part[first - low : last - low], first - start)
        self._parts = True

    def _turn(self, name: str, origin: str) -> torch.Tensor | None:
        """The reader's tensor; None on the others. All fail where the reader cannot have it."""
        tensor, error = None, None
        if self._world.rank == READER:
            try:
                assert self._source is not None
                tensor = self._source.take(origin)
            except AllranksError as own:
                error = own
            except (OSError, RuntimeError, KeyError, MemoryError) as other:
                error = EnvironmentNotAble(f"{origin} cannot be had: {first_line(other)}")
        _agree(self._world, error)
        self._read[name] = (0, 0, 0) if tensor is None else checksums(tensor)
        return tensor

    def finish(self) -> tuple[bytes | None, Loaded]:
        """Show that all has arrived.

        Returns:
            Where ranks hold parts, the digest of the whole weights (`proof.weights_digest` of a whole copy); and what was done.

        Raises:
            ProofFailed: the parts of all ranks are not what was read; names the parameter.
        """
        lost = [n for n in self._origins if n not in self._read]
        if lost:
            raise ProofFailed(f"loading: {lost[0]} got no weights, nor did {len(lost) - 1} more")
        digest = self._compare() if self._parts else None
        how = "parts" if self._parts else "mapped" if self._mapped else "whole"
        return digest, Loaded(
            how=how,
            tensors=len(self._origins),
            read_bytes=self._source.read_bytes if self._source else 0,
            kept_bytes=self._kept_bytes,
            seconds=round(time.perf_counter() - self._started, 3),
        )

    def _compare(self) -> bytes:
        names = sorted(self._origins)
        mine = torch.tensor([self._kept.get(n, (0, 0, 0)) for n in names], dtype=torch.int64).view(-1, 3)
        read = torch.tensor([self._read[n] for n in names], dtype=torch.int64).view(-1, 3)
        if self._world.size > 1:
            dist.all_reduce(mine, group=self._world.control)
            dist.broadcast(read, src=READER, group=self._world.control)
        mine[:, 1:] %= MODULUS
        wrong = [n for n, a, b in zip(names, mine.tolist(), read.tolist(), strict=True) if a != b]
        if wrong:
            raise ProofFailed(
                f"loading: {wrong[0]}{f' and {len(wrong) - 1} more tensors' if len(wrong) > 1 else ''}: what the ranks hold "
                "together is not what rank 0 read"
            )
        sums = dict(zip(names, (tuple(s) for s in read.tolist()), strict=True))
        digest = hashlib.sha256()
        for facts, waiting, own in self._layout:
            digest.update(f"{facts}{own if own is not None else sums[waiting]}".encode())
        return digest.digest()


def reader_does(world: World, action: Callable[[], Any]) -> Any:
    """Let the reader do something that may take long, such as fetching files; all ranks get its (small) result.

    Raises:
        AllranksError: on every rank, what the reader raised.
    """
    if world.size == 1:
        return action()
    if world.rank != READER:
        while not int(_word(world, 0)):
            pass
        return _agree(world, None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        while not wait([future], BUSY_S).done:
            _word(world, 0)
        _word(world, 1)
    problem = future.exception()
    if problem is not None and not isinstance(problem, AllranksError):
        _agree(world, EnvironmentNotAble(f"{type(problem).__name__}: {first_line(problem)}"))
    return _agree(world, problem if isinstance(problem, AllranksError) else None, None if problem else future.result())


def _word(world: World, value: int) -> torch.Tensor:
    word = torch.tensor(value)
    dist.broadcast(word, src=READER, group=world.control)
    return word


def _agree(world: World, error: AllranksError | None, result: Any = None) -> Any:
    """The reader's result on all ranks; or its error, raised on all."""
    if world.size == 1:
        if error is not None:
            raise error
        return result
    told = int(_word(world, 2 if error is not None else 0 if result is None else 1))
    if not told:
        return None
    box: list[Any] = [(type(error).__name__, str(error)) if error is not None else result]
    dist.broadcast_object_list(box, src=READER, group=world.control)
    if told == 1:
        return box[0]
    if error is not None:
        raise error
    kind, text = box[0]
    raise getattr(errors, kind, EnvironmentNotAble)(text)
