"""Which files belong to a diagnosis, and their bytes: packed or not, whole or cut, text or not."""

from __future__ import annotations

import codecs
import io
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from msgspec import Struct

from allranks.diagnose.packed import MAGIC, Packed
from allranks.errors import RequestError
from allranks.rundir import RunDir, is_run

BLOCK = 1 << 20
MAX_LINE = 1 << 18  # a line without end is handed on in pieces of this size
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
_MAGIC = {magic: kind for kind, magic in MAGIC.items()} | {b"\x28\xb5\x2f\xfd": "zst"}
_BINARY_MAGIC = (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"%PDF", b"ARROW1", b"PAR1", b"\x93NUMPY")


class Source(Struct, frozen=True):
    """A file to read; ``name`` is how reports call it."""

    path: Path
    name: str
    size: int


class Unreadable(Exception):
    """A file that cannot be read, with the reason in words."""


def find(paths: list[Path]) -> tuple[list[Source], list[tuple[str, str]]]:
    """All files under `paths` that may be logs, and (file, reason) of what was left aside.

    Raises `RequestError` where a path is not there.
    """
    found: dict[str, Source] = {}
    problems: list[tuple[str, str]] = []
    for path in paths:
        if not _is_there(path, problems):
            continue
        for file in _walk(path, problems):
            _add(file, path, found, problems)
            if len(found) >= MAX_FILES:
                problems.append((printable(path), f"more than {MAX_FILES} files; the rest is left out"))
                return list(found.values()), problems
    return list(found.values()), problems


def _is_there(path: Path, problems: list[tuple[str, str]]) -> bool:
    """False for what lies in a folder that may not be entered: others are read all the same."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{path}: there is no such file or folder; give log files, folders of them, or a run folder"
        ) from None
    except OSError as error:
        problems.append((printable(path), f"cannot be looked at: {error.strerror}"))
        return False
    return True


def _add(file: Path, given: Path, found: dict[str, Source], problems: list[tuple[str, str]]) -> None:
    try:
        info = file.stat()
    except OSError as error:
        problems.append((printable(file), f"cannot be looked at: {error.strerror}"))
        return
    if not stat.S_ISREG(info.st_mode):
        problems.append((printable(file), "is no regular file"))
        return
    real = os.path.realpath(file)
    if real not in found:
        found[real] = Source(file, printable(file if file == given else file.relative_to(given.parent)), info.st_size)


def printable(path: Path | str) -> str:
    """A path as text that any terminal and JSON can take, whatever bytes its name has."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _walk(path: Path, problems: list[tuple[str, str]]) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    if is_run(path) and (path / "plan.json").is_file():
        yield from _of_run(RunDir(path))
        return
    for folder, folders, files in os.walk(
        path, onerror=lambda e: problems.append((printable(e.filename), f"cannot be listed: {e.strerror}"))
    ):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED_FOLDERS and not Path(folder, f).is_symlink())
        if "plan.json" in files and "spec.yaml" in files:
            folders.clear()
            yield from _of_run(RunDir(Path(folder)))
            continue
        for name in sorted(files):
            if Path(name).suffix.lower() not in _NO_LOGS:
                yield Path(folder, name)


def _of_run(run: RunDir) -> Iterator[Path]:
    """The words of a run's newest attempt: its ranks', agents' and driver's logs, how they ended, and the events."""
    last = run.logs_of(max(run.attempts(), default=1))
    for folder, forms in (
        (last, ("*.log", "*.exit.json")),
        (run.logs, ("*.log", "driver.json")),
        (run.events, ("*.jsonl",)),
        (run.hang(max(run.attempts(), default=1)), ("*.stack.log", "flight.rank*", "watchdog.rank*")),
    ):
        for form in forms:
            yield from sorted(folder.glob(form))


def blocks(source: Source) -> Iterator[tuple[bytes, bool]]:
    """The file's text in pieces that end at line ends, each with whether its last line is whole.

    UTF-16 becomes UTF-8. Raises `Unreadable` with the reason; what came before it counts.
    """
    try:
        with source.path.open("rb") as raw:
            head = raw.read(8192)
            raw.seek(0)
            yield from _lines(_texts(_open(raw, head)))
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from None
    except EOFError as error:
        raise Unreadable(f"is cut or damaged: {error}; what came before was read") from None


def _open(raw: BinaryIO, head: bytes) -> BinaryIO:
    kind = next((k for magic, k in _MAGIC.items() if head.startswith(magic)), None)
    if kind == "zst":
        return _open_zstd(raw)
    return raw if kind is None else cast(BinaryIO, Packed(raw, kind))


def _open_zstd(raw: BinaryIO) -> BinaryIO:
    """Through Python's own module (3.14), the package zstandard, or the program zstd, whichever is there."""
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
        raise Unreadable(
            "is packed with zstd, and neither the package zstandard nor the program zstd is here; unpack it first"
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
            raise EOFError("zstd says that the file is damaged")
        return data


def _texts(file: BinaryIO) -> Iterator[bytes]:
    """Raw pieces as UTF-8, without the zeros of files with holes."""
    first = True
    wide: str | None = None
    decoder: codecs.IncrementalDecoder | None = None
    while data := file.read(BLOCK):
        if first:
            first = False
            wide = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(data[:2])
            if wide is None and _is_binary(data[:8192]):
                raise Unreadable("is binary, not a log")
        if wide is not None:
            decoder = decoder or codecs.getincrementaldecoder(wide)("replace")
            data = decoder.decode(data).removeprefix("\ufeff").encode()
        elif b"\0" in data:
            data = data.translate(None, b"\0")
        yield data


def _is_binary(head: bytes) -> bool:
    if head.startswith(_BINARY_MAGIC):
        return True
    text = head.replace(b"\0", b"") if head.count(0) > len(head) // 2 else head  # a hole at the start of a log
    if not text:
        return False
    odd = len(text) - len(
        text.translate(None, bytes(c for c in range(32) if c not in b"\t\n\r\x08\x0b\x0c\x1b") + b"\x7f")
    )
    undecodable = text.decode("utf-8", "replace").count("\ufffd")
    return odd > 0.05 * len(text) or (undecodable > 0.3 * len(text))


def _lines(texts: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    rest = b""
    for data in texts:
        at = data.rfind(b"\n")
        if at < 0:
            rest += data
            while len(rest) > MAX_LINE:
                yield rest[:MAX_LINE], False
                rest = rest[MAX_LINE:]
            continue
        yield rest + data[: at + 1], True
        rest = data[at + 1 :]
    if rest:
        yield rest, True
