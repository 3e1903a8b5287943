"""One rank: from its file to figures and to what the comparison with other ranks needs. Runs in a process of its own."""

from __future__ import annotations

import gc
from operator import add
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from allranks.trace.claims import rank_count, rank_number
from allranks.trace.decode import NotATrace, TraceStream, distributed_info
from allranks.trace.event_types import Head
from allranks.trace.events import RankEvents
from allranks.trace.intervals import Span
from allranks.trace.modules import ModuleTime, Source, module_times
from allranks.trace.phases import Phases, find_phases
from allranks.trace.rank_collectives import Collective, find_collectives
from allranks.trace.rank_phases import phase_rows
from allranks.trace.rank_remarks import Remark, remarks_on
from allranks.trace.records import Breakdown, PhaseRow
from allranks.trace.steps import Busy, Step, StepIndex, breakdown, find_steps, stretch, total
from allranks.trace.work import Tops, busy_on_device, busy_on_host, kernel_tops, memory_timeline, operator_tops

DRAWN_SPANS = 2000
KEPT_TOPS = 1000  # names a rank passes on


class RankResult(Struct, tag=True):
    """All that is kept of one rank; times in the trace's microseconds unless they end in `_s`."""

    path: str
    file_bytes: int
    n_events: int
    rank: int | None  # as the trace says
    world_size: int | None
    backend: str | None
    host: str | None
    device: str
    device_name: str | None
    base_ns: int
    damage: str | None
    skipped: int
    start: float
    end: float
    steps: list[Step]
    total: Breakdown
    by_step: list[Breakdown]
    phases: list[list[PhaseRow]]  # by step; without steps one list
    phase_segments: list[tuple[float, float, int]]
    busy: Busy  # for drawing
    first: Busy  # of the first step, exact: its begin may yet move
    collectives: list[Collective]
    kernels: Tops
    operators: Tops
    modules: list[ModuleTime]
    module_source: Source
    memory: dict[str, tuple[int, int, int | None, int, list[tuple[float, int]]]]
    remarks: list[Remark] = field(default_factory=list)


class Unreadable(Struct, tag=True):
    """A file that gave nothing."""

    path: str
    kind: str
    message: str


def read_rank(path: Path) -> RankResult | Unreadable:
    """Reads and analyses one trace."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here makes cycles, and all these tuples would be looked at again and again
    try:
        return _read(path)
    finally:
        if collecting:
            gc.enable()


def _read(path: Path) -> RankResult | Unreadable:
    try:
        stream = TraceStream(path)
        events = RankEvents()
        for piece in stream.pieces():
            events.add(piece)
    except NotATrace as error:
        return Unreadable(str(path), "not_a_trace", f"is no profiler trace: {error}")
    except OSError as error:
        return Unreadable(str(path), "unreadable", f"cannot be read: {error.strerror or error}")
    if not any(len(o) for o in events.operators) and not events.device and not events.marks:
        why = f" before {stream.damage}" if stream.damage else ""
        return Unreadable(str(path), "not_a_trace", f"holds no operators, kernels or marks{why}")
    events.finish()
    return _analyse(path, stream, events)


def _analyse(path: Path, stream: TraceStream, events: RankEvents) -> RankResult:
    info = distributed_info(stream.head)
    world = rank_count(info.get("world_size"))
    on_device = bool(events.device)
    collectives, waits = find_collectives(events, world, _one_group(info, world))
    busy = busy_on_device(events, collectives) if on_device else busy_on_host(events, collectives, waits)
    steps, empty = find_steps(events)
    phases = find_phases(events)
    if on_device and steps:
        stretch(steps, _device_ends(events, steps))
    start, end = _window(events, busy, steps)
    _place(collectives, phases, StepIndex(steps))
    by_step = [breakdown(busy, s.start, s.end) for s in steps]
    windows = [(s.start, s.end) for s in steps] or [(start, end)]
    modules, source = module_times(events, on_device)
    return RankResult(
        path=str(path),
        file_bytes=path.stat().st_size,
        n_events=events.count,
        rank=rank_number(info.get("rank")),
        world_size=world,
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        host=stream.head.host if isinstance(stream.head.host, str) else None,
        device="gpu" if on_device else "cpu",
        device_name=_device_name(stream.head),
        base_ns=_number(stream.head.base_ns) or 0,
        damage=stream.damage,
        skipped=stream.skipped + events.odd,
        start=start,
        end=end,
        steps=steps,
        total=total(by_step) if steps else breakdown(busy, start, end),
        by_step=by_step,
        phases=phase_rows(events, phases, busy, collectives, windows, on_device),
        phase_segments=[s for s in phases.segments if s[1] > start and s[0] < end],
        busy=busy.within(start, end).thinned(DRAWN_SPANS),
        first=busy.within(*windows[0]),
        collectives=[c for c in collectives if not steps or c.step is not None],
        kernels=_most(kernel_tops(events)),
        operators=_most(operator_tops(events)),
        modules=modules,
        module_source=source,
        memory=memory_timeline(events),
        remarks=[
            *(("note", "empty_step", text) for text in empty),
            *remarks_on(events, steps, collectives, waits, busy),
        ],
    )


def _one_group(info: dict[str, Any], world: int | None) -> bool:
    """Whether every collective must be one of all ranks: the trace tells of one communicator."""
    configs = info.get("pg_config")
    if isinstance(configs, list) and configs:
        sizes = [c.get("pg_size") for c in configs if isinstance(c, dict)]
        return bool(sizes) and all(size == world for size in sizes)
    return False


def _device_ends(events: RankEvents, steps: list[Step]) -> list[float]:
    """When the device work launched in each step had ended."""
    index = StepIndex(steps)
    ends = [s.end for s in steps]
    for _, end, _, correlation in events.device:
        launch = events.launches.get(correlation)
        at = index.at(launch[0]) if launch is not None else None
        if at is not None and end > ends[at]:
            ends[at] = end
    return ends


def _window(events: RankEvents, busy: Busy, steps: list[Step]) -> Span:
    if steps:
        return steps[0].start, steps[-1].end
    extent = busy.extent()
    first = [o.starts[0] for o in events.operators if len(o)] + [m[0] for m in events.marks]
    last = [m[1] for m in events.marks] + [max(map(add, o.starts, o.durations)) for o in events.operators if len(o)]
    if extent is not None:
        first.append(extent[0])
        last.append(extent[1])
    return min(first), max(last)


def _place(collectives: list[Collective], phases: Phases, index: StepIndex) -> None:
    """Notes of each collective the phase and the step in which it was launched."""
    for c in collectives:
        if c.launched is not None:
            c.phase = phases.at(c.launched, c.thread)
        at = index.at(c.launched if c.launched is not None else c.start)
        c.step = index.steps[at].number if at is not None else None


def _most(tops: Tops) -> Tops:
    return dict(sorted(tops.items(), key=lambda item: -item[1][1])[:KEPT_TOPS])


def _device_name(head: Head) -> str | None:
    devices = head.devices
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def _number(value: Any) -> int | None:
    try:
        number = int(value) if value is not None and not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1 << 63 else None
