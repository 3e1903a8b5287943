"""Compare two runs: all metrics, per rank and step, with ratios.

`a` is the requested run, `b` the baseline; a ratio is a / b, so a value below 1 means less time than in the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import field, structs

from allranks.analysis.trace.records import PHASES, Breakdown, Record, TopRow, TraceReport

Unit = Literal["s", "bytes", "bytes/s", "share", "count"]
MAX_CHANGED_ROWS = 15
_PARTS = ("span_s", "compute_s", "exposed_comm_s", "copy_s", "idle_s", "comm_s", "overlapped_comm_s")
_NAMES = {
    "span_s": "time",
    "compute_s": "compute",
    "exposed_comm_s": "exposed communication",
    "copy_s": "copies",
    "idle_s": "idle",
    "comm_s": "all communication",
    "overlapped_comm_s": "hidden communication",
}


class DiffRow(Record, frozen=True):
    """One figure of both runs. None: that run does not have it."""

    group: Literal["time", "phase", "collective", "memory", "kernel", "operator"]
    name: str
    unit: Unit
    a: float | None
    b: float | None
    ratio: float | None  # a / b; None if one is unknown or b is 0


class Comparison(Record, frozen=True):
    """Two runs."""

    a: str
    b: str
    per: Literal["rank and step", "rank"]  # divisor of times and counts
    remarks: tuple[str, ...]
    rows: tuple[DiffRow, ...]
    changed: tuple[DiffRow, ...] = field(default=())  # operators and kernels, the largest differences first


class _ComparedRun:
    """One run, and the divisor of its sums."""

    def __init__(self, report: TraceReport, by_step: bool) -> None:
        self.report = report
        steps = sum(len(r.steps) for r in report.ranks)
        self.parts = steps if by_step else len(report.ranks)

    def mean(self, value: float | None) -> float | None:
        return None if value is None else value / self.parts


def compare_last(a: Sequence[TraceReport], b: Sequence[TraceReport]) -> Comparison:
    """Compare the last report of each; add a remark if there were several."""
    found = compare_reports(a[-1], b[-1])
    told = [
        (
            f"{len(reports)} runs or windows were found; the last one, {_title(reports[-1])}, is compared. To compare "
            "another, give its path"
        )
        for reports in (a, b)
        if len(reports) > 1
    ]
    return structs.replace(found, remarks=(*told, *found.remarks))


def compare_reports(a: TraceReport, b: TraceReport) -> Comparison:
    """Compare two runs. Times are per rank and step if every rank of both runs has steps, otherwise per rank."""
    by_step = all(r.steps for report in (a, b) for r in report.ranks)
    left, right = _ComparedRun(a, by_step), _ComparedRun(b, by_step)
    rows = [*_times(left, right), *_phases(left, right), *_collectives(left, right), *_memory(left, right)]
    return Comparison(
        a=_title(a),
        b=_title(b),
        per="rank and step" if by_step else "rank",
        remarks=tuple(_remarks(a, b, by_step)),
        rows=tuple(rows),
        changed=tuple(_changed(left, right)),
    )


def _title(report: TraceReport) -> str:
    return f"{report.name}, window {report.window}" if report.window else report.name


def _row(group: str, name: str, unit: Unit, a: float | None, b: float | None) -> DiffRow:
    ratio = a / b if a is not None and b else None
    return DiffRow(group=group, name=name, unit=unit, a=a, b=b, ratio=ratio)  # type: ignore[arg-type]


def _times(left: _ComparedRun, right: _ComparedRun) -> Iterable[DiffRow]:
    for part in _PARTS:
        a, b = (_sum(s.report, lambda t, part=part: getattr(t, part)) for s in (left, right))
        yield _row("time", _NAMES[part], "s", left.mean(a), right.mean(b))
    yield _row("time", "overlap", "share", _overlap(left.report), _overlap(right.report))
    if left.report.pairing.paired and right.report.pairing.paired:
        a, b = left.report.pairing, right.report.pairing
        yield _row("time", "waiting for the last rank", "s", left.mean(a.wait_s), right.mean(b.wait_s))
        yield _row("time", "transfer", "s", left.mean(a.transfer_s), right.mean(b.transfer_s))


def _sum(report: TraceReport, of: Callable[[Breakdown], float]) -> float:
    return sum(of(r.total) for r in report.ranks)


def _overlap(report: TraceReport) -> float | None:
    comm = _sum(report, lambda t: t.comm_s)
    return _sum(report, lambda t: t.overlapped_comm_s) / comm if comm > 0 else None


def _phases(left: _ComparedRun, right: _ComparedRun) -> Iterable[DiffRow]:
    on_cpu = left.report.device == right.report.device == "cpu"
    what = "compute" if on_cpu else "compute launched"
    for phase in PHASES:
        a, b = (sum(p.busy_s for r in s.report.ranks for p in r.phases if p.phase == phase) for s in (left, right))
        if a or b:
            yield _row("phase", f"{phase}, {what}", "s", left.mean(a), right.mean(b))


def _collectives(left: _ComparedRun, right: _ComparedRun) -> Iterable[DiffRow]:
    found = [{c.kind: c for c in s.report.collectives} for s in (left, right)]
    for kind in sorted({*found[0], *found[1]}):
        a, b = found[0].get(kind), found[1].get(kind)
        yield _row(
            "collective", f"{kind}, count", "count", left.mean(a.count if a else 0), right.mean(b.count if b else 0)
        )
        yield _row(
            "collective", f"{kind}, time", "s", left.mean(a.total_s if a else 0), right.mean(b.total_s if b else 0)
        )
        sizes = (a.bytes if a else 0, b.bytes if b else 0)
        if any(sizes):
            yield _row("collective", f"{kind}, bytes", "bytes", left.mean(sizes[0]), right.mean(sizes[1]))
        bus = (a.busbw_bytes_s if a else None, b.busbw_bytes_s if b else None)
        if any(bus):
            yield _row("collective", f"{kind}, bus bandwidth", "bytes/s", *bus)


def _memory(left: _ComparedRun, right: _ComparedRun) -> Iterable[DiffRow]:
    peaks = [
        [m.peak_bytes for r in s.report.ranks for m in r.memory if _counts(s.report, m.device)] for s in (left, right)
    ]
    if any(peaks):
        yield _row("memory", "highest peak", "bytes", *(float(max(p)) if p else None for p in peaks))


def _counts(report: TraceReport, device: str) -> bool:
    """Return whether this is memory of the device that computes; host memory of a GPU run is not compared."""
    return (device == "cpu") == (report.device == "cpu")


def _changed(left: _ComparedRun, right: _ComparedRun) -> list[DiffRow]:
    """Return rows of both lists by the size of their difference. A row in one list only may be below the end of the
    other."""
    rows = _tops("kernel", left, right, left.report.top_kernels, right.report.top_kernels)
    rows += _tops("operator", left, right, left.report.top_operators, right.report.top_operators)
    return sorted(rows, key=lambda r: -abs((r.a or 0.0) - (r.b or 0.0)))[:MAX_CHANGED_ROWS]


def _tops(
    group: str, left: _ComparedRun, right: _ComparedRun, a: Sequence[TopRow], b: Sequence[TopRow]
) -> list[DiffRow]:
    first, second = ({row.name: row.total_s for row in rows} for rows in (a, b))
    names = list(dict.fromkeys([*first, *second]))
    return [_row(group, name, "s", left.mean(first.get(name)), right.mean(second.get(name))) for name in names]


def _remarks(a: TraceReport, b: TraceReport, by_step: bool) -> Iterable[str]:
    if a.device != b.device:
        yield f"{_title(a)} ran on {a.device.upper()}, {_title(b)} on {b.device.upper()}: compute is measured differently"
    if a.world_size != b.world_size:
        yield f"world sizes differ: {a.world_size or 'unknown'} and {b.world_size or 'unknown'}"
    for report in (a, b):
        if report.missing_ranks:
            yield f"{_title(report)} lacks {len(report.missing_ranks)} of its ranks"
    if not by_step:
        yield "a rank has no steps: sums are over complete traces, which may differ in length"
