"""What a rank worked on: busy spans, operators' own time, kernels, modules, memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict

from allranks.trace.events import ARITHMETIC, COMM, COMPUTE, COPY, TALK, Operators, RankEvents
from allranks.trace.intervals import Span, merge, subtract
from allranks.trace.rank_collectives import Collective
from allranks.trace.steps import Busy

KINDS = {COMPUTE: "compute", COMM: "comm", COPY: "copy"}
Tops = dict[str, list[float]]  # name: [count, total, longest, kind]


def busy_on_device(events: RankEvents, collectives: list[Collective]) -> Busy:
    """Kernels of all streams, merged by kind; collectives that run on the host (gloo beside a GPU) count as communication too."""
    spans: dict[int, list[Span]] = {COMPUTE: [], COMM: [], COPY: []}
    kinds = events.kernel_classes
    for start, end, name, _ in events.device:
        spans[kinds[name]].append((start, end))
    spans[COMM] += [(c.start, c.end) for c in collectives if not c.on_device]
    return Busy(merge(spans[COMPUTE]), merge(spans[COMM]), merge(spans[COPY]))


def busy_on_host(events: RankEvents, collectives: list[Collective], waits: list[Span]) -> Busy:
    """Operators that calculate, and communication.

    The own time of a node that can hold a blocking hook counts as compute only while no communication is in progress: the profiler cannot tell a
    hook that waits from one that works.
    """
    comm = merge([*((c.start, c.end) for c in collectives), *waits])
    firm: list[Span] = []
    loose: list[Span] = []
    gloo = {t for t, name in events.thread_names.items() if "gloo_runloop" in name}
    for thread, operators in enumerate(events.operators):
        if thread not in gloo:  # what gloo's own threads run is part of the collective
            sure_here, loose_here = _outer_spans(events, operators)
            firm += sure_here
            loose += loose_here
    sure = merge(firm)
    return Busy(merge([*sure, *subtract(merge(loose), comm)]), comm, [])


def _outer_spans(events: RankEvents, operators: Operators) -> tuple[list[Span], list[Span]]:
    """A thread's operators (sorted) that calculate for their whole span, and those that may wait for others."""
    classes = events.classes
    firm: list[Span] = []
    loose: list[Span] = []
    talks = [(s, s + d) for s, d, name, _ in operators if classes[name] == TALK]
    moments = [s for s, _ in talks]
    covered = float("-inf")
    for start, duration, name, _ in operators:
        end = start + duration
        if end <= covered:
            continue
        what = classes[name]
        if what == TALK:
            covered = end  # what a collective calls is no compute
        elif what == ARITHMETIC and not _holds(moments, start, end):
            firm.append((start, end))
            covered = end
        else:
            loose.append((start, end))
    return firm, subtract(merge(loose), merge(talks))


def _holds(moments: list[float], start: float, end: float) -> bool:
    if not moments:
        return False
    i = bisect_left(moments, start)
    return i < len(moments) and moments[i] < end


def kernel_tops(events: RankEvents) -> Tops:
    """Sum of durations by kernel."""
    tops: Tops = {}
    kinds = events.kernel_classes
    by_number: dict[int, list[float]] = {}
    for start, end, name, _ in events.device:
        duration = end - start
        row = by_number.get(name)
        if row is None:
            by_number[name] = [1, duration, duration, kinds[name]]
        else:
            row[0] += 1
            row[1] += duration
            if duration > row[2]:  # noqa: PLR1730 - a call a kernel costs more than all else here
                row[2] = duration
    for number, row in by_number.items():
        tops[events.kernel_names[number]] = row
    return tops


def operator_tops(events: RankEvents) -> Tops:
    """Own time by operator: its span without those of the operators it called on its thread."""
    n = len(events.names)
    counts, sums, longest = [0] * n, [0.0] * n, [0.0] * n
    for operators in events.operators:
        for name, own in zip(operators.names, _own_times(operators), strict=True):
            counts[name] += 1
            sums[name] += own
            if own > longest[name]:  # noqa: PLR1730 - as above
                longest[name] = own
    return {
        events.names[i]: [counts[i], sums[i], longest[i], COMM if events.classes[i] == TALK else COMPUTE]
        for i in range(n)
        if counts[i]
    }


def _own_times(operators: Operators) -> array[float]:
    """Of each operator, in order."""
    own = array("d", operators.durations)
    stack: list[int] = []
    ends: list[float] = []
    for i, (start, duration) in enumerate(zip(operators.starts, operators.durations, strict=True)):
        while ends and ends[-1] <= start:
            ends.pop()
            stack.pop()
        end = start + duration
        if ends:
            own[stack[-1]] -= (end if end < ends[-1] else ends[-1]) - start
        stack.append(i)
        ends.append(end)
    return own


def memory_timeline(
    events: RankEvents, limit: int = 400
) -> dict[str, tuple[int, int, int | None, int, list[tuple[float, int]]]]:
    """By device: (peak, last, peak reserved, events, points thinned so that peaks stay)."""
    out = {}
    for (kind, number), rows in events.memory.items():
        rows.sort(key=lambda r: r[0])
        allocated = [r[1] for r in rows]
        reserved = max(r[2] for r in rows)
        device = "cpu" if kind == 0 else f"gpu:{max(number, 0)}"
        out[device] = (max(allocated), allocated[-1], reserved or None, len(rows), _thin_points(rows, limit))
    return out


def _thin_points(rows: list[tuple[float, int, int]], limit: int) -> list[tuple[float, int]]:
    """The highest and the last point of each of some hundred equal stretches of events."""
    if len(rows) <= limit:
        return [(t, n) for t, n, _ in rows]
    width = -(-len(rows) * 2 // limit)
    points = []
    for at in range(0, len(rows), width):
        part = rows[at : at + width]
        high = max(range(len(part)), key=lambda i: part[i][1])
        points.append(part[high][:2])
        if high != len(part) - 1:
            points.append(part[-1][:2])
    return points


def by_launch(events: RankEvents) -> defaultdict[int, list[tuple[float, float]]]:
    """Not communication: device work by the thread that launched it, as (launch time, duration)."""
    out: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for start, end, name, correlation in events.device:
        launch = events.launches.get(correlation)
        if launch is not None and events.kernel_classes[name] == COMPUTE:
            out[launch[1]].append((launch[0], end - start))
    return out
