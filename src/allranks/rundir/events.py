"""Write and read events: one JSON object per line, one file per rank, append-only; also what a user's own program
reports.

An event ``progress`` summarizes the reports by ``allranks.report`` since the one before it: ``step`` and ``loss`` as
given last, ``tokens`` added up, ``reports`` their number, ``last`` the time of the last one. ``source`` is ``report``,
or ``log`` for what the agent has read in the log of rank 0 (`allranks.launch.monitor.log_progress`).
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import RunFailed
from allranks.rundir.files import open_append, replace_non_finite
from allranks.rundir.heartbeat import heartbeat
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_appended, read_lines
from allranks.utils.machine import host_name

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()
FILES_PER_POLL = 16
WARMUP_STEPS = 5
"""The first steps of a run, which figures of speed leave out."""


class EventLog:
    """Write events of one rank. Each line is written to the kernel at once, so that a kill loses none.

    As a context manager, it closes the file at the end; after an error, closing does not raise another one.

    Raises:
        RunFailed: from every method, if the file cannot be written; the message says why.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._rank, self._path = rank, path
        self.listener: Callable[[str, dict[str, Any]], None] | None = None
        with self._explained():
            self._fd = open_append(path)
            # an earlier attempt may have been killed within a line
            self._within_line = bool(os.fstat(self._fd).st_size) and not _ends_with_newline(path)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        with suppress(RunFailed):
            self.close()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``time`` (seconds since the epoch) and ``rank`` are added."""
        record = {"event": event, "time": round(time.time(), 6), "rank": self._rank, **fields}
        self._append(_encoder.encode(replace_non_finite(record)) + b"\n")
        if self.listener is not None:
            self.listener(event, fields)

    def _append(self, line: bytes) -> None:
        """Append a line. After a full disk cut a line, the next one starts on a new line."""
        rest = b"\n" + line if self._within_line else line
        with self._explained():
            while rest:
                written = os.write(self._fd, rest)
                self._within_line = written < len(rest)
                rest = rest[written:]

    def sync(self) -> None:
        """Wait until all events are on disk (before a checkpoint that they lead up to is published)."""
        with self._explained():
            os.fsync(self._fd)

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.sync()
        finally:
            os.close(self._fd)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"{self._path}: events cannot be written: {error.strerror}; free space there or choose another run_root"
            ) from None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Return the events of a file; skip damaged or incomplete lines."""
    return (event for line in _lines(path) if (event := decode_line(line)) is not None)


