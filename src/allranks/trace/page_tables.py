"""Tables and headline figures of the trace page. Names come from programs that were traced: they are text, never markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from allranks.report.tables import Cell, Row, Table, long, num, table
from allranks.report.text import plain
from allranks.trace.launches import by_place
from allranks.trace.records import CollectiveRow, ModuleRow, Phase, TopRow, TraceReport
from allranks.trace.shorten import most_own, short_name
from allranks.trace.units import rate, seconds, share, size

MOST_ROWS = 20
MOST_RANKS = 64
LONGEST_NAME = 160


@dataclass(frozen=True)
class Card:
    """One headline figure."""

    label: str
    value: str
    note: str


def name(text: str) -> str:
    """A name fit for a page."""
    return plain(short_name(text, LONGEST_NAME), LONGEST_NAME)


def cards(report: TraceReport) -> list[Card]:
    """What a person wants to know first."""
    n = len(report.ranks)
    spans = [r.total.span_s for r in report.ranks]
    steps = [s.breakdown.span_s for r in report.ranks for s in r.steps]
    whole = sum(spans)
    made = (
        [Card("Time of a step", seconds(sum(steps) / len(steps)), f"mean of {len(steps)} on {_ranks(n)}")]
        if steps
        else []
    )
    made = made or [Card("Time traced", seconds(max(spans)), "no steps were marked")]
    for text, part, note in (
        ("Compute", "compute_s", "of the time, mean of ranks"),
        ("Exposed communication", "exposed_comm_s", "no compute ran meanwhile"),
        ("Idle", "idle_s", "nothing ran"),
    ):
        made.append(Card(text, share(sum(getattr(r.total, part) for r in report.ranks), whole), note))
    comm = sum(r.total.comm_s for r in report.ranks)
    if comm > 0:
        made.append(
            Card(
                "Overlap",
                share(sum(r.total.overlapped_comm_s for r in report.ranks), comm),
                "of communication, hidden by compute",
            )
        )
    made += _waiting(report) + _peak(report)
    return made


def _waiting(report: TraceReport) -> list[Card]:
    p = report.pairing
    if not p.paired:
        return []
    first = report.stragglers[0] if report.stragglers else None
    note = f"mostly for rank {first.rank}" if first and first.caused_wait_s > 0 else "for the last rank"
    return [Card("Waiting in collectives", share(p.wait_s, p.wait_s + p.transfer_s), note)]


def _peak(report: TraceReport) -> list[Card]:
    found = [(m.peak_bytes, r.rank, m.device) for r in report.ranks for m in r.memory]
    if not found:
        return []
    peak, rank, device = max(found)
    since = " since the profiler started" if device == "cpu" else ""
    return [Card("Peak memory", size(peak), f"rank {rank}, {device}{since}")]


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


def rank_table(report: TraceReport) -> Table | None:
    rows: list[Row] = []
    for r in report.ranks[:MOST_RANKS]:
        b = r.total
        overlap = "-" if b.overlap is None else f"{100 * b.overlap:.1f} %"
        clock = seconds(r.clock_offset_s) if r.clock_pairs else "-"
        parts = [share(v, b.span_s) for v in (b.compute_s, b.exposed_comm_s, b.copy_s, b.idle_s)]
        rows.append(
            [
                num(str(r.rank)),
                *map(num, (seconds(b.span_s), str(len(r.steps)), *parts, seconds(b.comm_s), overlap, clock)),
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
    note = "Compute, exposed communication, copies and idle are shares of the rank's time and add up to it."
    if len(report.ranks) > MOST_RANKS:
        note += f" {len(report.ranks) - MOST_RANKS} more ranks are in summary.csv."
    return table("ranks", "Ranks", columns, rows, note)


def collective_table(report: TraceReport) -> Table | None:
    rows: list[Row] = []
    for row in report.collectives:
        mine = [r for r in report.sizes if r.kind == row.kind]
        one = mine[0].size_bucket if len(mine) == 1 else None
        rows.append(_collective(row, Cell(name(row.kind)), Cell(one or "all sizes", "" if one else "muted")))
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
    note = "Counts and times are of all ranks together. "
    if p.paired:
        how = f"{p.by_sequence} by sequence number, {p.by_order} by order"
        note += f"{p.paired} collectives were found on several ranks ({how}), {p.unpaired} were not found again. Bandwidth is bytes over transfer time; "
    else:
        note += (
            "None was found on a second rank, so waiting is not known and bandwidth is bytes over the whole duration; "
        )
    return table("collectives", "Collectives by kind and size", columns, rows, note + "GB is 10^9 bytes.")


def _collective(row: CollectiveRow, *first: Cell) -> Row:
    each = size(row.bytes / row.count) if row.bytes is not None and row.count else "-"
    waiting = share(row.wait_s, row.total_s) if row.wait_s is not None else "-"
    values = (str(row.group_size or "-"), f"{row.count:,}", each, seconds(row.mean_s), seconds(row.max_s), waiting)
    return [*first, *map(num, (*values, rate(row.algbw_bytes_s), rate(row.busbw_bytes_s)))]


def straggler_table(report: TraceReport) -> Table | None:
    found = [r for r in report.stragglers if r.pairs]
    rows: list[Row] = [
        [
            num(str(r.rank)),
            num(f"{r.last:,} of {r.pairs:,} ({100 * r.last_share:.0f} %)"),
            num(seconds(r.caused_wait_s)),
            num(seconds(r.mean_late_s)),
            num(seconds(r.max_late_s)),
            num(seconds(r.wait_s)),
        ]
        for r in found[:MOST_ROWS]
    ]
    columns = ["rank", "came last", "made others wait", "mean", "longest", "waited itself"]
    note = "How late a rank came is the longest wait of another rank for it."
    return table("stragglers", "Who others waited for", columns, rows if len(found) > 1 else [], note)


def wait_table(report: TraceReport) -> Table | None:
    rows: list[Row] = [
        [
            Cell(name(p.kind)),
            long(name(p.key)),
            num(size(p.bytes)),
            num(f"rank {p.last_rank}"),
            num(seconds(max(p.wait_s))),
            num(seconds(p.transfer_s)),
        ]
        for p in report.pairing.longest[:10]
        if max(p.wait_s) > 0
    ]
    return table(
        "waits",
        "Collectives with the most waiting",
        ["kind", "which", "bytes", "last to come", "longest wait", "transfer"],
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
    rows: list[Row] = [[Cell(phase), *(num(seconds(v)) for v in row)] for phase, row in sums.items() if any(row)]
    return table("phases", "Phases, mean of ranks", ["phase", "on the host", busy, "collectives launched"], rows)


def launch_table(report: TraceReport) -> Table | None:
    sums, told, steps = by_place(report)
    rows: list[Row] = [
        [
            Cell(name(kind)),
            phase,
            num(f"{n / steps:.4g}"),
            num(size(b / steps) if told else "-"),
            num(seconds(t / steps)),
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
    kept = most_own(report.modules, MOST_ROWS)
    rows: list[Row] = [
        [
            Cell(_indented(m), "code"),
            num(f"{m.count:,}"),
            *(num(seconds(v)) for v in (m.host_s, m.forward_s, m.backward_s, m.self_s)),
        ]
        for m in kept
    ]
    own = report.modules[0].source == "annotation"
    title = "Ranges that the program named" if own else "Modules of the model"
    note = "Sums over ranks."
    if len(kept) < len(report.modules):
        note = f"{len(kept)} of {len(report.modules)}: those with the most time of their own, and what they ran in; sums over ranks."
    return table("modules", title, ["name", "calls", "host", "forward", "backward", "own"], rows, note)


def _indented(m: ModuleRow) -> str:
    return "\u00a0\u00a0" * min(m.depth, 8) + name(m.name)


def top_table(id: str, title: str, tops: Sequence[TopRow], note: str) -> Table | None:
    rows: list[Row] = [
        [
            Cell(name(t.name), "long code"),
            t.kind,
            num(f"{t.count:,}"),
            num(seconds(t.total_s)),
            num(f"{100 * t.share:.1f} %"),
            num(seconds(t.mean_s)),
            num(seconds(t.max_s)),
        ]
        for t in tops[:MOST_ROWS]
    ]
    return table(id, title, ["name", "kind", "count", "sum", "share", "mean", "longest"], rows, note)


def file_table(report: TraceReport) -> Table | None:
    rows: list[Row] = [
        [
            num(str(r.rank)),
            long(plain(r.path)),
            num(size(r.file_bytes)),
            num(f"{r.n_events:,}"),
            Cell("yes") if r.whole else Cell("no", "bad"),
        ]
        for r in report.ranks[:MOST_RANKS]
    ]
    return table("files", "Files that were read", ["rank", "file", "size", "events", "whole"], rows)
