"""Text whose every character knows where in the file it stands, so that what a variable or a quoted script holds is found again."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

# What an outer shell has put in place before an inner one reads it: OPEN name CLOSE. Private-use characters, taken out of files.
OPEN, CLOSE = "\ue000", "\ue001"
_FROZEN = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


class Source:
    """``text[i]`` stands at offset ``at[i]`` of the file."""

    __slots__ = ("at", "text")

    def __init__(self, text: str, at: Sequence[int] | None = None) -> None:
        self.text = text
        self.at = range(len(text)) if at is None else at

    def where(self, index: int) -> int:
        """Offset in the file; behind the last character for an index at the end."""
        if index < len(self.at):
            return self.at[index]
        return self.at[-1] + 1 if len(self.at) else 0

    def part(self, start: int, end: int) -> Source:
        return Source(self.text[start:end], self.at[start:end])


def frozen(content: str, offset: int) -> Source:
    """A variable or substitution that is already decided, but not known here."""
    inner = content.replace(OPEN, "").replace(CLOSE, "")
    text = f"{OPEN}{inner}{CLOSE}"
    return Source(text, [offset] * len(text))


def joined(parts: Sequence[Source]) -> Source:
    if len(parts) == 1:
        return parts[0]
    at: list[int] = []
    for part in parts:
        at.extend(part.at)
    return Source("".join(part.text for part in parts), at)


def shown(text: str) -> str:
    """As a person writes it: frozen variables as ``$NAME`` or ``${NAME:-x}`` again."""
    return _FROZEN.sub(_as_written, text) if OPEN in text else text


def _as_written(found: re.Match[str]) -> str:
    simple = found[1].isidentifier() or found[1].startswith("(") or len(found[1]) == 1
    return f"${found[1]}" if simple else f"${{{found[1]}}}"


class Lines:
    """Offsets to lines and columns, both counted from 1."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def place(self, offset: int) -> tuple[int, int]:
        number = bisect_right(self._starts, min(max(offset, 0), len(self.text)))
        return number, offset - self._starts[number - 1] + 1

    def line(self, number: int) -> str:
        """Without its line break."""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r")
