"""Measure what one rank executed: busy time, kernels, operators and memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from allranks.analysis.trace.collectives import Collective
from allranks.analysis.trace.events import COMM, COMM_OP, COMPUTE, COMPUTE_OP, COPY, RankEvents, ThreadOperators
from allranks.analysis.trace.intervals import Span, merge, subtract
from allranks.analysis.trace.records import MemoryReport
from allranks.analysis.trace.steps import BusySpans

KIND_NAMES = {COMPUTE: "compute", COMM: "comm", COPY: "copy"}
TimeTotals = dict[str, list[float]]  # name: [count, total, longest, kind]


def busy_on_device(events: RankEvents, collectives: list[Collective]) -> BusySpans:
    """Merge kernels of all streams by kind; collectives on the host (gloo with a GPU) are communication too."""
    spans: dict[int, list[Span]] = {COMPUTE: [], COMM: [], COPY: []}
    kinds = events.kernel_classes
    for start, end, name, _ in events.device:
        spans[kinds[name]].append((start, end))
    spans[COMM] += [(c.start, c.end) for c in collectives if not c.on_device]
    return BusySpans(merge(spans[COMPUTE]), merge(spans[COMM]), merge(spans[COPY]))


def busy_on_host(events: RankEvents, collectives: list[Collective], waits: list[Span]) -> BusySpans:
    """Return operators that compute, and communication.

    The own time of a node that may contain a blocking hook counts as compute only while no communication is in
    progress: the profiler cannot distinguish a waiting hook from a working one.
    """
    comm = merge([*((c.start, c.end) for c in collectives), *waits])
    firm: list[Span] = []
    loose: list[Span] = []
    gloo = {t for t, name in events.thread_names.items() if "gloo_runloop" in name}
    for thread, operators in enumerate(events.operators):
        if thread not in gloo:  # gloo's own threads are part of the collective
            sure_here, loose_here = _outer_spans(events, operators)
            firm += sure_here
            loose += loose_here
    sure = merge(firm)
    return BusySpans(merge([*sure, *subtract(merge(loose), comm)]), comm, [])


def _outer_spans(events: RankEvents, operators: ThreadOperators) -> tuple[list[Span], list[Span]]:
    """Return a thread's operators (sorted) that compute for their whole span, and those that may wait for others."""
    classes = events.classes
    firm: list[Span] = []
    loose: list[Span] = []
    talks = [(s, s + d) for s, d, name in operators if classes[name] == COMM_OP]
    moments = [s for s, _ in talks]  # in order, like the operators
    covered = float("-inf")
    for start, duration, name in operators:
        end = start + duration
        if end <= covered:
            continue
        what = classes[name]
        if what == COMM_OP:
            covered = end  # operators inside a collective are not compute
        elif what == COMPUTE_OP and bisect_left(moments, start) == bisect_left(moments, end):
            firm.append((start, end))
            covered = end
        else:
            loose.append((start, end))
    return firm, subtract(merge(loose), merge(talks))


def kernel_totals(events: RankEvents) -> TimeTotals:
    """Return the sum of durations by kernel."""
    rows = ((name, end - start) for start, end, name, _ in events.device)
    return _totals(rows, events.kernel_names, events.kernel_classes)


def operator_self_times(events: RankEvents) -> TimeTotals:
    """Return the own time by operator: its span without the operators that it called on its thread."""
    rows = (row for o in events.operators for row in zip(o.names, _self_times(o), strict=True))
    return _totals(rows, events.names, [COMM if what == COMM_OP else COMPUTE for what in events.classes])


def _totals(rows: Iterable[tuple[int, float]], names: Sequence[str], kinds: Sequence[int]) -> TimeTotals:
    """Sum durations by the number of a name."""
    n = len(names)
    counts, sums, longest = [0] * n, [0.0] * n, [0.0] * n
    for name, duration in rows:
        counts[name] += 1
        sums[name] += duration
        if duration > longest[name]:  # noqa: PLR1730 - a call an event costs more than all else here
            longest[name] = duration
    return {names[i]: [counts[i], sums[i], longest[i], kinds[i]] for i in range(n) if counts[i]}


def _self_times(operators: ThreadOperators) -> list[float]:
    """Return the own time of each operator, in order."""
    own = list(operators.durations)
    callers: list[tuple[float, int]] = []  # (end, index), outermost first, without the innermost
    last, at = float("-inf"), -1  # the innermost
    for i, (start, duration) in enumerate(zip(operators.starts, own, strict=True)):
        while last <= start and at >= 0:
            last, at = callers.pop()
        end = start + duration
        if at >= 0:
            own[at] -= (end if end < last else last) - start
        callers.append((last, at))
        last, at = end, i
    return own


MEMORY_POINTS = 400


def memory_timeline(events: RankEvents) -> list[MemoryReport]:
    """Return the memory of each device; the points, in the trace's microseconds, are the highest of equal parts."""
    out = []
    for (kind, number), rows in sorted(events.memory.items()):
        rows.sort(key=lambda r: r[0])
        each = -(-len(rows) // MEMORY_POINTS)
        parts = (rows[at : at + each] for at in range(0, len(rows), each))
        out.append(
            MemoryReport(
                device="cpu" if kind == 0 else f"gpu:{max(number, 0)}",
                peak_bytes=max(r[1] for r in rows),
                last_bytes=rows[-1][1],
                peak_reserved_bytes=max(r[2] for r in rows) or None,
                n_events=len(rows),
                points=tuple(max(part, key=lambda r: r[1])[:2] for part in parts),
            )
        )
    return out
