"""Find log files, open and decompress them, and split their lines into prefix, time stamp and text.

A truncated compressed file is read up to the point of damage, because the end of a log is the most informative part.
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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from msgspec import Struct

from allranks.errors import RequestError
from allranks.rundir.paths import RunDir, is_run
from allranks.utils.inputs import BoundedReader, ExpansionTooLarge, open_regular

READ_BYTES = 1 << 14
XZ_MEMORY_BYTES = 512 << 20  # xz -9 needs 65 MiB; a header may ask for 4 GiB
PACKED_MAGIC = {"gz": b"\x1f\x8b", "bz2": b"BZh", "xz": b"\xfd7zXZ\x00"}


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


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": partial(lzma.LZMADecompressor, memlimit=XZ_MEMORY_BYTES),
}


class DecompressedFile(io.RawIOBase):
    """What a gz, bz2 or xz file holds; several streams in a row are one. `read` raises `EOFError` where it breaks off, once all
    that comes before has been given out."""

    def __init__(self, raw: BinaryIO, kind: str) -> None:
        raw.seek(0)
        self._raw, self._kind, self._unpack, self._problem = raw, kind, _DECOMPRESSORS[kind](), ""
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
        if not rest.startswith(PACKED_MAGIC[self._kind]):
            return False
        self._unpack, self._next = _DECOMPRESSORS[self._kind](), rest
        return True


ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
MAX_LINE_TEXT = 600

_RANK = re.compile(r"^\s*\[(?P<kind>rank|default)\s?(?P<rank>\d{1,7})\]:?\s?", re.IGNORECASE)
_TASK = re.compile(r"^\s*(?P<task>\d{1,6}): (?=\S|\s)")
_RAY = re.compile(r"^\s*\((?P<name>[\w.-]+)(?:\[rank=(?P<rank>\d{1,7})\])? pid=\d+(?:, ip=(?P<host>[\w.:-]+))?\) ?")
_NCCL = re.compile(r"^\s*(?P<host>[A-Za-z][\w.-]*):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] ")
_SYSLOG = re.compile(
    r"^(?:<\d+>)?(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r" (?P<host>[A-Za-z][\w.-]*) (?=[\w./-]+(?:\[\d+\])?:)"
)
_HOST = re.compile(r"^(?P<host>[A-Za-z][\w-]*\d[\w.-]*): (?=\S)")
_IN_RANK = re.compile(r"\[(?:PG [^\]]{0,80}?)?\bRank (?P<rank>\d{1,7})\]", re.IGNORECASE)
_ON = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON (?P<host>[\w.-]+) ")
_SRUN = re.compile(r"srun: error: (?P<host>[A-Za-z][\w.-]*): tasks? (?P<task>\d+)")
_ISO = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d)[T _-](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_GLOG = re.compile(r"\b[IWEF](?P<month>\d\d)(?P<date>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d{1,9})")
_EPOCH = re.compile(r'"time": ?(?P<time>\d{10}(?:\.\d+)?)')
_UNIX_DAY = re.compile(
    r"\b(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(?P<date>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d)(?: (?P<year>\d{4}))?"
)
_MONTHS = {
    m: i for i, m in enumerate(["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1)
}


class LogLine(Struct, frozen=True):
    """A line taken apart. ``local`` is a rank within its node only, ``task`` the number that srun --label puts before it."""

    text: str
    rank: int | None
    local: int | None
    task: int | None
    host: str | None
    pid: int | None


def decode_line(raw: bytes) -> str:
    """Text of a line, whatever its bytes; without control characters, at most `MAX_TEXT` long."""
    text = raw.decode("utf-8", "replace")
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return text


def parse_line(text: str, labelled: bool) -> LogLine:
    """Strip the prefixes of srun, torchrun, Ray, syslog and NCCL, and keep what they say."""
    rank = local = task = pid = None
    host: str | None = None
    if labelled and (match := _TASK.match(text)):
        task, text = int(match["task"]), text[match.end() :]
    for _ in range(3):
        if match := _RANK.match(text):
            if match["kind"].lower() == "rank":
                rank = int(match["rank"])
            else:
                local = int(match["rank"])
        elif match := _RAY.match(text):
            host = match["host"] or host
            rank = int(match["rank"]) if match["rank"] else rank
        elif match := _NCCL.match(text):
            host, pid = match["host"], int(match["pid"])
        elif match := _SYSLOG.match(text):
            host = match["host"]
        else:
            break
        text = text[match.end() :]
    if rank is None and (match := _IN_RANK.search(text)):
        rank = int(match["rank"])
    if host is None:
        srun = _SRUN.search(text)
        found = _ON.search(text) or srun or _HOST.match(text)
        host = found["host"] if found else None
        task = int(srun["task"]) if srun and found is srun else task
    return LogLine(text, rank, local, task, host, pid)


def has_task_labels(lines: list[bytes]) -> bool:
    """Whether most lines begin with a task number, as srun --label writes them."""
    filled = [line for line in lines if line.strip()]
    return len(filled) >= 2 and sum(bool(re.match(rb"\s*\d{1,6}: ", line)) for line in filled) > 0.6 * len(filled)


def timestamp_of(text: str) -> float | None:
    """Seconds since the epoch of the first time stamp in a line, or None.

    Stamps without a year are taken to be of 2000, those without a zone of UTC: only their order counts. Times within one
    log family compare; across families without a year they do not (`comparable`).
    """
    if match := _ISO.search(text[:200]):
        zone = (match["zone"] or "").replace("Z", "+00:00")
        return _stamp(f"{match['day']}T{match['clock']}{zone}", match["part"])
    if match := _EPOCH.search(text[:200]):
        return float(match["time"])
    if match := _GLOG.search(text[:200]):
        return _stamp(f"2000-{match['month']}-{match['date']}T{match['clock']}", match["part"])
    if match := _UNIX_DAY.search(text[:60]):
        day = f"{match['year'] or 2000}-{_MONTHS[match['month']]:02d}-{int(match['date']):02d}"
        return _stamp(f"{day}T{match['clock']}", None)
    return None


def _stamp(text: str, part: str | None) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{part}") if part else 0.0)


def times_comparable(a: float, b: float) -> bool:
    """Whether two times may be compared: both with a year, or both without."""
    return (a < YEAR_KNOWN) == (b < YEAR_KNOWN)


def in_year_of(time: float, like: float) -> float:
    """A time without a year (see `time_of`), in the year of another one, or in the year before where that is nearer."""
    moment, other = datetime.fromtimestamp(time, UTC), datetime.fromtimestamp(like, UTC)
    day = min(moment.day, 28) if moment.month == 2 else moment.day
    candidates = [moment.replace(year=year, day=day).timestamp() for year in (other.year, other.year - 1)]
    return min(candidates, key=lambda t: abs(t - like))


YEAR_KNOWN = datetime(2001, 1, 1, tzinfo=UTC).timestamp()


BLOCK = 1 << 20
MAX_LINE = 1 << 18  # a line without end is handed on in pieces of this size
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
    """A file to read; ``name`` is how reports call it."""

    path: Path
    name: str
    size: int


class UnreadableLog(Exception):
    """A file that cannot be read, with the reason in words."""


def find_logs(paths: list[Path]) -> tuple[list[LogFile], list[tuple[str, str]]]:
    """All files under `paths` that may be logs, and (file, reason) of what was left aside.

    Raises `RequestError` where a path is not there.
    """
    found: dict[str, LogFile] = {}
    problems: list[tuple[str, str]] = []
    for path in paths:
        if not _is_there(path, problems):
            continue
        for file in _walk(path, problems):
            _add(file, path, found, problems)
            if len(found) >= MAX_FILES:
                problems.append((printable_path(path), f"more than {MAX_FILES} files; the rest is left out"))
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
        problems.append((printable_path(path), f"cannot be looked at: {error.strerror}"))
        return False
    return True


def _add(file: Path, given: Path, found: dict[str, LogFile], problems: list[tuple[str, str]]) -> None:
    try:
        info = file.stat()
    except OSError as error:
        problems.append((printable_path(file), f"cannot be looked at: {error.strerror}"))
        return
    if not stat.S_ISREG(info.st_mode):
        problems.append((printable_path(file), "is no regular file"))
        return
    real = os.path.realpath(file)
    if real not in found:
        found[real] = LogFile(
            file, printable_path(file if file == given else file.relative_to(given.parent)), info.st_size
        )


def printable_path(path: Path | str) -> str:
    """A path as text that any terminal and JSON can take, whatever bytes its name has."""
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


def read_blocks(source: LogFile) -> Iterator[tuple[bytes, bool]]:
    """The file's text in pieces that end at line ends, each with whether its last line is whole.

    UTF-16 becomes UTF-8. Raises `Unreadable` with the reason; what came before it counts. Of a packed file that expands without
    end, and of a line that is too long, only the beginning is given: `Unreadable` says so after the last piece.
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
        raise UnreadableLog(f"is cut or damaged: {error}; what came before was read") from None
    if left_out:
        raise UnreadableLog(f"was read only in part: {left_out[0]}")


