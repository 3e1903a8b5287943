"""Analyse the trace of one rank: its metrics, warnings, and the data for comparison with other ranks."""

from __future__ import annotations

import gc
from operator import add
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from allranks.analysis.trace.activity import (
    TimeTotals,
    busy_on_device,
    busy_on_host,
    kernel_totals,
    memory_timeline,
    operator_self_times,
)
from allranks.analysis.trace.chrome_trace import NotATrace, TraceMetadata, TraceStream, distributed_info, parse_rank
from allranks.analysis.trace.collectives import Collective, find_collectives
from allranks.analysis.trace.events import RankEvents, as_int
from allranks.analysis.trace.intervals import Span, clip, total_length
from allranks.analysis.trace.records import Breakdown, MemoryReport, PhaseRow, Severity
from allranks.analysis.trace.steps import (
    SECONDS_PER_US,
    BusySpans,
    Phases,
    StepIndex,
    TraceStep,
    compute_breakdown,
    extend_to_device_ends,
    find_phases,
    find_steps,
    phase_rows,
    sum_breakdowns,
)
from allranks.utils.workers import map_in_processes

Remark = tuple[Severity, str, str]  # (severity, kind, message)


def find_remarks(events: RankEvents, steps: list[TraceStep], busy: BusySpans) -> list[Remark]:
    """Return what limits the figures of this rank. ``steps``: after adding device work."""
    out: list[Remark] = []
    if not steps:
        out.append(("warning", "no_steps", "has no ProfilerStep marks; the complete trace is used as one window"))
    calls = events.host_comms
    if calls and not events.comm_kernels and not any(c.name.startswith("gloo:") for c in calls):
        text = (
            f"contains communication only as {len(calls)} host calls ({calls[0].name}); its times, if there are any, "
            "are those of the calls"
        )
        out.append(("warning", "calls_only", text))
    return out + (_work_outside_steps(busy, steps) if steps else [])


def _work_outside_steps(busy: BusySpans, steps: list[TraceStep]) -> list[Remark]:
    """Report work outside of the steps, which the figures do not include."""
    out: list[Remark] = []
    for what, spans in (("compute", busy.compute), ("communication", busy.comm)):
        whole = total_length(spans)
        inside = sum(total_length(clip(spans, s.start, s.end)) for s in steps)
        if whole - inside > max(0.1 * whole, 0.01 * (steps[-1].end - steps[0].start)):
            text = (
                f"{(whole - inside) * SECONDS_PER_US:.3f} s of {whole * SECONDS_PER_US:.3f} s of {what} are outside of "
                "the step marks and not included"
            )
            out.append(("warning", "outside_steps", text))
    return out


MAX_NAMES = 1000  # maximum number of names returned per rank


class RankResult(Struct):
    """The result of one rank; times in the trace's microseconds unless they end in `_s`."""

    path: str
    file_bytes: int
    n_events: int
    world_size: int | None
    backend: str | None
    device: str
    device_name: str | None
    base_ns: int
    damage: str | None
    skipped: int
    start: float
    end: float
    steps: list[TraceStep]
    total: Breakdown
    by_step: list[Breakdown]
    phases: list[list[PhaseRow]]  # by step; one list without steps
    first: BusySpans  # of the first step, exact: its start may still move
    collectives: list[Collective]
    kernels: TimeTotals
    operators: TimeTotals
    memory: list[MemoryReport]
    remarks: list[Remark] = field(default_factory=list)


class UnreadableTrace(Struct):
    """A file without a result."""

    path: str
    kind: str
    message: str


def read_rank(path: Path) -> RankResult | UnreadableTrace:
    """Read and analyse one trace."""
    collecting = gc.isenabled()
    gc.disable()  # there are no cycles, and the collector would scan all tuples repeatedly
    try:
        return _read(path)
    finally:
        if collecting:
            gc.enable()


def _read(path: Path) -> RankResult | UnreadableTrace:
    try:
        stream = TraceStream(path)
        events = RankEvents()
        for piece in stream.pieces():
            events.add(piece)
    except NotATrace as error:
        return UnreadableTrace(str(path), "not_a_trace", f"is not a profiler trace: {error}")
    except OSError as error:
        return UnreadableTrace(str(path), "unreadable", f"cannot be read: {error.strerror or error}")
    if not any(len(o) for o in events.operators) and not events.device and not events.marks:
        why = f" before {stream.damage}" if stream.damage else ""
        return UnreadableTrace(str(path), "not_a_trace", f"has no operators, kernels or marks{why}")
    events.finish()
    return _analyse(path, stream, events)


