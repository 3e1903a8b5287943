"""A report as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.trace.launches import by_place
from allranks.trace.records import CPU_MEMORY, Breakdown, CollectiveRow, ModuleRow, PairReport, TopRow, TraceReport
from allranks.trace.shorten import most_own, short_name, short_names, short_path
from allranks.trace.units import rate, seconds, share, size

WIDE = 100  # columns
SHOWN_RANKS = 32
SHOWN_STEPS = 12
SHOWN_ROWS = 10
SHOWN_MODULES = 15


def show_report(console: Console, report: TraceReport) -> None:
    """Prints what a person wants to know first, first."""
    _title(console, report)
    _breakdown(console, report)
    _steps(console, report)
    _phases(console, report)
    _collectives(console, report)
    _stragglers(console, report)
    _tops(console, "Kernels", report.top_kernels)
    _tops(console, "Operators, own time on the host", report.top_operators)
    _modules(console, report)
    _memory(console, report)
    _problems(console, report)


def _title(console: Console, report: TraceReport) -> None:
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
        share(b.compute_s, b.span_s),
        share(b.exposed_comm_s, b.span_s),
        share(b.copy_s, b.span_s),
        share(b.idle_s, b.span_s),
        seconds(b.comm_s),
        overlap,
    ]


def _breakdown(console: Console, report: TraceReport) -> None:
    columns = ("rank", "time", "steps", "compute", "exposed comm.", "copies", "idle", "all comm.", "hidden")
    table = _table("Where the time went, by rank", *columns)
    for r in report.ranks[:SHOWN_RANKS]:
        table.add_row(str(r.rank), seconds(r.total.span_s), str(len(r.steps)) if r.steps else "none", *_parts(r.total))
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
        table.add_row(f"{s.step}{' (trimmed)' if s.trimmed else ''}", seconds(s.breakdown.span_s), *_parts(s.breakdown))
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
            table.add_row(phase.phase, *(seconds(m) for m in means))
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
        console.print(
            f"{p.paired} found on several ranks ({how}); {p.unpaired} not found again.", style="dim", soft_wrap=True
        )
    _launches(console, report)


def _collective_row(table: Table, row: CollectiveRow, name: str) -> None:
    each = size(row.bytes / row.count) if row.bytes is not None else "-"
    waiting = share(row.wait_s or 0, row.total_s) if row.wait_s is not None else "-"
    group = str(row.group_size) if row.group_size else "-"
    table.add_row(
        name,
        group,
        str(row.count),
        each,
        seconds(row.mean_s),
        waiting,
        rate(row.algbw_bytes_s),
        rate(row.busbw_bytes_s),
    )


def _launches(console: Console, report: TraceReport) -> None:
    """Where collectives were launched, per rank and step."""
    rows, told, steps = by_place(report)
    table = _table("Where they were launched, per rank and step", "kind", "phase", "count", "bytes", "time", left=2)
    for (kind, phase), (count, moved, time) in rows.items():
        table.add_row(kind, phase, f"{count / steps:.4g}", size(moved / steps) if told else "-", seconds(time / steps))
    console.print()
    console.print(table)


def _stragglers(console: Console, report: TraceReport) -> None:
    rows = [r for r in report.stragglers if r.pairs]
    if len(rows) < 2:
        return
    table = _table(
        "Who others waited for", "rank", "came last", "of", "made others wait", "mean", "longest", "waited itself"
    )
    for row in rows[:SHOWN_ROWS]:
        table.add_row(
            str(row.rank), f"{row.last} ({100 * row.last_share:.0f} %)", str(row.pairs), seconds(row.caused_wait_s),
            seconds(row.mean_late_s), seconds(row.max_late_s), seconds(row.wait_s),
        )  # fmt: skip
    console.print()
    console.print(table)
    worst = longest_wait(report)
    if worst is not None:
        what = f"{worst.kind} ({worst.key})" if worst.kind not in worst.key else worst.key
        text = f"Longest: rank {worst.last_rank} came {seconds(max(worst.wait_s))} after the first to {what}."
        console.print(Text(text, style="dim"), soft_wrap=True)


def longest_wait(report: TraceReport) -> PairReport | None:
    """The collective that a rank waited longest in, but for profilers that started later; None without waiting."""
    first = report.ranks[0].steps[0].step if report.startup is not None and report.ranks[0].steps else None
    pairs = [p for p in report.pairing.longest if report.startup is None or p.step != first]
    worst = max(pairs, key=lambda p: max(p.wait_s), default=None)
    return worst if worst is not None and max(worst.wait_s) > 0 else None


def _tops(console: Console, title: str, rows: Sequence[TopRow]) -> None:
    if not rows:
        return
    # a name cut to a few letters is none: where there is little room, the mean, which is sum by count, goes
    wide = console.width >= WIDE
    table = _table(title, "name", "kind", "count", "sum", "share", *(["mean"] if wide else []), "longest", left=2)
    width = max(console.width - (55 if wide else 45), 20)
    shown = rows[:SHOWN_ROWS]
    for row, name in zip(shown, short_names([r.name for r in shown], width), strict=True):
        table.add_row(
            Text(name),
            row.kind,
            str(row.count),
            seconds(row.total_s),
            f"{100 * row.share:.1f} %",
            *([seconds(row.mean_s)] if wide else []),
            seconds(row.max_s),
        )
    console.print()
    console.print(table)


def _modules(console: Console, report: TraceReport) -> None:
    if not report.modules:
        return
    own = report.modules[0].source == "annotation"
    title = "Ranges that the program named" if own else "Modules"
    table = _table(title, "name", "calls", "host", "forward", "backward", "own")
    for m in most_own(report.modules, SHOWN_MODULES):
        table.add_row(
            _indented(m, max(console.width - 50, 20)),
            str(m.count),
            seconds(m.host_s),
            seconds(m.forward_s),
            seconds(m.backward_s),
            seconds(m.self_s),
        )
    console.print()
    console.print(table)


def _indented(m: ModuleRow, width: int) -> Text:
    """A module's path says itself where it belongs; a name of the program is set in by its depth."""
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
        table.add_row(str(r.rank), m.device, size(m.peak_bytes), size(m.peak_reserved_bytes), size(m.last_bytes))
    console.print()
    console.print(table)
    if any(m.device == "cpu" for _, m in rows):
        console.print(Text(CPU_MEMORY, style="dim"), soft_wrap=True)


def _problems(console: Console, report: TraceReport) -> None:
    if not report.problems:
        return
    console.print()
    console.print("What to know about these figures", style="bold")
    styles = {"error": "red", "warning": "yellow", "note": "dim"}
    for p in report.problems:
        where = f"{p.file}: " if p.file else ""
        console.print(Text.assemble((f"{p.severity:7} ", styles[p.severity]), f"{where}{p.message}"), soft_wrap=True)
