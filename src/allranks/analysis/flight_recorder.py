"""Read dumps of torch's flight recorder without unpickling (only plain values are built), and find where ranks diverge
in their collectives.

A dump may come from any user. Pickled values can share parts through the memo, so a dump of 1 kB can expand to 2**60
values, and nesting has no limit. Building values takes linear time in the number of opcodes, which is bounded. No code
walks a complete value: dictionary keys are scalars, and `_call` reads a bounded number of scalars from known places.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeGuard, TypeVar

import msgspec
from msgspec import Struct

from allranks.analysis.stacks import is_library_file
from allranks.utils.collectives import size_rule
from allranks.utils.inputs import FileTooLarge, read_regular

MAX_BYTES = 256 << 20
MAX_CALLS = 4096
MAX_OPCODES = 20_000_000  # a call with 20 frames needs about 300
MAX_FRAMES = 24
MAX_SIZES = 64  # limit of tensors per call, and of dimensions per tensor
_RANK = re.compile(r"(\d{1,9})(?:\.\w+)?$")
HEAD = 1 << 16  # bytes needed to recognise a dump
DAMAGE = (
    ValueError, LookupError, TypeError, AttributeError, RecursionError, pickle.UnpicklingError, msgspec.DecodeError,
)  # fmt: skip
_OPCODES = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 INT LONG BINFLOAT FLOAT BINUNICODE
SHORT_BINUNICODE BINUNICODE8 UNICODE BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES GLOBAL STACK_GLOBAL REDUCE POP
BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET EMPTY_DICT EMPTY_LIST EMPTY_TUPLE LIST TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM
SETITEMS APPEND APPENDS
"""
_ALLOWED = frozenset(_OPCODES.split())


class CollectiveCall(Struct, frozen=True, kw_only=True):
    """One collective that a rank has called.

    ``sizes``: of its inputs; ``done``: completed on this rank; ``where``: the program's line, ``file:line:function``.
    """

    group: str
    seq: int
    op: str
    sizes: str
    output_sizes: str = ""
    done: bool
    where: str = ""


C = TypeVar("C", bound=CollectiveCall)


class OpenCollective(Struct, Generic[C], frozen=True):
    """The first collective of a group that is unfinished on a rank.

    ``calls``: each rank's call of this number. ``absent``: ranks whose last call in the group is earlier.
    """

    group: str
    seq: int
    calls: dict[int, C]
    absent: list[int]

    @property
    def waiting(self) -> list[int]:
        """Return the ranks on which it is unfinished."""
        return [rank for rank, call in sorted(self.calls.items()) if not call.done]

    @property
    def differs(self) -> bool:
        """Return whether the ranks called different operations, or one with sizes that must be equal and are not."""
        return len({c.op for c in self.calls.values() if c.op}) > 1 or any(len(s) > 1 for s in self._sizes())

    @property
    def rarest(self) -> list[int]:
        """Return the ranks whose call is the rarest."""
        kinds = {rank: _kind(call) for rank, call in sorted(self.calls.items())}
        counts = Counter(kinds.values())
        least = min(counts.values(), default=0)
        return [rank for rank, kind in kinds.items() if counts[kind] == least]

    def contrast(self, rank: int) -> C | None:
        """Return the most frequent call that differs from this rank's."""
        counts = Counter(_kind(c) for c in self.calls.values())
        others = [c for c in self.calls.values() if _kind(c) != _kind(self.calls[rank])]
        return max(others, key=lambda c: counts[_kind(c)], default=None)

    def describe(self, call: C | None) -> str:
        """Describe a call by operation and sizes; the sizes of its outputs are included if only they differ."""
        if call is None:
            return "another"
        inputs, outputs = self._sizes()
        to = f" to {call.output_sizes}" if len(inputs) < 2 and len(outputs) > 1 else ""
        return f"{describe_call(call)}{to}"

    def _sizes(self) -> tuple[set[str], set[str]]:
        """Return the different sizes of inputs and outputs that must be equal; unknown ones are ignored."""
        kinds = [_kind(c) for c in self.calls.values()]
        return {k[1] for k in kinds if k[1]}, {k[2] for k in kinds if k[2]}


def _kind(call: CollectiveCall) -> tuple[str, str, str]:
    """Return what must be equal on all ranks: the operation, and the sizes that its rule names."""
    rule = size_rule(call.op)
    return call.op, call.sizes if rule and rule.inputs else "", call.output_sizes if rule and rule.outputs else ""


def describe_call(call: CollectiveCall) -> str:
    """Describe a collective by operation and sizes."""
    return f"{call.op} {call.sizes}".strip()


def open_collectives(ranks: Mapping[int, Sequence[C]]) -> Iterator[OpenCollective[C]]:
    """Yield the first unfinished collective of each group that has one.

    Args:
        ranks: the calls that each rank has recorded.
    """
    for group in sorted({c.group for calls in ranks.values() for c in calls}):
        members = {rank: own for rank, calls in ranks.items() if (own := {c.seq: c for c in calls if c.group == group})}
        unfinished = [seq for own in members.values() for seq, c in own.items() if not c.done]
        if unfinished:
            seq = min(unfinished)
            yield OpenCollective(
                group=group,
                seq=seq,
                calls={rank: own[seq] for rank, own in members.items() if seq in own},
                absent=sorted(rank for rank, own in members.items() if max(own) < seq),
            )


