"""Places in JSON text: where an event begins and ends, and what stands before and behind the list of events."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from allranks.trace.event_types import HEAD, Head

_NEXT = re.compile(r"[^{\]]*\{")
_STDLIB = json.JSONDecoder()
BOM = b"\xef\xbb\xbf"


def head_of(text: bytes) -> Head:
    """The head from the text before the events: an object that was not closed."""
    body = text.removeprefix(BOM).rstrip().removesuffix(b",")
    try:
        return HEAD.decode(body + (b"}" if body.rstrip() != b"" else b"{}"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Head()


def head_behind(rest: bytes) -> Head | None:
    """The head from the text that closes the events and the document; None if it does not: it was cut, or a second document follows."""
    body = rest.lstrip()[1:].strip().removeprefix(b",").removesuffix(b"}").strip().removesuffix(b",")
    try:
        return HEAD.decode(b"{" + body + b"}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def after_comma(buffer: bytes, end: int) -> bytes:
    """What stands behind the comma that follows the event that ends at `end`."""
    return buffer[buffer.index(b",", end) + 1 :]


def first_whole(text: str, at: int, ends: list[int]) -> tuple[Any, int]:
    """The JSON value that begins at a place, tried up to each of some ends (an error costs as much as the text tried); 0: none."""
    for end in ends:
        try:
            return _STDLIB.raw_decode(text[at:end])
        except (ValueError, RecursionError):
            continue
    return None, 0


def next_brace(text: str, at: int) -> int:
    """Where the next event begins; -1 where the list or the text ends."""
    found = _NEXT.match(text, at)
    return found.end() - 1 if found else -1
