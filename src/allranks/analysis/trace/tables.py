"""Lay out a trace report, or a comparison of two, as lines and tables with shortened names, for a terminal or page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct, structs

from allranks.analysis.trace.records import (
    CPU_MEMORY,
    Breakdown,
    CollectiveRow,
    PairReport,
    TopRow,
    TraceReport,
    totals_by_phase,
)
from allranks.utils.text import (
    format_bandwidth,
    format_bytes,
    format_percent_of,
    format_seconds,
    printable,
    sanitize,
    wrapped,
)

if TYPE_CHECKING:
    from allranks.analysis.trace.diff import Comparison, DiffRow, Unit


WIDE_COLUMNS = 100
SHOWN_RANKS = 32
SHOWN_STEPS = 12
SHOWN_ROWS = 10
_LIBRARY_NAMESPACES = re.compile(
    r"\b(?:at::native|at::cuda|at::detail|c10|cutlass|cub|cudnn::ops|cudnn|thrust)::|\(anonymous namespace\)::"
)


class Line(Struct, frozen=True):
    """A line, or with `wrap` a paragraph; `parts` are (text, style)."""

    parts: tuple[tuple[str, str], ...] = ()
    wrap: bool = False


class Cell(Struct, frozen=True):
    """A cell with a style."""

    text: str
    style: str


class Table(Struct, frozen=True):
    """A table with `left` left-aligned columns; the others are right-aligned. A cell may have several lines."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str | Cell, ...]]
    left: int = 1
    title_style: str = "bold"


Block = Line | Table
BLANK = Line()


def report_blocks(report: TraceReport, width: int) -> Iterator[Block]:
    """Yield the report for a terminal of `width` columns, most important figures first."""
    yield from _title(report)
    for blocks in report_parts(report, width).values():
        yield from blocks
    yield from _problems(report)


def report_parts(report: TraceReport, width: int) -> dict[str, Iterator[Block]]:
    """Return the tables by part of the report."""
    return {
        "time": chain(_breakdown(report), _steps(report)),
        "phases": _phases(report),
        "collectives": _collectives(report),
        "stragglers": _stragglers(report),
        "tops": chain(
            _tops("Kernels", report.top_kernels, width),
            _tops("Operators, self time on the host", report.top_operators, width),
        ),
        "memory": _memory(report),
    }


def _title(report: TraceReport) -> Iterator[Block]:
    yield Line(((report.name, "bold"), (f": {', '.join(subtitle(report))}", "")))
    yield Line(((report.definition, "dim"),), wrap=True)


def subtitle(report: TraceReport) -> list[str]:
    """Return short facts about the run: its window, ranks and devices."""
    n, world = len(report.ranks), report.world_size
    names = sorted({r.device_name for r in report.ranks if r.device_name})
    parts = [
        f"window {report.window}" if report.window else "",
        f"{n} of {world} ranks" if world and world != n else f"{n} rank{'s' * (n > 1)}",
        report.device.upper(),
        report.backend or "",
        *names[:4],
    ]
    return [sanitize(part, 200) for part in parts if part]


Columns = dict[str, Callable[[Any], str | Cell]]


def _table(title: str, rows: Iterable[Any], columns: Columns, left: int = 1) -> Table:
    """Return a table of records; each column has a name and a function of a record."""
    return Table(title, tuple(columns), [tuple(show(record) for show in columns.values()) for record in rows], left)


def _parts(of: Callable[[Any], Breakdown]) -> Columns:
    """Return the columns of the parts of a span of time."""
    return {
        "compute": lambda r: format_percent_of(of(r).compute_s, of(r).span_s),
        "exposed comm.": lambda r: format_percent_of(of(r).exposed_comm_s, of(r).span_s),
        "copies": lambda r: format_percent_of(of(r).copy_s, of(r).span_s),
        "idle": lambda r: format_percent_of(of(r).idle_s, of(r).span_s),
        "all comm.": lambda r: format_seconds(of(r).comm_s),
        "hidden": lambda r: "-" if (overlap := of(r).overlap) is None else f"{100 * overlap:.1f} %",
    }


