"""What a reader should know of the trace of one rank before its figures."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.trace.events import RankEvents
from allranks.trace.intervals import clip, measure
from allranks.trace.rank_collectives import Collective
from allranks.trace.records import Severity
from allranks.trace.steps import US, Busy, Step

Remark = tuple[Severity, str, str]  # (severity, kind, message)


def remarks_on(
    events: RankEvents, steps: list[Step], collectives: list[Collective], waits: Sequence[object], busy: Busy
) -> list[Remark]:
    """``waits``: spans in which communication blocked a thread of the host; ``steps``: as they are after device work was added."""
    out: list[Remark] = []
    if not steps:
        out.append(("warning", "no_steps", "has no ProfilerStep marks; its whole length is taken as one window"))
    if collectives and not events.comm_kernels and not any(c.name.startswith("gloo:") for c in events.host_comms):
        text = "shows communication only as calls on the host; its times are those of the calls"
        out.append(("warning", "calls_only", text))
    if events.host_comms and not collectives and not waits:
        text = (
            f"calls communication {len(events.host_comms)} times ({events.host_comms[0].name}), and neither kernels nor sizes "
            "tell what it was; figures of communication are missing"
        )
        out.append(("warning", "calls_only", text))
    return out + (_outside(busy, steps) if steps else [])


def _outside(busy: Busy, steps: list[Step]) -> list[Remark]:
    """Says if much work lies outside of the steps, which the figures leave out."""
    out: list[Remark] = []
    for what, spans in (("compute", busy.compute), ("communication", busy.comm)):
        whole = measure(spans)
        inside = sum(measure(clip(spans, s.start, s.end)) for s in steps)
        if whole - inside > max(0.1 * whole, 0.01 * (steps[-1].end - steps[0].start)):
            text = f"{(whole - inside) * US:.3f} s of {whole * US:.3f} s of {what} lie outside of the step marks and are left out"
            out.append(("warning", "outside_steps", text))
    return out