def is_flight_record(head: bytes) -> bool:
    """Return whether a file starts like a flight-recorder dump, pickled or JSON."""
    if head.startswith(b"\x80") and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return any(key in head for key in (b"pg_config", b"pg_status", b"collective_seq_id", b"nccl_comm_state"))
    return head.lstrip().startswith(b"{") and (b'"collective_seq_id"' in head or b'"pg_config"' in head)


def read_flight_record(path: Path) -> FlightRecord:
    """Read a dump as records.

    Raises:
        ValueError: it is truncated, too large or has another format; the message says which.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except FileTooLarge:
        raise ValueError(f"is a flight-recorder dump larger than the limit of {MAX_BYTES >> 20} MiB") from None
    try:
        value = plain_value(data) if data.startswith(b"\x80") else msgspec.json.decode(data)
    except DAMAGE as error:
        raise ValueError(
            f"looks like a flight-recorder dump but is truncated or damaged ({str(error)[:200]})"
        ) from None
    if not isinstance(value, dict):
        raise ValueError("looks like a flight-recorder dump but has other content")
    entries = value.get("entries")
    calls = [call for e in (entries if isinstance(entries, list) else []) if (call := _call(e)) is not None]
    rank = value.get("rank")
    named = _RANK.search(path.name)
    return FlightRecord(
        rank=rank if _is_number(rank) else int(named.group(1)) if named else None, calls=calls[-MAX_CALLS:]
    )


def _load_items(reader: Any) -> None:
    """Refuse keys whose hash is slow or can collide: tuples (nested ones also exhaust C's stack), large integers."""
    values = reader.pop_mark()
    for key in values[::2]:
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 1 << 60):
            raise ValueError(f"a key is a {type(key).__name__}, which no flight recorder writes")
    reader.stack[-1].update(zip(values[::2], values[1::2], strict=True))


def _load_item(reader: Any) -> None:
    reader.metastack.append(reader.stack[:-2])
    reader.stack = reader.stack[-2:]
    _load_items(reader)


class _PlainUnpickler(pickle._Unpickler):
    """Build numbers, texts, lists, tuples, dictionaries; import nothing. `_ALLOWED` leaves no other object to call."""

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.SETITEMS[0]: _load_items,
        pickle.SETITEM[0]: _load_item,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a function that returns the value: torch marks lists and dictionaries with their type."""
        return lambda value, *_: value


def plain_value(data: bytes) -> Any:
    """Return the value of a pickle of numbers, texts, lists, tuples and dictionaries; nothing in it is imported."""
    for count, (opcode, _, _) in enumerate(pickletools.genops(data)):
        if count > MAX_OPCODES:
            raise ValueError(f"more than {MAX_OPCODES} opcodes")
        if opcode.name not in _ALLOWED:
            raise ValueError(f"it contains the opcode {opcode.name}")
    return _PlainUnpickler(io.BytesIO(data)).load()


def _call(entry: object) -> RecordedCall | None:
    """Return one recorded collective."""
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    seq = entry.get("collective_seq_id", entry.get("seq_id"))
    if not _is_number(seq):
        return None
    group = entry.get("process_group")
    first = group[0] if isinstance(group, list | tuple) and group else entry.get("pg_name", entry.get("pg_id", ""))
    frames = entry.get("frames")
    lines = [text for f in (frames if isinstance(frames, list | tuple) else [])[:MAX_FRAMES] if (text := _frame(f))]
    # gloo records neither start nor end; a call that has returned is marked as retired
    state = "completed" if entry.get("retired") else _text(entry.get("state", ""))[:20]
    return RecordedCall(
        group=_text(first)[:100],
        seq=seq,
        op=_text(entry.get("profiling_name", "")).rpartition(":")[2][:100],
        sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        done=state == "completed",
        where=next((line for line in lines if not is_library_file(line)), "")[:200],
        state=state,
        frames=lines,
    )


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and abs(value) < 1 << 63


def _text(value: object) -> str:
    """Return a scalar as text, and an empty text for a value that may be large or nested."""
    return value if isinstance(value, str) else str(value) if _is_number(value) else ""


def _sizes(value: object) -> str:
    """Return the shapes of a call's tensors, such as ``[[16, 8], [4]]``."""
    shapes = [
        [n for n in shape[:MAX_SIZES] if _is_number(n)]
        if isinstance(shape, list | tuple)
        else shape
        if _is_number(shape)
        else ""
        for shape in (value[:MAX_SIZES] if isinstance(value, list | tuple) else [])
    ]
    return str(shapes)[:200]


def _frame(frame: object) -> str:
    if not isinstance(frame, dict):
        return ""
    return f"{_text(frame.get('filename', ''))}:{_text(frame.get('line', ''))}:{_text(frame.get('name', ''))}"[:300]


class RecordedCall(CollectiveCall, frozen=True, kw_only=True):
    """A call in a flight recorder, with its state and its stack, innermost frame first."""

    state: str
    frames: list[str]

    def without_stack(self) -> CollectiveCall:
        """Return the call alone."""
        return CollectiveCall(**{name: getattr(self, name) for name in CollectiveCall.__struct_fields__})


class FlightRecord(Struct):
    """A rank's flight recorder."""

    rank: int | None
    calls: list[RecordedCall]
