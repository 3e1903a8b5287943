"""Find log files, open them, and read them in blocks of lines."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from allranks.errors import RequestError
from allranks.rundir.paths import RunDir, is_run
from allranks.utils.decompression import decompressed
from allranks.utils.inputs import ExpansionTooLarge, open_regular

BLOCK = 1 << 20
MAX_LINE = 1 << 18  # a longer line is passed on in pieces of this size
MAX_LINE_READ = 16 << 20
MAX_FILES = 20_000
_SKIPPED_FOLDERS = re.compile(
    r"checkpoints|model|traces|tensorboard|wandb|__pycache__|\.git|node_modules|\.venv|site-packages"
)
_NO_LOG = re.compile(
    r".*\.(?:safetensors|bin|pth?|ckpt|np[yz]|arrow|parquet|html|png|jpg|svg|pdf|so|pyc?|onnx|tar|zip|whl|model|ya?ml|toml|sh|sbatch|md)",
    re.IGNORECASE,
)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BINARY_MAGIC = (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"%PDF", b"ARROW1", b"PAR1", b"\x93NUMPY")


class LogFile(Struct, frozen=True):
    """A file to read; ``name`` is its name in reports."""

    path: Path
    name: str
    size: int


class UnreadableLog(Exception):
    """A file that cannot be read, with the reason."""


def find_logs(paths: list[Path]) -> tuple[list[LogFile], list[tuple[str, str]]]:
    """Return all files under `paths` that may be logs, and (file, reason) of the files left out.

    Raises:
        RequestError: a path does not exist.
    """
    logs: dict[str, LogFile] = {}
    problems: list[tuple[str, str]] = []
    for path in paths:
        if not _is_there(path, problems):
            continue
        for file in _walk(path, problems):
            _add(file, path, logs, problems)
            if len(logs) >= MAX_FILES:
                problems.append((printable_path(path), f"more than {MAX_FILES} files; the others were not read"))
                return list(logs.values()), problems
    return list(logs.values()), problems


def _is_there(path: Path, problems: list[tuple[str, str]]) -> bool:
    """Return False for a path in a folder without permission: the other paths are still read."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{path}: no such file or folder; give log files, folders of log files, or a run folder"
        ) from None
    except OSError as error:
        problems.append((printable_path(path), f"cannot be accessed: {error.strerror}"))
        return False
    return True


def _add(file: Path, given: Path, logs: dict[str, LogFile], problems: list[tuple[str, str]]) -> None:
    try:
        info = file.stat()
    except OSError as error:
        problems.append((printable_path(file), f"cannot be accessed: {error.strerror}"))
        return
    if not stat.S_ISREG(info.st_mode):
        problems.append((printable_path(file), "is not a regular file"))
        return
    real = os.path.realpath(file)
    if real not in logs:
        logs[real] = LogFile(
            file, printable_path(file if file == given else file.relative_to(given.parent)), info.st_size
        )


def printable_path(path: Path | str) -> str:
    """Return a path as text that any terminal and JSON can represent."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _walk(path: Path, problems: list[tuple[str, str]]) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for run in started_runs([path]):
        yield from _logs_of_run(run)
        return
    for folder, folders, files in os.walk(
        path, onerror=lambda e: problems.append((printable_path(e.filename), f"cannot be listed: {e.strerror}"))
    ):
        folders[:] = sorted(
            f for f in folders if not _SKIPPED_FOLDERS.fullmatch(f) and not Path(folder, f).is_symlink()
        )
        if "plan.json" in files and "spec.yaml" in files:
            folders.clear()
            yield from _logs_of_run(RunDir(Path(folder)))
            continue
        for name in sorted(files):
            if not _NO_LOG.fullmatch(name):
                yield Path(folder, name)


def started_runs(paths: Iterable[Path]) -> list[RunDir]:
    """Return the folders among some paths that are those of runs which have started."""
    return [RunDir(path) for path in paths if is_run(path) and (path / "plan.json").is_file()]


def _logs_of_run(run: RunDir) -> Iterator[Path]:
    """Return the logs of a run's newest attempt: ranks, agents, driver, exit records and events."""
    last = run.logs_of(max(run.attempts(), default=1))
    for folder, forms in (
        (last, ("*.log", "*.exit.json")),
        (run.logs, ("*.log", "driver.json")),
        (run.events, ("*.jsonl",)),
        (run.hang(max(run.attempts(), default=1)), ("*.stack.log", "flight.rank*", "watchdog.rank*", "nccl-ras.node*")),
    ):
        for form in forms:
            yield from sorted(folder.glob(form))


