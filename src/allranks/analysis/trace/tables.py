"""Print a trace report, or the comparison of two, as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.analysis.trace.diff import Comparison, DiffRow, Unit
from allranks.analysis.trace.labels import short_name, short_names, short_path, top_modules_by_self_time
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
from allranks.utils.formatting import format_bandwidth, format_bytes_precise, format_percent_of, format_seconds

WIDE_COLUMNS = 100
SHOWN_RANKS = 32
SHOWN_STEPS = 12
SHOWN_ROWS = 10
SHOWN_MODULES = 15


def show_report(console: Console, report: TraceReport) -> None:
    """Print the report, most important figures first."""
    _show_title(console, report)
    _breakdown(console, report)
    _steps(console, report)
    _phases(console, report)
    _collectives(console, report)
    _stragglers(console, report)
    _tops(console, "Kernels", report.top_kernels)
    _tops(console, "Operators, self time on the host", report.top_operators)
    _modules(console, report)
    _memory(console, report)
    _problems(console, report)


def _show_title(console: Console, report: TraceReport) -> None:
    window = f", window {report.window}" if report.window else ""
    world = f" of {report.world_size}" if report.world_size else ""
    ranks = f"{len(report.ranks)}{world} rank{'s' if max(len(report.ranks), report.world_size or 1) > 1 else ''}"
    names = {r.device_name for r in report.ranks if r.device_name}
    what = ", ".join(p for p in (ranks, report.device.upper(), report.backend or "", *sorted(names)) if p)
    console.print(Text.assemble((report.name, "bold"), f"{window}: {what}"), soft_wrap=True)
    console.print(Text(report.definition, style="dim"))


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


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


def _breakdown(console: Console, report: TraceReport) -> None:
    columns = ("rank", "time", "steps", "compute", "exposed comm.", "copies", "idle", "all comm.", "hidden")
    table = _table("Time by rank", *columns)
    for r in report.ranks[:SHOWN_RANKS]:
        table.add_row(
            str(r.rank), format_seconds(r.total.span_s), str(len(r.steps)) if r.steps else "none", *_parts(r.total)
        )
    console.print()
    console.print(table)
    if len(report.ranks) > SHOWN_RANKS:
        console.print(f"and {len(report.ranks) - SHOWN_RANKS} more ranks (--json has all)")


def _steps(console: Console, report: TraceReport) -> None:
    worst = max(report.ranks, key=lambda r: r.total.exposed_comm_s)
    if len(worst.steps) < 2:
        return
    why = " (most exposed communication)" if len(report.ranks) > 1 else ""
    table = _table(
        f"Steps of rank {worst.rank}{why}",
        "step",
        "time",
        "compute",
        "exposed comm.",
        "copies",
        "idle",
        "all comm.",
        "hidden",
    )
    for s in worst.steps[:SHOWN_STEPS]:
        table.add_row(
            f"{s.step}{' (trimmed)' if s.trimmed else ''}", format_seconds(s.breakdown.span_s), *_parts(s.breakdown)
        )
    console.print()
    console.print(table)


def _phases(console: Console, report: TraceReport) -> None:
    n = len(report.ranks)
    busy = "kernels" if report.device == "gpu" else "compute"
    table = _table(f"Phases, mean of {n} rank{'s' if n > 1 else ''}", "phase", "host", busy, "comm. launched")
    for i, phase in enumerate(report.ranks[0].phases):
        values = [(r.phases[i].host_s, r.phases[i].busy_s, r.phases[i].comm_s) for r in report.ranks]
        means = [sum(v[k] for v in values) / n for k in range(3)]
        if any(means):
            table.add_row(phase.phase, *(format_seconds(m) for m in means))
    console.print()
    console.print(table)


def _collectives(console: Console, report: TraceReport) -> None:
    if not report.collectives:
        return
    table = _table(
        "Collectives, all ranks", "kind and size", "ranks", "count", "each", "mean", "waiting", "alg GB/s", "bus GB/s"
    )
    for row in report.collectives:
        _collective_row(table, row, row.kind)
        mine = [r for r in report.sizes if r.kind == row.kind]
        for part in mine if len(mine) > 1 else []:
            _collective_row(table, part, f"  {part.size_bucket}")
    console.print()
    console.print(table)
    p = report.pairing
    if p.paired:
        how = f"{p.by_sequence} by sequence number, {p.by_order} by order"
        console.print(f"{p.paired} paired across ranks ({how}); {p.unpaired} not paired.", style="dim", soft_wrap=True)
    _launches(console, report)


def _collective_row(table: Table, row: CollectiveRow, name: str) -> None:
    waiting = format_percent_of(row.wait_s or 0, row.total_s) if row.wait_s is not None else "-"
    group = str(row.group_size) if row.group_size else "-"
    table.add_row(
        name,
        group,
        str(row.count),
        row.sizes_text.replace(", ", ",\n").replace(" to ", " to\n"),
        format_seconds(row.mean_s),
        waiting,
        format_bandwidth(row.algbw_bytes_s),
        format_bandwidth(row.busbw_bytes_s),
    )


def _launches(console: Console, report: TraceReport) -> None:
    """Print where collectives were launched, per rank and step."""
    rows, told, steps = totals_by_phase(report)
    table = _table(
        "Launch location of collectives, per rank and step", "kind", "phase", "count", "bytes", "time", left=2
    )
    for (kind, phase), (count, moved, time) in rows.items():
        table.add_row(
            kind,
            phase,
            f"{count / steps:.4g}",
            format_bytes_precise(moved / steps) if told else "-",
            format_seconds(time / steps),
        )
    console.print()
    console.print(table)


def _stragglers(console: Console, report: TraceReport) -> None:
    rows = [r for r in report.stragglers if r.pairs]
    if len(rows) < 2:
        return
    table = _table("Last ranks in collectives", "rank", "last", "of", "caused wait", "mean", "longest", "own wait")
    for row in rows[:SHOWN_ROWS]:
        table.add_row(
            str(row.rank), f"{row.last} ({100 * row.last_share:.0f} %)", str(row.pairs), format_seconds(row.caused_wait_s),
            format_seconds(row.mean_late_s), format_seconds(row.max_late_s), format_seconds(row.wait_s),
        )  # fmt: skip
    console.print()
    console.print(table)
    worst = longest_wait(report)
    if worst is not None:
        what = f"{worst.kind} ({worst.key})" if worst.kind not in worst.key else worst.key
        text = (
            f"Longest: rank {worst.last_rank} reached {what} {format_seconds(max(worst.wait_s))} after the first rank."
        )
        console.print(Text(text, style="dim"), soft_wrap=True)


def longest_wait(report: TraceReport) -> PairReport | None:
    """Return the collective with the longest wait, without waits for profilers that started later; None without waiting."""
    first = report.ranks[0].steps[0].step if report.startup is not None and report.ranks[0].steps else None
    pairs = [p for p in report.pairing.longest if report.startup is None or p.step != first]
    worst = max(pairs, key=lambda p: max(p.wait_s), default=None)
    return worst if worst is not None and max(worst.wait_s) > 0 else None


def _tops(console: Console, title: str, rows: Sequence[TopRow]) -> None:
    if not rows:
        return
    # a name of a few letters is useless: in narrow terminals the mean (sum by count) is omitted
    wide = console.width >= WIDE_COLUMNS
    table = _table(title, "name", "kind", "count", "sum", "share", *(["mean"] if wide else []), "longest", left=2)
    width = max(console.width - (55 if wide else 45), 20)
    shown = rows[:SHOWN_ROWS]
    for row, name in zip(shown, short_names([r.name for r in shown], width), strict=True):
        table.add_row(
            Text(name),
            row.kind,
            str(row.count),
            format_seconds(row.total_s),
            f"{100 * row.share:.1f} %",
            *([format_seconds(row.mean_s)] if wide else []),
            format_seconds(row.max_s),
        )
    console.print()
    console.print(table)


def _modules(console: Console, report: TraceReport) -> None:
    if not report.modules:
        return
    own = report.modules[0].source == "annotation"
    title = "Ranges named by the program" if own else "Modules"
    table = _table(title, "name", "calls", "host", "forward", "backward", "own")
    for m in top_modules_by_self_time(report.modules, SHOWN_MODULES):
        table.add_row(
            _indented(m, max(console.width - 50, 20)),
            str(m.count),
            format_seconds(m.host_s),
            format_seconds(m.forward_s),
            format_seconds(m.backward_s),
            format_seconds(m.self_s),
        )
    console.print()
    console.print(table)


def _indented(m: ModuleRow, width: int) -> Text:
    """Indent a name of the program by its depth; the path of a module already shows its position."""
    if m.source == "module":
        return Text(short_path(m.name, width))
    indent = "  " * min(m.depth, 6)
    return Text(indent + short_name(m.name, width - len(indent)))


def _memory(console: Console, report: TraceReport) -> None:
    rows = [(r, m) for r in report.ranks[:SHOWN_RANKS] for m in r.memory]
    if not rows:
        return
    table = _table("Memory that PyTorch allocated", "rank", "device", "peak", "reserved", "at the end", left=2)
    for r, m in rows:
        table.add_row(
            str(r.rank),
            m.device,
            format_bytes_precise(m.peak_bytes),
            format_bytes_precise(m.peak_reserved_bytes),
            format_bytes_precise(m.last_bytes),
        )
    console.print()
    console.print(table)
    if any(m.device == "cpu" for _, m in rows):
        console.print(Text(CPU_MEMORY, style="dim"), soft_wrap=True)


def _problems(console: Console, report: TraceReport) -> None:
    if not report.problems:
        return
    console.print()
    console.print("Notes about these figures", style="bold")
    styles = {"error": "red", "warning": "yellow", "note": "dim"}
    for p in report.problems:
        where = f"{p.file}: " if p.file else ""
        console.print(Text.assemble((f"{p.severity:7} ", styles[p.severity]), f"{where}{p.message}"), soft_wrap=True)


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print the tables of `compare_tables` and the remarks."""
    for table in compare_tables(comparison, console.width):
        console.print()
        console.print(table)
    for remark in comparison.remarks:
        console.print(Text(f"note    {remark}", style="dim"), soft_wrap=True)


