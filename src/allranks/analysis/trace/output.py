"""Write the files of a trace analysis: summary.html, summary.csv, collectives.csv, merged.json.gz, comparison.json.

merged.json.gz is one Chrome trace of all ranks on one clock, for Perfetto (ui.perfetto.dev) and chrome://tracing. Ranks
are read one after another in pieces and written at once, so memory use does not grow with their number or size. Only
`ts`, `pid` and `id` of an event are rewritten; everything else is copied unchanged.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Raw

from allranks.analysis.trace.chrome_trace import NotATrace, TraceMetadata, TraceStream
from allranks.analysis.trace.diff import Comparison
from allranks.analysis.trace.page import summary_html
from allranks.analysis.trace.records import CollectiveRow, RankReport, Record, TraceReport
from allranks.utils.filesystem import with_file_name, write_error
from allranks.utils.text import csv_cell

Row = Mapping[str, Any]


def summary_csv(report: TraceReport) -> str:
    """Return a row per rank: its window, breakdown, waits, memory and clock."""
    return _text([_rank_row(report, rank) for rank in report.ranks])


def collectives_csv(report: TraceReport) -> str:
    """Return a row per kind over all sizes (`size_bucket` is "all"), then the rows by size."""
    rows: list[CollectiveRow] = []
    for whole in report.collectives:
        rows += [whole, *(part for part in report.sizes if part.kind == whole.kind)]
    return _text([{name: value(row) for name, value in _COLLECTIVE.items()} for row in rows], _COLLECTIVE)


def _rank_row(report: TraceReport, rank: RankReport) -> Row:
    b = rank.total
    straggler = next((s for s in report.stragglers if s.rank == rank.rank), None)
    phases = {f"{p.phase}_{what}": getattr(p, what) for p in rank.phases for what in ("host_s", "busy_s", "comm_s")}
    return {
        "rank": rank.rank,
        "run": report.name,
        "window": report.window,
        "file": rank.path,
        "file_bytes": rank.file_bytes,
        "whole": rank.whole,
        "events": rank.n_events,
        "device": rank.device,
        "device_name": rank.device_name,
        "backend": rank.backend,
        "world_size": rank.world_size,
        "start_s": rank.start_s,
        "end_s": rank.end_s,
        "steps": len(rank.steps),
        "span_s": b.span_s,
        "compute_s": b.compute_s,
        "exposed_comm_s": b.exposed_comm_s,
        "copy_s": b.copy_s,
        "idle_s": b.idle_s,
        "comm_s": b.comm_s,
        "overlapped_comm_s": b.overlapped_comm_s,
        "overlap_ratio": b.overlap,
        "copy_total_s": b.copy_total_s,
        "collectives_paired": straggler.pairs if straggler else None,
        "wait_s": straggler.wait_s if straggler else None,
        "came_last": straggler.last if straggler else None,
        "caused_wait_s": straggler.caused_wait_s if straggler else None,
        **phases,
        "peak_allocated_bytes": max((m.peak_bytes for m in rank.memory), default=None),
        "clock_offset_s": rank.clock_offset_s if rank.clock_pairs else None,
        "clock_spread_s": rank.clock_spread_s,
        "clock_pairs": rank.clock_pairs,
    }


_COLLECTIVE: dict[str, Callable[[CollectiveRow], Any]] = {
    "kind": lambda r: r.kind,
    "size_bucket": lambda r: r.size_bucket or "all",
    "group_size": lambda r: r.group_size,
    "count": lambda r: r.count,
    "bytes": lambda r: r.bytes,
    "smallest_bytes": lambda r: r.distinct_bytes[0] if r.distinct_bytes else None,
    "largest_bytes": lambda r: r.distinct_bytes[-1] if r.distinct_bytes else None,
    "total_s": lambda r: r.total_s,
    "transfer_s": lambda r: r.transfer_s,
    "wait_s": lambda r: r.wait_s,
    "mean_s": lambda r: r.mean_s,
    "max_s": lambda r: r.max_s,
    "algbw_bytes_per_s": lambda r: r.algbw_bytes_s,
    "busbw_bytes_per_s": lambda r: r.busbw_bytes_s,
}


def _text(rows: Sequence[Row], head: Iterable[str] | None = None) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(rows[0] if rows else head or ())
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Return seconds to a tenth of a nanosecond; texts as from `text_cell`."""
    if isinstance(value, float):
        return f"{value:.10f}".rstrip("0").rstrip(".") if abs(value) < 1e6 else f"{value:.0f}"
    return csv_cell(value)


_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write ``comparison.json`` into a folder, which is created if needed. Raises the errors of `cannot_write`."""
    path = out / "comparison.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(msgspec.to_builtins(comparison), indent=2) + "\n")
    except OSError as error:
        raise write_error(path, error, "--out") from error
    return path


def write_all(reports: Sequence[TraceReport], out: Path) -> list[Path]:
    """Write all files of each report; into `out` itself for one report, else into one subfolder each. Return the files.

    Raises the errors of `cannot_write` if `out` cannot be written.
    """
    written: list[Path] = []
    for report, folder in zip(reports, _folders(reports, out), strict=True):
        try:
            written += _write(report, folder)
        except OSError as error:
            raise write_error(Path(error.filename or folder), error, "--out") from error
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
        return [*(path for path, _ in files), write_merged(report, merged).path]


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
