"""Let every rank read its own part of the weight files, if all ranks see the same files.

Rank 0 describes each file by its path, size, time of change, and a hash of its header and of samples of its weights. Every rank
compares this with what it finds under the path. If one rank finds anything else, all ranks receive the weights from rank 0.

A rank reads ranges of bytes with `pread`, in pieces: a shard is one range. A mapped file would end the process with SIGBUS if it were
truncated meanwhile; `pread` returns fewer bytes, which becomes an error with the name of the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from allranks.errors import EnvironmentNotAble
from allranks.train.distributed import DistContext
from allranks.train.models.weight_sources import OF_NAME, FileSource
from allranks.utils.inputs import open_regular
from allranks.utils.safetensors_files import MAX_HEADER

PIECE_BYTES = 16 << 20  # read at a time: each rank has one buffer of this size
SAMPLES, SAMPLE_BYTES = 8, 4096  # of the weights in each file
CRC_POLYNOMIAL = 0xEDB88320  # of CRC-32, with reversed bits


@dataclass(frozen=True)
class FileFacts:
    """A file as rank 0 sees it. ``content``: SHA-256 of its header and of samples of its weights."""

    path: Path
    size: int
    changed_ns: int
    content: str


@dataclass(frozen=True)
class StoredRange:
    """Where one tensor lies: index of its file, offset of its first byte, and the dtype's name in the format."""

    file: int
    offset: int
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model, and the places of those tensors that need no conversion, by the model's names."""

    files: list[FileFacts]
    places: dict[str, StoredRange]


@dataclass(frozen=True)
class Agreement:
    """Whether all ranks see the same files. ``reason``: why not; empty if they do."""

    reason: str
    one_node: bool


def describe(source: FileSource) -> WeightFiles:
    """Describe the files of a model.

    Raises:
        EnvironmentNotAble: a file cannot be read.
    """
    entries = source.unconverted()
    paths = sorted({entry.file for entry in entries.values()})
    index = {path: i for i, path in enumerate(paths)}
    try:
        facts = [_facts(path.absolute()) for path in paths]
    except OSError as error:
        raise EnvironmentNotAble(f"{error.filename or source.folder}: cannot be read: {error.strerror}") from None
    places = {name: StoredRange(index[entry.file], entry.offset, entry.dtype) for name, entry in entries.items()}
    return WeightFiles(facts, places)


def agree(world: DistContext, known: WeightFiles) -> Agreement:
    """Compare the files that this rank sees with those that rank 0 has described. Collective; all ranks get the same answer."""
    mine = next((reason for facts in known.files if (reason := difference(facts))), "")
    every: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(every, (mine, world.host), group=world.control)
    others = sum(bool(reason) for reason, _ in every) - 1
    more = f", and {others} more ranks differ from rank 0" if others > 0 else ""
    reason = next((f"rank {r} on {host} {reason}{more}" for r, (reason, host) in enumerate(every) if reason), "")
    return Agreement(reason, one_node=len({host for _, host in every}) == 1)


def difference(known: FileFacts) -> str:
    """Return in what a file differs from its description, as the end of a sentence; empty if in nothing."""
    path = known.path
    try:
        with open_regular(path) as stream:
            status = os.fstat(stream.fileno())
            if status.st_size != known.size:
                return f"finds {status.st_size} bytes in {path}, rank 0 {known.size}"
            if status.st_mtime_ns != known.changed_ns:
                return f"finds another time of change of {path} than rank 0"
            same = _content(stream, known.size) == known.content
    except FileNotFoundError:
        return f"does not see {path}"
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return "" if same else f"finds other content in {path} than rank 0"


def _facts(path: Path) -> FileFacts:
    with open_regular(path) as stream:
        status = os.fstat(stream.fileno())
        return FileFacts(path, status.st_size, status.st_mtime_ns, _content(stream, status.st_size))


