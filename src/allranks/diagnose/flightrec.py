"""Dumps of torch's flight recorder, read without unpickling: the opcodes are interpreted here, and build plain values only."""

from __future__ import annotations

import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from allranks.diagnose.signals import Call, Flight

MAX_BYTES = 256 << 20
MAX_CALLS = 4096
_MARK = object()
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")
HEAD = 1 << 16  # bytes that tell whether a file is such a dump


def is_flight_record(head: bytes) -> bool:
    """Whether a file begins like such a dump, pickled or as JSON."""
    if head.startswith(b"\x80") and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return any(key in head for key in (b"pg_config", b"pg_status", b"collective_seq_id", b"nccl_comm_state"))
    return head.lstrip().startswith(b"{") and (b'"collective_seq_id"' in head or b'"pg_config"' in head)


def read_flight_record(path: Path) -> Flight:
    """A dump as records.

    Raises:
        ValueError: it is cut, too large or of another form; the message says which.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(
            f"is a flight-recorder dump of {size >> 20} MiB, more than the {MAX_BYTES >> 20} MiB that are read"
        )
    data = path.read_bytes()
    try:
        value = plain_value(data) if data.startswith(b"\x80") else msgspec.json.decode(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, msgspec.DecodeError) as error:
        raise ValueError(f"looks like a flight-recorder dump and is cut or damaged ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("looks like a flight-recorder dump and holds something else")
    entries = value.get("entries")
    calls = [call for e in (entries if isinstance(entries, list) else []) if (call := _call(e)) is not None]
    rank = value.get("rank")
    named = _RANK.search(path.name)
    return Flight(
        rank=rank if isinstance(rank, int) else int(named.group(1)) if named else None, calls=calls[-MAX_CALLS:]
    )


def plain_value(data: bytes) -> Any:
    """The value of a pickle made of numbers, texts, lists, tuples and dictionaries; nothing named in it is ever imported."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return stack.pop()
        if opcode.name in _CONSTANTS:
            stack.append(_CONSTANTS[opcode.name])
        elif opcode.name in _LITERALS:
            stack.append(argument)
        elif opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument or 0)] = stack[-1]
        elif opcode.name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif opcode.name in _STEPS:
            _STEPS[opcode.name](stack)
        elif opcode.name not in ("PROTO", "FRAME"):
            raise ValueError(f"it holds a {opcode.name}")
    raise ValueError("it has no end")


def _since_mark(stack: list[Any]) -> list[Any]:
    at = len(stack) - 1 - next(i for i, v in enumerate(reversed(stack)) if v is _MARK)
    values = stack[at + 1 :]
    del stack[at:]
    return values


def _set_items(stack: list[Any]) -> None:
    values = _since_mark(stack)
    stack[-1].update(zip(values[::2], values[1::2], strict=True))


def _set_item(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    stack[-1][key] = value


def _append(stack: list[Any]) -> None:
    value = stack.pop()
    stack[-1].append(value)


def _appends(stack: list[Any]) -> None:
    values = _since_mark(stack)
    stack[-1].extend(values)


def _tuple(count: int) -> Callable[[list[Any]], None]:
    def make(stack: list[Any]) -> None:
        values = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        stack.append(values)

    return make


def _reduce(stack: list[Any]) -> None:
    """torch marks lists and dictionaries with their type through a call: the value is its first argument."""
    arguments, _ = stack.pop(), stack.pop()
    stack.append(arguments[0] if arguments else None)


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_LITERALS = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "INT",
        "LONG",
        "BINFLOAT",
        "FLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "UNICODE",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "GLOBAL",
    ]
)
_STEPS: dict[str, Callable[[list[Any]], None]] = {
    "EMPTY_DICT": lambda stack: stack.append({}),
    "EMPTY_LIST": lambda stack: stack.append([]),
    "EMPTY_TUPLE": lambda stack: stack.append(()),
    "LIST": lambda stack: stack.append(list(_since_mark(stack))),
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "APPEND": _append,
    "APPENDS": _appends,
    "POP": lambda stack: stack.pop() and None,
    "STACK_GLOBAL": lambda stack: stack.append((stack.pop(), stack.pop())),
    "REDUCE": _reduce,
}


def _call(entry: object) -> Call | None:
    """One recorded collective."""
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    seq = entry.get("collective_seq_id", entry.get("seq_id"))
    if not isinstance(seq, int):
        return None
    group = entry.get("process_group")
    name = (
        str(group[0])
        if isinstance(group, list | tuple) and group
        else str(entry.get("pg_name", entry.get("pg_id", "")))
    )
    frames = entry.get("frames")
    return Call(
        group=name[:100],
        seq=seq,
        op=str(entry.get("profiling_name", "")).rpartition(":")[2][:100],
        sizes=str([list(s) if isinstance(s, list | tuple) else s for s in entry.get("input_sizes") or []])[:200],
        # gloo never notes a start or an end; a call that has returned is marked as retired
        state="completed" if entry.get("retired") else str(entry.get("state", ""))[:20],
        frames=[text for f in (frames if isinstance(frames, list | tuple) else [])[:24] if (text := _frame(f))],
    )


def _frame(frame: object) -> str:
    if not isinstance(frame, dict):
        return ""
    return f"{frame.get('filename', '')}:{frame.get('line', '')}:{frame.get('name', '')}"[:300]