def read_telemetry(path: Path) -> list[dict[str, Any]]:
    """Return the samples of one host; skip damaged lines."""
    return [row for line in _lines(path) if isinstance(row := _decoded(line), dict) and "time" in row]


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from read_lines(path)
    except OSError:
        return


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Return one line as an event, or None."""
    value = _decoded(line)
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def _decoded(line: bytes) -> Any:
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None


def read_run_events(run: RunDir) -> dict[int, list[dict[str, Any]]]:
    """Return all events of a run by rank, in the order in which they were written."""
    return {rank: list(read_events(path)) for rank, path in run.event_files().items()}


class EventTail:
    """Read what has been added to a run's event files since the last call.

    A call opens at most `FILES_A_LOOK` files for any number of ranks: that of rank 0, and others in turn.
    """

    def __init__(self, run: RunDir, world_size: int) -> None:
        self._run, self._world_size = run, world_size
        self._offsets: dict[int, int] = {}
        self._next = 1

    def skip_existing(self) -> None:
        """Skip existing events, for an attempt that follows earlier ones."""
        for rank in range(self._world_size):
            try:
                self._offsets[rank] = self._run.events_of(rank).stat().st_size
            except OSError:
                continue

    def new(self) -> list[dict[str, Any]]:
        """Return complete new lines of some ranks, ordered by time."""
        others = min(self._world_size, FILES_PER_POLL) - 1
        chosen = [0, *((self._next + i - 1) % (self._world_size - 1) + 1 for i in range(others))]
        self._next += others
        return self._read(chosen)

    def rest(self) -> list[dict[str, Any]]:
        """Return everything not yet returned, of all ranks; for the end of a run."""
        return self._read(range(self._world_size))

    def _read(self, ranks: Iterable[int]) -> list[dict[str, Any]]:
        fresh: list[dict[str, Any]] = []
        for rank in ranks:
            offset = self._offsets.get(rank, 0)
            try:
                data = read_appended(self._run.events_of(rank), offset).data
            except OSError:
                continue
            end = data.rfind(b"\n") + 1
            self._offsets[rank] = offset + end
            fresh += [event for line in data[:end].splitlines() if (event := decode_line(line)) is not None]
        return sorted(fresh, key=lambda event: event.get("time", 0.0))


WRITE_INTERVAL_S = 1.0  # a rank that is killed loses no more; the last report is written when the program ends
WRITTEN_AT_ONCE = 20  # the first reports of a rank: one that is killed soon after its start has reported little else
PROGRESS = "progress"
REPORTED, READ_IN_LOG = "report", "log"
# Texts for the key "how" of the event "data".
CACHE_STATES = {"found": "from the cache", "built": "built now", "waited": "built by another rank"}


class ProgressReporter:
    """Collect the reports of one rank. It does nothing before `open`, and in processes that the rank has forked."""

    def __init__(self) -> None:
        self._log: EventLog | None = None
        self._owner = 0
        self._lock = threading.Lock()
        self._pending: dict[str, Any] = {}
        self._written_at = 0.0
        self._reports = 0
        self._finite = True
        self._by_program = False
        self._warned: set[str] = set()

    def open(self, log: EventLog) -> None:
        """Write reports to this log from now on."""
        self._log, self._owner = log, os.getpid()

    def report(self, step: Any, loss: Any, tokens: Any, *, by_callback: bool = False, **more: Any) -> None:
        """Record one report; see `allranks.report`.

        Args:
            by_callback: made by a callback of this package: only a sign of life, once the program reports itself.
            more: ``eval_loss``, and ``total``, the number of steps.
        """
        if self._log is None or os.getpid() != self._owner:
            return
        heartbeat.beat()
        if by_callback and self._by_program:
            return
        self._by_program = not by_callback
        event = {
            "step": self._checked("step", step, _count),
            "loss": self._checked("loss", loss, float),
            "tokens": self._checked("tokens", tokens, _count),
            "eval_loss": self._checked("eval_loss", more.get("eval_loss"), float),
            "total": self._checked("total", more.get("total"), _count),
        }
        with self._lock:
            now = time.monotonic()
            self._reports += 1
            due = now - self._written_at >= WRITE_INTERVAL_S or self._reports <= WRITTEN_AT_ONCE
            known = {name: value for name, value in event.items() if value is not None}
            if by_callback and "loss" in self._pending and "loss" not in known:
                if not due and "eval_loss" not in known:  # a loss keeps the step at which it was logged
                    return
                self._write()
            if "tokens" in known:
                known["tokens"] += self._pending.get("tokens", 0)
            self._pending |= known
            self._pending["reports"] = self._pending.get("reports", 0) + 1
            self._pending["last"] = round(time.time(), 6)
            if "loss" in known:  # the step of the first loss that is not finite is worth a record of its own
                finite = math.isfinite(known["loss"])
                due, self._finite = due or (self._finite and not finite), finite
            if due:
                self._written_at = now
                self._write()

    def flush(self) -> None:
        """Write what has not been written."""
        if self._log is not None and os.getpid() == self._owner:
            with self._lock:
                self._write()

    def close(self) -> None:
        """Write what has not been written, and ignore later reports."""
        self.flush()
        if os.getpid() == self._owner:
            self._log = None

    def _write(self) -> None:
        if not self._pending or self._log is None:
            return
        try:
            self._log.write(PROGRESS, source=REPORTED, **self._pending)
        except RunFailed as error:  # a full disk; the program continues
            self._warn("events", str(error))
        self._pending = {}

    def _checked(self, name: str, value: Any, convert: Any) -> Any:
        """Return the value as a number; None, after one warning, if it is none. A report never ends a program."""
        if value is None:
            return None
        try:
            return convert(value)
        except Exception as error:  # noqa: BLE001 - a value may be any object, such as a tensor of several elements
            self._warn(name, f"{name}={value!r:.80} is no number and is ignored ({type(error).__name__}: {error})")
            return None

    def _warn(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"allranks.report: {text}", RuntimeWarning, stacklevel=5)


def _count(value: Any) -> int:
    """Return a number that is whole and not negative."""
    number = float(value)
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise ValueError("expected a whole number that is not negative")
    return int(value)


# One per process, as the heartbeat is: the program reports through it from anywhere.
reporter = ProgressReporter()


def open_event_log(run: RunDir, attempt: int, resumed_from: int | None) -> EventLog:
    """Open this rank's event log and write its first event, which says where the rank runs."""
    rank = int(os.environ["RANK"])
    events = EventLog(run.events_of(rank), rank)
    events.write(
        "start",
        host=host_name(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        attempt=attempt,
        pid=os.getpid(),
        world_size=int(os.environ["WORLD_SIZE"]),
        resumed_from=resumed_from,
    )
    return events
