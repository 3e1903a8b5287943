"""Write one Chrome trace of all ranks on one clock, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Ranks are read one after another in pieces and written at once, so memory use does not grow with their number or size.
Only `ts`, `pid` and `id` of an event are rewritten; everything else is copied unchanged.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Raw

from allranks.analysis.trace.chrome_trace import NotATrace, TraceMetadata, TraceStream
from allranks.analysis.trace.records import RankReport, Record, TraceReport

COMPRESSION = 1  # output a third larger than with the best level, but several times faster
PIDS_PER_RANK = 1000  # process ids of rank r are r * 1000, r * 1000 + 1, ...
_PROCESS_METADATA = (b'"process_name"', b'"process_sort_index"')
LAST_SORT_INDEX = 1 << 30  # sort index of entries that are not processes
_NONE = Raw(b"0")

RawEvent = dict[str, Raw]


class _RawTail(TraceMetadata):
    events: list[RawEvent] = msgspec.field(name="traceEvents", default_factory=list)


_LIST = msgspec.json.Decoder(list[RawEvent])
_TAIL = msgspec.json.Decoder(_RawTail)


class Merged(Record, frozen=True):
    """The result of writing."""

    path: Path
    ranks: tuple[int, ...]
    n_events: int  # events of the ranks, without the process names that this module adds
    left_out: tuple[str, ...]  # files that could no longer be read, each with the reason


class _RawStream(TraceStream):
    """Events as undecoded fields. Text that is not UTF-8 uses the tolerant parser of the base class."""

    @staticmethod
    def decode_list(text: bytes) -> list[RawEvent]:  # type: ignore[override]
        text.decode()
        return _LIST.decode(text)

    @staticmethod
    def decode_tail(text: bytes) -> _RawTail:  # type: ignore[override]
        text.decode()
        return _TAIL.decode(text)

    @staticmethod
    def convert(value: Any) -> tuple[RawEvent | None, bool]:
        if not isinstance(value, dict) or "ph" not in value:
            return None, False
        # numbers that JSON does not support (NaN) become null; unpaired surrogates stay escaped
        return {str(k): Raw(json.dumps(_finite(v)).encode()) for k, v in value.items()}, True


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def write_merged(report: TraceReport, target: Path) -> Merged:
    """Write the merged trace of a report's ranks, gzip compressed. Raises `OSError` if `target` cannot be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    # The rank with the latest clock zero keeps its times; those of the others move forward, so that none is negative.
    latest = max(report.ranks, key=lambda r: r.zero_us)
    ranks, left_out, events, between = [], [], 0, b""
    try:
        with gzip.open(partial, "wb", compresslevel=COMPRESSION) as out:
            out.write(_merged_header(report, latest))
            for index, rank in enumerate(report.ranks):
                writer = _RankWriter(rank, latest.zero_us - rank.zero_us, index, len(report.ranks))
                try:
                    for text in writer.pieces():
                        out.write(between + text)
                        between = b",\n"
                    ranks.append(rank.rank)
                except NotATrace as error:
                    left_out.append(f"{rank.path}: {error}")
                except OSError as error:
                    if error.filename != rank.path:
                        raise
                    left_out.append(f"{rank.path}: {error.strerror}")
                events += writer.n_events
            out.write(b"\n]}\n")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return Merged(path=target, ranks=tuple(ranks), n_events=events, left_out=tuple(left_out))


def _merged_header(report: TraceReport, reference: RankReport) -> bytes:
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": reference.base_time_ns,
        "allranksMerged": {
            "run": report.name,
            "window": report.window,
            "timesOfRank": reference.rank,
            "ranks": [
                {
                    "rank": r.rank,
                    "file": Path(r.path).name,
                    "clockOffset_s": r.clock_offset_s,
                    "clockPairs": r.clock_pairs,
                    "clockSpread_s": r.clock_spread_s,
                }
                for r in report.ranks
            ],
        },
    }
    # json, not msgspec: file names may not be UTF-8, and are written as escapes
    return json.dumps(head).encode()[:-1] + b',"traceEvents":[\n'


