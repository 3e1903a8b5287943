"""The form of a catalogue entry, and what the scanner must know of its patterns."""

from __future__ import annotations

import re
from functools import cached_property

from msgspec import Struct

MIN_ANCHOR = 3
_RUN = re.compile(r"[a-z _:/<>'\"=@,;!%&#~-]+")

# How much a message says about its class. Between two messages of unlike strength the stronger wins, whatever the time.
CERTAIN = 0.95  # names the cause itself
LIKELY = 0.8  # this cause, save for rare exceptions
POSSIBLE = 0.6  # one of several causes; others come with it
WEAK = 0.35  # counts only beside something stronger


class Pattern:
    """A regular expression (case ignored) over one line, and literals of which each match contains one.

    Args:
        regex: searched in the line without its prefix of rank, task or time.
        anchors: lower-case, without digits, beginning where a word begins (a star before one says that it may be the
            end of a longer word); left out where the longest literal at the top level of `regex` will do.
        weight: how much a match says (`SAYS`, `SHOWS`, `FITS`, `HINTS`).
        passing: a warning from which programs often recover; where the job goes on after it, it is harmless.
        says: what this message tells, for evidence of a cause that it only fits.
    """

    def __init__(
        self, regex: str, *anchors: str, weight: float = CERTAIN, passing: bool = False, unless: str = ""
    ) -> None:
        self.regex, self.weight, self.passing, self.unless = regex, weight, passing, unless
        self.anchors = tuple(a.removeprefix("*") for a in anchors) or (longest_literal(regex),)
        self.suffixes = frozenset(a.removeprefix("*") for a in anchors if a.startswith("*"))
        for anchor in self.anchors:
            if len(anchor) < MIN_ANCHOR or anchor != anchor.lower() or any(c.isdigit() for c in anchor):
                raise ValueError(
                    f"pattern {regex!r}: its anchor {anchor!r} must be {MIN_ANCHOR} or more lower-case characters without digits"
                )

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """Compiled when a line first has one of the anchors: most patterns never are."""
        return re.compile(self.regex, re.IGNORECASE)

    @cached_property
    def _excluded(self) -> re.Pattern[str]:
        return re.compile(self.unless, re.IGNORECASE)

    def search(self, text: str) -> re.Match[str] | None:
        """A match in a line, unless the line also says that it is something else."""
        match = self.compiled.search(text)
        if match is not None and self.unless and self._excluded.search(text):
            return None
        return match


class FailureClass(Struct, frozen=True, kw_only=True):
    """A class of failure: how it is recognised, what it is, what cures it, and how to be sure."""

    id: str
    title: str
    cause: str
    fix: str
    next_test: str
    reference: str
    patterns: tuple[Pattern, ...]
    example: str
    near_miss: str
    echo: bool = False  # says only that something else failed


def longest_literal(regex: str) -> str:
    """The longest run of plain characters that every match of `regex` holds; "" where alternatives at the top forbid one.

    Digits end a run: the scanner looks for anchors in lines whose digits were removed.
    """
    runs, run, i = [], "", 0
    while i < len(regex):
        char = regex[i]
        if char == "|":
            return ""
        if char in "([":
            runs, run, i = [*runs, run], "", _end_of_group(regex, i)
        elif char == "\\" and i + 1 < len(regex):
            escaped = regex[i + 1]
            if escaped.isalnum():
                runs, run = [*runs, run], ""
            else:
                run += escaped
            i += 2
        elif char in "*?{":
            runs, run = [*runs, run[:-1]], ""
            i = regex.index("}", i) + 1 if char == "{" else i + 1
        elif char in ".^$+" or char.isdigit():
            runs, run, i = [*runs, run], "", i + 1
        else:
            run, i = run + char, i + 1
    return max([*runs, run], key=len).lower()


def _end_of_group(regex: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    close, depth, i = {"(": ")", "[": "]"}[regex[start]], 0, start
    while i < len(regex):
        if regex[i] == "\\":
            i += 1
        elif regex[i] == regex[start] and regex[start] == "(":
            depth += 1
        elif regex[i] == close and (regex[start] == "(" or i > start + 1):
            depth -= regex[start] == "("
            if depth <= 0:
                return i + 1
        i += 1
    return len(regex)
