"""Trace files: written aside, checked, compressed, renamed; earlier ones kept. No torch."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from allranks.errors import AllranksError

_COMPRESSION = 3  # a third of the time of 9, a tenth larger


class TraceNotWritten(AllranksError):
    """The profiler left no whole trace, for example because the disk is full."""


def publish(export: Callable[[str], object], target: Path, before: Callable[[], None] | None = None) -> int:
    """Let ``export(path)`` write JSON beside ``target``, compress it, and rename it into place.

    Args:
        before: called when the new file is whole, just before it takes its place.

    Returns:
        The compressed size in bytes.

    Raises:
        OSError: the folder cannot be written.
        TraceNotWritten: the export ended without a whole file (torch does not say so itself).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}")  # torch leaves halves of its own beside its file
    plain, packed = aside / "trace.json", aside / target.name
    try:
        aside.mkdir()
        export(str(plain))
        _require_whole(plain)
        with plain.open("rb") as source, packed.open("wb") as raw:
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=_COMPRESSION, mtime=0) as into:
                shutil.copyfileobj(source, into, 1 << 20)
            raw.flush()
            os.fsync(raw.fileno())
        size = packed.stat().st_size
        if before is not None:
            before()
        packed.replace(target)
        return size
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def set_aside(current: Path, earlier: Path) -> None:
    """Move an earlier attempt's trace, where there is one, so that the new one can take its name."""
    if current.exists():
        earlier.parent.mkdir(parents=True, exist_ok=True)
        current.replace(earlier)


def _require_whole(path: Path) -> None:
    if not path.exists():
        raise TraceNotWritten(f"the profiler wrote no file in {path.parent.parent}; is there space?")
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 64, 0))
        if not file.read().rstrip().endswith(b"}"):
            raise TraceNotWritten(f"the profiler's file in {path.parent.parent} breaks off; is there space?")
