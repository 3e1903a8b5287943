"""Compare two runs: all metrics, per rank and step, with ratios.

`a` is the requested run, `b` the baseline; a ratio is a / b, so a value below 1 means less time than in the baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import field, structs

from allranks.analysis.trace.records import PHASES, Record, TopRow, TraceReport
from allranks.analysis.trace.steps import sum_breakdowns

Unit = Literal["s", "bytes", "bytes/s", "share", "count"]
Group = Literal["time", "phase", "collective", "memory", "kernel", "operator"]
Figures = dict[tuple[Group, str, Unit], float]
MAX_CHANGED_ROWS = 15
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

    group: Group
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


def compare_last(a: Sequence[TraceReport], b: Sequence[TraceReport]) -> Comparison:
    """Compare the last report of each; add a remark if there were several."""
    comparison = compare_reports(a[-1], b[-1])
    notes = [
        (
            f"{len(reports)} runs or windows were found; the last one, {_title(reports[-1])}, is compared. To compare "
            "another, give its path"
        )
        for reports in (a, b)
        if len(reports) > 1
    ]
    return structs.replace(comparison, remarks=(*notes, *comparison.remarks))


def compare_reports(a: TraceReport, b: TraceReport) -> Comparison:
    """Compare two runs. Times are per rank and step if every rank of both runs has steps, otherwise per rank."""
    by_step = all(r.steps for report in (a, b) for r in report.ranks)
    changed = _rows(*(_tops(report, _divisor(report, by_step)) for report in (a, b)))
    return Comparison(
        a=_title(a),
        b=_title(b),
        per="rank and step" if by_step else "rank",
        remarks=tuple(_remarks(a, b, by_step)),
        rows=tuple(_rows(*(_figures(report, _divisor(report, by_step)) for report in (a, b)))),
        changed=tuple(sorted(changed, key=lambda r: -abs((r.a or 0.0) - (r.b or 0.0)))[:MAX_CHANGED_ROWS]),
    )


def _divisor(report: TraceReport, by_step: bool) -> int:
    return sum(len(r.steps) for r in report.ranks) if by_step else len(report.ranks)


def _title(report: TraceReport) -> str:
    return f"{report.name}, window {report.window}" if report.window else report.name


def _rows(a: Figures, b: Figures) -> list[DiffRow]:
    return [
        DiffRow(group=group, name=name, unit=unit, a=x, b=y, ratio=x / y if x is not None and y else None)
        for group, name, unit in dict.fromkeys([*a, *b])
        for x, y in [(a.get((group, name, unit)), b.get((group, name, unit)))]
    ]


def _figures(report: TraceReport, parts: int) -> Figures:
    """Return the known figures of a run; sums over ranks and steps are divided by `parts`."""
    whole, pairing = sum_breakdowns([r.total for r in report.ranks]), report.pairing
    figures: Figures = {("time", name, "s"): getattr(whole, part) / parts for part, name in _NAMES.items()}
    if whole.overlap is not None:
        figures["time", "overlap", "share"] = whole.overlap
    if pairing.paired:
        figures["time", "waiting for the last rank", "s"] = pairing.wait_s / parts
        figures["time", "transfer", "s"] = pairing.transfer_s / parts
    for phase in PHASES:
        if busy := sum(p.busy_s for r in report.ranks for p in r.phases if p.phase == phase):
            figures["phase", f"{phase}, compute", "s"] = busy / parts
    for c in report.collectives:
        figures["collective", f"{c.kind}, count", "count"] = c.count / parts
        figures["collective", f"{c.kind}, time", "s"] = c.total_s / parts
        if c.bytes:
            figures["collective", f"{c.kind}, bytes", "bytes"] = c.bytes / parts
        if c.busbw_bytes_s:
            figures["collective", f"{c.kind}, bus bandwidth", "bytes/s"] = c.busbw_bytes_s
    # host memory of a GPU run is not compared
    peaks = [m.peak_bytes for r in report.ranks for m in r.memory if (m.device == "cpu") == (report.device == "cpu")]
    if peaks:
        figures["memory", "highest peak", "bytes"] = max(peaks)
    return figures


def _tops(report: TraceReport, parts: int) -> Figures:
    """Return the time of each listed kernel and operator."""
    tops: tuple[tuple[Group, tuple[TopRow, ...]], ...] = (
        ("kernel", report.top_kernels),
        ("operator", report.top_operators),
    )
    return {(group, row.name, "s"): row.total_s / parts for group, rows in tops for row in rows}


def _remarks(a: TraceReport, b: TraceReport, by_step: bool) -> Iterable[str]:
    if a.device != b.device:
        devices = f"{_title(a)} ran on {a.device.upper()}, {_title(b)} on {b.device.upper()}"
        yield f"{devices}: compute is measured differently"
    if a.world_size != b.world_size:
        yield f"world sizes differ: {a.world_size or 'unknown'} and {b.world_size or 'unknown'}"
    for report in (a, b):
        if report.missing_ranks:
            yield f"{_title(report)} lacks {len(report.missing_ranks)} of its ranks"
    if not by_step:
        yield "a rank has no steps: sums are over complete traces, which may differ in length"
