"""Write and read events: one JSON object per line, one file per rank, append-only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import RunFailed
from allranks.rundir.files import open_append, replace_non_finite
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_appended, read_lines

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
    try:
        for line in read_lines(path):
            event = decode_line(line)
            if event is not None:
                yield event
    except OSError:
        return


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Return one line as an event, or None."""
    try:
        value = _decoder.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def read_run_events(run: RunDir) -> dict[int, list[dict[str, Any]]]:
    """Return all events of a run by rank, in the order in which they were written."""
    found = {}
    for path in run.events.glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdigit():
            found[int(number)] = list(read_events(path))
    return dict(sorted(found.items()))


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


def read_telemetry(path: Path) -> list[dict[str, Any]]:
    """Return the samples of one host; skip damaged lines."""
    rows = []
    try:
        for line in read_lines(path):
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError):
                continue
            if isinstance(row, dict) and "time" in row:
                rows.append(row)
    except OSError:
        pass
    return rows