def _breakdown(report: TraceReport) -> Iterator[Block]:
    columns: Columns = {
        "rank": lambda r: str(r.rank),
        "time": lambda r: format_seconds(r.total.span_s),
        "steps": lambda r: str(len(r.steps)) if r.steps else "none",
        **_parts(lambda r: r.total),
    }
    yield BLANK
    yield _table("Time by rank", report.ranks[:SHOWN_RANKS], columns)
    if len(report.ranks) > SHOWN_RANKS:
        yield Line(((f"and {len(report.ranks) - SHOWN_RANKS} more ranks (--json has all)", ""),))


def _steps(report: TraceReport) -> Iterator[Block]:
    worst = max(report.ranks, key=lambda r: r.total.exposed_comm_s)
    if len(worst.steps) < 2:
        return
    why = " (most exposed communication)" if len(report.ranks) > 1 else ""
    columns: Columns = {
        "step": lambda s: f"{s.step}{' (trimmed)' if s.trimmed else ''}",
        "time": lambda s: format_seconds(s.breakdown.span_s),
        **_parts(lambda s: s.breakdown),
    }
    yield BLANK
    yield _table(f"Steps of rank {worst.rank}{why}", worst.steps[:SHOWN_STEPS], columns)


def _phases(report: TraceReport) -> Iterator[Block]:
    n = len(report.ranks)
    phases = [
        (rows[0].phase, *(sum(getattr(r, name) for r in rows) / n for name in ("host_s", "busy_s", "comm_s")))
        for rows in zip(*(rank.phases for rank in report.ranks), strict=True)
    ]
    columns: Columns = {
        "phase": lambda r: r[0],
        "host": lambda r: format_seconds(r[1]),
        "kernels" if report.device == "gpu" else "compute": lambda r: format_seconds(r[2]),
        "comm. launched": lambda r: format_seconds(r[3]),
    }
    yield BLANK
    yield _table(f"Phases, mean of {n} rank{'s' if n > 1 else ''}", [r for r in phases if any(r[1:])], columns)


def _collectives(report: TraceReport) -> Iterator[Block]:
    if not report.collectives:
        return
    rows: list[CollectiveRow] = []
    for row in report.collectives:
        parts = [r for r in report.sizes if r.kind == row.kind]
        rows += [row, *(parts if len(parts) > 1 else [])]
    columns: Columns = {
        "kind and size": lambda r: r.kind if r.size_bucket is None else f"  {r.size_bucket}",
        "ranks": lambda r: str(r.group_size) if r.group_size else "-",
        "count": lambda r: str(r.count),
        "each": lambda r: r.sizes_text.replace(", ", ",\n").replace(" to ", " to\n"),
        "mean": lambda r: format_seconds(r.mean_s),
        "waiting": lambda r: format_percent_of(r.wait_s or 0, r.total_s) if r.wait_s is not None else "-",
        "alg GB/s": lambda r: format_bandwidth(r.algbw_bytes_s),
        "bus GB/s": lambda r: format_bandwidth(r.busbw_bytes_s),
    }
    yield BLANK
    yield _table("Collectives, all ranks", rows, columns)
    p = report.pairing
    if p.paired:
        text = f"{p.paired} paired across ranks ({p.by_sequence} by sequence number); {p.unpaired} not paired."
        yield Line(((text, "dim"),))
    yield from _launches(report)


def _launches(report: TraceReport) -> Iterator[Block]:
    """Yield where collectives were launched, per rank and step."""
    totals, has_bytes, steps = totals_by_phase(report)
    columns: Columns = {
        "kind": lambda r: r[0][0],
        "phase": lambda r: r[0][1],
        "count": lambda r: f"{r[1][0] / steps:.4g}",
        "bytes": lambda r: format_bytes(r[1][1] / steps, digits=4) if has_bytes else "-",
        "time": lambda r: format_seconds(r[1][2] / steps),
    }
    yield BLANK
    yield _table("Launch location of collectives, per rank and step", totals.items(), columns, left=2)


