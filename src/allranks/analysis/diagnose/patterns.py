"""Patterns and failure classes, and a search for the literal words (anchors) that select the patterns to try on a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

from msgspec import Struct

MIN_ANCHOR = 3  # letters

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
            needed only where `find_anchors` finds none in `regex`, or none that are rare.
        weight: how strongly a match indicates the class (`CERTAIN`, `LIKELY`, `POSSIBLE`, `WEAK`); 0: that of `weighted`.
        passing: a warning from which programs often recover; it is harmless if the job continues after it.
        unless: a line that also matches this does not count.
    """

    def __init__(self, regex: str, *anchors: str, weight: float = 0.0, passing: bool = False, unless: str = "") -> None:
        self.regex, self.weight, self.passing, self.unless = regex, weight, passing, unless
        self.anchors = tuple(a.removeprefix("*") for a in anchors) or find_anchors(regex)
        self.suffixes = frozenset(a.removeprefix("*") for a in anchors if a.startswith("*"))
        for anchor in self.anchors or [""]:
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


def weighted(weight: float, *found: str | Pattern) -> tuple[Pattern, ...]:
    """Return patterns of one weight, except for those that have their own."""
    patterns = tuple(Pattern(p) if isinstance(p, str) else p for p in found)
    for pattern in patterns:
        pattern.weight = pattern.weight or weight
    return patterns


certain, likely, possible, weak = (partial(weighted, weight) for weight in (CERTAIN, LIKELY, POSSIBLE, WEAK))

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


# A token of a regular expression: the start of a group, the end of one, a set of characters, a class, a digit, or a run of literal
# characters; and how often it may occur.
_TOKEN = re.compile(
    r"(\((?:\?(?:P<\w+>|<?[=!]|-?i:|:))?|[|)]|\[\^?\]?(?:\\.|[^\]\\])*\]|\\\w|[.^$\d]"
    r"|(?:(?:\\\W|[^\\()[\]|.^$\d*+?{])(?![*+?{]))+|\\?.)([*+?]\??|\{\d*,?\d*\}\??)?"
)
_NO_LETTER = frozenset([r"\b", r"\s", r"\W", r"\d", "^", "$", *"0123456789"])
_SET_WITHOUT_LETTERS = re.compile(r"\[(?!\^)(?:\\[dsW]|\\\W|[^\\A-Za-z])*\]")
# Words of so many lines that they select hardly any.
_FREQUENT = re.compile(
    r" ?(?:batch|data|device|epoch|error|exit|failed|gpu|host|job|loss|memory|model|nccl|node|process|ranks?|state|step|torch|worker) ?"
)
_INSIDE_WORD, _AFTER_GAP, _WORD_START = range(3)
_Literals = dict[str, int]  # a match contains one of them; how much a literal is worth


def find_anchors(regex: str) -> tuple[str, ...]:
    """Return literals that begin a word, one of which every match of `regex` contains; the rarest such set, or nothing.

    What follows a gap, as in `error.{0,40}timeout`, is taken to begin a word. Digits end a literal: the scanner looks for anchors in
    lines whose digits were removed.
    """
    return tuple(_of_alternatives(_TOKEN.findall(regex), 0, _WORD_START)[0])


def _of_alternatives(tokens: list[tuple[str, str]], i: int, start: int) -> tuple[_Literals, int, int]:
    """Return the literals of a group, whether a word may begin after it, and the index of its end."""
    branches, ends = [], []
    while True:
        literals, end, i = _of_sequence(tokens, i, start)
        branches.append(literals)
        ends.append(end)
        if i == len(tokens) or tokens[i][0] == ")":
            return {k: v for found in branches for k, v in found.items()} if all(branches) else {}, min(ends), i
        i += 1


def _of_sequence(tokens: list[tuple[str, str]], i: int, start: int) -> tuple[_Literals, int, int]:
    """Return the same for tokens up to the next `|` or the end of the group."""
    best: _Literals = {}
    run, run_start = "", start
    while i < len(tokens) and tokens[i][0] not in ("|", ")"):
        part, repeat = tokens[i]
        i += 1
        literals: _Literals = {}
        if part[0] == "(":
            literals, end, i = _of_alternatives(tokens, i, start)
            repeat = tokens[i][1]
            i += 1
            if part[-1] in "=!":  # it looks ahead or behind
                literals, end, repeat = {}, start, ""
        elif part in _NO_LETTER or _SET_WITHOUT_LETTERS.fullmatch(part):
            end = _WORD_START
        elif part[0] in ".[" or (part[0] == "\\" and part[1].isalnum()):
            end = _AFTER_GAP if part == "." else _INSIDE_WORD
        else:
            text = re.sub(r"\\(.)", r"\1", part).lower() if "\\" in part else part.lower()
            end = _INSIDE_WORD if text[-1].isalpha() else _WORD_START
            if not repeat or repeat[0] == "+":
                run_start = run_start if run else start
                run += text
            if not repeat:
                start = end
                continue
        if repeat.startswith(("*", "?", "{0", "{,")):
            literals, end = {}, end if part == "." else min(start, end)
        best = _rarer(_rarer(best, _literal(run, run_start)), literals)
        run, start = "", end
    return _rarer(best, _literal(run, run_start)), start, i


def _literal(run: str, start: int) -> _Literals:
    """Return a run of literal characters, from the start of a word on, with its worth."""
    if len(run) < MIN_ANCHOR:
        return {}
    if start == _INSIDE_WORD:
        run, start = run.lstrip("abcdefghijklmnopqrstuvwxyz"), _WORD_START
    letters = sum(map(str.isalpha, run))
    return {run: start * (1 if _FREQUENT.fullmatch(run) else letters)} if letters >= MIN_ANCHOR else {}


def _rarer(one: _Literals, other: _Literals) -> _Literals:
    if not one or not other:
        return one or other
    return max(one, other, key=lambda literals: (min(literals.values()), -len(literals)))


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
