"""Events: one JSON object a line, one file a rank, appended and never rewritten."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import RunFailed
from allranks.rundir import RunDir, finite

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


class EventLog:
    """Writes events of one rank. Each line goes to the kernel at once, so that a kill loses none."""

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rank, self._path = rank, path
        self.listener: Callable[[str, dict[str, Any]], None] | None = None
        if os.fstat(self._fd).st_size and not _ends_with_newline(path):
            os.write(self._fd, b"\n")  # an earlier attempt was killed within a line

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; ``time`` (seconds since the epoch) and ``rank`` are added."""
        record = {"event": event, "time": round(time.time(), 6), "rank": self._rank, **fields}
        try:
            os.write(self._fd, _encoder.encode(finite(record)) + b"\n")
        except OSError as error:
            raise RunFailed(
                f"{self._path}: events cannot be written: {error.strerror}; free space there or choose another run_root"
            ) from None
        if self.listener is not None:
            self.listener(event, fields)

    def sync(self) -> None:
        """Wait until all events are on disk (before a checkpoint that they lead up to is published)."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Flush and close the file."""
        os.fsync(self._fd)
        os.close(self._fd)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a file; damaged or half-written lines are passed over."""
    try:
        with path.open("rb") as file:
            for line in file:
                event = decode_line(line)
                if event is not None:
                    yield event
    except OSError:
        return


def decode_line(line: bytes) -> dict[str, Any] | None:
    """One line as an event, or None."""
    try:
        value = _decoder.decode(line)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def read_run(run: RunDir) -> dict[int, list[dict[str, Any]]]:
    """All events of a run by rank, in the order in which they were written."""
    found = {}
    for path in run.events.glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdigit():
            found[int(number)] = list(read_events(path))
    return dict(sorted(found.items()))


class Tail:
    """Reads what has been added to the event files of a run since the last look."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._offsets: dict[Path, int] = {}

    def skip_existing(self) -> None:
        """Start at the present end: for an attempt that follows earlier ones."""
        for path in self._run.events.glob("rank*.jsonl"):
            self._offsets[path] = path.stat().st_size

    def new(self) -> list[dict[str, Any]]:
        """Whole new lines of all ranks, in order of time."""
        fresh: list[dict[str, Any]] = []
        for path in self._run.events.glob("rank*.jsonl"):
            offset = self._offsets.get(path, 0)
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
            except OSError:
                continue
            end = data.rfind(b"\n") + 1
            self._offsets[path] = offset + end
            fresh += [event for line in data[:end].splitlines() if (event := decode_line(line)) is not None]
        return sorted(fresh, key=lambda event: event.get("time", 0.0))