def _stragglers(report: TraceReport) -> Iterator[Block]:
    rows = [r for r in report.stragglers if r.pairs]
    if len(rows) < 2:
        return
    columns: Columns = {
        "rank": lambda r: str(r.rank),
        "last": lambda r: f"{r.last} ({100 * r.last_share:.0f} %)",
        "of": lambda r: str(r.pairs),
        "caused wait": lambda r: format_seconds(r.caused_wait_s),
        "mean": lambda r: format_seconds(r.mean_late_s),
        "longest": lambda r: format_seconds(r.max_late_s),
        "own wait": lambda r: format_seconds(r.wait_s),
    }
    yield BLANK
    yield _table("Last ranks in collectives", rows[:SHOWN_ROWS], columns)
    worst = longest_wait(report)
    if worst is not None:
        what = f"{worst.kind} ({worst.key})" if worst.kind not in worst.key else worst.key
        text = (
            f"Longest: rank {worst.last_rank} reached {what} {format_seconds(max(worst.wait_s))} after the first rank."
        )
        yield Line(((text, "dim"),))


def longest_wait(report: TraceReport) -> PairReport | None:
    """Return the collective with the longest wait that is not for a later profiler; None without waiting."""
    first = report.ranks[0].steps[0].step if report.startup is not None and report.ranks[0].steps else None
    pairs = [p for p in report.pairing.longest if report.startup is None or p.step != first]
    worst = max(pairs, key=lambda p: max(p.wait_s), default=None)
    return worst if worst is not None and max(worst.wait_s) > 0 else None


def _tops(title: str, rows: Sequence[TopRow], width: int) -> Iterator[Block]:
    if not rows:
        return
    # a name of a few letters is useless: in narrow terminals the mean (sum by count) is omitted
    mean: Columns = {"mean": lambda r: format_seconds(r.mean_s)} if width >= WIDE_COLUMNS else {}
    name_width = max(width - (55 if mean else 45), 20)
    columns: Columns = {
        "name": lambda r: short_name(r.name, name_width),
        "kind": lambda r: r.kind,
        "count": lambda r: str(r.count),
        "sum": lambda r: format_seconds(r.total_s),
        "share": lambda r: f"{100 * r.share:.1f} %",
        **mean,
        "longest": lambda r: format_seconds(r.max_s),
    }
    yield BLANK
    yield _table(title, rows[:SHOWN_ROWS], columns, left=2)


def _memory(report: TraceReport) -> Iterator[Block]:
    devices = [(r.rank, m) for r in report.ranks[:SHOWN_RANKS] for m in r.memory]
    if not devices:
        return
    columns: Columns = {
        "rank": lambda r: str(r[0]),
        "device": lambda r: r[1].device,
        "peak": lambda r: format_bytes(r[1].peak_bytes, digits=4),
        "reserved": lambda r: format_bytes(r[1].peak_reserved_bytes, digits=4),
        "at the end": lambda r: format_bytes(r[1].last_bytes, digits=4),
    }
    yield BLANK
    yield _table("Memory that PyTorch allocated", devices, columns, left=2)
    if any(m.device == "cpu" for _, m in devices):
        yield Line(((CPU_MEMORY, "dim"),))


def _problems(report: TraceReport) -> Iterator[Block]:
    if not report.problems:
        return
    yield BLANK
    yield Line((("Notes about these figures", "bold"),), wrap=True)
    styles = {"error": "red", "warning": "yellow", "note": "dim"}
    for p in report.problems:
        where = f"{p.file}: " if p.file else ""
        yield Line(((f"{p.severity:7} ", styles[p.severity]), (f"{where}{p.message}", "")))


def comparison_blocks(comparison: Comparison, width: int) -> Iterator[Block]:
    """Yield one table of all figures, one of the kernels and operators with the largest changes, and the remarks."""
    title = f"{comparison.a} against {comparison.b}, per {comparison.per}"
    yield BLANK
    yield _comparison_table(title, comparison.rows, width)
    if comparison.changed:
        yield BLANK
        yield _comparison_table("Kernels and operators with the largest changes", comparison.changed, width)
    for remark in comparison.remarks:
        yield Line(((f"note    {remark}", "dim"),))


