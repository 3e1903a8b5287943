"""Load weights that one rank reads into every rank, full or as shards; parameters stay unmaterialized until then.

An unmaterialized parameter has the right shape, dtype and device, but all its elements share one storage element, so it needs
no memory. (On the ``meta`` device, PEFT would discard the initial values of adapters, and a parameter could not get storage in
place.) Buffers that are in no file, such as rotary frequencies, are real.

One rank of the world reads, not one per node: every file is read once, only one node needs access, and each rank receives only
its part. For every tensor, the reader first reports whether it could be read, so that all ranks fail together with the reason;
then the tensor is sent and freed. So the reader's host holds one tensor at a time, and a device holds its shard and one tensor.
Checksums then show that the ranks together hold what was read.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from allranks import errors
from allranks.errors import AllranksError, EnvironmentNotAble, ProofFailed
from allranks.train.data.tokenization import first_line
from allranks.train.distributed import DistContext
from allranks.train.models.weight_sources import WeightSource
from allranks.train.sync_proof import MODULUS, TensorSums, add_checksums, checksums


def make_unmaterialized(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of this shape that shares one storage element."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def unmaterialized_parameter(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, origin: str, trained: bool
) -> nn.Parameter:
    """Return a parameter without storage that will receive the weights of `origin`; deep copies of it behave the same."""
    parameter = nn.Parameter(make_unmaterialized(shape, dtype, device), requires_grad=trained)
    parameter.origin = origin  # type: ignore[attr-defined]
    parameter.__deepcopy__ = partial(_copy, parameter)  # type: ignore[attr-defined] - otherwise a copy would allocate the full size
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

    Parameters become unmaterialized. Buffers and weights that are in no file (a new classification head) are created on the CPU
    and initialized as transformers does.

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
_BUSY, _DONE, _RESULT, _ERROR = range(4)


def run_on_reader(world: DistContext, action: Callable[[], Any]) -> Any:
    """Run a long action, such as a download, on the reader only; all ranks get its (small) result.

    Raises:
        AllranksError: the reader's exception, on every rank.
    """
    if world.size == 1:
        return action()
    if world.rank != READER:
        while int(_word(world, _BUSY)) == _BUSY:
            pass
        return raise_on_all_ranks(world, None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(action)
        while not wait([future], BUSY_S).done:
            _word(world, _BUSY)
        _word(world, _DONE)
    problem = future.exception()
    return raise_on_all_ranks(world, problem, None if problem else future.result())


def raise_on_all_ranks(world: DistContext, problem: BaseException | None, result: Any = None) -> Any:
    """Return the reader's result on all ranks, or raise its exception on all. Collective; only the reader's arguments count."""
    error = _named(problem)
    if world.size > 1:
        told = int(_word(world, _ERROR if error else _DONE if result is None else _RESULT))
        if told == _DONE:
            return None
        box: list[Any] = [result if error is None else (type(error).__name__, str(error))]
        dist.broadcast_object_list(box, src=READER, group=world.control)
        result = box[0]
        if told == _ERROR and error is None:
            kind, text = result
            error = getattr(errors, kind, EnvironmentNotAble)(text)
    if error is not None:
        raise error
    return result


def _named(problem: BaseException | None) -> AllranksError | None:
    if problem is None or isinstance(problem, AllranksError):
        return problem
    return EnvironmentNotAble(f"rank {READER}, which reads the model: {type(problem).__name__}: {first_line(problem)}")


def _word(world: DistContext, value: int) -> torch.Tensor:
    word = torch.tensor(value)
    dist.broadcast(word, src=READER, group=world.control)
    return word


NO_SUMS: TensorSums = (0, 0, 0)


class TransferChecksums:
    """Checksums by parameter: of what the reader sent (on the reader), and of what this rank keeps."""

    def __init__(self) -> None:
        self._sent: dict[str, TensorSums] = {}
        self._kept: dict[str, TensorSums] = {}
        self._copies: dict[str, int] = {}

    def send(self, name: str, part: torch.Tensor, start: int = 0) -> None:
        """Add the data that the reader sends: elements of the flattened parameter from index `start`."""
        self._sent[name] = add_checksums(self._sent.get(name, NO_SUMS), checksums(part, start))

    def keep(self, name: str, part: torch.Tensor, start: int = 0, copies: int = 1) -> None:
        """Add what this rank keeps; all ranks together keep the parameter `copies` times."""
        self._copies[name] = copies
        self._kept[name] = add_checksums(self._kept.get(name, NO_SUMS), checksums(part, start))

    def compare(self, world: DistContext) -> dict[str, TensorSums]:
        """Compare the sums, and return those of each full parameter on every rank. Collective.

        Raises:
            ProofFailed: names a parameter that was not received as it was sent.
        """
        names = sorted(self._copies)
        kept = torch.tensor([self._kept[n] for n in names], dtype=torch.int64).view(-1, 3)
        sent = torch.tensor([self._sent.get(n, NO_SUMS) for n in names], dtype=torch.int64).view(-1, 3)
        if world.size > 1:
            dist.all_reduce(kept, group=world.control)
            dist.broadcast(sent, src=READER, group=world.control)
        due = sent * torch.tensor([self._copies[n] for n in names]).view(-1, 1)
        kept[:, 1:] %= MODULUS
        due[:, 1:] %= MODULUS
        wrong = [n for n, a, b in zip(names, kept.tolist(), due.tolist(), strict=True) if a != b]
        if wrong:
            more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
            raise ProofFailed(
                f"loading: {wrong[0]}{more}: the weights held by the ranks differ from those that rank {READER} read"
            )
        return {n: (s[0], s[1], s[2]) for n, s in zip(names, sent.tolist(), strict=True)}


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What loading did on this rank. ``how``: whole or parts; bytes count the weights from the source."""

    how: str
    tensors: int
    read_bytes: int
    kept_bytes: int
    seconds: float
    digest: str = ""
    """SHA-256 over the frozen weights as they were read; "" without any, and on ranks that do not read files."""


