"""Find the collectives of one rank: kind, size, launch location and time."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from functools import cache

from msgspec import Struct

from allranks.analysis.trace.events import (
    CollectiveMetadata,
    CommKernel,
    HostCommCall,
    RankEvents,
    collective_kind,
    is_wait,
)
from allranks.utils.collectives import size_rule

_GLOO = "gloo:"
_SIDES = re.compile(r"\d+")


class Collective(Struct):
    """One collective on one rank; times in the trace's microseconds."""

    kind: str
    start: float
    end: float
    launched: float | None  # when the host called it
    thread: int | None
    bytes: int | None
    group: str | None  # names the communicator; None: unknown
    members: tuple[int, ...] | None
    size: int | None
    seq: int | None
    source: int | None
    target: int | None
    on_device: bool
    uneven: bool = False  # its size may differ between ranks
    phase: int = 4
    step: int | None = None  # the step's number

    @property
    def duration(self) -> float:
        return self.end - self.start


def find_collectives(
    events: RankEvents, world_size: int | None, one_group: bool
) -> tuple[list[Collective], list[tuple[float, float]]]:
    """Return collectives in the order of their start, and other spans in which communication blocked a host thread."""
    calls = [c for c in events.host_comms if not is_wait(c.name)]
    waits = [(c.start, c.end) for c in events.host_comms if is_wait(c.name)]
    default = world_size if one_group else None
    index = _CallIndex(calls)
    collectives = [_of_kernel(k, events, index, default) for k in events.comm_kernels]
    gloo = [c for c in calls if c.name.startswith(_GLOO)]
    collectives += _of_gloo(gloo, calls, default)
    if not collectives:
        collectives = [c for c in (_of_call(c, default) for c in _outermost(calls)) if c.kind != "unknown"]
    collectives.sort(key=lambda c: c.start)
    return collectives, waits


class _CallIndex:
    """Find the communication call that contains a launch."""

    def __init__(self, calls: list[HostCommCall]) -> None:
        self._by_thread: dict[int, list[HostCommCall]] = {}
        for call in sorted(calls, key=lambda c: (c.start, -c.end)):
            self._by_thread.setdefault(call.thread, []).append(call)
        self._starts = {t: [c.start for c in on_thread] for t, on_thread in self._by_thread.items()}

    def around(self, t: float, thread: int) -> list[HostCommCall]:
        """Return the calls that contain a time on a thread, innermost first. Nesting is at most a few levels deep."""
        calls = self._by_thread.get(thread, [])
        i = bisect_right(self._starts.get(thread, []), t)
        return [c for c in reversed(calls[max(0, i - 32) : i]) if c.end >= t]


def _of_kernel(kernel: CommKernel, events: RankEvents, index: _CallIndex, default: int | None) -> Collective:
    launch = events.launches.get(kernel.correlation) if kernel.correlation is not None else None
    around = index.around(*launch) if launch is not None else []
    metadata = (
        kernel.metadata or next((c.metadata for c in around if c.metadata is not None), None) or CollectiveMetadata()
    )
    kind = metadata.kind or next((c.kind for c in around if c.kind is not None), None) or kernel.kind or "unknown"
    size = metadata.size if metadata.size is not None else default
    nbytes = metadata.bytes
    if nbytes is None:
        # the inner annotation has one rank's part, the operator around it also the complete tensor
        nbytes = max((n for c in around if (n := _bytes(c, kind, size)) is not None), default=None)
    name = metadata.name or next((c.name for c in around if c.kind is not None), "")
    return _collective(kind, kernel.start, kernel.end, launch, nbytes, metadata, size, True, name)


def _collective(
    kind: str,
    start: float,
    end: float,
    launch: tuple[float, int] | None,
    nbytes: int | None,
    metadata: CollectiveMetadata,
    size: int | None,
    on_device: bool,
    name: str,
) -> Collective:
    members = (
        tuple(int(n) for n in _SIDES.findall(metadata.members))
        if metadata.members and "..." not in metadata.members
        else None
    )
    group = f"{metadata.group or ''} {metadata.members or ''}".strip() or None
    return Collective(
        kind=kind,
        start=start,
        end=end,
        launched=launch[0] if launch else None,
        thread=launch[1] if launch else None,
        bytes=nbytes,
        group=group,
        members=members or None,
        size=size,
        seq=metadata.seq if group else None,
        source=metadata.source,
        target=metadata.target,
        on_device=on_device,
        uneven=_may_be_uneven(name, kind),
    )


