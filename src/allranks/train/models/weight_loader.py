"""Load weights into every rank, full or as shards; parameters stay unmaterialized until then.

An unmaterialized parameter has the right shape, dtype and device, but all its elements share one storage element, so it
needs no memory. (On the ``meta`` device, PEFT would discard the initial values of adapters, and a parameter could not
get storage in place.) Buffers that are in no file, such as rotary frequencies, are real.

A tensor arrives in one of two ways, with the same result:

- The ranks that keep it read it in pieces, if all ranks see the same files, and the tensor is stored as the model has
  it (`DirectReads`). Each rank reads its own part. What several nodes keep is not read so, because each of them would
  read the same bytes of the file system.
- The reader, rank 0, reads the tensor, sends each rank its part, and frees it. Before, it reports whether it could be
  read, so that all ranks fail together with the reason. The reader's host holds one tensor at a time, a device its
  shard and one tensor. Under HSDP the ranks of the first copy receive rows, and each sends its own to the other copies.

Checksums then show that the ranks together hold what was read.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from allranks import errors
from allranks.errors import AllranksError, EnvironmentNotAble, ProofFailed
from allranks.train.data.tokenization import first_line
from allranks.train.distributed import DistContext
from allranks.train.models.weight_sources import DirectReads, FileSource, ModelSource, crc_followed_by, xor_over_ranks
from allranks.train.sync_proof import MODULUS, TensorSums, add_checksums, checksums


def unmaterialized_parameter(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, origin: str, trained: bool
) -> nn.Parameter:
    """Return a parameter without storage that will receive the weights of `origin`; deep copies behave alike."""
    parameter = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(shape), requires_grad=trained)
    parameter.origin = origin  # type: ignore[attr-defined]
    parameter.__deepcopy__ = partial(_copy, parameter)  # type: ignore[attr-defined] - else a copy allocates it
    return parameter


def _copy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    made = unmaterialized_parameter(
        parameter.shape, parameter.dtype, parameter.device, origin_of(parameter) or "", parameter.requires_grad
    )
    memo[id(parameter)] = made
    return made


def mark_materialized(parameter: nn.Parameter) -> None:
    """Mark a parameter as loaded; deep copies of it copy the weights."""
    for name in ("origin", "__deepcopy__"):
        vars(parameter).pop(name, None)


def origin_of(parameter: torch.Tensor) -> str | None:
    """Return the name, in the bare model, of the weights that a parameter needs, or None if it is loaded."""
    return getattr(parameter, "origin", None)


def is_unmaterialized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no storage of its own."""
    return tensor.is_meta or (tensor.numel() > 1 and not any(tensor.stride()))


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter | None]) -> None:
    """Replace each parameter with the result of `make`; None keeps it. Tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter | None] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = make(f"{path}.{name}" if path else name, parameter)
            new = made[parameter]
            if new is not None:
                module._parameters[name] = new


def unmaterialize(model: nn.Module, device: torch.device, dtypes: dict[str, torch.dtype] | None = None) -> None:
    """Free a model's weights; `dtypes` has the new dtype by name, if it changes."""
    known = dtypes or {}

    def make(name: str, p: nn.Parameter) -> nn.Parameter:
        return unmaterialized_parameter(p.shape, known.get(name, p.dtype), device, name, p.requires_grad)

    replace_parameters(model, make)


def to_meta(model: nn.Module) -> None:
    """Move unmaterialized parameters to the ``meta`` device, which `fully_shard` requires."""

    def make(name: str, p: nn.Parameter) -> nn.Parameter | None:
        if origin_of(p) is None or not is_unmaterialized(p):
            return None
        return nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)

    replace_parameters(model, make)


def from_meta(model: Any, given: Iterable[str], dtypes: dict[str, torch.dtype], device: torch.device) -> None:
    """Complete a transformers model that was built on the ``meta`` device.

    Parameters become unmaterialized. Buffers and weights that are in no file (a new classification head) are created on
    the CPU and initialized as transformers does.

    Args:
        given: names of parameters and buffers in the files; for a tied parameter, any of its names.
        dtypes: dtypes by name.
        device: device of the unmaterialized parameters.
    """
    waits = set(given)
    origins: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in waits:
            origins.setdefault(id(p), name)

    def make(name: str, p: nn.Parameter) -> nn.Parameter:
        dtype = dtypes.get(name, p.dtype)
        if id(p) not in origins:
            return nn.Parameter(torch.empty(p.shape, dtype=dtype), requires_grad=p.requires_grad)
        made = unmaterialized_parameter(p.shape, dtype, device, origins[id(p)], p.requires_grad)
        made._is_hf_initialized = True  # type: ignore[attr-defined] - transformers initializes all others
        return made

    replace_parameters(model, make)
    for path, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                full = f"{path}.{name}" if path else name
                module._buffers[name] = torch.zeros(buffer.shape, dtype=dtypes.get(full, buffer.dtype))
    model.initialize_weights()
    for parameter in model.parameters():
        if hasattr(parameter, "_is_hf_initialized"):
            del parameter._is_hf_initialized


