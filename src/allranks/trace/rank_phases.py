"""Time of each phase of training, step by step: on the host, at work, and in communication."""

from __future__ import annotations

from collections import defaultdict

from allranks.trace.events import COMPUTE, RankEvents
from allranks.trace.intervals import Merged, Span, clip, intersect, measure
from allranks.trace.phases import Phases
from allranks.trace.rank_collectives import Collective
from allranks.trace.records import PHASES, PhaseRow
from allranks.trace.steps import US, Busy, Step, StepIndex


def phase_rows(
    events: RankEvents, phases: Phases, busy: Busy, collectives: list[Collective], windows: list[Span], on_device: bool
) -> list[list[PhaseRow]]:
    """Rows of every phase, by window (steps, or the whole trace)."""
    spans = [phases.spans(p) for p in range(len(PHASES))]
    launched = _launched_compute(events, phases, windows) if on_device else None
    rows = []
    for w, (start, end) in enumerate(windows):
        row, host_left = [], end - start
        busy_left = measure(clip(busy.compute, start, end))
        for p, name in enumerate(PHASES):
            mine = clip(spans[p], start, end)
            host = measure(mine) if name != "other" else host_left
            host_left -= host
            if launched is not None:
                work = launched[w, p]
            else:
                work = _host_compute(busy.compute, mine, start, end) if name != "other" else busy_left
                busy_left -= work
            row.append(PhaseRow(phase=name, host_s=max(host, 0.0) * US, busy_s=max(work, 0.0) * US, comm_s=0.0))
        rows.append(row)
    return _with_comm(rows, collectives, windows)


def _host_compute(compute: Merged, phase: Merged, start: float, end: float) -> float:
    return measure(intersect(clip(compute, start, end), phase))


def _launched_compute(events: RankEvents, phases: Phases, windows: list[Span]) -> defaultdict[tuple[int, int], float]:
    """Sum of compute kernels by (window, phase) of their launch."""
    index = StepIndex([Step(i, a, b) for i, (a, b) in enumerate(windows)])
    out: defaultdict[tuple[int, int], float] = defaultdict(float)
    for start, end, name, correlation in events.device:
        if events.kernel_classes[name] != COMPUTE:
            continue
        launch = events.launches.get(correlation)
        at = index.at(launch[0] if launch is not None else start)
        if at is not None:
            out[at, phases.at(*launch) if launch is not None else len(PHASES) - 1] += end - start
    return out


def _with_comm(rows: list[list[PhaseRow]], collectives: list[Collective], windows: list[Span]) -> list[list[PhaseRow]]:
    index = StepIndex([Step(i, a, b) for i, (a, b) in enumerate(windows)])
    sums: defaultdict[tuple[int, int], float] = defaultdict(float)
    for c in collectives:
        at = index.at(c.launched if c.launched is not None else c.start)
        if at is not None:
            sums[at, c.phase] += c.duration
    return [
        [PhaseRow(phase=r.phase, host_s=r.host_s, busy_s=r.busy_s, comm_s=sums[w, p] * US) for p, r in enumerate(row)]
        for w, row in enumerate(rows)
    ]
