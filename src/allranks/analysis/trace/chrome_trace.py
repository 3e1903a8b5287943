"""Read a profiler trace (Chrome trace event format, plain or gzip) incrementally into typed events.

Memory use does not grow with the file; events before a damaged position are kept. The text is cut between events: a cut
is guessed from the text and confirmed by decoding, as a valid JSON array cannot end inside a string or object.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Raw, Struct, field

from allranks.utils.decompression import decompressed
from allranks.utils.inputs import ExpansionTooLarge, open_regular

_ARG_NAMES = {
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


class EventArgs(Struct, rename=lambda name: _ARG_NAMES.get(name, name), gc=False):
    """The arguments that the analysis needs; others are skipped while decoding."""

    correlation: int | None = None
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


NO_TIME = float("nan")  # metadata needs no time, everything else does


class TraceEvent(Struct, gc=False):
    """One event of a trace; `ts` and `dur` in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float = NO_TIME
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: EventArgs | None = None


class TraceMetadata(Struct):
    """Metadata of a trace, outside its events."""

    schema: Any = field(name="schemaVersion", default=None)
    distributed: Any = field(name="distributedInfo", default=None)
    devices: Any = field(name="deviceProperties", default=None)
    base_ns: Any = field(name="baseTimeNanoseconds", default=None)
    host: Any = field(name="host_name", default=None)


class _MetadataAndEvents(TraceMetadata):
    events: list[TraceEvent] = field(name="traceEvents", default_factory=list)


EVENT_LIST_DECODER = msgspec.json.Decoder(list[TraceEvent], strict=False)
EVENT_DECODER = msgspec.json.Decoder(TraceEvent, strict=False)
METADATA_DECODER = msgspec.json.Decoder(TraceMetadata)
METADATA_AND_EVENTS_DECODER = msgspec.json.Decoder(_MetadataAndEvents, strict=False)


def decode_event(value: Any) -> tuple[TraceEvent | None, bool]:
    """Return the event, and whether it is complete: with damaged arguments it still has its name and time."""
    if not isinstance(value, dict) or "ph" not in value:
        return None, False
    for drop in ((), ("args",)):
        try:
            text = msgspec.json.encode({k: v for k, v in value.items() if k not in drop})
            return EVENT_DECODER.decode(text), not drop
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            continue
    return None, False


_NEXT = re.compile(r"[^{\]]*\{")
_STDLIB = json.JSONDecoder()
BOM = b"\xef\xbb\xbf"