def _content(stream: BinaryIO, size: int) -> str:
    """Return the SHA-256 of the header and of samples of the weights."""
    start = stream.read(8)
    length = min(int.from_bytes(start, "little"), MAX_HEADER)
    digest = hashlib.sha256(start + stream.read(length))
    for i in range(SAMPLES):  # from the first bytes to the last ones
        stream.seek(8 + length + max(size - 8 - length - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
        digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


class DirectReads:
    """Read ranges of the stored tensors of a model."""

    def __init__(self, known: WeightFiles, dtypes: Mapping[str, torch.dtype], *, one_node: bool) -> None:
        """Initialize. `dtypes` has the dtype by name to which `pieces` converts."""
        self._known, self._dtypes, self._one_node = known, dtypes, one_node
        self._open: tuple[int, int] | None = None  # index of the open file, and its descriptor
        self._buffer: torch.Tensor | None = None
        self.read_bytes = 0

    def why_not(self, name: str, copies: int) -> str:
        """Return why rank 0 should send a tensor of which the ranks together keep so many copies; empty if each rank should read it."""
        if name not in self._known.places:
            return "the files hold them in another layout"
        if copies > 1 and not self._one_node:
            return "ranks of several nodes keep the same weights, and each node would read them"
        return ""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the pieces of a tensor."""
        return self._dtypes[name]

    def pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the elements from `start` to `stop` of a flattened tensor: index of a piece, and the piece.

        A piece is valid until the next one is read.

        Raises:
            EnvironmentNotAble: the file cannot be read, ends too early, or was changed since the ranks compared it.
        """
        place = self._known.places[name]
        stored = OF_NAME[place.dtype]
        step = PIECE_BYTES // stored.itemsize
        if self._buffer is None:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        for at in range(start, stop, step):
            length = min(step, stop - at)
            raw = self._buffer[: length * stored.itemsize]
            self._fill(raw, place.file, place.offset + at * stored.itemsize, name)
            yield at, raw.view(stored).to(self._dtypes[name])

    def close(self) -> None:
        """Close the open file.

        Raises:
            EnvironmentNotAble: it was changed while it was read.
        """
        if self._open is None:
            return
        (index, descriptor), self._open = self._open, None
        try:
            self._require_unchanged(index, descriptor)
        finally:
            os.close(descriptor)

    def _fill(self, raw: torch.Tensor, index: int, offset: int, name: str) -> None:
        path, view, done = self._known.files[index].path, raw.numpy().data, 0
        try:
            descriptor = self._descriptor(index)
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise EnvironmentNotAble(
                        f"{path}: {name} cannot be read: the file was truncated to {offset + done} bytes or fewer while it was "
                        "read. Download it again"
                    )
                done += count
        except OSError as error:
            raise EnvironmentNotAble(f"{path}: {name} cannot be read: {error.strerror}") from None
        self.read_bytes += len(view)

    def _descriptor(self, index: int) -> int:
        if self._open is None or self._open[0] != index:
            self.close()
            with open_regular(self._known.files[index].path) as stream:
                self._open = index, os.dup(stream.fileno())
            self._require_unchanged(*self._open)
        return self._open[1]

    def _require_unchanged(self, index: int, descriptor: int) -> None:
        known, status = self._known.files[index], os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (known.size, known.changed_ns):
            raise EnvironmentNotAble(
                f"{known.path}: was changed while the model was loaded ({known.size} bytes before, {status.st_size} now): start the "
                "run again when the file is complete"
            )


def crc_followed_by(crc: int, count: int) -> int:
    """Return what a part's CRC-32 adds to that of the full data, if so many bytes follow the part.

    The CRC-32 of the full data is the XOR over its parts (as ``crc32_combine`` of zlib computes it).
    """
    power, square = 1 << 31, 1 << 23  # the polynomials 1 and x^8
    while count:
        if count & 1:
            power = _multiply(power, square)
        square, count = _multiply(square, square), count >> 1
    return _multiply(power, crc)


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (CRC_POLYNOMIAL if b & 1 else 0)
    return product


def xor_over_ranks(world: DistContext, values: Sequence[int]) -> list[int]:
    """Return the bitwise XOR over all ranks of each 32-bit value. Collective."""
    total = torch.tensor(list(values), dtype=torch.int64)
    dist.all_reduce(total, op=dist.ReduceOp.BXOR, group=world.control)
    return total.tolist()
