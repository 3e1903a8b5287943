"""Open files that a user or a run folder supplies: regular files only, read up to a limit.

Opening a named pipe blocks until a process writes to it, and a device such as ``/dev/zero`` never ends. A run folder, a
log folder or a cache may belong to another user, so every reader of such a file uses this module. All refusals are
`OSError` subclasses whose ``strerror`` says what is wrong, so code that handles unreadable files handles them too.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from allranks.errors import SpecError

STDIN_NAME = "standard input"
RECORD_BYTES = 256 << 20
"""Limit of one JSON record of a run folder; the plan of 10,000 ranks has about 10 MB."""
LINES_BYTES = 4 << 30
"""Limit of a file that is read line by line, such as the events of a rank."""
LINE_BYTES = 16 << 20
"""A longer line is skipped."""
PIPE_TIMEOUT_S = 60.0
"""How long to wait for the end of a pipe that a shell passes as ``/dev/fd/N``."""
EXPANSION_BYTES = 64 << 20
"""Size up to which any compressed file may expand."""
EXPANSION_RATIO = 50
"""Limit beyond that size, per byte read from the compressed file. Logs and traces reach 10 to 30."""
_BLOCK = 1 << 20
_PIPE_PATH = r"/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+"
_KINDS = (
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class StdinClosed(Exception):
    """Standard input was requested, but the caller had closed it (``<&-``)."""


class NotRegularFile(OSError):
    """The path is a pipe, a socket or a device."""


class FileTooLarge(OSError):
    """The file is larger than the caller's limit."""


class ExpansionTooLarge(Exception):
    """A compressed file expands beyond the limit, which the message names."""


class BoundedReader(io.RawIOBase):
    """Reader of decompressed data that enforces the expansion limits.

    Args:
        unpacked: the decompressing stream; closed with this object.
        packed: the open file that `unpacked` reads; its position is the number of bytes used.
    """

    def __init__(self, unpacked: BinaryIO, packed: BinaryIO) -> None:
        self._unpacked, self._packed, self._given = unpacked, packed, 0

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        """Return up to `size` bytes. Raise `ExpansionTooLarge` when the limit is reached."""
        if self._given > EXPANSION_BYTES:
            used = os.lseek(self._packed.fileno(), 0, os.SEEK_CUR)  # also correct if another process reads it
            if self._given > EXPANSION_BYTES + EXPANSION_RATIO * used:
                raise ExpansionTooLarge(
                    f"it expands to more than {EXPANSION_RATIO} times its size, which no log or trace does; "
                    f"the first {self._given >> 20} MiB were read"
                )
        data = self._unpacked.read(size)
        self._given += len(data)
        return data

    def close(self) -> None:
        """Close the decompressing stream; the compressed file stays open."""
        if not self.closed:
            self._unpacked.close()
        super().close()


def is_stdin(path: str | Path) -> bool:
    """Return whether the path is ``-``, which means standard input."""
    return str(path) == "-"


def name_of(path: str | Path) -> str:
    """Return the file's name for messages."""
    return STDIN_NAME if is_stdin(path) else str(path)


class Appended(NamedTuple):
    """What was appended to a file: the bytes, and how many before them were skipped."""

    data: bytes
    skipped: int


def read_appended(path: str | Path, offset: int, limit: int | None = None) -> Appended:
    """Return the content of a growing file from an offset on, no more than the newest `limit` bytes.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        skipped = 0 if limit is None else max(0, file.seek(0, os.SEEK_END) - offset - limit)
        file.seek(offset + skipped)
        return Appended(file.read(limit), skipped)


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading. Never blocks.

    Raises:
        NotRegularFile: it is a pipe, a socket or a device.
        OSError: it cannot be opened; a folder is an `IsADirectoryError`.
    """
    _require_regular(os.stat(path), path)  # opening some devices has side effects, so check first  # noqa: PTH116
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(fd), path)  # it may have been replaced in between
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | Path, limit: int = RECORD_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Args:
        limit: maximum size of the file in bytes.

    Raises:
        FileTooLarge: it is larger.
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return _up_to(file, limit, path)


