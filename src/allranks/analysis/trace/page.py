"""Render summary.html: key figures, tables and charts of a trace report, in one offline page with light and dark mode.

Names come from the traced programs and are escaped as text.
"""

from __future__ import annotations

from collections.abc import Iterable

from allranks.analysis.report.html import (
    Cell,
    Item,
    Items,
    KeyFigure,
    Page,
    Row,
    Section,
    Table,
    Text,
    long_cell,
    number_cell,
    plotly_source,
    render,
    table,
)
from allranks.analysis.trace import charts
from allranks.analysis.trace.records import TraceReport
from allranks.analysis.trace.steps import sum_breakdowns
from allranks.analysis.trace.tables import Block, Line, report_parts
from allranks.analysis.trace.tables import Cell as TerminalCell
from allranks.analysis.trace.tables import Table as TerminalTable
from allranks.utils.text import format_bytes, format_percent_of, format_seconds, sanitize

MAX_RANK_ROWS = 64
NAME_WIDTH = 200  # of the terminal that would have the names of the page


def key_figures(report: TraceReport) -> list[KeyFigure]:
    """Return the most important figures."""
    total, p = sum_breakdowns([r.total for r in report.ranks]), report.pairing
    steps = [s.breakdown.span_s for r in report.ranks for s in r.steps]
    if steps:
        note = f"mean of {len(steps)} on {_ranks(len(report.ranks))}"
        made = [KeyFigure("Time of a step", format_seconds(sum(steps) / len(steps)), note)]
    else:
        longest = max(r.total.span_s for r in report.ranks)
        made = [KeyFigure("Time traced", format_seconds(longest), "no steps were marked")]
    for text, part, whole, note in (
        ("Compute", total.compute_s, total.span_s, "of the time, mean of ranks"),
        ("Exposed communication", total.exposed_comm_s, total.span_s, "not hidden by compute"),
        ("Idle", total.idle_s, total.span_s, "no work"),
        ("Overlap", total.overlapped_comm_s, total.comm_s, "of communication, hidden by compute"),
    ):
        if text != "Overlap" or whole:
            made.append(KeyFigure(text, format_percent_of(part, whole), note))
    if p.paired:
        first = report.stragglers[0] if report.stragglers else None
        note = f"mostly for rank {first.rank}" if first and first.caused_wait_s > 0 else "for the last rank"
        made.append(KeyFigure("Waiting in collectives", format_percent_of(p.wait_s, p.wait_s + p.transfer_s), note))
    found = [(m.peak_bytes, r.rank, m.device) for r in report.ranks for m in r.memory]
    if found:
        peak, rank, device = max(found)
        since = " since the profiler started" if device == "cpu" else ""
        made.append(KeyFigure("Peak memory", format_bytes(peak, digits=4), f"rank {rank}, {device}{since}"))
    return made


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


def page_tables(blocks: Iterable[Block]) -> list[Table | None]:
    """Return the tables of a terminal as those of a page; the lines after a table are its note."""
    found: list[tuple[TerminalTable, list[str]]] = []
    for block in blocks:
        if isinstance(block, TerminalTable):
            found.append((block, []))
        elif isinstance(block, Line) and block.parts and found:
            found[-1][1].append("".join(text for text, _ in block.parts))

    def cell(value: str | TerminalCell, column: int, block: TerminalTable) -> Cell:
        text = value if isinstance(value, str) else value.text
        indent = len(text) - len(text.lstrip(" "))
        return Cell(
            "\u00a0" * indent + text[indent:], "num" if column >= block.left else "wrap" if len(text) > 40 else ""
        )

    return [
        table(
            "",
            b.title,
            list(b.columns),
            [[cell(v, i, b) for i, v in enumerate(row)] for row in b.rows],
            " ".join(notes),
        )
        for b, notes in found
    ]


def file_table(report: TraceReport) -> Table | None:
    rows: list[Row] = [
        [
            number_cell(str(r.rank)),
            long_cell(sanitize(r.path)),
            number_cell(format_bytes(r.file_bytes, digits=4)),
            number_cell(f"{r.n_events:,}"),
            Cell("yes") if r.whole else Cell("no", "bad"),
        ]
        for r in report.ranks[:MAX_RANK_ROWS]
    ]
    return table("files", "Trace files", ["rank", "file", "size", "events", "whole"], rows)


SEVERITIES = {"error": "bad", "warning": "warn", "note": "muted"}