def _open(raw: BinaryIO, head: bytes) -> BinaryIO:
    kind = next((k for magic, k in _MAGIC.items() if head.startswith(magic)), None)
    if kind is None:
        return raw
    unpacked = _open_zstd(raw) if kind == "zst" else cast(BinaryIO, DecompressedFile(raw, kind))
    return cast(BinaryIO, BoundedReader(unpacked, raw))


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
        raise UnreadableLog(
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

    def close(self) -> None:
        """End the program, which may not have written all."""
        if not self.closed and self._process.stdout is not None:
            self._process.kill()
            self._process.stdout.close()
            self._process.wait()
        super().close()


def _texts(file: BinaryIO) -> Iterator[bytes]:
    """Raw pieces as UTF-8, without the zeros of files with holes."""
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
                raise UnreadableLog("is binary, not a log")
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


def _skip_hole(file: BinaryIO) -> None:
    """Go to the next data of a file with holes: a hole of any size takes no room on the disk."""
    if not isinstance(file, io.BufferedReader):
        return
    try:
        file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
    except OSError as error:
        if error.errno == errno.ENXIO:  # the rest is a hole
            file.seek(0, os.SEEK_END)


def _lines(texts: Iterator[bytes], left_out: list[str]) -> Iterator[tuple[bytes, bool]]:
    """Cut text at line ends. Of a line above `MAX_LINE_READ` the rest is skipped, which `left_out` then says."""
    rest = b""
    length = 0  # of a line without end, as far as it was handed on
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
        if length >= MAX_LINE_READ:  # the rest of that line ends here
            begin, rest = data.index(b"\n"), b""
        length = 0
        yield rest + data[begin : at + 1], True
        rest = data[at + 1 :]
    if rest:
        yield rest, True
