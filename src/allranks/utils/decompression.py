"""Read files compressed with gzip, bzip2 or xz, up to the position where they are truncated or damaged."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, cast

from allranks.utils.inputs import BoundedReader

READ_BYTES = 1 << 13  # what a damaged position makes unreadable before it
XZ_MEMORY_BYTES = 512 << 20  # xz -9 needs 65 MiB; a header may request 4 GiB
_MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}


def decompressed(raw: BinaryIO) -> BinaryIO:
    """Return a compressed file's content as `DecompressedFile` with `BoundedReader`'s limits, else the file itself."""
    head = raw.read(8)
    raw.seek(0)
    kind = next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), None)
    return raw if kind is None else cast(BinaryIO, BoundedReader(cast(BinaryIO, DecompressedFile(raw, kind)), raw))


class _Gzip:
    """zlib's decompressor with the interface of bz2 and lzma."""

    def __init__(self) -> None:
        self._unzip, self._rest = zlib.decompressobj(wbits=31), b""

    @property
    def eof(self) -> bool:
        return self._unzip.eof

    @property
    def needs_input(self) -> bool:
        return not self._rest and not self.eof

    @property
    def unused_data(self) -> bytes:
        return self._unzip.unused_data

    def decompress(self, data: bytes, limit: int) -> bytes:
        out = self._unzip.decompress(self._rest + data, limit)
        self._rest = self._unzip.unconsumed_tail
        return out


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, memlimit=XZ_MEMORY_BYTES),
}


class DecompressedFile(io.RawIOBase):
    """The content of a gz, bz2 or xz file; several streams in a row are concatenated.

    `read` raises `EOFError` at a truncated or damaged position, after all data before it was returned.
    """

    def __init__(self, raw: BinaryIO, kind: str) -> None:
        raw.seek(0)
        self._raw, self._kind, self._unpack, self._problem = raw, kind, _DECOMPRESSORS[kind](), ""
        self._next = b""  # data of the next stream

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        parts: list[bytes] = []
        left = size
        while left > 0 and not self._problem and (data := self._more(left)) is not None:
            parts.append(data)
            left -= len(data)
        if self._problem and not parts:
            raise EOFError(self._problem)
        return b"".join(parts)

    def _more(self, limit: int) -> bytes | None:
        """Return the next piece; None at the end or at a damaged position (`_problem`)."""
        if self._unpack.eof and not self._begin_next():
            return None
        data = b""
        if self._unpack.needs_input:
            data, self._next = self._next or self._raw.read(READ_BYTES), b""
            if not data:
                self._problem = "the compressed data is truncated"
                return None
        try:
            return self._unpack.decompress(data, limit)
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
            self._problem = f"the compressed data is damaged ({str(error).rpartition(':')[2].strip()})"
            return None

    def _begin_next(self) -> bool:
        magic, rest = _MAGIC[self._kind], self._unpack.unused_data.lstrip(b"\0")
        while len(rest) < len(magic) and (more := self._raw.read(READ_BYTES)):  # a stream may end where a read ends
            rest = (rest + more).lstrip(b"\0")
        if not rest.startswith(magic):
            return False
        self._unpack, self._next = _DECOMPRESSORS[self._kind](), rest
        return True
