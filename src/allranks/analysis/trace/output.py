"""Write the files of a trace analysis: summary.html, summary.csv, collectives.csv, merged.json.gz, comparison.json.

`summary.csv` has a row per rank, `collectives.csv` a row per kind and size. Column names contain the unit; an empty cell means
that the traces do not contain the value.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks.analysis.trace.diff import Comparison
from allranks.analysis.trace.merge import write_merged
from allranks.analysis.trace.page import summary_html
from allranks.analysis.trace.records import CollectiveRow, RankReport, TraceReport
from allranks.utils.filesystem import with_file_name, write_error
from allranks.utils.text import csv_cell

Row = Mapping[str, Any]


def summary_csv(report: TraceReport) -> str:
    """Return a row per rank: its window, breakdown, waits, memory and clock."""
    return _text([_rank_row(report, rank) for rank in report.ranks])


def collectives_csv(report: TraceReport) -> str:
    """Return a row per kind over all sizes (`size_bucket` is "all"), then the rows by size."""
    rows: list[Row] = []
    for whole in report.collectives:
        rows += [_collective_row(whole), *(_collective_row(part) for part in report.sizes if part.kind == whole.kind)]
    return _text(rows, _collective_row(_NO_ROW))


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


_NO_ROW = CollectiveRow(
    kind="", group_size=None, size_bucket=None, count=0, bytes=None, distinct_bytes=(), n_distinct=0, total_s=0, transfer_s=None, wait_s=None, mean_s=0,
    max_s=0, algbw_bytes_s=None, busbw_bytes_s=None,
)  # fmt: skip


def _collective_row(row: CollectiveRow) -> Row:
    return {
        "kind": row.kind,
        "size_bucket": row.size_bucket or "all",
        "group_size": row.group_size,
        "count": row.count,
        "bytes": row.bytes,
        "smallest_bytes": row.distinct_bytes[0] if row.distinct_bytes else None,
        "largest_bytes": row.distinct_bytes[-1] if row.distinct_bytes else None,
        "total_s": row.total_s,
        "transfer_s": row.transfer_s,
        "wait_s": row.wait_s,
        "mean_s": row.mean_s,
        "max_s": row.max_s,
        "algbw_bytes_per_s": row.algbw_bytes_s,
        "busbw_bytes_per_s": row.busbw_bytes_s,
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
            path.write_text(
                text, encoding="utf-8", errors="backslashreplace", newline=""
            )  # file names may not be UTF-8
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
