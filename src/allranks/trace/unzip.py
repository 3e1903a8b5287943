"""Text of a file that may be packed, chunk by chunk; damage is told and what came before it kept."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

READ_BYTES = 1 << 16
CHUNK_BYTES = 1 << 17
GZIP = b"\x1f\x8b"


def plain(file: Any, first: bytes) -> Iterator[bytes]:
    """A file that is not packed, of which `first` was read."""
    yield first
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def unzip(file: Any, chunk: bytes, damaged: Callable[[str], None]) -> Iterator[bytes]:
    """Decompresses; what came before damage is passed on, and the damage told to `damaged`."""
    packed = zlib.decompressobj(wbits=31)
    while chunk:
        before = packed.copy()
        try:
            data = packed.decompress(chunk, CHUNK_BYTES)
        except zlib.error as error:
            damaged(f"the gzip data is damaged ({str(error).split(':')[-1].strip()})")
            yield from _until_damage(before, chunk)
            return
        yield data
        if packed.unconsumed_tail:
            chunk = packed.unconsumed_tail
        elif packed.eof and packed.unused_data[:2] == GZIP:  # several gzip members in a row are one file
            chunk, packed = packed.unused_data, zlib.decompressobj(wbits=31)
        else:
            chunk = b"" if packed.eof else file.read(READ_BYTES)
    if not packed.eof:
        damaged("the gzip data breaks off")


def _until_damage(unzip: Any, chunk: bytes) -> Iterator[bytes]:
    """What a chunk with damage in it holds before that."""
    try:
        for at in range(0, len(chunk), 64):
            yield unzip.decompress(chunk[at : at + 64])
    except zlib.error:
        return
