"""Text out of packed files, up to the byte where one breaks off: of a log the end tells most, so nothing before it may be lost."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

READ_BYTES = 1 << 14
MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}


class _Gzip:
    """zlib's object with the manners of those of bz2 and lzma."""

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


_MAKERS: dict[str, Callable[[], Any]] = {"gz": _Gzip, "bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}


class Packed(io.RawIOBase):
    """What a gz, bz2 or xz file holds; several streams in a row are one. `read` raises `EOFError` where it breaks off, once all
    that comes before has been given out."""

    def __init__(self, raw: BinaryIO, kind: str) -> None:
        raw.seek(0)
        self._raw, self._kind, self._unpack, self._problem = raw, kind, _MAKERS[kind](), ""
        self._next = b""  # of a stream behind the one that has ended

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
        """The next piece; None at the end, or where it breaks off (`_problem`)."""
        if self._unpack.eof and not self._begin_next():
            return None
        data = b""
        if self._unpack.needs_input:
            data, self._next = self._next or self._raw.read(READ_BYTES), b""
            if not data:
                self._problem = "the packed data breaks off"
                return None
        try:
            return self._unpack.decompress(data, limit)
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
            self._problem = f"the packed data is damaged ({str(error).rpartition(':')[2].strip()})"
            return None

    def _begin_next(self) -> bool:
        rest = (self._unpack.unused_data or self._raw.read(READ_BYTES)).lstrip(b"\0")
        if not rest.startswith(MAGIC[self._kind]):
            return False
        self._unpack, self._next = _MAKERS[self._kind](), rest
        return True