def _comparison_table(title: str, rows: Sequence[DiffRow], width: int) -> Table:
    columns: Columns = {
        "": lambda r: short_name(r.name, max(width - 40, 20)),
        "this": lambda r: format_figure(r.a, r.unit),
        "other": lambda r: format_figure(r.b, r.unit),
        "ratio": _ratio,
    }
    return structs.replace(_table(title, rows, columns), title_style="")


def format_figure(value: float | None, unit: Unit) -> str:
    """Return a figure with its unit."""
    return "-" if value is None else _FORMATS[unit](value)


_FORMATS: dict[Unit, Callable[[float], str]] = {
    "s": format_seconds,
    "bytes": lambda value: format_bytes(value, digits=4),
    "bytes/s": lambda value: f"{value / 1e9:.3g} GB/s",
    "share": lambda value: f"{100 * value:.1f} %",
    "count": lambda value: f"{value:.4g}",
}


def _ratio(row: DiffRow) -> str | Cell:
    """Return the ratio; colour times that changed by at least a tenth (more of others is no better or worse)."""
    ratio = f"{row.ratio:.3g}" if row.ratio is not None else "-"
    if row.unit != "s" or row.ratio is None or row.name == "hidden communication" or 0.9 <= row.ratio <= 1.1:
        return ratio
    return Cell(ratio, "red" if row.ratio > 1 else "green")


def short_name(name: str, width: int) -> str:
    """Shorten a kernel's or operator's name to `width` columns: first remove common parts, then its middle."""
    name = _strip_signature(name, width)
    if len(name) <= width:
        return name
    end = (width - 1) // 3
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"


def _strip_signature(name: str, width: int) -> str:
    """Remove `void`, the list of parameters and library namespaces from a name, as far as needed."""
    for drop in (lambda n: n.removeprefix("void "), _without_parameters, lambda n: _LIBRARY_NAMESPACES.sub("", n)):
        if len(name) <= width:
            break
        name = drop(name)
    return name


def _without_parameters(name: str) -> str:
    """Return a C++ signature without its last parameter list."""
    if not name.endswith(")"):
        return name
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0:
            return name[:at] or name
    return name


_GAP = "  "
_STYLES: dict[str, dict[str, Any]] = {"": {}, "bold": {"bold": True}, "dim": {"dim": True}}  # others are colours


def text_lines(blocks: Iterable[Block], width: int) -> Iterator[str]:
    """Yield the lines of blocks with colour codes, which click removes if there is no terminal."""
    for block in blocks:
        if isinstance(block, Table):
            yield from _table_lines(block)
        elif block.wrap:
            for text, style in block.parts:
                yield from (_styled(line, style) for line in wrapped(text, width).split("\n"))
        else:
            yield "".join(_styled(text, style) for text, style in block.parts)


def _styled(text: str, style: str) -> str:
    return click.style(printable(text), **_STYLES.get(style, {"fg": style})) if style and text else printable(text)


def _table_lines(table: Table) -> Iterator[str]:
    cells = [[c if isinstance(c, Cell) else Cell(c, "") for c in row] for row in table.rows]
    head = [Cell(name, "dim") for name in table.columns]
    rows = [[Cell(printable(c.text), c.style) for c in row] for row in [head, *cells]]
    widths = [max(len(part) for c in column for part in c.text.split("\n")) for column in zip(*rows, strict=True)]
    yield _styled(table.title, table.title_style)
    for row in rows:
        for parts in zip_longest(*(c.text.split("\n") for c in row), fillvalue=""):
            aligned = (
                _styled(part.ljust(size) if i < table.left else part.rstrip().rjust(size), row[i].style)
                for i, (part, size) in enumerate(zip(parts, widths, strict=True))
            )
            yield _GAP.join(aligned)
