"""Which part of training a moment belongs to: by marks where the program set them, by what operators tell elsewhere."""

from __future__ import annotations

import re
from bisect import bisect_right

from allranks.trace.events import ARITHMETIC, RankEvents
from allranks.trace.intervals import Lookup, flatten, merge
from allranks.trace.records import PHASES

FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER = range(5)
EVALUATE = "autograd::engine::evaluate_function"
STEP = re.compile(r"^ProfilerStep\s*#\s*(\d{1,18})(?!\d)")

# how programs call the parts of a step; matched on the name without decoration
_MARKS = {
    "forward": FORWARD, "fwd": FORWARD, "forward pass": FORWARD, "forward_pass": FORWARD, "forward_step": FORWARD,
    "backward": BACKWARD, "bwd": BACKWARD, "backward pass": BACKWARD, "backward_pass": BACKWARD, "backward_step": BACKWARD,
    "optimizer": OPTIMIZER, "optimizer step": OPTIMIZER, "optimizer_step": OPTIMIZER, "optim": OPTIMIZER,
    "optim step": OPTIMIZER, "optim_step": OPTIMIZER, "opt_step": OPTIMIZER,
    "data": DATA, "data load": DATA, "data_load": DATA, "dataload": DATA, "data loading": DATA, "data_loading": DATA,
    "load_batch": DATA, "get_batch": DATA, "batch_generator": DATA,
}  # fmt: skip


class Phases:
    """Phases of one rank. `segments` are (start, end, phase), ascending, without overlap."""

    def __init__(self, segments: list[tuple[float, float, int]], autograd: frozenset[int]) -> None:
        self.segments = segments
        self._lookup = Lookup(segments)
        self._autograd = autograd

    def at(self, t: float, thread: int | None) -> int:
        """The phase of something that a thread began at `t`."""
        if thread in self._autograd:
            return BACKWARD
        found = self._lookup.at(t)
        return OTHER if found < 0 else found

    def spans(self, phase: int) -> list[tuple[float, float]]:
        """Where a phase lies on the host, merged."""
        return merge((a, b) for a, b, p in self.segments if p == phase)


def phase_of_mark(name: str) -> int | None:
    """The phase that an annotation's name stands for (`## forward ##`, `allranks.backward`, `optimizer`)."""
    return _MARKS.get(name.strip("# \t").lower().removeprefix("allranks."))


def find_phases(events: RankEvents) -> Phases:
    """Marks of the program decide; a phase without any is inferred from the profiler's own marks and from operators."""
    spans: dict[int, list[tuple[float, float]]] = {p: [] for p in range(len(PHASES))}
    for start, end, name, _ in events.marks:
        phase = phase_of_mark(name)
        if phase is not None:
            spans[phase].append((start, end))
    if not spans[OPTIMIZER]:
        spans[OPTIMIZER] = [(a, b) for a, b, name, _ in events.marks if name.startswith("Optimizer.")]
    if not spans[DATA]:
        spans[DATA] = [(a, b) for a, b, name, _ in events.marks if name.startswith("enumerate(DataLoader)")]
    nodes = _nodes(events)
    if not spans[BACKWARD]:
        spans[BACKWARD] = merge(events.backward_calls) or _backward(events, nodes)
    if not spans[FORWARD]:
        spans[FORWARD] = _forward(events, spans)
    labelled = [(a, b, phase) for phase, found in spans.items() for a, b in found]
    autograd = frozenset(t for t, name in events.thread_names.items() if "pt_autograd" in name)
    return Phases(flatten(labelled), autograd)


def _nodes(events: RankEvents) -> dict[int, list[tuple[float, float]]]:
    """By thread, where the autograd engine ran its nodes."""
    is_node = [name.startswith(EVALUATE) for name in events.names]
    found: dict[int, list[tuple[float, float]]] = {}
    if not any(is_node):
        return found
    for thread, operators in enumerate(events.operators):
        spans = merge((s, s + d) for s, d, name, _ in operators if is_node[name])
        if spans:
            found[thread] = spans
    return found


def _backward(events: RankEvents, nodes: dict[int, list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Nodes in a row are one backward pass, until an operator runs between them that is none's part."""
    out: list[tuple[float, float]] = []
    for thread, spans in nodes.items():
        between = Lookup([(a, b, 0) for a, b in spans])
        foreign = sorted(
            s for s, _, name, _ in events.operators[thread] if events.classes[name] == ARITHMETIC and between.at(s) < 0
        )
        at = 0
        start, end = spans[0]
        for a, b in spans[1:]:
            while at < len(foreign) and foreign[at] < end:
                at += 1
            if at < len(foreign) and foreign[at] < a:
                out.append((start, end))
                start = a
            end = b
        out.append((start, end))
    return merge(out)


def _forward(events: RankEvents, spans: dict[int, list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """From the first to the last operator whose node a backward pass ran, and what DDP calls its forward; before each backward pass."""
    main = main_thread(events)
    backward = merge(spans[BACKWARD])
    if main is None or not backward:
        return []
    taken = Lookup(flatten([(a, b, p) for p, found in spans.items() for a, b in found]))
    made = [m for m in _makers(events, main) if taken.at(m[0]) < 0]
    made += [(a, b) for a, b, name, _ in events.marks if name.startswith("DistributedDataParallel.forward")]
    made.sort()
    borders = sorted(
        {b for found in spans.values() for _, b in found} | {a for a, _, n, _ in events.marks if STEP.match(n)}
    )
    out: list[tuple[float, float]] = []
    at = 0
    for begin, _ in backward:
        i = bisect_right(borders, begin) - 1
        since = borders[i] if i >= 0 else float("-inf")
        while at < len(made) and made[at][0] < since:
            at += 1
        first = at
        while at < len(made) and made[at][0] < begin:
            at += 1
        if at > first:
            out.append((made[first][0], min(max(e for _, e in made[first:at]), begin)))
    return merge(out)


def _makers(events: RankEvents, thread: int) -> list[tuple[float, float]]:
    """Operators of a thread that made the nodes which a backward pass ran.

    Autograd gives an operator the number that the next node will get, so of those with one number the last made the node; its callers with the
    same number belong to it.
    """
    is_node = [name.startswith(EVALUATE) for name in events.names]
    if not any(is_node):
        return []
    ran = {q for operators in events.operators for _, _, name, q in operators if q >= 0 and is_node[name]}
    by_number: dict[int, list[tuple[float, float]]] = {}
    for start, duration, name, number in events.operators[thread]:
        if number in ran and events.classes[name] == ARITHMETIC:
            by_number.setdefault(number, []).append((start, start + duration))
    out = []
    for found in by_number.values():
        last = found[-1][0]
        out += [f for f in found if f[1] >= last]
    return out


def main_thread(events: RankEvents) -> int | None:
    """The thread of the step marks, else the one with most operators."""
    for _, _, name, thread in events.marks:
        if STEP.match(name):
            return thread
    sizes = [(len(o), t) for t, o in enumerate(events.operators) if o]
    return max(sizes)[1] if sizes else None
