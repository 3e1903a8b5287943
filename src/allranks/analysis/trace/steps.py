"""Find training steps and phases (forward, backward, optimizer, data), and compute the breakdown of their time.

Phases come from marks of the program, otherwise from operators.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct, structs

from allranks.analysis.trace.collectives import Collective
from allranks.analysis.trace.events import COMPUTE, RankEvents
from allranks.analysis.trace.intervals import (
    MergedSpans,
    SegmentIndex,
    Span,
    clip,
    flatten,
    intersect,
    merge,
    subtract,
    total_length,
)
from allranks.analysis.trace.records import PHASES, Breakdown, PhaseRow

FORWARD, BACKWARD, OPTIMIZER, DATA, OTHER = range(5)
STEP_PATTERN = re.compile(r"^ProfilerStep\s*#\s*(\d{1,18})(?!\d)")

# names that programs use for the parts of a step; matched without decoration
_PHASE_OF_NAME = {
    "forward": FORWARD, "fwd": FORWARD, "forward pass": FORWARD, "forward_pass": FORWARD, "forward_step": FORWARD,
    "backward": BACKWARD, "bwd": BACKWARD, "backward pass": BACKWARD, "backward_pass": BACKWARD,
    "backward_step": BACKWARD, "optimizer": OPTIMIZER, "optimizer step": OPTIMIZER, "optimizer_step": OPTIMIZER,
    "optim": OPTIMIZER, "optim step": OPTIMIZER, "optim_step": OPTIMIZER, "opt_step": OPTIMIZER, "data": DATA,
    "data load": DATA, "data_load": DATA, "dataload": DATA, "data loading": DATA, "data_loading": DATA,
    "load_batch": DATA, "get_batch": DATA, "batch_generator": DATA,
}  # fmt: skip


_PROFILER_MARKS = {FORWARD: "DistributedDataParallel.forward", OPTIMIZER: "Optimizer.", DATA: "enumerate(DataLoader)"}


class Phases:
    """Phases of one rank. `segments` are (start, end, phase), ascending, without overlap."""

    def __init__(self, segments: list[tuple[float, float, int]], autograd: frozenset[int]) -> None:
        self.segments = segments
        self._lookup = SegmentIndex(segments)
        self._autograd = autograd

    def at(self, t: float, thread: int | None) -> int:
        """Return the phase of an event that a thread started at `t`."""
        if thread in self._autograd:
            return BACKWARD
        span = self._lookup.at(t)
        return OTHER if span < 0 else span

    def spans(self, phase: int) -> list[tuple[float, float]]:
        """Return the spans of a phase on the host, merged."""
        return merge((a, b) for a, b, p in self.segments if p == phase)


def phase_of_annotation(name: str) -> int | None:
    """Return the phase of an annotation's name (`## forward ##`, `allranks.backward`, `optimizer`)."""
    return _PHASE_OF_NAME.get(name.strip("# \t").lower().removeprefix("allranks."))


def find_phases(events: RankEvents) -> Phases:
    """Return the phases from the program's marks; otherwise from the profiler's, backward also from nodes."""
    spans: dict[int, list[tuple[float, float]]] = {p: [] for p in range(len(PHASES))}
    for start, end, name, _ in events.marks:
        phase = phase_of_annotation(name)
        if phase is not None:
            spans[phase].append((start, end))
    for phase, prefix in _PROFILER_MARKS.items():
        spans[phase] = spans[phase] or [(a, b) for a, b, name, _ in events.marks if name.startswith(prefix)]
    if not spans[BACKWARD]:
        is_node = [name.startswith("autograd::engine::evaluate_function") for name in events.names]
        nodes = ((s, s + d) for operators in events.operators for s, d, name in operators if is_node[name])
        spans[BACKWARD] = merge(events.backward_calls or nodes)
    labelled = [(a, b, phase) for phase, ranges in spans.items() for a, b in ranges]
    autograd = frozenset(t for t, name in events.thread_names.items() if "pt_autograd" in name)
    return Phases(flatten(labelled), autograd)


SECONDS_PER_US = 1e-6


class TraceStep(Struct):
    """One step, in the trace's microseconds."""

    number: int
    start: float
    end: float


class StepIndex:
    """Return the step of a time on the host."""

    def __init__(self, steps: Sequence[TraceStep]) -> None:
        self.steps = steps
        self._starts = [s.start for s in steps]

    def at(self, t: float) -> int | None:
        """Return the index of the step that contains a time; None between steps, for example in an evaluation."""
        i = bisect_right(self._starts, t) - 1
        return i if i >= 0 and t <= self.steps[i].end else None


def find_steps(events: RankEvents) -> tuple[list[TraceStep], list[str]]:
    """Return the steps from `ProfilerStep#N` marks, and remarks. A last mark without work is no step."""
    marks: dict[int, tuple[float, float]] = {}
    for start, end, name, _ in events.marks:
        match = STEP_PATTERN.match(name)
        if match and int(match.group(1)) not in marks:
            marks[int(match.group(1))] = (start, end)
    steps = sorted((TraceStep(n, a, b) for n, (a, b) in marks.items()), key=lambda s: s.start)
    for one, following in pairwise(steps):
        one.end = min(one.end, following.start)
    remarks = []
    if len(steps) > 1 and not _has_work(events, steps[-1]):
        remarks.append(f"step {steps[-1].number} has a mark but no work; it is left out")
        steps.pop()
    return steps, remarks


