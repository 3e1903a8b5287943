"""Failure classes and their patterns."""

from __future__ import annotations

import re
from functools import cached_property

from msgspec import Struct

MIN_ANCHOR = 3

# How strongly a message indicates its class. A stronger message wins over an earlier one.
CERTAIN = 0.95  # states the cause itself
LIKELY = 0.8  # this cause, with rare exceptions
POSSIBLE = 0.6  # one of several possible causes
WEAK = 0.35  # only counts together with a stronger message

# an event: not the name of a setting with its value
TIMED_OUT = r"(?:timed ?out|time ?out(?!\w|['\"]?\s{0,2}(?:=|:\s{0,2}['\"]?(?:\d|none|null|datetime)|\(\w+\)=)))"


class Pattern:
    """A regular expression (case-insensitive) for one line, and literals (anchors); every match contains at least one of them.

    Args:
        regex: searched in the line without its prefix of rank, task or time.
        anchors: lower case, without digits, starting at the start of a word (a leading star allows the end of a longer word);
            not needed if the longest literal at the top level of `regex` is sufficient.
        weight: how strongly a match indicates the class (`CERTAIN`, `LIKELY`, `POSSIBLE`, `WEAK`).
        passing: a warning from which programs often recover; it is harmless if the job continues after it.
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
        """Compile when a line first contains one of the anchors: most patterns are never needed.

        A match that begins with a letter begins a word: `ib` is not found in `attributes`.
        """
        return re.compile(rf"(?:(?<![A-Za-z])|(?![A-Za-z]))(?:{self.regex})", re.IGNORECASE)

    @cached_property
    def _excluded(self) -> re.Pattern[str]:
        return re.compile(self.unless, re.IGNORECASE)

    def search(self, text: str) -> re.Match[str] | None:
        """Return a match in a line, unless the line also matches `unless`."""
        match = self.compiled.search(text)
        if match is not None and self.unless and self._excluded.search(text):
            return None
        return match


# Emitters (`lines.EMITTERS`) of groups of classes. "program" is everything that is not recognised.
PROGRAM = frozenset({"python", "torch", "launcher", "ray", "program", "nccl", "hccl", "mpi"})
NETWORK = PROGRAM | {"network_library", "kernel"}
MACHINE = frozenset(
    {"kernel", "nccl", "hccl", "torch", "python", "ray", "launcher", "program", "slurm_daemon", "slurm_client"}
)
SCHEDULER = frozenset({"slurm_client", "slurm_daemon", "shell", "program"})


class FailureClass(Struct, frozen=True, kw_only=True):
    """A class of failure: how it is recognised, its cause, its fix, and how to confirm it."""

    id: str
    title: str
    cause: str
    fix: str
    next_test: str
    reference: str
    patterns: tuple[Pattern, ...]
    example: str
    near_miss: str
    echo: bool = False  # only reports that something else failed
    emitters: frozenset[str] = frozenset()  # whose lines may show it; empty: any
    ends_job: bool = True  # a job that goes on after it has survived it
    measured: bool = (
        False  # a value that the program printed: it counts at any log level, and as long as it is repeated
    )

    def accepts(self, emitter: str) -> bool:
        """Return whether a line of this emitter may show the class."""
        return not self.emitters or emitter in self.emitters


def longest_literal(regex: str) -> str:
    """Return the longest run of plain characters in every match of `regex`; "" if alternatives at the top level prevent one.

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
    """Return the index after the bracket that closes the one at `start`."""
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