def read_text(path: str | Path, limit: int = RECORD_BYTES, errors: str = "strict", encoding: str = "utf-8") -> str:
    """Return the text of a regular file. Raises `OSError` as `read_regular` does, and `UnicodeDecodeError`."""
    return read_regular(path, limit).decode(encoding, errors)


class DuplicateKey(ValueError):
    """A key that occurs twice in a JSON object; Python's parser would keep the last one."""


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; the ``object_pairs_hook`` of `json.loads` that raises `DuplicateKey`."""
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKey(f"the key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice in one object")
    return content


def read_json_object(path: Path, limit: int, key: str, *, distinct: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file that a spec names.

    Args:
        key: the key of the spec, for messages.
        distinct: refuse a key that occurs twice in an object.

    Raises:
        SpecError: it does not exist, cannot be read, is too large, or not a JSON object.
    """
    try:
        content = json.loads(read_text(path, limit), object_pairs_hook=distinct_keys if distinct else None)
    except FileTooLarge:
        raise SpecError(f"{key}: {path} is larger than {limit >> 20} MiB; this is not a configuration") from None
    except FileNotFoundError:
        raise SpecError(f"{key}: file not found: {path}") from None
    except OSError as error:
        raise SpecError(f"{key}: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{key}: {path} is not valid JSON: {str(error)[:120]}") from None
    if not isinstance(content, dict):
        raise SpecError(f"{key}: {path}: expected a JSON object, found a {type(content).__name__}")
    return content


def read_lines(path: str | Path, limit: int = LINES_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file without line ends, up to `limit` bytes; lines longer than `LINE_BYTES` are
    skipped.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        yield from _lines(file, limit)


def read_input(path: str | Path, limit: int) -> bytes:
    """Return the bytes of a file named on the command line.

    ``-`` is standard input. A pipe is accepted only under the names that a shell uses for ``<(command)``
    (``/dev/fd/63``), and must end within `PIPE_TIMEOUT_S`.

    Raises:
        StdinClosed: there is no standard input.
        FileTooLarge: it has more than `limit` bytes.
        OSError: it cannot be read, or is neither a regular file nor such a pipe.
    """
    if is_stdin(path):
        if sys.stdin is None:
            raise StdinClosed
        return _up_to(sys.stdin.buffer, limit, path)
    if re.fullmatch(_PIPE_PATH, str(path)) and stat.S_ISFIFO(os.stat(path).st_mode):  # noqa: PTH116
        return _read_pipe(path, limit)
    return read_regular(path, limit)


def _require_regular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "a special file")
    raise NotRegularFile(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _too_large(limit: int, path: str | Path) -> FileTooLarge:
    return FileTooLarge(errno.EFBIG, f"it is larger than {limit} bytes", str(path))


def _up_to(file: BinaryIO, limit: int, path: str | Path) -> bytes:
    """Read at most `limit` + 1 bytes."""
    parts: list[bytes] = []
    left = limit + 1
    while left and (data := file.read(min(left, _BLOCK))):
        parts.append(data)
        left -= len(data)
    if not left:
        raise _too_large(limit, path)
    return b"".join(parts)


def _lines(file: BinaryIO, limit: int) -> Iterator[bytes]:
    rest = b""
    skipping = False  # within a line that is too long
    while limit > 0 and (data := file.read(min(limit, _BLOCK))):
        limit -= len(data)
        first, *more = data.split(b"\n")
        if not more:
            rest = b"" if skipping else rest + first
            skipping = skipping or len(rest) > LINE_BYTES
            continue
        if not skipping:
            yield rest + first
        skipping = False
        rest = more.pop()
        yield from more
    if rest and not skipping:
        yield rest


def _read_pipe(path: str | Path, limit: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    deadline, parts, left = time.monotonic() + PIPE_TIMEOUT_S, [], limit
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        while left >= 0:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(errno.ETIMEDOUT, f"the pipe did not end within {PIPE_TIMEOUT_S:.0f} s", str(path))
            with suppress(BlockingIOError):
                if not (data := os.read(fd, 1 << 16)):
                    return b"".join(parts)
                parts.append(data)
                left -= len(data)
        raise _too_large(limit, path)
    finally:
        os.close(fd)
