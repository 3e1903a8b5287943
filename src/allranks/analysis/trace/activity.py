"""Measure what one rank executed: busy time, kernels, operators, modules of the model and memory.

Time per module comes from the profiler's module spans, the run's module marks, or other marks of the program.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import Literal

from msgspec import Struct

from allranks.analysis.trace.collectives import Collective
from allranks.analysis.trace.events import (
    COMM,
    COMM_OP,
    COMPUTE,
    COMPUTE_OP,
    COPY,
    RankEvents,
    ThreadOperators,
    is_comm_operator,
)
from allranks.analysis.trace.intervals import SegmentIndex, Span, flatten, merge, subtract
from allranks.analysis.trace.steps import AUTOGRAD_NODE_PREFIX, STEP_PATTERN, BusySpans, phase_of_annotation

KIND_NAMES = {COMPUTE: "compute", COMM: "comm", COPY: "copy"}
TimeTotals = dict[str, list[float]]  # name: [count, total, longest, kind]


def busy_on_device(events: RankEvents, collectives: list[Collective]) -> BusySpans:
    """Merge kernels of all streams by kind; collectives that run on the host (gloo with a GPU) also count as
    communication."""
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
    talks = [(s, s + d) for s, d, name, _ in operators if classes[name] == COMM_OP]
    moments = [s for s, _ in talks]  # in order, like the operators
    covered = float("-inf")
    for start, duration, name, _ in operators:
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
    tops: TimeTotals = {}
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


def operator_self_times(events: RankEvents) -> TimeTotals:
    """Return the own time by operator: its span without the operators that it called on its thread."""
    n = len(events.names)
    counts, sums, longest = [0] * n, [0.0] * n, [0.0] * n
    for operators in events.operators:
        for name, own in zip(operators.names, _self_times(operators), strict=True):
            counts[name] += 1
            sums[name] += own
            if own > longest[name]:  # noqa: PLR1730 - as above
                longest[name] = own
    return {
        events.names[i]: [counts[i], sums[i], longest[i], COMM if events.classes[i] == COMM_OP else COMPUTE]
        for i in range(n)
        if counts[i]
    }


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


def memory_timeline(
    events: RankEvents, limit: int = 400
) -> dict[str, tuple[int, int, int | None, int, list[tuple[float, int]]]]:
    """Return by device: (peak, last, peak reserved, events, points thinned without losing peaks)."""
    out = {}
    for (kind, number), rows in events.memory.items():
        rows.sort(key=lambda r: r[0])
        allocated = [r[1] for r in rows]
        reserved = max(r[2] for r in rows)
        device = "cpu" if kind == 0 else f"gpu:{max(number, 0)}"
        out[device] = (max(allocated), allocated[-1], reserved or None, len(rows), _downsample_points(rows, limit))
    return out


def _downsample_points(rows: list[tuple[float, int, int]], limit: int) -> list[tuple[float, int]]:
    """Return the highest and the last point of each of some hundred equal intervals of events."""
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


def compute_by_launch_thread(events: RankEvents) -> defaultdict[int, list[tuple[float, float]]]:
    """Return device work except communication by the thread that launched it, as (launch time, duration)."""
    out: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for start, end, name, correlation in events.device:
        launch = events.launches.get(correlation)
        if launch is not None and events.kernel_classes[name] == COMPUTE:
            out[launch[1]].append((launch[0], end - start))
    return out


MODULE_ANNOTATION = "allranks.module:"
ModuleSource = Literal["module", "annotation"]
# (start, end, name, thread)
AnnotatedRange = tuple[float, float, str, int]


class ModuleTime(Struct):
    """Times of one module on one rank, in microseconds."""

    name: str
    depth: int
    count: int = 0
    host: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    own: float = 0.0


def module_times(events: RankEvents, on_device: bool) -> tuple[list[ModuleTime], ModuleSource]:
    """Return the modules in the order in which they first ran, and the source of their names."""
    ranges, source = _ranges(events)
    if not ranges:
        return [], source
    by_thread: defaultdict[int, list[AnnotatedRange]] = defaultdict(list)
    for found in ranges:
        by_thread[found[3]].append(found)
    trees = {thread: _RangeTree(mine) for thread, mine in by_thread.items()}
    work = compute_by_launch_thread(events) if on_device else _outermost_compute(events)
    nodes = _BackwardNodes(events, trees)
    for thread, pieces in work.items():
        tree = trees.get(thread)
        for t, duration in pieces:
            place = nodes.module_of_backward_at(t, thread)
            if place is not None:
                trees[place[0]].add(place[1], duration, backward=True)
            elif tree is not None and (at := tree.lookup.at(t)) >= 0:
                tree.add(at, duration, backward=False)
    return _sum(list(trees.values())), source


def _ranges(events: RankEvents) -> tuple[list[AnnotatedRange], ModuleSource]:
    if events.modules:
        return events.modules, "module"
    marked = [
        (a, b, n.removeprefix(MODULE_ANNOTATION), t) for a, b, n, t in events.marks if n.startswith(MODULE_ANNOTATION)
    ]
    if marked:
        return marked, "module"
    return [m for m in events.marks if _is_own_name(m[2])], "annotation"


def _is_own_name(name: str) -> bool:
    """Return whether the program named this range, rather than the profiler or a phase."""
    own = STEP_PATTERN.match(name) or name.startswith(
        ("Optimizer.", "enumerate(DataLoader)", "DistributedDataParallel.", "allranks.")
    )
    return not own and not is_comm_operator(name) and phase_of_annotation(name) is None


class _RangeTree:
    """The nested ranges of one thread."""

    def __init__(self, ranges: list[AnnotatedRange]) -> None:
        self.ranges = sorted(ranges, key=lambda r: (r[0], -r[1]))
        self.parents: list[int] = []
        stack: list[int] = []
        for i, (start, _, _, _) in enumerate(self.ranges):
            while stack and self.ranges[stack[-1]][1] <= start:
                stack.pop()
            self.parents.append(stack[-1] if stack else -1)
            stack.append(i)
        self.lookup = SegmentIndex(flatten((r[0], r[1], i) for i, r in enumerate(self.ranges)))
        self.forward = [0.0] * len(ranges)
        self.backward = [0.0] * len(ranges)
        self.own = [0.0] * len(ranges)

    def add(self, at: int, duration: float, backward: bool) -> None:
        self.own[at] += duration
        into = self.backward if backward else self.forward
        while at >= 0:
            into[at] += duration
            at = self.parents[at]

    def depth(self, at: int) -> int:
        depth = 0
        while (at := self.parents[at]) >= 0:
            depth += 1
        return depth


class _BackwardNodes:
    """Backward nodes by time; autograd's sequence number identifies the forward operator that created the node."""

    def __init__(self, events: RankEvents, trees: dict[int, _RangeTree]) -> None:
        is_node = [n.startswith(AUTOGRAD_NODE_PREFIX) for n in events.names]
        made: dict[int, tuple[float, int, int]] = {}
        nodes: dict[int, list[tuple[float, float, int]]] = {}
        for thread, operators in enumerate(events.operators):
            tree = trees.get(thread)
            for start, duration, name, sequence in operators:
                if sequence < 0 or events.classes[name] not in (COMPUTE_OP, 1):
                    continue
                if is_node[name]:
                    nodes.setdefault(thread, []).append((start, start + duration, sequence))
                elif tree is not None and events.classes[name] == COMPUTE_OP:
                    place = tree.lookup.at(start)
                    if place >= 0 and (sequence not in made or made[sequence][0] < start):
                        made[sequence] = (start, thread, place)
        self._made = made
        self._nodes = {t: sorted(found) for t, found in nodes.items()}
        self._starts = {t: [n[0] for n in found] for t, found in self._nodes.items()}

    def module_of_backward_at(self, t: float, thread: int) -> tuple[int, int] | None:
        """Return (thread, range) whose backward ran at a time."""
        nodes = self._nodes.get(thread)
        if not nodes:
            return None
        i = bisect_right(self._starts[thread], t) - 1
        if i < 0 or nodes[i][1] < t:
            return None
        found = self._made.get(nodes[i][2])
        return found[1:] if found else None


def _outermost_compute(events: RankEvents) -> dict[int, list[tuple[float, float]]]:
    """Return the outermost computing operators on a CPU as (start, duration), by thread."""
    out: dict[int, list[tuple[float, float]]] = {}
    for thread, operators in enumerate(events.operators):
        mine, covered = [], float("-inf")
        for start, duration, name, _ in operators:
            if start >= covered and events.classes[name] == COMPUTE_OP:
                covered = start + duration
                mine.append((start, duration))
        if mine:
            out[thread] = mine
    return out


def _sum(trees: list[_RangeTree]) -> list[ModuleTime]:
    rows: dict[str, ModuleTime] = {}
    for tree in trees:
        for i, (start, end, name, _) in enumerate(tree.ranges):
            row = rows.get(name)
            if row is None:
                rows[name] = row = ModuleTime(name, tree.depth(i))
            row.count += 1
            row.host += end - start
            row.forward += tree.forward[i]
            row.backward += tree.backward[i]
            row.own += tree.own[i]
    return list(rows.values())
