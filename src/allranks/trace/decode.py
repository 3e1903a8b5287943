"""Trace files to typed events, a piece at a time: memory does not grow with the file, and what lies before a cut is kept.

A piece ends where one event ends and the next begins. Such a place is guessed from the text and proven by decoding: a prefix that is a whole JSON
array cannot end inside a string or a nested object.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Raw, Struct, field

READ_BYTES = 1 << 16
PIECE_BYTES = 1 << 17  # what stays in the processor's cache is decoded faster than what does not
CHUNK_BYTES = 1 << 17
LARGEST_EVENT = 1 << 23
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BETWEEN_TEXT = re.compile(r"\}\s*,\s*\{")
_NEXT = re.compile(r"[^{\]]*\{")
_STDLIB = json.JSONDecoder()
NESTED = 8  # ends of objects within an event that are tried before it is given up
_TS = re.compile(rb'"ts"\s*:\s*"?(\d{1,18}(?:\.\d*)?)')
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_HEAD = 1 << 26
_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


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


_EVENTS = msgspec.json.Decoder(list[Event], strict=False)
_EVENT = msgspec.json.Decoder(Event, strict=False)
_HEAD = msgspec.json.Decoder(Head)
_TAIL = msgspec.json.Decoder(_Tail, strict=False)


class NotATrace(Exception):
    """The file is no trace; the text says why."""


class TraceStream:
    """Reads one file once. Iterate `pieces()`; afterwards `head`, `damage` and `skipped` say what else was found.

    A subclass that wants events as another type says how they are decoded."""

    decode_list: Any = staticmethod(_EVENTS.decode)
    decode_tail: Any = staticmethod(_TAIL.decode)

    @staticmethod
    def convert(value: Any) -> tuple[Any, bool]:
        """An event of the standard library's JSON, and whether all of it was understood; None if it is none."""
        return _event_of(value)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head = Head()
        self.damage: str | None = None  # why the file ended early
        self.skipped = 0  # events that could not be understood
        self.raw_bytes = 0

    def pieces(self) -> Iterator[list[Event]]:
        """Events in the file's order, some thousand at a time. Raises `NotATrace`, `OSError`."""
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
        with self.path.open("rb") as file:
            first = file.read(READ_BYTES)
            if not first:
                raise NotATrace("the file is empty")
            reader = _unzip(self, file, first) if first[:2] == _GZIP else _plain(file, first)
            for chunk in reader:
                self.raw_bytes += len(chunk)
                yield chunk

    def _skip_head(self, chunks: Iterator[bytes]) -> bytes:
        """Reads up to the first event; returns the text behind the opening bracket."""
        buffer = b""
        for chunk in chunks:
            buffer += chunk
            start = buffer.removeprefix(_BOM).lstrip()[:1]
            if start == b"[":
                return buffer.removeprefix(_BOM).lstrip()[1:]
            if start not in (b"{", b""):
                break
            found = _ARRAY.search(buffer)
            if found:
                self.head = _head_of(buffer[: found.start()])
                return buffer[found.end() :]
            if len(buffer) > _MAX_HEAD:
                break
        raise NotATrace(self.damage or "it has no traceEvents")

    def _take(self, buffer: bytes) -> tuple[list[Event], bytes]:
        """As many whole events as there are; the rest of the text comes back."""
        ends: list[int] = []
        for back in (PIECE_BYTES >> 5, PIECE_BYTES):  # some near the end will do
            ends = [m.start() + 1 for m in _BETWEEN.finditer(buffer, max(0, len(buffer) - back))]
            if ends:
                break
        for end in reversed(ends[-3:]):
            try:
                return self.decode_list(b"[%b]" % buffer[:end]), _after_comma(buffer, end)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        if not ends and len(buffer) > LARGEST_EVENT and not _BETWEEN.search(buffer):
            raise NotATrace("it holds no list of events")
        return self._one_by_one(buffer)

    def _one_by_one(self, buffer: bytes, last: bool = False) -> tuple[list[Event], bytes]:
        """Slow and forgiving: an event that cannot be understood is counted and left out."""
        text = buffer.decode("utf-8", "replace")
        ends = [m.start() + 1 for m in _BETWEEN_TEXT.finditer(text)]
        events: list[Event] = []
        at = 0
        while (begin := _next_brace(text, at)) >= 0:
            at = begin
            k = bisect_right(ends, at)
            tried = [*ends[k : k + NESTED], *([len(text)] if last and k + NESTED > len(ends) else [])]
            value, length = _first_whole(text, at, tried)
            if length == 0:
                more_may_come = not last and len(text) - at < LARGEST_EVENT
                if k == len(ends) or (more_may_come and k + NESTED > len(ends)):
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

    def _finish(self, buffer: bytes) -> Iterator[list[Event]]:
        """The last events and what stands behind them."""
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
            behind = _head_behind(rest)
            if behind is not None:
                self._add_head(behind)
            elif self.damage is None:
                self.damage = "what stands behind the events is no part of one JSON document"
        elif self.damage is None:
            self.damage = "the JSON breaks off"
        yield events

    def _add_head(self, other: Head) -> None:
        for name in Head.__struct_fields__:
            if getattr(self.head, name) is None:
                setattr(self.head, name, getattr(other, name))