def compare_tables(comparison: Comparison, width: int = 100) -> list[Table]:
    """Return one table of all figures, and one of the kernels and operators with the largest changes."""
    title = f"{comparison.a} against {comparison.b}, per {comparison.per}"
    tables = [_comparison_table(title, comparison.rows, width)]
    if comparison.changed:
        tables.append(_comparison_table("Kernels and operators with the largest changes", comparison.changed, width))
    return tables


def _comparison_table(title: str, rows: Sequence[DiffRow], width: int) -> Table:
    table = Table(
        title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    table.add_column("", no_wrap=True)
    for column in ("this", "other", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    room = max(width - 40, 20)
    for row, name in zip(rows, short_names([r.name for r in rows], room), strict=True):
        ratio = f"{row.ratio:.3g}" if row.ratio is not None else "-"
        table.add_row(
            Text(name), format_figure(row.a, row.unit), format_figure(row.b, row.unit), _coloured_ratio(ratio, row)
        )
    return table


def format_figure(value: float | None, unit: Unit) -> str:
    """Return a figure with its unit."""
    if value is None:
        return "-"
    if unit == "s":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes_precise(value)
    return (
        f"{100 * value:.1f} %"
        if unit == "share"
        else f"{value / 1e9:.3g} GB/s"
        if unit == "bytes/s"
        else f"{value:.4g}"
    )


def _coloured_ratio(ratio: str, row: DiffRow) -> Text:
    """Colour times that changed by at least a tenth; for other figures, more is neither better nor worse."""
    if row.unit != "s" or row.ratio is None or row.name == "hidden communication" or 0.9 <= row.ratio <= 1.1:
        return Text(ratio)
    return Text(ratio, style="red" if row.ratio > 1 else "green")
