"""Events of a trace and what it says of itself, as msgspec decodes them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Raw, Struct, field

_ARG_NAMES = {
    "sequence": "Sequence number",
    "dims": "Input Dims",
    "types": "Input type",
    "collective": "Collective name",
    "in_elements": "In msg nelems",
    "out_elements": "Out msg nelems",
    "group_size": "Group size",
    "group": "Process Group Name",
    "group_ranks": "Process Group Ranks",
    "comm_seq": "Seq",
    "source": "Src Rank",
    "target": "Dst Rank",
    "device_type": "Device Type",
    "device_id": "Device Id",
    "allocated": "Total Allocated",
    "reserved": "Total Reserved",
}


Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Args(Struct, rename=lambda name: _ARG_NAMES.get(name, name), gc=False):
    """The arguments that the analysis needs; all else is skipped while decoding."""

    correlation: int | None = None
    sequence: Int64 | None = None
    dims: Raw = Raw()
    types: Raw = Raw()
    name: Any = None
    collective: str | None = None
    in_elements: Any = None
    out_elements: Any = None
    group_size: Any = None
    dtype: str | None = None
    group: str | None = None
    group_ranks: Any = None
    comm_seq: Any = None
    source: Any = None
    target: Any = None
    device_type: int | None = None
    device_id: int | None = None
    allocated: Int64 | None = None
    reserved: Int64 | None = None


NO_TIME = float("nan")  # metadata needs no time, all else does


class Event(Struct, gc=False):
    """One event of a trace; `ts` and `dur` in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float = NO_TIME
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: Args | None = None


class Head(Struct):
    """What a trace says about itself, outside its events."""

    schema: Any = field(name="schemaVersion", default=None)
    distributed: Any = field(name="distributedInfo", default=None)
    devices: Any = field(name="deviceProperties", default=None)
    base_ns: Any = field(name="baseTimeNanoseconds", default=None)
    host: Any = field(name="host_name", default=None)


class _Tail(Head):
    events: list[Event] = field(name="traceEvents", default_factory=list)


EVENTS = msgspec.json.Decoder(list[Event], strict=False)
EVENT = msgspec.json.Decoder(Event, strict=False)
HEAD = msgspec.json.Decoder(Head)
TAIL = msgspec.json.Decoder(_Tail, strict=False)


def event_of(value: Any) -> tuple[Event | None, bool]:
    """The event, and whether all of it was understood: one whose arguments are damaged still tells its name and time."""
    if not isinstance(value, dict) or "ph" not in value:
        return None, False
    for drop in ((), ("args",)):
        try:
            text = msgspec.json.encode({k: v for k, v in value.items() if k not in drop})
            return EVENT.decode(text), not drop
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            continue
    return None, False
