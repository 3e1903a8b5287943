"""Lay out a trace report, or the comparison of two, as lines and tables with shortened names, for a terminal or a page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from allranks.analysis.trace.records import (
    CPU_MEMORY,
    Breakdown,
    CollectiveRow,
    ModuleRow,
    PairReport,
    TopRow,
    TraceReport,
    totals_by_phase,
)
from allranks.utils.text import format_bandwidth, format_bytes, format_percent_of, format_seconds, printable, wrapped

if TYPE_CHECKING:
    from allranks.analysis.trace.diff import Comparison, DiffRow, Unit


WIDE_COLUMNS = 100
SHOWN_RANKS = 32
SHOWN_STEPS = 12
SHOWN_ROWS = 10
SHOWN_MODULES = 15
PAGE_FACTOR = 2  # rows of a table on a page for each one in a terminal
_LIBRARY_NAMESPACES = re.compile(
    r"\b(?:at::native|at::cuda|at::detail|c10|cutlass|cub|cudnn::ops|cudnn|thrust)::|\(anonymous namespace\)::"
)


class Line(Struct, frozen=True):
    """A line, or with `wrap` a paragraph; `parts` are (text, style)."""

    parts: tuple[tuple[str, str], ...] = ()
    wrap: bool = False


class Rule(Struct, frozen=True):
    """A horizontal line across the terminal."""


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


Block = Line | Rule | Table
BLANK = Line()


def report_blocks(report: TraceReport, width: int) -> Iterator[Block]:
    """Yield the report for a terminal of `width` columns, most important figures first."""
    yield from _title(report)
    for blocks in report_parts(report, width).values():
        yield from blocks
    yield from _problems(report)


def report_parts(report: TraceReport, width: int, *, page: bool = False) -> dict[str, Iterator[Block]]:
    """Return the tables by part of the report. A `page` has more rows and columns than a terminal."""
    return {
        "time": chain(_breakdown(report, page=page), _steps(report)),
        "phases": _phases(report),
        "collectives": _collectives(report, page=page),
        "stragglers": _stragglers(report, page=page),
        "tops": chain(
            _tops("Kernels", report.top_kernels, width, page=page),
            _tops("Operators, self time on the host", report.top_operators, width, page=page),
        ),
        "modules": _modules(report, width, page=page),
        "memory": _memory(report),
    }


def _title(report: TraceReport) -> Iterator[Block]:
    window = f", window {report.window}" if report.window else ""
    world = f" of {report.world_size}" if report.world_size else ""
    ranks = f"{len(report.ranks)}{world} rank{'s' if max(len(report.ranks), report.world_size or 1) > 1 else ''}"
    names = {r.device_name for r in report.ranks if r.device_name}
    what = ", ".join(p for p in (ranks, report.device.upper(), report.backend or "", *sorted(names)) if p)
    yield Line(((report.name, "bold"), (f"{window}: {what}", "")))
    yield Line(((report.definition, "dim"),), wrap=True)


def _parts(b: Breakdown) -> list[str]:
    overlap = "-" if b.overlap is None else f"{100 * b.overlap:.1f} %"
    return [
        format_percent_of(b.compute_s, b.span_s),
        format_percent_of(b.exposed_comm_s, b.span_s),
        format_percent_of(b.copy_s, b.span_s),
        format_percent_of(b.idle_s, b.span_s),
        format_seconds(b.comm_s),
        overlap,
    ]


def _breakdown(report: TraceReport, *, page: bool = False) -> Iterator[Block]:
    columns = ("rank", "time", "steps", "compute", "exposed comm.", "copies", "idle", "all comm.", "hidden")
    shown = report.ranks[: SHOWN_RANKS * (PAGE_FACTOR if page else 1)]
    rows: list[tuple[str | Cell, ...]] = [
        (str(r.rank), format_seconds(r.total.span_s), str(len(r.steps)) if r.steps else "none", *_parts(r.total))
        for r in shown
    ]
    if page:
        columns += ("clock ahead",)
        rows = [
            (*row, format_seconds(r.clock_offset_s) if r.clock_pairs else "-")
            for row, r in zip(rows, shown, strict=True)
        ]
    yield BLANK
    yield Table("Time by rank", columns, rows)
    if len(report.ranks) > len(shown):
        text = f"and {len(report.ranks) - len(shown)} more ranks (--json has all)"
        yield Line(((text, ""),), wrap=True)


def _steps(report: TraceReport) -> Iterator[Block]:
    worst = max(report.ranks, key=lambda r: r.total.exposed_comm_s)
    if len(worst.steps) < 2:
        return
    why = " (most exposed communication)" if len(report.ranks) > 1 else ""
    columns = ("step", "time", "compute", "exposed comm.", "copies", "idle", "all comm.", "hidden")
    rows: list[tuple[str | Cell, ...]] = [
        (f"{s.step}{' (trimmed)' if s.trimmed else ''}", format_seconds(s.breakdown.span_s), *_parts(s.breakdown))
        for s in worst.steps[:SHOWN_STEPS]
    ]
    yield BLANK
    yield Table(f"Steps of rank {worst.rank}{why}", columns, rows)


def _phases(report: TraceReport) -> Iterator[Block]:
    n = len(report.ranks)
    busy = "kernels" if report.device == "gpu" else "compute"
    rows: list[tuple[str | Cell, ...]] = []
    for i, phase in enumerate(report.ranks[0].phases):
        values = [(r.phases[i].host_s, r.phases[i].busy_s, r.phases[i].comm_s) for r in report.ranks]
        means = [sum(v[k] for v in values) / n for k in range(3)]
        if any(means):
            rows.append((phase.phase, *(format_seconds(m) for m in means)))
    yield BLANK
    yield Table(f"Phases, mean of {n} rank{'s' if n > 1 else ''}", ("phase", "host", busy, "comm. launched"), rows)


def _collectives(report: TraceReport, *, page: bool = False) -> Iterator[Block]:
    if not report.collectives:
        return
    columns = (
        "kind and size",
        "ranks",
        "count",
        "each",
        "mean",
        *(["longest"] if page else []),
        "waiting",
        "alg GB/s",
        "bus GB/s",
    )
    rows: list[tuple[str | Cell, ...]] = []
    for row in report.collectives:
        rows.append(_collective_row(row, row.kind, page=page))
        mine = [r for r in report.sizes if r.kind == row.kind]
        rows += [_collective_row(part, f"  {part.size_bucket}", page=page) for part in (mine if len(mine) > 1 else [])]
    yield BLANK
    yield Table("Collectives, all ranks", columns, rows)
    p = report.pairing
    if p.paired:
        how = f"{p.by_sequence} by sequence number, {p.by_order} by order"
        text = f"{p.paired} paired across ranks ({how}); {p.unpaired} not paired."
        yield Line(((text, "dim"),))
    yield from _launches(report)


def _collective_row(row: CollectiveRow, name: str, *, page: bool) -> tuple[str, ...]:
    waiting = format_percent_of(row.wait_s or 0, row.total_s) if row.wait_s is not None else "-"
    group = str(row.group_size) if row.group_size else "-"
    return (
        name,
        group,
        str(row.count),
        row.sizes_text.replace(", ", ",\n").replace(" to ", " to\n"),
        format_seconds(row.mean_s),
        *([format_seconds(row.max_s)] if page else []),
        waiting,
        format_bandwidth(row.algbw_bytes_s),
        format_bandwidth(row.busbw_bytes_s),
    )


def _launches(report: TraceReport) -> Iterator[Block]:
    """Yield where collectives were launched, per rank and step."""
    found, told, steps = totals_by_phase(report)
    rows: list[tuple[str | Cell, ...]] = [
        (
            kind,
            phase,
            f"{count / steps:.4g}",
            format_bytes(moved / steps, digits=4) if told else "-",
            format_seconds(time / steps),
        )
        for (kind, phase), (count, moved, time) in found.items()
    ]
    title = "Launch location of collectives, per rank and step"
    yield BLANK
    yield Table(title, ("kind", "phase", "count", "bytes", "time"), rows, left=2)


def _stragglers(report: TraceReport, *, page: bool = False) -> Iterator[Block]:
    found = [r for r in report.stragglers if r.pairs]
    if len(found) < 2:
        return
    columns = ("rank", "last", "of", "caused wait", "mean", "longest", "own wait")
    rows: list[tuple[str | Cell, ...]] = [
        (
            str(row.rank), f"{row.last} ({100 * row.last_share:.0f} %)", str(row.pairs), format_seconds(row.caused_wait_s),
            format_seconds(row.mean_late_s), format_seconds(row.max_late_s), format_seconds(row.wait_s),
        )
        for row in found[: SHOWN_ROWS * (PAGE_FACTOR if page else 1)]
    ]  # fmt: skip
    yield BLANK
    yield Table("Last ranks in collectives", columns, rows)
    worst = longest_wait(report)
    if worst is not None:
        what = f"{worst.kind} ({worst.key})" if worst.kind not in worst.key else worst.key
        text = (
            f"Longest: rank {worst.last_rank} reached {what} {format_seconds(max(worst.wait_s))} after the first rank."
        )
        yield Line(((text, "dim"),))
    if page:
        waits: list[tuple[str | Cell, ...]] = [
            (p.kind, p.key, format_bytes(p.bytes, digits=4), f"rank {p.last_rank}", format_seconds(max(p.wait_s)), format_seconds(p.transfer_s))
            for p in report.pairing.longest[:SHOWN_ROWS]
            if max(p.wait_s) > 0
        ]  # fmt: skip
        columns = ("kind", "which", "bytes", "last rank", "longest wait", "transfer")
        yield Table("Collectives with the longest waits", columns, waits, left=2)


def longest_wait(report: TraceReport) -> PairReport | None:
    """Return the collective with the longest wait, without waits for profilers that started later; None without waiting."""
    first = report.ranks[0].steps[0].step if report.startup is not None and report.ranks[0].steps else None
    pairs = [p for p in report.pairing.longest if report.startup is None or p.step != first]
    worst = max(pairs, key=lambda p: max(p.wait_s), default=None)
    return worst if worst is not None and max(worst.wait_s) > 0 else None


def _tops(title: str, found: Sequence[TopRow], width: int, *, page: bool = False) -> Iterator[Block]:
    if not found:
        return
    # a name of a few letters is useless: in narrow terminals the mean (sum by count) is omitted
    wide = width >= WIDE_COLUMNS
    columns = ("name", "kind", "count", "sum", "share", *(["mean"] if wide else []), "longest")
    shown = found[: SHOWN_ROWS * (PAGE_FACTOR if page else 1)]
    names = short_names([r.name for r in shown], max(width - (55 if wide else 45), 20))
    rows: list[tuple[str | Cell, ...]] = [
        (
            name,
            row.kind,
            str(row.count),
            format_seconds(row.total_s),
            f"{100 * row.share:.1f} %",
            *([format_seconds(row.mean_s)] if wide else []),
            format_seconds(row.max_s),
        )
        for row, name in zip(shown, names, strict=True)
    ]
    yield BLANK
    yield Table(title, columns, rows, left=2)


def _modules(report: TraceReport, width: int, *, page: bool = False) -> Iterator[Block]:
    if not report.modules:
        return
    own = report.modules[0].source == "annotation"
    rows: list[tuple[str | Cell, ...]] = [
        (
            _indented(m, max(width - 50, 20)),
            str(m.count),
            format_seconds(m.host_s),
            format_seconds(m.forward_s),
            format_seconds(m.backward_s),
            format_seconds(m.self_s),
        )
        for m in top_modules_by_self_time(report.modules, SHOWN_MODULES * (PAGE_FACTOR if page else 1))
    ]
    title = "Ranges named by the program" if own else "Modules"
    yield BLANK
    yield Table(title, ("name", "calls", "host", "forward", "backward", "own"), rows)


def _indented(m: ModuleRow, width: int) -> str:
    """Indent a name of the program by its depth; the path of a module already shows its position."""
    if m.source == "module":
        return short_path(m.name, width)
    indent = "  " * min(m.depth, 6)
    return indent + short_name(m.name, width - len(indent))


def _memory(report: TraceReport) -> Iterator[Block]:
    found = [(r, m) for r in report.ranks[:SHOWN_RANKS] for m in r.memory]
    if not found:
        return
    rows: list[tuple[str | Cell, ...]] = [
        (
            str(r.rank),
            m.device,
            format_bytes(m.peak_bytes, digits=4),
            format_bytes(m.peak_reserved_bytes, digits=4),
            format_bytes(m.last_bytes, digits=4),
        )
        for r, m in found
    ]
    columns = ("rank", "device", "peak", "reserved", "at the end")
    yield BLANK
    yield Table("Memory that PyTorch allocated", columns, rows, left=2)
    if any(m.device == "cpu" for _, m in found):
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


def _comparison_table(title: str, found: Sequence[DiffRow], width: int) -> Table:
    names = short_names([r.name for r in found], max(width - 40, 20))
    rows: list[tuple[str | Cell, ...]] = [
        (name, format_figure(row.a, row.unit), format_figure(row.b, row.unit), _ratio(row))
        for row, name in zip(found, names, strict=True)
    ]
    return Table(title, ("", "this", "other", "ratio"), rows, title_style="")


def format_figure(value: float | None, unit: Unit) -> str:
    """Return a figure with its unit."""
    if value is None:
        return "-"
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(value, digits=4)
    return (
        f"{100 * value:.1f} %"
        if unit == "share"
        else f"{value / 1e9:.3g} GB/s"
        if unit == "bytes/s"
        else f"{value:.4g}"
    )


def _ratio(row: DiffRow) -> str | Cell:
    """Return the ratio; colour times that changed by at least a tenth. For other figures, more is neither better nor worse."""
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


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Apply `short_name` to each name. Of names that would be equal, the different part is shown."""
    shown = [short_name(name, width) for name in names]
    for text, count in Counter(shown).items():
        if count > 1:
            alike = [i for i, other in enumerate(shown) if other == text]
            for i, own in zip(
                alike, _distinguish([_strip_signature(names[i], width) for i in alike], width), strict=True
            ):
                shown[i] = own
    return shown