class _RankWriter:
    """Rewrite one rank's events."""

    def __init__(self, rank: RankReport, shift_us: float, index: int, count: int) -> None:
        self.rank, self.shift_us, self.index, self.count = rank, shift_us, index, count
        self.n_events = 0
        self._pids: dict[bytes, int] = {}
        self._tids: dict[bytes, int | None] = {}
        self._names: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._sorts: dict[int, int] = {}
        self._with_events: set[int] = set()

    def pieces(self) -> Iterator[bytes]:
        """Yield the text of events, with commas between them."""
        stream = _RawStream(Path(self.rank.path))
        for piece in cast("Iterator[list[RawEvent]]", stream.pieces()):
            kept = [e for event in piece if (e := self._event(event)) is not None]
            self.n_events += len(kept)
            if kept:
                yield msgspec.json.encode(kept)[1:-1]
        host = stream.head.host if isinstance(stream.head.host, str) else ""
        names = list(self._processes(host))
        if names:
            yield msgspec.json.encode(names)[1:-1]

    def _event(self, event: RawEvent) -> RawEvent | dict[str, Any] | None:
        """Return the event in the merged trace; None for names of processes, which come from `_processes`."""
        pid = self._pid(bytes(event.get("pid", _NONE)))
        if bytes(event.get("ph", _NONE)) == b'"M"':
            name = bytes(event.get("name", _NONE))
            if name in _PROCESS_METADATA or name == b'"process_labels"':
                self._note(pid, event)
            if name in _PROCESS_METADATA:
                return None
        else:
            self._with_events.add(pid)
        out: dict[str, Any] = {**event, "pid": pid}
        tid = self._tid(bytes(event.get("tid", _NONE)))
        if tid is not None:
            out["tid"] = tid
        if "ts" in event:
            ts = _number(event["ts"])
            if ts is not None:
                out["ts"] = round(ts + self.shift_us, 3)
        if "id" in event:
            out["id"] = self._id(event["id"])
        return out

    def _pid(self, text: bytes) -> int:
        """Return a number that no other rank has."""
        found = self._pids.get(text)
        if found is None:
            found = self._pids[text] = self.rank.rank * PIDS_PER_RANK + len(self._pids)
            if text[:1] == b'"':  # the profiler's own entries, besides processes and devices
                self._names[found] = msgspec.json.decode(text) or "profiler"
                self._sorts[found] = LAST_SORT_INDEX
        return found

    def _tid(self, text: bytes) -> int | None:
        """Return a number for a thread ID that Perfetto would confuse (it uses 32-bit numbers); None to keep it."""
        if text not in self._tids:
            number = _number(Raw(text)) if text[:1] != b'"' else None
            odd = number is not None and not 0 <= number < 1 << 32
            self._tids[text] = int(number) & 0xFFFFFFFF if odd and abs(number) < 1e18 else None  # type: ignore[arg-type,operator]
        return self._tids[text]

    def _id(self, raw: Raw) -> int | str:
        """Return an `id` that is unique across ranks: arrows connect events with the same `id`."""
        value = msgspec.json.decode(raw)
        if isinstance(value, int):
            return value * self.count + self.index
        return f"{self.rank.rank}.{value}"

    def _note(self, pid: int, event: RawEvent) -> None:
        args = msgspec.json.decode(event.get("args", Raw(b"{}")))
        if not isinstance(args, dict):
            return
        if "name" in args:
            self._names[pid] = str(args["name"])
        if "labels" in args:
            self._labels[pid] = str(args["labels"])
        if isinstance(args.get("sort_index"), int):
            self._sorts[pid] = args["sort_index"]

    def _processes(self, host: str) -> Iterator[dict[str, Any]]:
        """Yield the names of the processes with events: `rank R host`, then the name in the file."""
        first = f"rank {self.rank.rank} {host}".rstrip()
        ordered = sorted(self._with_events, key=lambda pid: (self._sorts.get(pid, 0), pid))
        for place, pid in enumerate(ordered):
            what = self._labels.get(pid) or self._names.get(pid, "")
            yield _metadata(pid, "process_name", {"name": f"{first}: {what}" if what else first})
            yield _metadata(pid, "process_sort_index", {"sort_index": self.rank.rank * PIDS_PER_RANK + place})


def _metadata(pid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}


def _number(raw: Raw) -> float | None:
    """Parse a number: some versions of the profiler write times as text."""
    try:
        return float(bytes(raw).strip(b'"'))
    except ValueError:
        return None