def decode_leading_metadata(text: bytes) -> TraceMetadata:
    """Return the metadata from the text before the events: an unclosed object."""
    body = text.removeprefix(BOM).rstrip().removesuffix(b",")
    try:
        return METADATA_DECODER.decode(body + (b"}" if body.rstrip() != b"" else b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return TraceMetadata()


def decode_trailing_metadata(rest: bytes) -> TraceMetadata | None:
    """Return the metadata after the events; None if the document is truncated or followed by a second document."""
    body = rest.lstrip()[1:].strip().removeprefix(b",").removesuffix(b"}").strip().removesuffix(b",")
    try:
        return METADATA_DECODER.decode(b"{" + body + b"}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


CHUNK_BYTES = 1 << 17
PIECE_BYTES = 1 << 17  # pieces that fit into the processor's cache are decoded faster
LARGEST_EVENT = 1 << 23
_EVENT_SEPARATOR = re.compile(rb"\}\s*,\s*\{")
_EVENT_SEPARATOR_TEXT = re.compile(r"\}\s*,\s*\{")
MAX_NESTED_ENDS = 8  # ends of objects in an event that are tried before it is skipped
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_METADATA_BYTES = 1 << 26


class NotATrace(Exception):
    """The file is not a trace; the text says why."""


class TraceStream:
    """Read one file once. Iterate `pieces()`; afterwards `head`, `damage` and `skipped` have the other results.

    A subclass that needs another event type overrides the decoding.
    """

    decode_list: Any = staticmethod(EVENT_LIST_DECODER.decode)
    decode_tail: Any = staticmethod(METADATA_AND_EVENTS_DECODER.decode)

    @staticmethod
    def convert(value: Any) -> tuple[Any, bool]:
        """Convert an event of the standard library's JSON, or None; also return whether it is complete."""
        return decode_event(value)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = TraceMetadata()
        self.damage: str | None = None  # why the file ended early
        self.skipped = 0  # events that could not be parsed

    def pieces(self) -> Iterator[list[TraceEvent]]:
        """Yield events in the file's order, some thousand at a time. Raises `NotATrace`, `OSError`."""
        chunks = self._chunks()
        buffer = self._skip_head(chunks)
        for chunk in chunks:
            buffer += chunk
            if len(buffer) < PIECE_BYTES:
                continue
            events, buffer = self._take(buffer)
            if events:
                yield events
        yield from self._finish(buffer)

    def _chunks(self) -> Iterator[bytes]:
        with open_regular(self.path) as file:
            if not file.peek(1):
                raise NotATrace("the file is empty")
            reader = decompressed(file)
            try:
                while chunk := reader.read(CHUNK_BYTES):
                    yield chunk
            except (EOFError, ExpansionTooLarge) as error:
                self.damage = str(error)

    def _skip_head(self, chunks: Iterator[bytes]) -> bytes:
        """Read up to the first event; return the text after the opening bracket."""
        buffer = b""
        for chunk in chunks:
            buffer += chunk
            start = buffer.removeprefix(BOM).lstrip()[:1]
            if start == b"[":
                return buffer.removeprefix(BOM).lstrip()[1:]
            if start not in (b"{", b""):
                break
            match = _ARRAY.search(buffer)
            if match:
                self.head = decode_leading_metadata(buffer[: match.start()])
                return buffer[match.end() :]
            if len(buffer) > _MAX_METADATA_BYTES:
                break
        raise NotATrace(self.damage or "it has no traceEvents")

    def _take(self, buffer: bytes) -> tuple[list[TraceEvent], bytes]:
        """Return all complete events, and the rest of the text."""
        ends: list[int] = []
        for back in (PIECE_BYTES >> 5, PIECE_BYTES):  # positions near the end are usually sufficient
            ends = [m.start() + 1 for m in _EVENT_SEPARATOR.finditer(buffer, max(0, len(buffer) - back))]
            if ends:
                break
        for end in reversed(ends[-3:]):
            try:
                return self.decode_list(b"".join((b"[", memoryview(buffer)[:end], b"]"))), buffer[
                    buffer.index(b",", end) + 1 :
                ]
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        if not ends and len(buffer) > LARGEST_EVENT and not _EVENT_SEPARATOR.search(buffer):
            raise NotATrace("it has no list of events")
        return self._one_by_one(buffer)

    def _one_by_one(self, buffer: bytes, last: bool = False) -> tuple[list[TraceEvent], bytes]:
        """Parse slowly and tolerantly: an event that cannot be parsed is counted and skipped."""
        text = buffer.decode("utf-8", "replace")
        ends = [m.start() + 1 for m in _EVENT_SEPARATOR_TEXT.finditer(text)]
        events: list[TraceEvent] = []
        at = 0
        while match := _NEXT.match(text, at):
            at = match.end() - 1
            k = bisect_right(ends, at)
            tried = [*ends[k : k + MAX_NESTED_ENDS], *([len(text)] if last and k + MAX_NESTED_ENDS > len(ends) else [])]
            value, length = None, 0
            for end in tried:  # an error costs as much as the text that was tried
                try:
                    value, length = _STDLIB.raw_decode(text[at:end])
                    break
                except (ValueError, RecursionError):
                    continue
            if length == 0:
                more_may_come = not last and len(text) - at < LARGEST_EVENT
                if k == len(ends) or (more_may_come and k + MAX_NESTED_ENDS > len(ends)):
                    break
                self.skipped += 1
                at = ends[k]
                continue
            event, whole = self.convert(value)
            self.skipped += not whole
            if event is not None:
                events.append(event)
            at += length
        return events, text[at:].encode()

    def _finish(self, buffer: bytes) -> Iterator[list[TraceEvent]]:
        """Parse the last events and the text after them."""
        for frame in ((b'{"traceEvents":[', b""), (b'{"traceEvents":[', b"}")):
            try:
                tail = self.decode_tail(frame[0] + buffer + frame[1])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            self._add_head(tail)
            yield tail.events
            return
        events, rest = self._one_by_one(buffer, last=True)
        if rest.lstrip()[:1] == b"]":
            behind = decode_trailing_metadata(rest)
            if behind is not None:
                self._add_head(behind)
            elif self.damage is None:
                self.damage = "the text after the events is not part of the same JSON document"
        elif self.damage is None:
            self.damage = "the JSON is truncated"
        yield events

    def _add_head(self, other: TraceMetadata) -> None:
        for name in TraceMetadata.__struct_fields__:
            if getattr(self.head, name) is None:
                setattr(self.head, name, getattr(other, name))


def read_metadata(path: Path, limit: int = 1 << 17) -> TraceMetadata:
    """Return the metadata at the start of a trace; errors give empty metadata."""
    text = b""
    try:
        for chunk in TraceStream(path)._chunks():
            text += chunk
            if len(text) >= limit:
                break
    except (NotATrace, OSError):
        return TraceMetadata()
    match = _ARRAY.search(text)
    return decode_leading_metadata(text[: match.start()]) if match else TraceMetadata()


def distributed_info(head: TraceMetadata) -> dict[str, Any]:
    """Return `distributedInfo` as a mapping; empty if it is something else."""
    return head.distributed if isinstance(head.distributed, dict) else {}


MAX_RANKS = 1 << 20  # a larger number of ranks is a damaged value


def parse_rank(value: Any) -> int | None:
    """Return a rank or a world size from a trace or a name, which may be text; None if it is invalid."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_RANKS else None