def _analyse(path: Path, stream: TraceStream, events: RankEvents) -> RankResult:
    info = distributed_info(stream.head)
    world = parse_rank(info.get("world_size")) or None
    on_device = bool(events.device)
    collectives, waits = find_collectives(events, world, _one_group(info, world))
    busy = busy_on_device(events, collectives) if on_device else busy_on_host(events, collectives, waits)
    steps, empty = find_steps(events)
    phases = find_phases(events)
    if on_device and steps:
        extend_to_device_ends(steps, _device_ends(events, steps))
    start, end = _window(events, busy, steps)
    _assign_phases_and_steps(collectives, phases, StepIndex(steps))
    by_step = [compute_breakdown(busy, s.start, s.end) for s in steps]
    windows = [(s.start, s.end) for s in steps] or [(start, end)]
    return RankResult(
        path=str(path),
        file_bytes=path.stat().st_size,
        n_events=events.count,
        world_size=world,
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        device="gpu" if on_device else "cpu",
        device_name=_device_name(stream.head),
        base_ns=as_int(stream.head.base_ns) or 0,
        damage=stream.damage,
        skipped=stream.skipped + events.odd,
        start=start,
        end=end,
        steps=steps,
        total=sum_breakdowns(by_step) if steps else compute_breakdown(busy, start, end),
        by_step=by_step,
        phases=phase_rows(events, phases, busy, collectives, windows, on_device),
        first=busy.within(*windows[0]),
        collectives=[c for c in collectives if not steps or c.step is not None],
        kernels=_longest(kernel_totals(events)),
        operators=_longest(operator_self_times(events)),
        memory=memory_timeline(events),
        remarks=[*(("note", "empty_step", text) for text in empty), *find_remarks(events, steps, busy)],
    )


def _one_group(info: dict[str, Any], world: int | None) -> bool:
    """Return whether every collective has all ranks, because the trace has only one communicator."""
    configs = info.get("pg_config")
    if isinstance(configs, list) and configs:
        sizes = [c.get("pg_size") for c in configs if isinstance(c, dict)]
        return bool(sizes) and all(size == world for size in sizes)
    return False


def _device_ends(events: RankEvents, steps: list[TraceStep]) -> list[float]:
    """Return when the device work launched in each step had ended."""
    index = StepIndex(steps)
    ends = [s.end for s in steps]
    for _, end, _, correlation in events.device:
        launch = events.launches.get(correlation)
        at = index.at(launch[0]) if launch is not None else None
        if at is not None and end > ends[at]:
            ends[at] = end
    return ends


def _window(events: RankEvents, busy: BusySpans, steps: list[TraceStep]) -> Span:
    if steps:
        return steps[0].start, steps[-1].end
    extent = busy.extent()
    first = [o.starts[0] for o in events.operators if len(o)] + [m[0] for m in events.marks]
    last = [m[1] for m in events.marks] + [max(map(add, o.starts, o.durations)) for o in events.operators if len(o)]
    if extent is not None:
        first.append(extent[0])
        last.append(extent[1])
    return min(first), max(last)


def _assign_phases_and_steps(collectives: list[Collective], phases: Phases, index: StepIndex) -> None:
    """Set the phase and the step in which each collective was launched."""
    for c in collectives:
        if c.launched is not None:
            c.phase = phases.at(c.launched, c.thread)
        at = index.at(c.launched if c.launched is not None else c.start)
        c.step = index.steps[at].number if at is not None else None


def _longest(tops: TimeTotals) -> TimeTotals:
    return dict(sorted(tops.items(), key=lambda item: -item[1][1])[:MAX_NAMES])


def _device_name(head: TraceMetadata) -> str | None:
    devices = head.devices
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


Result = RankResult | UnreadableTrace


def read_all(files: list[Path], workers: int) -> dict[Path, Result]:
    """Read each file in one of `workers` processes; a process takes the next file when it has finished one."""
    if workers <= 1:
        return {path: read_rank(path) for path in files}
    answers = zip(files, map_in_processes(read_rank, files, workers), strict=True)
    return {
        path: UnreadableTrace(str(path), "unreadable", f"was not read: {answer}")
        if isinstance(answer, ChildProcessError)
        else answer
        for path, answer in answers
    }
