"""Find log files, open and decompress them, and read them in blocks of lines.

A truncated compressed file is read up to the damaged position.
"""

from __future__ import annotations

import bz2
import codecs
import errno
import io
import lzma
import os
import re
import shutil
import stat
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from msgspec import Struct

from allranks.errors import RequestError
from allranks.rundir.paths import RunDir, is_run
from allranks.utils.inputs import BoundedReader, ExpansionTooLarge, open_regular

READ_BYTES = 1 << 14
XZ_MEMORY_BYTES = 512 << 20  # xz -9 needs 65 MiB; a header may request 4 GiB
PACKED_MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}


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
        magic, rest = PACKED_MAGIC[self._kind], self._unpack.unused_data.lstrip(b"\0")
        while len(rest) < len(magic) and (more := self._raw.read(READ_BYTES)):  # a stream may end where a read ends
            rest = (rest + more).lstrip(b"\0")
        if not rest.startswith(magic):
            return False
        self._unpack, self._next = _DECOMPRESSORS[self._kind](), rest
        return True


BLOCK = 1 << 20
MAX_LINE = 1 << 18  # a longer line is passed on in pieces of this size
MAX_LINE_READ = 16 << 20
MAX_FILES = 20_000
_SKIPPED_FOLDERS = frozenset(
    {
        "checkpoints",
        "model",
        "traces",
        "tensorboard",
        "wandb",
        "__pycache__",
        ".git",
        "node_modules",
        ".venv",
        "site-packages",
    }
)
_NO_LOGS = frozenset(
    [
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".npy",
        ".npz",
        ".arrow",
        ".parquet",
        ".html",
        ".png",
        ".jpg",
        ".svg",
        ".pdf",
        ".so",
        ".pyc",
        ".py",
        ".onnx",
        ".tar",
        ".zip",
        ".whl",
        ".model",
        ".yaml",
        ".yml",
        ".toml",
        ".sh",
        ".sbatch",
        ".md",
    ]
)
_MAGIC = {magic: kind for kind, magic in PACKED_MAGIC.items()} | {b"\x28\xb5\x2f\xfd": "zst"}
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
    found: dict[str, LogFile] = {}
    problems: list[tuple[str, str]] = []
    for path in paths:
        if not _is_there(path, problems):
            continue
        for file in _walk(path, problems):
            _add(file, path, found, problems)
            if len(found) >= MAX_FILES:
                problems.append((printable_path(path), f"more than {MAX_FILES} files; the others were not read"))
                return list(found.values()), problems
    return list(found.values()), problems


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


def _add(file: Path, given: Path, found: dict[str, LogFile], problems: list[tuple[str, str]]) -> None:
    try:
        info = file.stat()
    except OSError as error:
        problems.append((printable_path(file), f"cannot be accessed: {error.strerror}"))
        return
    if not stat.S_ISREG(info.st_mode):
        problems.append((printable_path(file), "is not a regular file"))
        return
    real = os.path.realpath(file)
    if real not in found:
        found[real] = LogFile(
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
    if is_run(path) and (path / "plan.json").is_file():
        yield from _logs_of_run(RunDir(path))
        return
    for folder, folders, files in os.walk(
        path, onerror=lambda e: problems.append((printable_path(e.filename), f"cannot be listed: {e.strerror}"))
    ):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not Path(folder, f).is_symlink())
        if "plan.json" in files and "spec.yaml" in files:
            folders.clear()
            yield from _logs_of_run(RunDir(Path(folder)))
            continue
        for name in sorted(files):
            if Path(name).suffix.lower() not in _NO_LOGS:
                yield Path(folder, name)


def _logs_of_run(run: RunDir) -> Iterator[Path]:
    """Return the logs of a run's newest attempt: ranks, agents, driver, exit records and events."""
    last = run.logs_of(max(run.attempts(), default=1))
    for folder, forms in (
        (last, ("*.log", "*.exit.json")),
        (run.logs, ("*.log", "driver.json")),
        (run.events, ("*.jsonl",)),
        (run.hang(max(run.attempts(), default=1)), ("*.stack.log", "flight.rank*", "watchdog.rank*")),
    ):
        for form in forms:
            yield from sorted(folder.glob(form))


def read_blocks(source: LogFile) -> Iterator[tuple[bytes, bool]]:
    """Yield the file's text in pieces that end at line ends, each with whether its last line is complete.

    UTF-16 is converted to UTF-8. Raises `UnreadableLog` with the reason; text before it was yielded. Of a compressed file that
    expands without limit, and of a line that is too long, only the beginning is read; `UnreadableLog` is then raised at the end.
    """
    left_out: list[str] = []
    try:
        with open_regular(source.path) as raw:
            head = raw.read(8192)
            raw.seek(0)
            with closing(_open(raw, head)) as file:
                yield from _lines(_texts(file), left_out)
    except ExpansionTooLarge as error:
        raise UnreadableLog(f"was read only in part: {error}") from None
    except OSError as error:
        raise UnreadableLog(f"cannot be read: {error.strerror or error}") from None
    except EOFError as error:
        raise UnreadableLog(f"is truncated or damaged: {error}; the part before was read") from None
    if left_out:
        raise UnreadableLog(f"was read only in part: {left_out[0]}")


def _open(raw: BinaryIO, head: bytes) -> BinaryIO:
    kind = next((k for magic, k in _MAGIC.items() if head.startswith(magic)), None)
    if kind is None:
        return raw
    unpacked = _open_zstd(raw) if kind == "zst" else cast(BinaryIO, DecompressedFile(raw, kind))
    return cast(BinaryIO, BoundedReader(unpacked, raw))


def _open_zstd(raw: BinaryIO) -> BinaryIO:
    """Open with Python's own module (3.14), the package zstandard, or the program zstd, whichever is available."""
    try:
        from compression import zstd  # type: ignore[import-not-found]

        return zstd.ZstdFile(raw)
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found]

        return zstandard.ZstdDecompressor().stream_reader(raw)
    except ImportError:
        pass
    if shutil.which("zstd") is None:
        raise UnreadableLog(
            "is compressed with zstd, but neither the package zstandard nor the program zstd is installed; decompress it first"
        )
    return cast(BinaryIO, _Unpacker(raw))


class _Unpacker(io.RawIOBase):
    """The output of ``zstd -dc``."""

    def __init__(self, raw: BinaryIO) -> None:
        raw.seek(0)
        self._process = subprocess.Popen(["zstd", "-dcq"], stdin=raw, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if not data and self._process.wait() != 0:
            raise EOFError("zstd reports that the file is damaged")
        return data

    def close(self) -> None:
        """End the program, which may still have output."""
        if not self.closed and self._process.stdout is not None:
            self._process.kill()
            self._process.stdout.close()
            self._process.wait()
        super().close()


def _texts(file: BinaryIO) -> Iterator[bytes]:
    """Yield raw pieces as UTF-8, without the zero bytes of sparse files."""
    first = True
    wide: str | None = None
    decoder: codecs.IncrementalDecoder | None = None
    while data := file.read(BLOCK):
        if data.count(0) == len(data):
            _skip_hole(file)
        if first:
            first = False
            wide = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(data[:2])
            if wide is None and _is_binary(data[:8192]):
                raise UnreadableLog("is a binary file, not a log")
        if wide is not None:
            decoder = decoder or codecs.getincrementaldecoder(wide)("replace")
            data = decoder.decode(data).removeprefix("\ufeff").encode()
        elif b"\0" in data:
            data = data.translate(None, b"\0")
        yield data


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
