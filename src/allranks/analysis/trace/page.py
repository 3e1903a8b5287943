"""Render summary.html: key figures, tables and charts of a trace report, in one offline page with light and dark mode.

Names come from the traced programs and are escaped as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from allranks.analysis.report import html
from allranks.analysis.trace.records import Breakdown, TraceReport
from allranks.analysis.trace.steps import sum_breakdowns
from allranks.analysis.trace.tables import Block, Line, report_parts, subtitle
from allranks.analysis.trace.tables import Cell as TerminalCell
from allranks.analysis.trace.tables import Table as TerminalTable
from allranks.utils.palette import ACTIVITY_COLOURS
from allranks.utils.text import format_bytes, format_percent_of, format_seconds, sanitize

MAX_BARS = 32
NAME_WIDTH = 200  # of the terminal that would have the names of the page
_PARTS: tuple[tuple[str, str, Callable[[Breakdown], float]], ...] = (
    ("compute", "compute", lambda b: b.compute_s),
    ("exposed communication", "exposed", lambda b: b.exposed_comm_s),
    ("copies", "copy", lambda b: b.copy_s),
    ("idle", "idle", lambda b: b.idle_s),
)


def key_figures(report: TraceReport) -> list[html.KeyFigure]:
    """Return the most important figures."""
    total, p = sum_breakdowns([r.total for r in report.ranks]), report.pairing
    steps = [s.breakdown.span_s for r in report.ranks for s in r.steps]
    if steps:
        note = f"mean of {len(steps)} on {len(report.ranks)} rank{'s' * (len(report.ranks) > 1)}"
        made = [html.KeyFigure("Time of a step", format_seconds(sum(steps) / len(steps)), note)]
    else:
        longest = max(r.total.span_s for r in report.ranks)
        made = [html.KeyFigure("Time traced", format_seconds(longest), "no steps were marked")]
    for text, part, whole, note in (
        ("Compute", total.compute_s, total.span_s, "of the time, mean of ranks"),
        ("Exposed communication", total.exposed_comm_s, total.span_s, "not hidden by compute"),
        ("Idle", total.idle_s, total.span_s, "no work"),
        ("Overlap", total.overlapped_comm_s, total.comm_s, "of communication, hidden by compute"),
    ):
        if text != "Overlap" or whole:
            made.append(html.KeyFigure(text, format_percent_of(part, whole), note))
    if p.paired:
        first = report.stragglers[0] if report.stragglers else None
        note = f"mostly for rank {first.rank}" if first and first.caused_wait_s > 0 else "for the last rank"
        made.append(
            html.KeyFigure("Waiting in collectives", format_percent_of(p.wait_s, p.wait_s + p.transfer_s), note)
        )
    peaks = [(m.peak_bytes, r.rank, m.device) for r in report.ranks for m in r.memory]
    if peaks:
        peak, rank, device = max(peaks)
        since = " since the profiler started" if device == "cpu" else ""
        made.append(html.KeyFigure("Peak memory", format_bytes(peak, digits=4), f"rank {rank}, {device}{since}"))
    return made


def page_tables(blocks: Iterable[Block]) -> list[html.Table | None]:
    """Return the tables of a terminal as those of a page; the lines after a table are its note."""
    groups: list[tuple[TerminalTable, list[str]]] = []
    for block in blocks:
        if isinstance(block, TerminalTable):
            groups.append((block, []))
        elif isinstance(block, Line) and block.parts and groups:
            groups[-1][1].append("".join(text for text, _ in block.parts))

    def cell(value: str | TerminalCell, column: int, block: TerminalTable) -> html.Cell:
        text = value if isinstance(value, str) else value.text
        indent = len(text) - len(text.lstrip(" "))
        return html.Cell(
            "\u00a0" * indent + text[indent:], "num" if column >= block.left else "wrap" if len(text) > 40 else ""
        )

    tables = []
    for block, notes in groups:
        cells = [[cell(value, i, block) for i, value in enumerate(row)] for row in block.rows]
        tables.append(html.table("", block.title, list(block.columns), cells, " ".join(notes)))
    return tables


def _bars(title: str, ranks: Sequence[tuple[int, list[tuple[str, str, float]]]], note: str) -> html.Bars | None:
    """Return a stacked bar of times for each rank; its parts are (name, colour, seconds)."""
    if len(ranks) > MAX_BARS:
        note += f" {len(ranks) - MAX_BARS} more ranks are in summary.csv."
    rows = [html.BarValues(f"rank {rank}", parts, sum(part[2] for part in parts)) for rank, parts in ranks[:MAX_BARS]]
    return html.stacked_bars(title, rows, format_seconds, note)


def _breakdown_bars(report: TraceReport) -> html.Bars | None:
    ranks = [(r.rank, [(name, ACTIVITY_COLOURS[key], of(r.total)) for name, key, of in _PARTS]) for r in report.ranks]
    return _bars("Parts of the time, by rank", ranks, report.definition)


def _waiting_bars(report: TraceReport) -> html.Bars | None:
    """Return the sums over the collectives of each rank: transfer, and waiting for others."""
    waited = {s.rank: s.wait_s for s in report.stragglers}
    launched = dict.fromkeys(waited, 0.0)
    for row in report.launches:
        if row.rank in waited:
            launched[row.rank] += row.time_s
    fake = report.startup.fake_wait_s if report.startup else {}
    ranks = []
    for rank, wait in sorted(waited.items()):
        transfer = max(launched[rank] - wait - fake.get(rank, 0.0), 0.0)
        parts = [
            ("transfer", ACTIVITY_COLOURS["hidden"], transfer),
            ("waiting for the last rank", ACTIVITY_COLOURS["wait"], wait),
        ]
        ranks.append((rank, parts))
    note = "Sums over collectives, including concurrent ones. The other ranks wait for the rank with the least waiting."
    return _bars("Transfer and waiting, by rank", ranks, note)


SEVERITIES = {"error": "bad", "warning": "warn", "note": "muted"}


def summary_html(report: TraceReport) -> str:
    """Return the page."""
    files = (
        "summary.csv and collectives.csv contain these figures in machine-readable form; merged.json.gz contains the "
        "traces of all ranks on one clock, for ui.perfetto.dev."
    )
    name, cards = sanitize(report.name, 200), key_figures(report)
    page = html.Page("trace analysis", name, _sections(report), subtitle(report), cards=cards, footer=[files])
    return html.render(page)


def _sections(report: TraceReport) -> list[html.Section]:
    parts = {name: page_tables(blocks) for name, blocks in report_parts(report, NAME_WIDTH).items()}
    shares = "Compute, exposed communication, copies and idle are shares of a rank's time; their sum is 100 %."
    sums = (
        "Counts and times are totals of all ranks. Bandwidth is bytes over transfer time, or over the whole duration "
        "of collectives that were found on one rank only; GB is 10^9 bytes."
    )
    problems = [
        html.Item(p.severity, SEVERITIES[p.severity], sanitize(f"{p.file}: {p.message}" if p.file else p.message))
        for p in report.problems
    ]
    return [
        html.Section("time", "Time", [("stack", [_breakdown_bars(report), *parts["time"]])], shares),
        html.Section("collectives", "Collectives", [("stack", [_waiting_bars(report), *parts["collectives"]])], sums),
        html.Section("stragglers", "Stragglers", [("stack", parts["stragglers"])]),
        html.Section("program", "Phases", [("stack", parts["phases"])]),
        html.Section("tops", "Kernels and operators", [("stack", parts["tops"])]),
        html.Section("memory", "Memory", [("stack", parts["memory"])]),
        html.Section(
            "problems",
            "Notes about these figures",
            [("stack", [html.Items("", problems) if problems else None])],
            short="Notes",
        ),
    ]
