"""Trace files to typed events, a piece at a time: memory does not grow with the file, and what lies before a cut is kept.

A piece ends where one event ends and the next begins. Such a place is guessed from the text and proven by decoding: a prefix that is a whole JSON
array cannot end inside a string or a nested object.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from allranks.trace.event_types import EVENTS, TAIL, Event, Head, event_of
from allranks.trace.json_places import BOM, after_comma, first_whole, head_behind, head_of, next_brace
from allranks.trace.unzip import GZIP, READ_BYTES, plain, unzip

PIECE_BYTES = 1 << 17  # what stays in the processor's cache is decoded faster than what does not
LARGEST_EVENT = 1 << 23
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BETWEEN_TEXT = re.compile(r"\}\s*,\s*\{")
NESTED = 8  # ends of objects within an event that are tried before it is given up
_TS = re.compile(rb'"ts"\s*:\s*"?(\d{1,18}(?:\.\d*)?)')
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_HEAD = 1 << 26


class NotATrace(Exception):
    """The file is no trace; the text says why."""


class TraceStream:
    """Reads one file once. Iterate `pieces()`; afterwards `head`, `damage` and `skipped` say what else was found.

    A subclass that wants events as another type says how they are decoded."""

    decode_list: Any = staticmethod(EVENTS.decode)
    decode_tail: Any = staticmethod(TAIL.decode)

    @staticmethod
    def convert(value: Any) -> tuple[Any, bool]:
        """An event of the standard library's JSON, and whether all of it was understood; None if it is none."""
        return event_of(value)

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
            reader = unzip(file, first, self._damaged) if first[:2] == GZIP else plain(file, first)
            for chunk in reader:
                self.raw_bytes += len(chunk)
                yield chunk

    def _damaged(self, why: str) -> None:
        self.damage = why

    def _skip_head(self, chunks: Iterator[bytes]) -> bytes:
        """Reads up to the first event; returns the text behind the opening bracket."""
        buffer = b""
        for chunk in chunks:
            buffer += chunk
            start = buffer.removeprefix(BOM).lstrip()[:1]
            if start == b"[":
                return buffer.removeprefix(BOM).lstrip()[1:]
            if start not in (b"{", b""):
                break
            found = _ARRAY.search(buffer)
            if found:
                self.head = head_of(buffer[: found.start()])
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
                return self.decode_list(b"[%b]" % buffer[:end]), after_comma(buffer, end)
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
        while (begin := next_brace(text, at)) >= 0:
            at = begin
            k = bisect_right(ends, at)
            tried = [*ends[k : k + NESTED], *([len(text)] if last and k + NESTED > len(ends) else [])]
            value, length = first_whole(text, at, tried)
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
            behind = head_behind(rest)
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
    return head_of(text[: found.start()]), next((t for t in times if t > 0), None)


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
