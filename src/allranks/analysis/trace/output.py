"""Write the files of a trace analysis: summary.html, summary.csv, collectives.csv, merged.json.gz, comparison.json.

merged.json.gz is one Chrome trace of all ranks on one clock, for Perfetto (ui.perfetto.dev) and chrome://tracing. Ranks
are read one after another in pieces and written at once, so memory use does not grow with their number or size. Only
`ts`, `pid`, `tid` and `id` of an event are rewritten.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from allranks.analysis.trace.chrome_trace import NotATrace, TraceMetadata, TraceStream
from allranks.analysis.trace.diff import Comparison
from allranks.analysis.trace.page import summary_html
from allranks.analysis.trace.records import CollectiveRow, RankReport, TraceReport
from allranks.errors import RequestError
from allranks.utils.filesystem import with_file_name, write_error
from allranks.utils.text import csv_cell, finite_float


def summary_csv(report: TraceReport) -> str:
    """Return a row per rank: its window, breakdown, waits, memory and clock, named as in ``--json``."""
    rows = [_rank_row(report, rank) for rank in report.ranks]
    return _csv_text(rows[0], rows)


def _rank_row(report: TraceReport, rank: RankReport) -> dict[str, Any]:
    late = next((s for s in report.stragglers if s.rank == rank.rank), None)
    phases = {f"{p.phase}_{what}": getattr(p, what) for p in rank.phases for what in ("host_s", "busy_s", "comm_s")}
    row = {
        "rank": rank.rank,
        "run": report.name,
        "window": report.window,
        **{name: value for name, value in structs.asdict(rank).items() if isinstance(value, str | int | float | None)},
        "steps": len(rank.steps),
        **structs.asdict(rank.total),
        "overlap_ratio": rank.total.overlap,
        "collectives_paired": late.pairs if late else None,
        "wait_s": late.wait_s if late else None,
        "came_last": late.last if late else None,
        "caused_wait_s": late.caused_wait_s if late else None,
        **phases,
        "peak_allocated_bytes": max((m.peak_bytes for m in rank.memory), default=None),
    }
    return row if rank.clock_pairs else row | {"clock_offset_s": None}


def collectives_csv(report: TraceReport) -> str:
    """Return a row per kind over all sizes (`size_bucket` is "all"), then the rows by size, named as in ``--json``."""
    rows = []
    for whole in report.collectives:
        rows.append(structs.asdict(whole) | {"size_bucket": "all"})
        rows += [structs.asdict(part) for part in report.sizes if part.kind == whole.kind]
    for row in rows:
        row["distinct_bytes"] = " ".join(map(str, row["distinct_bytes"]))
    return _csv_text(CollectiveRow.__struct_fields__, rows)


def _csv_text(names: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


def write_all(reports: Sequence[TraceReport], out: Path, comparison: Comparison | None = None) -> list[Path]:
    """Write all files of each report; into `out` itself for one report, else into one subfolder each. Return the files.

    Args:
        comparison: also written, as ``comparison.json``.

    Raises the errors of `write_error` if `out` cannot be written.
    """
    written: list[Path] = []
    try:
        for report, folder in zip(reports, _folders(reports, out), strict=True):
            written += _write(report, folder)
        if comparison is not None:
            written.append(out / "comparison.json")
            with with_file_name(written[-1]):
                written[-1].write_text(json.dumps(msgspec.to_builtins(comparison), indent=2) + "\n")
    except OSError as error:
        raise write_error(Path(error.filename or out), error, "--out") from error
    return written


def _write(report: TraceReport, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [
        (folder / "summary.html", summary_html(report)),
        (folder / "summary.csv", summary_csv(report)),
        (folder / "collectives.csv", collectives_csv(report)),
    ]
    for path, text in files:
        with with_file_name(path):
            # file names may not be UTF-8
            path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    merged = folder / "merged.json.gz"
    with with_file_name(merged):
        write_merged(report, merged)
    return [*(path for path, _ in files), merged]


def _folders(reports: Sequence[TraceReport], out: Path) -> list[Path]:
    if len(reports) == 1:
        return [out]
    folders: list[Path] = []
    for report in reports:
        parts = (report.name, f"window-{report.window.split()[0]}" if report.window else "")
        base = "-".join(_UNSAFE_CHARACTERS.sub("-", p).strip(".-") for p in parts if p) or "run"
        name, n = base, 2
        while out / name in folders:
            name, n = f"{base}-{n}", n + 1
        folders.append(out / name)
    return folders


COMPRESSION = 1  # output a third larger than with the best level, but several times faster
PIDS_PER_RANK = 1000  # process ids of rank r are r * 1000, r * 1000 + 1, ...
_PROCESS_METADATA = ("process_name", "process_sort_index")
LAST_SORT_INDEX = 1 << 30  # sort index of entries that are not processes

Event = dict[str, Any]


class _Tail(TraceMetadata):
    events: list[Event] = msgspec.field(name="traceEvents", default_factory=list)


class _WholeEvents(TraceStream):
    """Events with all their fields."""

    decode_list = staticmethod(msgspec.json.Decoder(list[Event]).decode)
    decode_tail = staticmethod(msgspec.json.Decoder(_Tail).decode)

    @staticmethod
    def convert(value: Any) -> tuple[Event | None, bool]:
        return (_finite(value), True) if isinstance(value, dict) and "ph" in value else (None, False)


def _finite(value: Any) -> Any:
    """Return the value with null for numbers that JSON does not have (NaN)."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def write_merged(report: TraceReport, target: Path) -> None:
    """Write the merged trace of a report's ranks, gzip compressed.

    Raises:
        OSError: `target` cannot be written.
        RequestError: a trace can no longer be read.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    # The rank with the latest clock zero keeps its times; those of the others move forward, so that none is negative.
    latest = max(report.ranks, key=lambda r: r.zero_us)
    offsets = [{"rank": r.rank, "file": Path(r.path).name, "clockOffset_s": r.clock_offset_s} for r in report.ranks]
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": latest.base_time_ns,
        "allranksMerged": {"run": report.name, "timesOfRank": latest.rank, "ranks": offsets},
    }
    between = b""
    try:
        with gzip.open(partial, "wb", compresslevel=COMPRESSION) as out:
            # json, not msgspec: file names and texts may not be UTF-8, and are written as escapes
            out.write(json.dumps(head).encode()[:-1] + b',"traceEvents":[\n')
            for index, rank in enumerate(report.ranks):
                for events in _RankWriter(rank, latest.zero_us - rank.zero_us, index, len(report.ranks)).pieces():
                    if events:
                        out.write(between + json.dumps(events).encode()[1:-1])
                        between = b",\n"
            out.write(b"\n]}\n")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class _RankWriter:
    """Rewrite one rank's events."""

    def __init__(self, rank: RankReport, shift_us: float, index: int, count: int) -> None:
        self.rank, self.shift_us, self.index, self.count = rank, shift_us, index, count
        self._pids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._sorts: dict[int, int] = {}
        self._with_events: set[int] = set()

    def pieces(self) -> Iterator[list[Event]]:
        """Yield the rewritten events, some thousand at a time."""
        stream = _WholeEvents(Path(self.rank.path))
        try:
            for piece in stream.pieces():
                yield [e for event in piece if (e := self._event(event)) is not None]  # type: ignore[arg-type]
        except (NotATrace, OSError) as error:
            raise RequestError(f"{self.rank.path} has changed since it was analysed: {error}") from None
        yield list(self._processes(stream.head.host if isinstance(stream.head.host, str) else ""))

    def _event(self, event: Event) -> Event | None:
        """Return the event in the merged trace; None for names of processes, which come from `_processes`."""
        pid = self._pid(event.get("pid", 0))
        if event.get("ph") == "M":
            self._note(pid, event)
            if event.get("name") in _PROCESS_METADATA:
                return None
        else:
            self._with_events.add(pid)
        event["pid"] = pid
        tid = event.get("tid")
        if isinstance(tid, int) and not 0 <= tid < 1 << 32:  # Perfetto's thread ids have 32 bits
            event["tid"] = tid & 0xFFFFFFFF
        if (ts := _time(event.get("ts"))) is not None:
            event["ts"] = round(ts + self.shift_us, 3)
        if "id" in event:  # arrows connect events with the same id
            value = event["id"]
            event["id"] = value * self.count + self.index if isinstance(value, int) else f"{self.rank.rank}.{value}"
        return event

    def _pid(self, value: Any) -> int:
        """Return a number that no other rank has."""
        key = repr(value)
        if key not in self._pids:
            self._pids[key] = pid = self.rank.rank * PIDS_PER_RANK + len(self._pids)
            if isinstance(value, str):  # the profiler's own entries, besides processes and devices
                self._names[pid] = value or "profiler"
                self._sorts[pid] = LAST_SORT_INDEX
        return self._pids[key]

    def _note(self, pid: int, event: Event) -> None:
        args = event.get("args")
        if not isinstance(args, dict):
            return
        if event.get("name") == "process_name" and "name" in args:
            self._names[pid] = str(args["name"])
        if "labels" in args:
            self._labels[pid] = str(args["labels"])
        if isinstance(args.get("sort_index"), int) and event.get("name") == "process_sort_index":
            self._sorts[pid] = args["sort_index"]

    def _processes(self, host: str) -> Iterator[Event]:
        """Yield the names of the processes with events: `rank R host`, then the name in the file."""
        first = f"rank {self.rank.rank} {host}".rstrip()
        ordered = sorted(self._with_events, key=lambda pid: (self._sorts.get(pid, 0), pid))
        for place, pid in enumerate(ordered):
            what = self._labels.get(pid) or self._names.get(pid, "")
            sort_index = self.rank.rank * PIDS_PER_RANK + place
            for name, args in (
                ("process_name", {"name": f"{first}: {what}" if what else first}),
                ("process_sort_index", {"sort_index": sort_index}),
            ):
                yield {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}


def _time(value: Any) -> float | None:
    """Return a time as a number: some versions of the profiler write times as text."""
    try:
        return finite_float(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
