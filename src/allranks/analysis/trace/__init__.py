"""Analyse PyTorch profiler traces; uses only the standard library and msgspec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import structs

from allranks.analysis.trace.aggregation import build_report
from allranks.analysis.trace.files import find_trace_sets
from allranks.analysis.trace.rank import Result, UnreadableTrace, read_all
from allranks.analysis.trace.records import Problem, TraceReport
from allranks.errors import RequestError
from allranks.utils.machine import usable_cpus

SMALL_BYTES = 1 << 22  # for fewer bytes, starting a process takes longer than reading them


def analyse(
    paths: Sequence[Path], *, select: Literal["latest", "all"] = "latest", workers: int | None = None
) -> list[TraceReport]:
    """Return the reports of the traces under `paths`, one for each run and window, oldest first.

    Args:
        paths: files or folders.
        select: only the newest window of each rank, or all windows.
        workers: processes that read ranks in parallel; None uses the number of cores.

    Raises:
        RequestError: no file of `paths` could be read as a trace.
    """
    sets, problems = find_trace_sets([Path(p) for p in paths], select)
    files = [path for trace_set in sets for path in trace_set.files.values()]
    results = read_traces(files, workers)
    reports = []
    unread: list[UnreadableTrace] = []
    for trace_set in sets:
        mine = [(rank, results[path]) for rank, path in trace_set.files.items()]
        report = build_report(trace_set, mine)
        if report is not None:
            reports.append(report)
        unread += [r for _, r in mine if isinstance(r, UnreadableTrace) and report is None]
    if not reports:
        raise RequestError(_none_read(paths, unread))
    problems += [Problem("warning", u.kind, u.message, u.path) for u in unread]
    # problems that belong to no report: files that could not be read as traces of another run
    return [structs.replace(reports[0], problems=(*reports[0].problems, *problems)), *reports[1:]]


def read_traces(files: Sequence[Path], workers: int | None = None) -> dict[Path, Result]:
    """Read and analyse all files, largest first, so that the processes end at about the same time.

    `workers`: as for `analyse`; a few small files are read in this process.
    """
    queue = sorted(set(files), key=_size, reverse=True)
    count = min(workers if workers is not None else usable_cpus(), len(queue))
    return read_all(queue, count if sum(_size(f) for f in queue) >= SMALL_BYTES else 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _none_read(paths: Sequence[Path], unread: list[UnreadableTrace]) -> str:
    where = ", ".join(str(p) for p in paths)
    lines = [f"{u.path} {u.message}" for u in unread[:5]]
    more = f" (and {len(unread) - 5} more)" if len(unread) > 5 else ""
    return f"no profiler trace could be read under {where}: {'; '.join(lines)}{more}"
