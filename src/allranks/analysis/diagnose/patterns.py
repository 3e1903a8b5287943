"""Patterns and failure classes, and a search for the literal words (anchors) that select the patterns to try on a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
        """Return whether a line of this emitter may show the class; what allranks itself wrote shows it only if the class says so."""
        return emitter in self.emitters if self.emitters else emitter != "allranks"


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


_LETTERS = bytes(
    c if 97 <= c <= 122 else c + 32 if 65 <= c <= 90 else 48 if 48 <= c <= 57 else 32 for c in range(256)
)  # small letters, digits as 0, anything else blank
FAST_BYTES = 1 << 17  # texts of this size are worth the compilation of faster patterns
_DIGIT_LITERAL = re.compile(r"(?<![\\{,\d])\d(?![\d,]*\})")


class ScanRule:
    """A pattern and its use: ``kind`` is class, fact, sign, benign or progress; ``owner`` its name."""

    __slots__ = ("anchors", "exact", "index", "kind", "owner", "pattern")

    def __init__(self, index: int, kind: str, owner: str, pattern: Pattern) -> None:
        self.index, self.kind, self.owner, self.pattern = index, kind, owner, pattern
        self.anchors = tuple(a.encode() for a in pattern.anchors)
        # a pattern with digits must be tried on each line: cached forms of lines have no digits
        texts = (pattern.regex, pattern.unless)
        # (the progress pattern must not have any: its lines are only counted)
        self.exact = not any(_DIGIT_LITERAL.search(t) or "[1-9]" in t or "[0-6]" in t for t in texts)


class LiteralPrefilter:
    """Find the rules whose anchors a line contains.

    Text and anchors are normalised without changing positions: letters, 0 for digits, blanks. One regular expression
    searches anchors at the start of words; a second one searches the few that may end a longer word, in the reversed text.
    """

    def __init__(self, rules: Sequence[ScanRule]) -> None:
        self.rules = list(rules)
        self._heads: dict[bytes, set[int]] = {}
        self._tails: dict[bytes, set[int]] = {}  # by the reversed anchor
        for rule in self.rules:
            for anchor in rule.pattern.anchors:
                words = _words(anchor)
                self._heads.setdefault(words, set()).add(rule.index)
                if anchor in rule.pattern.suffixes:
                    self._tails.setdefault(words[::-1], set()).add(rule.index)
        # an anchor that is a prefix of another one represents both: the search ends at the shorter
        # (in a lookahead, so that one inside another is found too)
        self._head = re.compile(b"[ 0](?=(" + _trie(self._heads) + b"))")
        self._tail = re.compile(b" (?=(" + _trie(self._tails) + b"))")
        for table in (self._heads, self._tails):
            for longer in list(table):
                for shorter in (longer[:end] for end in range(1, len(longer))):
                    if shorter in table:
                        table[shorter] |= table[longer]

    def candidates(self, line: bytes) -> list[ScanRule]:
        """Return the rules whose anchors a line contains."""
        words = _normalized(line)
        found = set[int]()
        for anchor in self._head.findall(words):
            found |= self._heads[anchor]
        for anchor in self._tail.findall(words[::-1]):
            found |= self._tails[anchor]
        if not found:
            return []
        low = line.lower()
        rules = (self.rules[i] for i in sorted(found))
        return [rule for rule in rules if any(anchor in low for anchor in rule.anchors)]

    def telling(self, text: bytes) -> set[int]:
        """Return the indices of the lines of a text that may contain an anchor. One search for all lines is much faster than one each."""
        words = _normalized(text)
        heads, tail = self._fast if len(text) >= FAST_BYTES else ((self._head,), self._tail)
        places = [found.start() for head in heads for found in head.finditer(words)]
        places += [len(text) - found.start() - 1 for found in tail.finditer(words[::-1])]
        telling, line, counted = set[int](), 0, 0
        for place in sorted(places):
            line += text.count(b"\n", counted, place)
            telling.add(line)
            counted = place
        return telling

    @cached_property
    def _fast(self) -> tuple[tuple[re.Pattern[bytes], ...], re.Pattern[bytes]]:
        """Patterns without groups, for anchors after a blank and after a digit: `re` finds one literal much faster than one of two."""
        heads = _trie(self._heads)
        tail = re.compile(b" (?=" + _trie(self._tails) + b")")
        return (re.compile(b" (?=" + heads + b")"), re.compile(b"0(?=" + heads + b")")), tail


def _normalized(text: bytes) -> bytes:
    return b" " + text.translate(_LETTERS) + b" "


def _words(anchor: str) -> bytes:
    """Return an anchor in the form of normalised text, from its first letter on."""
    words = anchor.encode().translate(_LETTERS).lstrip()
    if not words.strip():
        raise ValueError(f"anchor {anchor!r} has no letter")
    return words


def _trie(anchors: Iterable[bytes]) -> bytes:
    """Return a regular expression for the shortest of the anchors that start at a position."""
    tree: dict[int, dict] = {}
    for anchor in sorted(anchors):
        node = tree
        for i, char in enumerate(anchor):
            node = node.setdefault(char, {})
            if node.get(0) is not None:
                break  # a shorter one ends here
            if i == len(anchor) - 1:
                node.clear()
                node[0] = {}
    return _branches(tree)


def _branches(tree: dict[int, dict]) -> bytes:
    parts = [bytes([char]) + (b"" if 0 in below else _branches(below)) for char, below in tree.items()]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