def summary_html(report: TraceReport) -> str:
    """Return the page. Without plotly (the `report` extra) it has no charts, and explains how to get them."""
    files = (
        "summary.csv and collectives.csv contain these figures in machine-readable form; merged.json.gz contains the "
        "traces of all ranks on one clock, for ui.perfetto.dev."
    )
    name, banner = sanitize(report.name, 200), ("info", "Where the time goes", verdict(report))
    page = Page(
        "trace analysis", name, _sections(report), _subtitle(report), None, [banner], key_figures(report), [files]
    )
    return render(page, plotly_source())


def verdict(report: TraceReport) -> str:
    """Return in a few sentences what the time was spent on, and for whom the ranks waited."""
    total = sum_breakdowns([r.total for r in report.ranks])
    parts = {
        "compute": total.compute_s,
        "exposed communication": total.exposed_comm_s,
        "copies": total.copy_s,
        "idle time": total.idle_s,
    }
    shares = [(part, seconds / total.span_s) for part, seconds in parts.items() if total.span_s]
    first, *rest = sorted((one for one in shares if one[1] >= 0.005), key=lambda one: -one[1]) or [("idle time", 1.0)]
    text = f"{first[1]:.0%} of the time is {first[0]}"
    text += "".join(f", {share:.0%} {part}" for part, share in rest) + "."
    if not total.comm_s:
        return f"{text} No communication was traced."
    text += f" Compute hides {total.overlapped_comm_s / total.comm_s:.0%} of the communication."
    p = report.pairing
    if not p.paired:
        return text
    waiting = p.wait_s / (p.wait_s + p.transfer_s) if p.wait_s + p.transfer_s else 0.0
    text += f" Ranks spend {waiting:.0%} of their time in collectives waiting for the last rank"
    late = max(report.stragglers, key=lambda s: s.caused_wait_s, default=None)
    caused = sum(s.caused_wait_s for s in report.stragglers)
    if late is not None and caused and late.caused_wait_s > 0.6 * caused:
        text += f", mostly for rank {late.rank}, which was last in {late.last:,} of {late.pairs:,}"
    return f"{text}."


def _sections(report: TraceReport) -> list[Section]:
    parts = {name: page_tables(blocks) for name, blocks in report_parts(report, NAME_WIDTH, page=True).items()}
    shares = "Compute, exposed communication, copies and idle are shares of a rank's time; their sum is 100 %."
    sums = (
        "Counts and times are totals of all ranks. Bandwidth is bytes over transfer time, or over the whole duration "
        "of collectives that were found on one rank only; GB is 10^9 bytes."
    )
    startup, problems = (
        _startup(report),
        [
            Item(p.severity, SEVERITIES[p.severity], sanitize(f"{p.file}: {p.message}" if p.file else p.message))
            for p in report.problems
        ],
    )
    notes = [Text("", [startup]) if startup else None, Items("", problems) if problems else None]
    communication = [charts.waiting_chart(report), charts.bandwidth_chart(report)]
    time = [charts.breakdown_chart(report), charts.overlap_chart(report), charts.step_chart(report)]
    return [
        Section("time", "Time", [("two", time), ("stack", parts["time"])], shares),
        Section("collectives", "Collectives", [("two", communication), ("stack", parts["collectives"])], sums),
        Section("stragglers", "Stragglers", [("stack", parts["stragglers"])]),
        Section("program", "Phases", [("stack", parts["phases"])]),
        Section("tops", "Kernels and operators", [("stack", parts["tops"])]),
        Section("memory", "Memory", [("two", [charts.memory_chart(report)]), ("stack", parts["memory"])]),
        Section("problems", "Notes about these figures", [("stack", notes)], short="Notes"),
        Section("files", "Files", [("stack", [file_table(report)])]),
    ]


def _subtitle(report: TraceReport) -> list[str]:
    n, world = len(report.ranks), report.world_size
    names = sorted({r.device_name for r in report.ranks if r.device_name})
    parts = [
        f"window {report.window}" if report.window else "",
        f"{n} of {world} ranks" if world and world != n else f"{n} rank{'s' if n > 1 else ''}",
        report.device.upper(),
        *names[:4],
        report.backend or "",
    ]
    return [sanitize(p, 200) for p in parts if p]


def _startup(report: TraceReport) -> str:
    s = report.startup
    if s is None or s.skew_s <= 0:
        return ""
    removed = max(s.removed_s.values(), default=0.0)
    cut = (
        f" Up to {format_seconds(removed)} per rank were left out: the windows start after {s.until}."
        if removed > 0
        else ""
    )
    return sanitize(f"The profilers started {format_seconds(s.skew_s)} apart.{cut}")