def read_blocks(source: LogFile) -> Iterator[tuple[bytes, bool]]:
    """Yield the file's text in pieces that end at line ends, each with whether its last line is complete.

    Raises `UnreadableLog` with the reason; text before it was yielded. Of a compressed file that expands without limit,
    and of a line that is too long, only the beginning is read; `UnreadableLog` is then raised at the end.
    """
    left_out: list[str] = []
    try:
        with open_regular(source.path) as raw:
            if raw.peek(4).startswith(_ZSTD_MAGIC):
                raise UnreadableLog("is compressed with zstd, which is not read; decompress it first (zstd -d)")
            with closing(decompressed(raw)) as file:
                yield from _lines(_texts(file), left_out)
    except ExpansionTooLarge as error:
        raise UnreadableLog(f"was read only in part: {error}") from None
    except OSError as error:
        raise UnreadableLog(f"cannot be read: {error.strerror or error}") from None
    except EOFError as error:
        raise UnreadableLog(f"is truncated or damaged: {error}; the part before was read") from None
    if left_out:
        raise UnreadableLog(f"was read only in part: {left_out[0]}")


def _texts(file: BinaryIO) -> Iterator[bytes]:
    """Yield pieces of text without the zero bytes of sparse files."""
    first = True
    while data := file.read(BLOCK):
        if data.count(0) == len(data):
            _skip_hole(file)
        if first and _is_binary(data[:8192]):
            raise UnreadableLog("is a binary file, not a log")
        first = False
        yield data.translate(None, b"\0") if b"\0" in data else data


_HOLE = re.compile(rb"\0{16,}")


def _is_binary(head: bytes) -> bool:
    if head.startswith(_BINARY_MAGIC):
        return True
    text = _HOLE.sub(b"", head)  # of a log that was truncated while a process wrote to it
    if not text:
        return False
    odd = len(text) - len(
        text.translate(None, bytes(c for c in range(32) if c not in b"\t\n\r\x08\x0b\x0c\x1b") + b"\x7f")
    )
    undecodable = text.decode("utf-8", "replace").count("\ufffd")
    return odd > 0.05 * len(text) or (undecodable > 0.3 * len(text))


def _skip_hole(file: BinaryIO) -> None:
    """Seek to the next data of a sparse file: a hole of any size uses no disk space."""
    if not isinstance(file, io.BufferedReader):
        return
    try:
        file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
    except OSError as error:
        if error.errno == errno.ENXIO:  # no data follows
            file.seek(0, os.SEEK_END)


def _lines(texts: Iterator[bytes], left_out: list[str]) -> Iterator[tuple[bytes, bool]]:
    """Cut text at line ends. The rest of a line above `MAX_LINE_READ` is skipped and reported in `left_out`."""
    rest = b""
    length = 0  # length so far of a line that continues
    for data in texts:
        at = data.rfind(b"\n")
        if at < 0:
            if length >= MAX_LINE_READ:
                if not left_out:
                    left_out.append(f"a line is longer than {MAX_LINE_READ >> 20} MiB; its rest was skipped")
                rest = b""
                continue
            rest += data
            while len(rest) > MAX_LINE:
                yield rest[:MAX_LINE], False
                rest = rest[MAX_LINE:]
                length += MAX_LINE
            continue
        begin = 0
        if length >= MAX_LINE_READ:  # skip the rest of that line
            begin, rest = data.index(b"\n"), b""
        length = 0
        yield rest + data[begin : at + 1], True
        rest = data[at + 1 :]
    if rest:
        yield rest, True
