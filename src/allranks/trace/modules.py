"""Time by module of the model: from the profiler's own module spans, the run's module marks, or any other mark of the program."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from msgspec import Struct

from allranks.trace.events import ARITHMETIC, RankEvents
from allranks.trace.intervals import Lookup, flatten
from allranks.trace.names import is_comm_operator
from allranks.trace.phases import EVALUATE, STEP, phase_of_mark
from allranks.trace.work import by_launch

MODULE_MARK = "allranks.module:"
Source = Literal["module", "annotation"]
# (start, end, name, thread)
Range = tuple[float, float, str, int]


class ModuleTime(Struct):
    """Sums of one module on one rank, microseconds."""

    name: str
    depth: int
    count: int = 0
    host: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    own: float = 0.0


def module_times(events: RankEvents, on_device: bool) -> tuple[list[ModuleTime], Source]:
    """Modules in the order in which they first ran, and where their names come from."""
    ranges, source = _ranges(events)
    if not ranges:
        return [], source
    trees = {thread: _Tree(mine) for thread, mine in _by_thread(ranges).items()}
    work = by_launch(events) if on_device else _own_work(events)
    nodes = _Nodes(events, trees)
    for thread, pieces in work.items():
        tree = trees.get(thread)
        for t, duration in pieces:
            place = nodes.module_at(t, thread)
            if place is not None:
                trees[place[0]].add(place[1], duration, backward=True)
            elif tree is not None and (at := tree.lookup.at(t)) >= 0:
                tree.add(at, duration, backward=False)
    return _sum(list(trees.values())), source


def _ranges(events: RankEvents) -> tuple[list[Range], Source]:
    if events.modules:
        return events.modules, "module"
    marked = [(a, b, n.removeprefix(MODULE_MARK), t) for a, b, n, t in events.marks if n.startswith(MODULE_MARK)]
    if marked:
        return marked, "module"
    return [m for m in events.marks if _is_own_name(m[2])], "annotation"


def _is_own_name(name: str) -> bool:
    """A range that the program named, not the profiler and not a phase."""
    own = STEP.match(name) or name.startswith(
        ("Optimizer.", "enumerate(DataLoader)", "DistributedDataParallel.", "allranks.")
    )
    return not own and not is_comm_operator(name) and phase_of_mark(name) is None


def _by_thread(ranges: list[Range]) -> dict[int, list[Range]]:
    out: dict[int, list[Range]] = {}
    for r in ranges:
        out.setdefault(r[3], []).append(r)
    return out


class _Tree:
    """The nested ranges of one thread."""

    def __init__(self, ranges: list[Range]) -> None:
        self.ranges = sorted(ranges, key=lambda r: (r[0], -r[1]))
        self.parents: list[int] = []
        stack: list[int] = []
        for i, (start, _, _, _) in enumerate(self.ranges):
            while stack and self.ranges[stack[-1]][1] <= start:
                stack.pop()
            self.parents.append(stack[-1] if stack else -1)
            stack.append(i)
        self.lookup = Lookup(flatten((r[0], r[1], i) for i, r in enumerate(self.ranges)))
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


class _Nodes:
    """Backward nodes by time; autograd's sequence number leads to the forward operator that made the node."""

    def __init__(self, events: RankEvents, trees: dict[int, _Tree]) -> None:
        is_node = [n.startswith(EVALUATE) for n in events.names]
        made: dict[int, tuple[float, int, int]] = {}
        nodes: dict[int, list[tuple[float, float, int]]] = {}
        for thread, operators in enumerate(events.operators):
            tree = trees.get(thread)
            for start, duration, name, sequence in operators:
                if sequence < 0 or events.classes[name] not in (ARITHMETIC, 1):
                    continue
                if is_node[name]:
                    nodes.setdefault(thread, []).append((start, start + duration, sequence))
                elif tree is not None and events.classes[name] == ARITHMETIC:
                    place = tree.lookup.at(start)
                    if place >= 0 and (sequence not in made or made[sequence][0] < start):
                        made[sequence] = (start, thread, place)
        self._made = made
        self._nodes = {t: sorted(found) for t, found in nodes.items()}
        self._starts = {t: [n[0] for n in found] for t, found in self._nodes.items()}

    def module_at(self, t: float, thread: int) -> tuple[int, int] | None:
        """(thread, range) whose backward ran at a moment."""
        nodes = self._nodes.get(thread)
        if not nodes:
            return None
        i = bisect_right(self._starts[thread], t) - 1
        if i < 0 or nodes[i][1] < t:
            return None
        found = self._made.get(nodes[i][2])
        return found[1:] if found else None


def _own_work(events: RankEvents) -> dict[int, list[tuple[float, float]]]:
    """On a CPU: outermost calculating operators as (start, duration), by thread."""
    out: dict[int, list[tuple[float, float]]] = {}
    for thread, operators in enumerate(events.operators):
        mine, covered = [], float("-inf")
        for start, duration, name, _ in operators:
            if start >= covered and events.classes[name] == ARITHMETIC:
                covered = start + duration
                mine.append((start, duration))
        if mine:
            out[thread] = mine
    return out


def _sum(trees: list[_Tree]) -> list[ModuleTime]:
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