def _has_work(events: RankEvents, step: TraceStep) -> bool:
    launched = (t for t, _ in events.launches.values())
    if any(step.start <= t < step.end for t in launched):
        return True
    return any(step.start <= t < step.end for operators in events.operators for t in operators.starts)


def extend_to_device_ends(steps: Sequence[TraceStep], ends: Sequence[float]) -> None:
    """Extend each step until the device work launched in it has ended (`ends`, by step), but not into the next one."""
    for i, step in enumerate(steps):
        limit = steps[i + 1].start if i + 1 < len(steps) else float("inf")
        step.end = max(step.end, min(ends[i], limit))


class BusySpans(Struct):
    """Merged spans of each kind of work."""

    compute: list[Span]
    comm: list[Span]
    copy: list[Span]

    def within(self, start: float, end: float) -> BusySpans:
        """Return the part in a span of time."""
        return BusySpans(*(clip(spans, start, end) for spans in structs.astuple(self)))

    def extent(self) -> Span | None:
        """Return the span from the first start to the last end."""
        kept = [spans for spans in structs.astuple(self) if spans]
        return (min(m[0][0] for m in kept), max(m[-1][1] for m in kept)) if kept else None


def compute_breakdown(busy: BusySpans, start: float, end: float) -> Breakdown:
    """Return the breakdown of [start, end]: compute first, then communication, then copies; the rest is idle."""
    b = busy.within(start, end)
    exposed = subtract(b.comm, b.compute)
    working: MergedSpans = merge([*b.compute, *b.comm])
    alone = subtract(b.copy, working)
    span, compute, exposed_s, copy = end - start, total_length(b.compute), total_length(exposed), total_length(alone)
    return Breakdown(
        span_s=span * SECONDS_PER_US,
        compute_s=compute * SECONDS_PER_US,
        exposed_comm_s=exposed_s * SECONDS_PER_US,
        copy_s=copy * SECONDS_PER_US,
        idle_s=max(span - compute - exposed_s - copy, 0.0) * SECONDS_PER_US,
        comm_s=total_length(b.comm) * SECONDS_PER_US,
        overlapped_comm_s=total_length(intersect(b.comm, b.compute)) * SECONDS_PER_US,
        copy_total_s=total_length(b.copy) * SECONDS_PER_US,
    )


def sum_breakdowns(parts: Sequence[Breakdown]) -> Breakdown:
    """Return the sum of several breakdowns."""
    return Breakdown(**{name: sum(getattr(p, name) for p in parts) for name in Breakdown.__struct_fields__})


def phase_rows(
    events: RankEvents,
    phases: Phases,
    busy: BusySpans,
    collectives: list[Collective],
    windows: list[Span],
    on_device: bool,
) -> list[list[PhaseRow]]:
    """Return rows of every phase, by window (steps, or the complete trace)."""
    spans = [phases.spans(p) for p in range(len(PHASES))]
    index = StepIndex([TraceStep(i, a, b) for i, (a, b) in enumerate(windows)])
    launched = _launched_compute(events, phases, index) if on_device else None
    comm: defaultdict[tuple[int | None, int], float] = defaultdict(float)
    for c in collectives:
        comm[index.at(c.launched if c.launched is not None else c.start), c.phase] += c.duration
    rows = []
    for w, (start, end) in enumerate(windows):
        row, host_left = [], end - start
        compute = clip(busy.compute, start, end)
        busy_left = total_length(compute)
        for p, name in enumerate(PHASES):
            mine = clip(spans[p], start, end)
            host = total_length(mine) if name != "other" else host_left
            host_left -= host
            if launched is not None:
                work = launched[w, p]
            else:
                work = total_length(intersect(compute, mine)) if name != "other" else busy_left
                busy_left -= work
            host_s, busy_s, comm_s = (t * SECONDS_PER_US for t in (max(host, 0.0), max(work, 0.0), comm[w, p]))
            row.append(PhaseRow(phase=name, host_s=host_s, busy_s=busy_s, comm_s=comm_s))
        rows.append(row)
    return rows


def _launched_compute(events: RankEvents, phases: Phases, index: StepIndex) -> defaultdict[tuple[int, int], float]:
    """Return the sum of compute kernels by (window, phase) of their launch."""
    out: defaultdict[tuple[int, int], float] = defaultdict(float)
    for start, end, name, correlation in events.device:
        if events.kernel_classes[name] != COMPUTE:
            continue
        launch = events.launches.get(correlation)
        at = index.at(launch[0] if launch is not None else start)
        if at is not None:
            out[at, phases.at(*launch) if launch is not None else len(PHASES) - 1] += end - start
    return out