class WeightLoader:
    """Load one model. Every rank creates a loader and calls the same methods in the same order."""

    def __init__(self, world: DistContext, source: WeightSource | None, *, drawn: tuple[str, ...] = ()) -> None:
        """Initialize. `source` is None on ranks that do not read; `drawn` names weights that no file holds."""
        self._world, self._source, self.drawn = world, source, drawn
        self._origins: dict[str, str] = {}
        self._frozen: set[str] = set()
        self._done: set[str] = set()
        self._read: dict[str, tuple[str, tuple[int, ...], int]] = {}  # dtype, shape and CRC-32 by origin, on the reader
        self._tally: TransferChecksums | None = None
        self._layout: list[tuple[str, str, Any]] = []
        self._started = time.perf_counter()
        self._kept_bytes = 0

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
        self._tally = TransferChecksums()
        names = {id(p): n for n, p in named.items()}
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            place = names.get(id(tensor), "")
            own = None if place in self._origins else checksums(tensor)
            self._layout.append((f"{name} {tuple(tensor.shape)} {tensor.dtype} ", place, own))

    def whole(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Send these parameters in full to every rank, and allocate storage for them if needed."""
        for name, parameter in named:
            if self._give_whole(name, parameter):
                self._keep(name, parameter.data, copies=self._world.size)

    def flat(
        self, named: Sequence[tuple[str, nn.Parameter]], spans: Sequence[tuple[int, int]], low: int, high: int
    ) -> None:
        """Send these parameters in full to every rank; it keeps the range ``[low, high)`` of their concatenation (`spans`)."""
        for (name, parameter), (start, stop) in zip(named, spans, strict=True):
            if self._give_whole(name, parameter):
                first = min(max(low, start), stop)
                part = parameter.data.flatten()[first - start : max(min(high, stop), first) - start]
                self._keep(name, part, first - start)

    def prepare_parts(self, module: nn.Module) -> None:
        """Prepare for `fully_shard`, which requires parameters without content to be on the ``meta`` device."""
        to_meta(module)

    def parts(self, module: nn.Module, device: torch.device) -> None:
        """Send each rank its rows of every unmaterialized parameter, on `device`. Call after `fully_shard`."""
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
            For sharded weights the digest of the full weights (equal to `weights_digest` of a full copy), else None; and a
            report.

        Raises:
            ProofFailed: names a parameter that got no weights, or whose shards differ from what was read.
        """
        lost = [n for n in self._origins if n not in self._done]
        if lost:
            raise ProofFailed(f"loading: {lost[0]} and {len(lost) - 1} more parameters got no weights")
        source, self._source = self._source, None  # a strategy that loads in parts keeps this loader
        return self._digest(), LoadReport(
            how="parts" if self._tally else "whole",
            tensors=len(self._origins),
            read_bytes=source.read_bytes if source else 0,
            kept_bytes=self._kept_bytes,
            seconds=round(time.perf_counter() - self._started, 3),
            digest=hashlib.sha256(repr(sorted(self._read.items())).encode()).hexdigest() if self._read else "",
        )

    def waits(self, name: str) -> bool:
        """Return whether this parameter still needs its weights."""
        return name in self._origins and name not in self._done

    def _give_whole(self, name: str, parameter: nn.Parameter) -> bool:
        """Send a parameter in full; return whether it needed its weights."""
        if not self.waits(name):
            return False
        tensor = self._turn(name)
        if is_unmaterialized(parameter):
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._world.device)
        if tensor is not None:
            parameter.data.copy_(tensor)
            self._send(name, parameter.data)
        if self._world.size > 1:
            dist.broadcast(parameter.data, src=READER, group=self._world.group)
        mark_materialized(parameter)
        return True

    def _give_rows(self, name: str, parameter: DTensor) -> None:
        if not self.waits(name):
            return
        assert parameter.placements in ((Shard(0),), (Replicate(), Shard(0))), f"{name}: {parameter.placements}"
        world, shape, local = self._world, parameter.shape, parameter.to_local()
        count = parameter.device_mesh.size(
            -1
        )  # ranks that shard together; consecutive, so that the next ones hold a copy
        rows = -(-shape[0] // count)  # like `torch.chunk`: the last shards may be shorter or empty
        tensor = self._turn(name)
        chunks = (
            None
            if tensor is None
            else [self._rows(name, tensor, r * rows, rows, parameter.dtype) for r in range(count)]
            * (world.size // count)
        )
        own = torch.empty((rows, *shape[1:]), dtype=parameter.dtype, device=world.device)
        dist.scatter(own, chunks, src=READER, group=world.group)
        local.copy_(own[: local.shape[0]])
        first = min(world.rank % count * rows, shape[0]) * shape[1:].numel()
        self._keep(name, local, first, world.size // count)

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