def _strip_signature(name: str, width: int) -> str:
    """Remove `void`, the list of parameters and library namespaces from a name, as far as needed."""
    for drop in (lambda n: n.removeprefix("void "), _without_parameters, lambda n: _LIBRARY_NAMESPACES.sub("", n)):
        if len(name) <= width:
            break
        name = drop(name)
    return name


def _distinguish(names: list[str], width: int) -> list[str]:
    """Return the start and the part after the first difference; repeated for names that differ later."""
    same = len(commonprefix(names))  # noqa: RUF071 - characters are what is meant
    head = width // 3
    start = max(min(same - 2, min(map(len, names)) - 1), head)
    room = width - head - 1
    made = [f"{n[:head]}…{n[start:] if len(n) - start <= room else n[start : start + room - 1] + '…'}" for n in names]
    for text, count in Counter(made).items():
        alike = [i for i, other in enumerate(made) if other == text]
        if 1 < count < len(names):
            for i, own in zip(alike, _distinguish([names[i] for i in alike], width), strict=True):
                made[i] = own
    return made


def short_path(path: str, width: int) -> str:
    """Shorten a dotted path to `width` columns: keep the end, starting at a dot if possible."""
    if len(path) <= width:
        return path
    end = path[len(path) - (width - 1) :]
    dot = end.find(".")
    return "…" + (end[dot:] if 0 <= dot < width // 3 else end)


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


def top_modules_by_self_time(modules: Sequence[ModuleRow], limit: int) -> list[ModuleRow]:
    """Return the modules with the largest self time in their order, each with its parents.

    Without its parents, an indented module would seem to belong to the row above it.
    """
    ranked = sorted(range(len(modules)), key=lambda i: -modules[i].self_s)[:limit]
    shown = set(ranked)
    for i in ranked:
        depth, at = (
            (0 if modules[i].source == "module" else modules[i].depth),
            i,
        )  # the path of a module includes its parents
        while depth > 0 and at > 0:
            at -= 1
            if modules[at].depth < depth:
                depth = modules[at].depth
                shown.add(at)
    return [modules[i] for i in sorted(shown)]


_GAP = "  "
_STYLES: dict[str, dict[str, Any]] = {"": {}, "bold": {"bold": True}, "dim": {"dim": True}}  # others are colours


def text_lines(blocks: Iterable[Block], width: int) -> Iterator[str]:
    """Yield the lines of blocks with colour codes, which click removes if there is no terminal."""
    for block in blocks:
        if isinstance(block, Table):
            yield from _table_lines(block)
        elif isinstance(block, Rule):
            yield "\u2500" * width
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
