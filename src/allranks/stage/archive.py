"""Tar files of staging: the same files give the same bytes, wherever and whenever they are packed."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from allranks.stage.unpack import Refused, members, unpack

__all__ = ["FIXED_TIME", "Packed", "Refused", "check", "pack", "unpack"]

FIXED_TIME = 1_000_000_000
"""Modification time of every packed file; compiled files are made to agree with it."""
_PYC_TIMESTAMP = struct.Struct("<III")  # flags, source time, source size; behind the four bytes of the magic number


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of packing."""

    sha256: str
    bytes: int
    files: int
    unpacked_bytes: int


class _HashingWriter:
    """A file whose bytes are hashed as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        self.bytes += len(block)
        return self._file.write(block)


def pack(target: Path, files: Iterable[tuple[str, Path]]) -> Packed:
    """Write files, by the names that they shall have, into a new tar file: sorted, one time, one owner, no links.

    A link is packed as the file it leads to. Compiled Python files that are stale are left out.
    """
    count = total = 0
    with target.open("xb") as raw:
        sink = _HashingWriter(raw)
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:  # type: ignore[call-overload]
            for name, path in sorted(files):
                compiled = _fixed_pyc(path) if path.suffix == ".pyc" else b""
                if compiled is None:
                    continue
                with path.open("rb") if not compiled else io.BytesIO(compiled) as content:
                    entry = tarfile.TarInfo(name)
                    status = path.stat()
                    entry.size = len(compiled) or status.st_size
                    entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
                    entry.mtime = FIXED_TIME
                    tar.addfile(entry, content)
                count += 1
                total += entry.size
    return Packed(sha256=sink.digest.hexdigest(), bytes=sink.bytes, files=count, unpacked_bytes=total)


def check(archive: Path, packed: Packed) -> None:
    """Read an archive whole, as unpacking would, and compare it with what was packed.

    Raises:
        Refused: it is damaged or holds what must not be unpacked.
    """
    files = sum(entry.isreg() for entry, _ in members(str(archive), packed.sha256, packed.unpacked_bytes))
    if files != packed.files:
        raise Refused(f"holds {files} files, not {packed.files}")


def _fixed_pyc(path: Path) -> bytes | None:
    """A compiled file that agrees with its source at `FIXED_TIME`; None if it does not agree with it now."""
    source = path.parent.parent / f"{path.name.split('.', 1)[0]}.py"
    try:
        content, status = path.read_bytes(), source.stat()
        flags, time, size = _PYC_TIMESTAMP.unpack_from(content, 4)
    except (OSError, struct.error):
        return None
    if flags != 0 or time != int(status.st_mtime) & 0xFFFFFFFF or size != status.st_size & 0xFFFFFFFF:
        return None
    return content[:4] + _PYC_TIMESTAMP.pack(0, FIXED_TIME, size) + content[16:]
