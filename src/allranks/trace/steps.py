"""Where steps begin and end, and how the time between was spent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from allranks.trace.events import RankEvents
from allranks.trace.intervals import Merged, Span, clip, intersect, measure, merge, subtract, thin
from allranks.trace.phases import STEP
from allranks.trace.records import Breakdown

US = 1e-6


class Step(Struct):
    """One step, in the trace's microseconds."""

    number: int
    start: float
    end: float


class StepIndex:
    """Which step a moment of the host belongs to."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self._starts = [s.start for s in steps]

    def at(self, t: float) -> int | None:
        """Index of the step that a moment lies in; None outside of all: an evaluation between two steps belongs to neither."""
        i = bisect_right(self._starts, t) - 1
        return i if i >= 0 and t <= self.steps[i].end else None


def find_steps(events: RankEvents) -> tuple[list[Step], list[str]]:
    """The steps that `ProfilerStep#N` marks, and remarks. A mark without any work at the end is no step but the profiler's own end."""
    marks: dict[int, tuple[float, float]] = {}
    for start, end, name, _ in events.marks:
        found = STEP.match(name)
        if found and int(found.group(1)) not in marks:
            marks[int(found.group(1))] = (start, end)
    steps = sorted((Step(n, a, b) for n, (a, b) in marks.items()), key=lambda s: s.start)
    for one, following in pairwise(steps):
        one.end = min(one.end, following.start)
    remarks = []
    if len(steps) > 1 and not _has_work(events, steps[-1]):
        remarks.append(f"step {steps[-1].number} has a mark and no work in it; it is left out")
        steps.pop()
    return steps, remarks


def _has_work(events: RankEvents, step: Step) -> bool:
    launched = (t for t, _ in events.launches.values())
    if any(step.start <= t < step.end for t in launched):
        return True
    return any(step.start <= t < step.end for operators in events.operators for t in operators.starts)


def stretch(steps: Sequence[Step], ends: Sequence[float]) -> None:
    """Let each step last until the device work launched in it has ended (`ends`, by step), but not into the next."""
    for i, step in enumerate(steps):
        limit = steps[i + 1].start if i + 1 < len(steps) else float("inf")
        step.end = max(step.end, min(ends[i], limit))


class Busy(Struct):
    """What ran when, each kind merged."""

    compute: list[Span]
    comm: list[Span]
    copy: list[Span]

    def within(self, start: float, end: float) -> Busy:
        """The part in a span of time."""
        return Busy(clip(self.compute, start, end), clip(self.comm, start, end), clip(self.copy, start, end))

    def thinned(self, limit: int) -> Busy:
        """For drawing: at most so many spans of each kind."""
        return Busy(thin(self.compute, limit), thin(self.comm, limit), thin(self.copy, limit))

    def extent(self) -> Span | None:
        """From the first begin to the last end."""
        kept = [m for m in (self.compute, self.comm, self.copy) if m]
        return (min(m[0][0] for m in kept), max(m[-1][1] for m in kept)) if kept else None


def breakdown(busy: Busy, start: float, end: float) -> Breakdown:
    """How [start, end] was spent: compute first, then communication, then copies, the rest is idle."""
    b = busy.within(start, end)
    exposed = subtract(b.comm, b.compute)
    working: Merged = merge([*b.compute, *b.comm])
    alone = subtract(b.copy, working)
    span, compute, exposed_s, copy = end - start, measure(b.compute), measure(exposed), measure(alone)
    return Breakdown(
        span_s=span * US,
        compute_s=compute * US,
        exposed_comm_s=exposed_s * US,
        copy_s=copy * US,
        idle_s=max(span - compute - exposed_s - copy, 0.0) * US,
        comm_s=measure(b.comm) * US,
        overlapped_comm_s=measure(intersect(b.comm, b.compute)) * US,
        copy_total_s=measure(b.copy) * US,
    )


def total(parts: Sequence[Breakdown]) -> Breakdown:
    """The sum of several."""
    return Breakdown(**{name: sum(getattr(p, name) for p in parts) for name in Breakdown.__struct_fields__})