def read_head(path: Path, limit: int = 1 << 17) -> tuple[Head, float | None]:
    """The head of a trace and the `ts` of its first event with a time, from the file's beginning alone. Errors give an empty head."""
    stream = TraceStream(path)
    text = b""
    try:
        for chunk in stream._chunks():
            text += chunk
            if len(text) >= limit:
                break
    except (NotATrace, OSError):
        return Head(), None
    found = _ARRAY.search(text)
    if not found:
        return Head(), None
    times = (float(t.group(1)) for t in _TS.finditer(text, found.end()))  # names of processes may stand at 0
    return _head_of(text[: found.start()]), next((t for t in times if t > 0), None)


def distributed_info(head: Head) -> dict[str, Any]:
    """`distributedInfo` as a mapping; some tools write it as the text of a Python dict."""
    value = head.distributed
    if isinstance(value, str) and len(value) < 1 << 20:
        import ast

        try:
            value = ast.literal_eval(value)  # literals only, nothing is run
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = None
    return value if isinstance(value, dict) else {}


def _plain(file: Any, first: bytes) -> Iterator[bytes]:
    yield first
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _unzip(stream: TraceStream, file: Any, chunk: bytes) -> Iterator[bytes]:
    """Decompresses; what came before damage is passed on and the damage noted."""
    unzip = zlib.decompressobj(wbits=31)
    while chunk:
        before = unzip.copy()
        try:
            data = unzip.decompress(chunk, CHUNK_BYTES)
        except zlib.error as error:
            stream.damage = f"the gzip data is damaged ({str(error).split(':')[-1].strip()})"
            yield from _until_damage(before, chunk)
            return
        yield data
        if unzip.unconsumed_tail:
            chunk = unzip.unconsumed_tail
        elif unzip.eof and unzip.unused_data[:2] == _GZIP:  # several gzip members in a row are one file
            chunk, unzip = unzip.unused_data, zlib.decompressobj(wbits=31)
        else:
            chunk = b"" if unzip.eof else file.read(READ_BYTES)
    if not unzip.eof:
        stream.damage = "the gzip data breaks off"


def _until_damage(unzip: Any, chunk: bytes) -> Iterator[bytes]:
    """What a chunk with damage in it holds before that."""
    try:
        for at in range(0, len(chunk), 64):
            yield unzip.decompress(chunk[at : at + 64])
    except zlib.error:
        return


def _head_of(text: bytes) -> Head:
    """The head from the text before the events: an object that was not closed."""
    body = text.removeprefix(_BOM).rstrip().removesuffix(b",")
    try:
        return _HEAD.decode(body + (b"}" if body.rstrip() != b"" else b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Head()


def _head_behind(rest: bytes) -> Head | None:
    """The head from the text that closes the events and the document; None if it does not: it was cut, or a second document follows."""
    body = rest.lstrip()[1:].strip().removeprefix(b",").removesuffix(b"}").strip().removesuffix(b",")
    try:
        return _HEAD.decode(b"{" + body + b"}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _after_comma(buffer: bytes, end: int) -> bytes:
    return buffer[buffer.index(b",", end) + 1 :]


def _first_whole(text: str, at: int, ends: list[int]) -> tuple[Any, int]:
    """The JSON value that begins at a place, tried up to each of some ends (an error costs as much as the text tried); 0: none."""
    for end in ends:
        try:
            return _STDLIB.raw_decode(text[at:end])
        except (ValueError, RecursionError):
            continue
    return None, 0


def _next_brace(text: str, at: int) -> int:
    """Where the next event begins; -1 where the list or the text ends."""
    found = _NEXT.match(text, at)
    return found.end() - 1 if found else -1


def _event_of(value: Any) -> tuple[Event | None, bool]:
    """The event, and whether all of it was understood: one whose arguments are damaged still tells its name and time."""
    if not isinstance(value, dict) or "ph" not in value:
        return None, False
    for drop in ((), ("args",)):
        try:
            text = msgspec.json.encode({k: v for k, v in value.items() if k not in drop})
            return _EVENT.decode(text), not drop
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
            continue
    return None, False
