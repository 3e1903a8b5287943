"""Render summary.html: key figures, tables and charts of a trace report, in one offline page with light and dark mode.

Names come from the traced programs and are escaped as text.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from allranks.analysis.trace.records import CollectiveRow, ModuleRow, Phase, TopRow, TraceReport, totals_by_phase
from allranks.analysis.trace.tables import short_name, top_modules_by_self_time
from allranks.utils.text import format_bandwidth, format_bytes, format_percent_of, format_seconds, sanitize

MAX_ROWS = 20
MAX_RANK_ROWS = 64
MAX_NAME_LENGTH = 160


def display_name(text: str) -> str:
    """Return a name for display on a page."""
    return sanitize(short_name(text, MAX_NAME_LENGTH), MAX_NAME_LENGTH)


def key_figures(report: TraceReport) -> list[KeyFigure]:
    """Return the most important figures."""
    n = len(report.ranks)
    spans = [r.total.span_s for r in report.ranks]
    steps = [s.breakdown.span_s for r in report.ranks for s in r.steps]
    whole = sum(spans)
    made = (
        [KeyFigure("Time of a step", format_seconds(sum(steps) / len(steps)), f"mean of {len(steps)} on {_ranks(n)}")]
        if steps
        else []
    )
    made = made or [KeyFigure("Time traced", format_seconds(max(spans)), "no steps were marked")]
    for text, part, note in (
        ("Compute", "compute_s", "of the time, mean of ranks"),
        ("Exposed communication", "exposed_comm_s", "not hidden by compute"),
        ("Idle", "idle_s", "no work"),
    ):
        made.append(KeyFigure(text, format_percent_of(sum(getattr(r.total, part) for r in report.ranks), whole), note))
    comm = sum(r.total.comm_s for r in report.ranks)
    if comm > 0:
        made.append(
            KeyFigure(
                "Overlap",
                format_percent_of(sum(r.total.overlapped_comm_s for r in report.ranks), comm),
                "of communication, hidden by compute",
            )
        )
    made += _waiting(report) + _peak(report)
    return made


def _waiting(report: TraceReport) -> list[KeyFigure]:
    p = report.pairing
    if not p.paired:
        return []
    first = report.stragglers[0] if report.stragglers else None
    note = f"mostly for rank {first.rank}" if first and first.caused_wait_s > 0 else "for the last rank"
    return [KeyFigure("Waiting in collectives", format_percent_of(p.wait_s, p.wait_s + p.transfer_s), note)]


def _peak(report: TraceReport) -> list[KeyFigure]:
    found = [(m.peak_bytes, r.rank, m.device) for r in report.ranks for m in r.memory]
    if not found:
        return []
    peak, rank, device = max(found)
    since = " since the profiler started" if device == "cpu" else ""
    return [KeyFigure("Peak memory", format_bytes(peak, digits=4), f"rank {rank}, {device}{since}")]


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


def rank_table(report: TraceReport) -> Table | None:
    rows: list[Row] = []
    for r in report.ranks[:MAX_RANK_ROWS]:
        b = r.total
        overlap = "-" if b.overlap is None else f"{100 * b.overlap:.1f} %"
        clock = format_seconds(r.clock_offset_s) if r.clock_pairs else "-"
        parts = [format_percent_of(v, b.span_s) for v in (b.compute_s, b.exposed_comm_s, b.copy_s, b.idle_s)]
        rows.append(
            [
                number_cell(str(r.rank)),
                *map(
                    number_cell,
                    (format_seconds(b.span_s), str(len(r.steps)), *parts, format_seconds(b.comm_s), overlap, clock),
                ),
            ]
        )
    columns = [
        "rank",
        "time",
        "steps",
        "compute",
        "exposed comm.",
        "copies",
        "idle",
        "all comm.",
        "overlap",
        "clock ahead",
    ]
    note = "Compute, exposed communication, copies and idle are shares of the rank's time; their sum is 100 %."
    if len(report.ranks) > MAX_RANK_ROWS:
        note += f" {len(report.ranks) - MAX_RANK_ROWS} more ranks are in summary.csv."
    return table("ranks", "Ranks", columns, rows, note)


def collective_table(report: TraceReport) -> Table | None:
    rows: list[Row] = []
    for row in report.collectives:
        mine = [r for r in report.sizes if r.kind == row.kind]
        one = mine[0].size_bucket if len(mine) == 1 else None
        rows.append(_collective(row, Cell(display_name(row.kind)), Cell(one or "all sizes", "" if one else "muted")))
        rows += [_collective(part, Cell(""), Cell(part.size_bucket or "-")) for part in (mine if not one else [])]
    columns = [
        "kind",
        "size",
        "ranks",
        "count",
        "bytes each",
        "mean time",
        "longest",
        "waiting",
        "algorithm GB/s",
        "bus GB/s",
    ]
    p = report.pairing
    note = "Counts and times are totals of all ranks. "
    if p.paired:
        how = f"{p.by_sequence} by sequence number, {p.by_order} by order"
        note += f"{p.paired} collectives were paired across ranks ({how}), {p.unpaired} were not. Bandwidth is bytes over transfer time; "
    else:
        note += "None was paired with another rank, so the waiting time is unknown and bandwidth is bytes over the whole duration; "
    return table("collectives", "Collectives by kind and size", columns, rows, note + "GB is 10^9 bytes.")


def _collective(row: CollectiveRow, *first: Cell) -> Row:
    waiting = format_percent_of(row.wait_s, row.total_s) if row.wait_s is not None else "-"
    values = (
        str(row.group_size or "-"),
        f"{row.count:,}",
        row.sizes_text,
        format_seconds(row.mean_s),
        format_seconds(row.max_s),
        waiting,
    )
    return [
        *first,
        *map(number_cell, (*values, format_bandwidth(row.algbw_bytes_s), format_bandwidth(row.busbw_bytes_s))),
    ]


def straggler_table(report: TraceReport) -> Table | None:
    found = [r for r in report.stragglers if r.pairs]
    rows: list[Row] = [
        [
            number_cell(str(r.rank)),
            number_cell(f"{r.last:,} of {r.pairs:,} ({100 * r.last_share:.0f} %)"),
            number_cell(format_seconds(r.caused_wait_s)),
            number_cell(format_seconds(r.mean_late_s)),
            number_cell(format_seconds(r.max_late_s)),
            number_cell(format_seconds(r.wait_s)),
        ]
        for r in found[:MAX_ROWS]
    ]
    columns = ["rank", "last", "caused wait", "mean", "longest", "own wait"]
    note = "The delay of a rank is the longest wait of another rank for it."
    return table("stragglers", "Last ranks in collectives", columns, rows if len(found) > 1 else [], note)


def wait_table(report: TraceReport) -> Table | None:
    rows: list[Row] = [
        [
            Cell(display_name(p.kind)),
            long_cell(display_name(p.key)),
            number_cell(format_bytes(p.bytes, digits=4)),
            number_cell(f"rank {p.last_rank}"),
            number_cell(format_seconds(max(p.wait_s))),
            number_cell(format_seconds(p.transfer_s)),
        ]
        for p in report.pairing.longest[:10]
        if max(p.wait_s) > 0
    ]
    return table(
        "waits",
        "Collectives with the longest waits",
        ["kind", "which", "bytes", "last rank", "longest wait", "transfer"],
        rows,
    )


def phase_table(report: TraceReport) -> Table | None:
    sums: dict[Phase, list[float]] = {}
    for r in report.ranks:
        for p in r.phases:
            row = sums.setdefault(p.phase, [0.0, 0.0, 0.0])
            for i, value in enumerate((p.host_s, p.busy_s, p.comm_s)):
                row[i] += value / len(report.ranks)
    busy = "kernels launched" if report.device == "gpu" else "operators"
    rows: list[Row] = [
        [Cell(phase), *(number_cell(format_seconds(v)) for v in row)] for phase, row in sums.items() if any(row)
    ]
    return table("phases", "Phases, mean of ranks", ["phase", "on the host", busy, "collectives launched"], rows)


def launch_table(report: TraceReport) -> Table | None:
    sums, told, steps = totals_by_phase(report)
    rows: list[Row] = [
        [
            Cell(display_name(kind)),
            phase,
            number_cell(f"{n / steps:.4g}"),
            number_cell(format_bytes(b / steps, digits=4) if told else "-"),
            number_cell(format_seconds(t / steps)),
        ]
        for (kind, phase), (n, b, t) in sums.items()
    ]
    return table(
        "launches",
        "Where collectives were launched, per rank and step",
        ["kind", "phase", "count", "bytes", "time"],
        rows,
    )


def module_table(report: TraceReport) -> Table | None:
    if not report.modules:
        return None
    kept = top_modules_by_self_time(report.modules, MAX_ROWS)
    rows: list[Row] = [
        [
            Cell(_indented(m), "code"),
            number_cell(f"{m.count:,}"),
            *(number_cell(format_seconds(v)) for v in (m.host_s, m.forward_s, m.backward_s, m.self_s)),
        ]
        for m in kept
    ]
    own = report.modules[0].source == "annotation"
    title = "Ranges named by the program" if own else "Modules of the model"
    note = "Sums over ranks."
    if len(kept) < len(report.modules):
        note = f"{len(kept)} of {len(report.modules)}: those with the largest self time, and their parents; sums over ranks."
    return table("modules", title, ["name", "calls", "host", "forward", "backward", "own"], rows, note)


def _indented(m: ModuleRow) -> str:
    return "\u00a0\u00a0" * min(m.depth, 8) + display_name(m.name)


def top_table(id: str, title: str, tops: Sequence[TopRow], note: str) -> Table | None:
    rows: list[Row] = [
        [
            Cell(display_name(t.name), "long code"),
            t.kind,
            number_cell(f"{t.count:,}"),
            number_cell(format_seconds(t.total_s)),
            number_cell(f"{100 * t.share:.1f} %"),
            number_cell(format_seconds(t.mean_s)),
            number_cell(format_seconds(t.max_s)),
        ]
        for t in tops[:MAX_ROWS]
    ]
    return table(id, title, ["name", "kind", "count", "sum", "share", "mean", "longest"], rows, note)


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
        "summary.csv and collectives.csv contain these figures in machine-readable form; merged.json.gz contains the traces of all "
        "ranks on one clock, for ui.perfetto.dev."
    )
    name, banner = sanitize(report.name, 200), ("info", "Where the time goes", verdict(report))
    page = Page(
        "trace analysis", name, _sections(report), _subtitle(report), None, [banner], key_figures(report), [files]
    )
    return render(page, plotly_source())


def verdict(report: TraceReport) -> str:
    """Return in a few sentences what the time was spent on, and for whom the ranks waited."""
    total = [r.total for r in report.ranks]
    span = sum(b.span_s for b in total)
    shares = {
        "compute": sum(b.compute_s for b in total) / span if span else 0.0,
        "exposed communication": sum(b.exposed_comm_s for b in total) / span if span else 0.0,
        "copies": sum(b.copy_s for b in total) / span if span else 0.0,
        "idle time": sum(b.idle_s for b in total) / span if span else 0.0,
    }
    first, *rest = sorted(
        ((part, share) for part, share in shares.items() if share >= 0.005), key=lambda one: -one[1]
    ) or [("idle time", 1.0)]
    text = f"{first[1]:.0%} of the time is {first[0]}"
    text += "".join(f", {share:.0%} {part}" for part, share in rest) + "."
    comm = sum(b.comm_s for b in total)
    if not comm:
        return f"{text} No communication was traced."
    text += f" Compute hides {sum(b.overlapped_comm_s for b in total) / comm:.0%} of the communication."
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
    own = "Self time on the host (without called operators); sums over ranks."
    startup, problems = (
        _startup(report),
        [
            Item(p.severity, SEVERITIES[p.severity], sanitize(f"{p.file}: {p.message}" if p.file else p.message))
            for p in report.problems
        ],
    )
    notes = [Text("", [startup]) if startup else None, Items("", problems) if problems else None]
    time = [charts.breakdown_chart(report), charts.overlap_chart(report), charts.step_chart(report)]
    tops = [
        top_table("kernels", "Kernels", report.top_kernels, "Sums over ranks."),
        top_table("operators", "Operators", report.top_operators, own),
    ]
    return [
        Section("time", "Time", [("two", time), ("stack", [rank_table(report)])]),
        Section("timeline", "Timeline", [("two", [charts.timeline_chart(report)])]),
        Section(
            "collectives",
            "Collectives",
            [
                ("two", [charts.waiting_chart(report), charts.bandwidth_chart(report)]),
                ("stack", [collective_table(report), launch_table(report)]),
            ],
        ),
        Section("stragglers", "Stragglers", [("stack", [straggler_table(report), wait_table(report)])]),
        Section("program", "Phases and modules", [("stack", [phase_table(report), module_table(report)])]),
        Section("tops", "Kernels and operators", [("stack", tops)]),
        Section("memory", "Memory", [("two", [charts.memory_chart(report)])]),
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