READER = 0
BUSY_S = 5.0  # interval of the reader's signs of life: far below any timeout of collectives


def run_on_reader(world: DistContext, action: Callable[[], Any]) -> Any:
    """Run a long action, such as a download, on the reader only; all ranks get its (small) result.

    Raises:
        AllranksError: the reader's exception, on every rank.
    """
    if world.size == 1:
        return action()
    if world.rank != READER:
        while _reader_is_busy(world):
            pass
        return raise_on_all_ranks(world, None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        while not wait([future], BUSY_S).done:
            _reader_is_busy(world, busy=True)
        _reader_is_busy(world)
    problem = future.exception()
    return raise_on_all_ranks(world, problem, None if problem else future.result())


def _reader_is_busy(world: DistContext, *, busy: bool = False) -> bool:
    word = torch.tensor(int(busy))
    dist.broadcast(word, src=READER, group=world.control)
    return bool(word)


def raise_on_all_ranks(world: DistContext, problem: BaseException | None, result: Any = None) -> Any:
    """Return the reader's result on all ranks, or raise its exception there. Collective; only its arguments count."""
    if world.rank != READER:
        problem = None
    elif problem is not None and not isinstance(problem, AllranksError):
        kind = type(problem).__name__
        problem = EnvironmentNotAble(f"rank {READER}, which reads the model: {kind}: {first_line(problem)}")
    box: list[Any] = [(result, None if problem is None else (type(problem).__name__, str(problem)))]
    if world.size > 1:
        dist.broadcast_object_list(box, src=READER, group=world.control)
    result, failed = box[0]
    if problem is not None or failed:
        raise problem or getattr(errors, failed[0], EnvironmentNotAble)(failed[1])
    return result


NO_SUMS: TensorSums = (0, 0, 0)


class TransferChecksums:
    """Checksums by parameter: of what was read (the reader sent it, or this rank read it), and of what this rank keeps.

    Args:
        elements: number of elements of each full parameter.
    """

    def __init__(self, elements: dict[str, int]) -> None:
        self._elements = elements
        self._sent: dict[str, TensorSums] = {}
        self._kept: dict[str, TensorSums] = {}
        self._copies: dict[str, int] = {}

    def send(self, name: str, part: torch.Tensor, start: int = 0) -> None:
        """Add data read: elements of the flattened parameter from `start` on. All ranks together read it once."""
        self._sent[name] = add_checksums(self._sent.get(name, NO_SUMS), checksums(part, start))

    def keep(self, name: str, part: torch.Tensor, start: int = 0, copies: int = 1) -> None:
        """Add what this rank keeps; all ranks together keep the parameter `copies` times."""
        self._copies[name] = copies
        self._kept[name] = add_checksums(self._kept.get(name, NO_SUMS), checksums(part, start))

    def compare(self, world: DistContext, reader: str) -> dict[str, TensorSums]:
        """Compare the sums, and return those of each full parameter on every rank. Collective.

        Args:
            reader: who has read, for the message.

        Raises:
            ProofFailed: names a parameter that is not held as it was read, or of which a part was not read.
        """
        names = sorted(self._copies)
        both = [[*self._sent.get(n, NO_SUMS), *self._kept[n]] for n in names]
        total = torch.tensor(both, dtype=torch.int64).view(-1, 6)
        if world.size > 1:
            dist.all_reduce(total, group=world.control)
        loaded, wrong = {}, []
        for name, (count, plain, weighted, *kept) in zip(names, total.tolist(), strict=True):
            loaded[name] = count, plain % MODULUS, weighted % MODULUS
            due, copies = loaded[name], self._copies[name]
            expected = [due[0] * copies, due[1] * copies % MODULUS, due[2] * copies % MODULUS]
            if [kept[0], kept[1] % MODULUS, kept[2] % MODULUS] != expected or count != self._elements[name]:
                wrong.append(name)
        if wrong:
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            raise ProofFailed(
                f"loading: {wrong[0]}{more}: the weights held by the ranks differ from those that {reader} read"
            )
        return loaded


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What loading did on this rank. ``how``: whole or parts; ``read_bytes`` counts what this rank read in files."""

    how: str
    tensors: int
    read_bytes: int
    kept_bytes: int
    seconds: float
    digest: str = ""
    """SHA-256 over the frozen weights as they were read; "" without any, and on ranks other than 0."""
    readers: str = ""
    """Who read the files: ``every rank`` or ``rank 0``; "" without files."""
    why: str = ""
    """Why these ranks read, as a sentence without a full stop."""


class WeightLoader:
    """Load one model. Every rank creates a loader and calls the same methods in the same order."""

    def __init__(
        self,
        world: DistContext,
        source: FileSource | ModelSource | None,
        *,
        drawn: tuple[str, ...] = (),
        direct: DirectReads | None = None,
        why_not_direct: str = "",
        first_node: int = 1,
    ) -> None:
        """Initialize.

        Args:
            source: None on ranks other than 0.
            drawn: names of weights that no file holds.
            direct: the files, if all ranks see them.
            why_not_direct: why not all ranks see the files; empty if there are none.
            first_node: number of ranks on rank 0's node, which are the first ranks.
        """
        self._world, self.drawn = world, drawn
        self._source: Any = source
        self._direct, self._why_not_direct, self._first_node = direct, why_not_direct, first_node
        self._problem: AllranksError | None = None  # why this rank could not read
        self._sent_because: Counter[str] = Counter()  # tensors that rank 0 sends although all ranks see the files
        # frozen weights that ranks other than 0 read, too: dtype and shape by origin
        self._summed: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._crcs: Counter[str] = Counter()  # by origin, this rank's share of the CRC-32
        self._origins: dict[str, str] = {}
        self._frozen: set[str] = set()
        self._done: set[str] = set()
        self._read: dict[str, tuple[str, tuple[int, ...], int]] = {}  # dtype, shape and CRC-32 by origin, on the reader
        self._tally: TransferChecksums | None = None
        self._layout: list[tuple[str, str, Any]] = []
        self._started = time.perf_counter()
        self._kept_bytes = 0

    def wrap_source(self, wrap: Callable[[Any], Any]) -> None:
        """Take tensors from what `wrap` makes of the source, on the reader."""
        if self._source is not None:
            self._source = wrap(self._source)

    def begin(self, module: nn.Module, model: nn.Module, *, in_parts: bool) -> None:
        """Find unmaterialized parameters in `module`; digests and checkpoints use the names in the inner `model`.

        Args:
            in_parts: no rank will hold all weights; checksums are added up as weights arrive.
        """
        named = dict(module.named_parameters())
        self._origins = {n: o for n, p in named.items() if (o := origin_of(p)) is not None}
        self._frozen = {n for n, p in named.items() if not p.requires_grad}
        if not in_parts:
            return
        self._tally = TransferChecksums({n: named[n].numel() for n in self._origins})
        names = {id(p): n for n, p in named.items()}
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            place = names.get(id(tensor), "")
            own = None if place in self._origins else checksums(tensor)
            self._layout.append((f"{name} {tuple(tensor.shape)} {tensor.dtype} ", place, own))

    def whole(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Load these parameters in full on every rank, and allocate storage for them if needed."""
        for name, parameter in named:
            if not self.waits(name):
                continue
            if self._reads_directly(name, self._world.size):
                self._allocate(parameter)
                self._read_part(name, parameter.data, 0, parameter.shape, counts=self._world.rank == READER)
                mark_materialized(parameter)
            else:
                self._give_whole(name, parameter)
            self._keep(name, parameter.data, copies=self._world.size)

    def flat(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        spans: Sequence[tuple[int, int]],
        low: int,
        high: int,
        *,
        needs_whole: str = "",
    ) -> None:
        """Load the range ``[low, high)`` of the concatenation (`spans`) of these parameters.

        Args:
            needs_whole: why the parameters must arrive in full; empty if the rest may stay undefined.
        """
        for (name, parameter), (start, stop) in zip(named, spans, strict=True):
            if not self.waits(name):
                continue
            first = min(max(low, start), stop)
            own = slice(first - start, max(min(high, stop), first) - start)
            if self._reads_directly(name, 1, needs_whole):
                self._read_part(name, parameter.data.view(-1)[own], own.start, parameter.shape)
                mark_materialized(parameter)
            else:
                self._give_whole(name, parameter)
            self._keep(name, parameter.data.flatten()[own], own.start)

    def parts(self, module: nn.Module, device: torch.device) -> None:
        """Load this rank's rows of every unmaterialized parameter, on `device`. Call after `fully_shard`."""
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
        for name, parameter in module.named_parameters():
            if isinstance(parameter.data, DTensor):
                self._give_rows(name, parameter.data)
            else:
                self.whole([(name, parameter)])

    def load_all(self, model: nn.Module) -> nn.Module:
        """Load all weights into a model that no strategy shards, and return it."""
        self.begin(model, model, in_parts=False)
        self.whole(model.named_parameters())
        self.finish()
        return model

    def finish(self) -> tuple[bytes | None, LoadReport]:
        """Check that all weights arrived, and release the files.

        Returns:
            For sharded weights the digest of the full weights (equal to `weights_digest` of a full copy), else None;
            and a report.

        Raises:
            ProofFailed: names a parameter that got no weights, or whose shards differ from what was read.
        """
        lost = [n for n in self._origins if n not in self._done]
        if lost:
            raise ProofFailed(f"loading: {lost[0]} and {len(lost) - 1} more parameters got no weights")
        direct_bytes = self._end_direct_reads()
        source, self._source = self._source, None  # a strategy that loads in parts keeps this loader
        if source:
            source.close()
        readers, why = self._who_read()
        return self._digest(readers or f"rank {READER}"), LoadReport(
            how="parts" if self._tally else "whole",
            tensors=len(self._origins),
            read_bytes=direct_bytes + (source.read_bytes if source else 0),
            kept_bytes=self._kept_bytes,
            seconds=round(time.perf_counter() - self._started, 3),
            digest=hashlib.sha256(repr(sorted(self._read.items())).encode()).hexdigest() if self._read else "",
            readers=readers,
            why=why,
        )

    def waits(self, name: str) -> bool:
        """Return whether this parameter still needs its weights."""
        return name in self._origins and name not in self._done

    def _allocate(self, parameter: nn.Parameter) -> None:
        if is_unmaterialized(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._world.device)

    def _give_whole(self, name: str, parameter: nn.Parameter) -> None:
        """Send a parameter in full."""
        tensor = self._turn(name)
        self._allocate(parameter)
        if tensor is not None:
            parameter.data.copy_(tensor)
            self._send(name, parameter.data)
        if self._world.size > 1:
            dist.broadcast(parameter.data, src=READER, group=self._world.group)
        mark_materialized(parameter)

    def _give_rows(self, name: str, parameter: DTensor) -> None:
        if not self.waits(name):
            return
        assert parameter.placements in ((Shard(0),), (Replicate(), Shard(0))), f"{name}: {parameter.placements}"
        world, shape, local, mesh = self._world, parameter.shape, parameter.to_local(), parameter.device_mesh
        count = mesh.size(-1)  # ranks that shard together; consecutive, so that the next ones hold a copy
        rows = -(-shape[0] // count)  # like `torch.chunk`: the last shards may be shorter or empty
        first = min(world.rank % count * rows, shape[0]) * shape[1:].numel()
        copies = world.size // count
        if self._reads_directly(name, copies):
            self._read_part(name, local, first, shape, counts=world.rank < count)
        else:
            self._scatter_rows(name, local, rows, mesh, parameter.dtype, shape)
        self._keep(name, local, first, copies)

    def _scatter_rows(
        self, name: str, local: torch.Tensor, rows: int, mesh: DeviceMesh, dtype: torch.dtype, shape: torch.Size
    ) -> None:
        """Send rows to the ranks of the first copy, and from each of them to the ranks that keep the same ones."""
        world, tensor, count = self._world, self._turn(name), mesh.size(-1)
        chunks = None if tensor is None else [self._rows(name, tensor, r * rows, rows, dtype) for r in range(count)]
        own = torch.empty((rows, *shape[1:]), dtype=dtype, device=world.device)
        if world.rank < count:
            dist.scatter(own, chunks, src=READER, group=mesh.get_group(mesh.ndim - 1))
        if world.size > count:
            dist.broadcast(own, src=world.rank % count, group=mesh.get_group(0))
        local.copy_(own[: local.shape[0]])

    def _rows(self, name: str, tensor: torch.Tensor, first: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows on the device, padded to `rows`."""
        part = tensor[first : first + rows].to(self._world.device, dtype).contiguous()
        self._send(name, part, min(first, tensor.shape[0]) * tensor.shape[1:].numel())
        missing = rows - part.shape[0]
        return torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) if missing else part

    def _turn(self, name: str) -> torch.Tensor | None:
        """Return the tensor on the reader, None on other ranks. All ranks fail if the reader cannot read it."""
        tensor, problem, origin = None, None, self._origins[name]
        if self._world.rank == READER:
            try:
                assert self._source is not None
                tensor = self._source.take(origin)
                if name in self._frozen and origin not in self._read:
                    words = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
                    self._read[origin] = (str(tensor.dtype), tuple(tensor.shape), zlib.crc32(words.data))
            except AllranksError as own:
                problem = own
            except (OSError, RuntimeError, KeyError, MemoryError) as other:
                problem = EnvironmentNotAble(f"{origin} cannot be read: {first_line(other)}")
        raise_on_all_ranks(self._world, problem)
        self._done.add(name)
        if self._source and not any(o == origin and n not in self._done for n, o in self._origins.items()):
            self._source.forget(origin)
        return tensor

    def _reads_directly(self, name: str, copies: int, needs_whole: str = "") -> bool:
        """Return whether ranks that keep a parameter read it; otherwise rank 0 does, and sends it.

        Args:
            copies: how often all ranks together keep it. On one node the page cache serves all but the first.
        """
        if self._direct is None:
            return False
        reason = needs_whole
        if not reason and self._origins[name] not in self._direct:
            reason = "the files hold them in another layout"
        if not reason and copies > 1 and self._first_node < self._world.size:
            reason = "nodes keep the same weights"
        if reason:
            self._sent_because[reason] += 1
        return not reason

    def _read_part(self, name: str, part: torch.Tensor, start: int, shape: torch.Size, *, counts: bool = True) -> None:
        """Fill this rank's part of a parameter: its elements from index `start`; undefined after a failure, until all
        ranks fail together.

        Args:
            shape: of the full parameter.
            counts: whether what this rank reads is part of the checksums, in which each element counts once.
        """
        direct, origin, flat = self._direct, self._origins[name], part.view(-1)
        assert direct is not None
        summed = name in self._frozen and origin not in self._summed
        if summed:
            self._summed[origin] = str(direct.dtypes[origin]), tuple(shape)
        try:
            stop = start + flat.numel() if self._problem is None else start
            for low, high, piece in direct.pieces(origin, start, stop):
                if summed and counts:
                    crc = zlib.crc32(piece.view(torch.uint8).numpy().data)
                    self._crcs[origin] ^= crc_followed_by(crc, (shape.numel() - high) * piece.itemsize)
                own = flat[low - start : high - start].copy_(piece)
                if counts:
                    self._send(name, own, low)
        except (AllranksError, MemoryError) as error:
            self._problem = error if isinstance(error, AllranksError) else EnvironmentNotAble(f"{origin}: {error}")
        self._done.add(name)

    def _end_direct_reads(self) -> int:
        """Close the files; raise on all ranks what the lowest rank that could not read has met. Collective.

        Returns:
            The bytes that this rank has read.
        """
        if self._direct is None:
            return 0
        try:
            self._direct.close()
        except AllranksError as error:
            self._problem = self._problem or error
        mine = self._problem and (type(self._problem).__name__, f"rank {self._world.rank}: {self._problem}")
        every: list[tuple[str, str] | None] = [None] * self._world.size
        dist.all_gather_object(every, mine, group=self._world.control)
        if failed := next((one for one in every if one), None):
            raise getattr(errors, failed[0], EnvironmentNotAble)(failed[1])
        if self._summed:
            names = sorted(self._summed)
            whole = xor_over_ranks(self._world, [self._crcs[n] for n in names])
            if self._world.rank == READER:
                self._read |= {n: (*self._summed[n], crc) for n, crc in zip(names, whole, strict=True)}
        return self._direct.read_bytes

    def _who_read(self) -> tuple[str, str]:
        """Return ``readers`` and ``why`` of the report."""
        if self._direct is None:
            return (f"rank {READER}", self._why_not_direct) if self._why_not_direct else ("", "")
        sent, because = self._sent_because.total(), "; ".join(self._sent_because)
        if sent == len(self._origins):
            return (f"rank {READER}", because) if sent else ("", "")
        why = "all ranks see the same files"
        return "every rank", f"{why}; rank {READER} sends {sent} tensors, because {because}" if sent else why

    def _send(self, name: str, part: torch.Tensor, start: int = 0) -> None:
        if self._tally:
            self._tally.send(name, part, start)

    def _keep(self, name: str, part: torch.Tensor, start: int = 0, copies: int = 1) -> None:
        self._kept_bytes += part.numel() * part.element_size()
        if self._tally:
            self._tally.keep(name, part, start, copies)

    def _digest(self, reader: str) -> bytes | None:
        if self._tally is None:
            return None
        sums, digest = self._tally.compare(self._world, reader), hashlib.sha256()
        for facts, place, own in self._layout:
            digest.update(f"{facts}{own if own is not None else sums[place]}".encode())
        return digest.digest()