@cache
def _may_be_uneven(name: str, kind: str) -> bool:
    """Return whether the size may differ between ranks, by the name of the call, else by its kind."""
    rule = size_rule(name) or size_rule(kind)
    return rule is not None and not rule.even_calls


def _outermost(calls: list[HostCommCall]) -> list[HostCommCall]:
    """Return calls that are not inside another call of their thread."""
    ends: dict[int, float] = {}
    kept = []
    for call in sorted(calls, key=lambda c: (c.start, -c.end)):
        if call.start >= ends.get(call.thread, float("-inf")):
            ends[call.thread] = call.end
            kept.append(call)
    return kept


def _of_gloo(spans: list[HostCommCall], calls: list[HostCommCall], default: int | None) -> list[Collective]:
    """Name gloo's spans by their calls: a span only has tensors, and a reduce-scatter is recorded as an all-reduce.

    Both are in the same order: a span gets the earliest call before it of a kind run this way, of its size if possible.
    """
    waiting = deque(c for c in _outermost([c for c in calls if not c.name.startswith(_GLOO)]) if c.kind is not None)
    collectives = []
    for span in sorted(spans, key=lambda c: c.start):
        call = _take(waiting, span)
        kind = (call.kind if call else span.kind) or "unknown"
        nbytes = _gloo_bytes(span, call, kind, default)
        launch = (call.start, call.thread) if call else None
        name = call.name if call else span.name
        collectives.append(
            _collective(kind, span.start, span.end, launch, nbytes, CollectiveMetadata(), default, False, name)
        )
    return collectives


def _take(waiting: deque[HostCommCall], span: HostCommCall) -> HostCommCall | None:
    fits = [c for c in waiting if c.start <= span.start and span.kind in _as_gloo(c.kind)]
    own = {n for n, _ in span.tensors}
    best = next((c for c in fits if own & {n for n, _ in c.tensors}), fits[0] if fits else None)
    if best is not None:
        waiting.remove(best)
        while (
            waiting and waiting[0].end < best.start and len(waiting) > 64
        ):  # drop calls that never ran, to keep this linear
            waiting.popleft()
    return best


def _as_gloo(kind: str | None) -> tuple[str | None, ...]:
    return (kind, "all_reduce") if kind in ("reduce_scatter", "barrier") else (kind,)


def _gloo_bytes(span: HostCommCall, call: HostCommCall | None, kind: str, size: int | None) -> int | None:
    if kind == "barrier":
        return 0
    each = next((b for _, b in span.tensors if b is not None), None)
    if each is None or not span.tensors:
        return _bytes(call, kind, size) if call else None
    own = sum(n for n, _ in span.tensors)
    if kind == "all_gather":  # the span has this rank's part
        largest = max((n for n, _ in call.tensors), default=0) if call else 0
        return largest * each if largest > own else (own * size * each if size else None)
    return own * each


def _bytes(call: HostCommCall, kind: str, size: int | None) -> int | None:
    """Return nccl-tests' size of a collective from the shapes of its call."""
    sized = [(n, b) for n, b in call.tensors if n]
    each = next((b for _, b in sized if b is not None), None)
    if not sized or each is None:
        return None
    largest = max(n for n, _ in sized)
    if kind in ("all_gather", "reduce_scatter") and len(sized) < 2:
        if "reduce_scatter" in call.name and kind == "reduce_scatter":
            return largest * each  # its input, which is the complete tensor
        return largest * each * size if size else None
    return largest * each


def _of_call(call: HostCommCall, default: int | None) -> Collective:
    metadata = call.metadata or CollectiveMetadata()
    kind = metadata.kind or call.kind or collective_kind(call.name) or "unknown"
    size = metadata.size if metadata.size is not None else default
    nbytes = metadata.bytes if metadata.bytes is not None else _bytes(call, kind, size)
    name = metadata.name or call.name
    return _collective(kind, call.start, call.end, (call.start, call.thread), nbytes, metadata, size, False, name)
