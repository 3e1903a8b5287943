"""Patterns and failure classes, and a search for literal words (anchors) that selects the patterns to try on a line."""

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

NCCL_ERROR = re.compile(r"\bNCCL error\b|\bnccl[A-Z]\w*Error\b")  # of torch or NCCL, whatever the reason

_LETTERS = bytes(c if 97 <= c <= 122 else c + 32 if 65 <= c <= 90 else 48 if 48 <= c <= 57 else 32 for c in range(256))


def normalize(text: str) -> str:
    """Return text with small letters, digits as 0, and a blank for each other byte."""
    return text.encode().translate(_LETTERS).decode("ascii")


class Pattern:
    """A regular expression (case-insensitive) for one line, and literals (anchors); every match contains at least one
    of them.

    Args:
        regex: searched in the line without its prefix of rank, task or time.
        anchors: separated by ``|``, without digits, starting at the start of a word (a leading star allows the end of a
            longer word); needed only where `find_anchors` finds none in `regex`, or none that are rare.
        weight: how strongly a match indicates the class (`CERTAIN`, `LIKELY`, `POSSIBLE`, `WEAK`); 0: that of
        `weighted`.
        passing: a warning from which programs often recover; it is harmless if the job continues after it.
        unless: a line that also matches this does not count.
    """

    def __init__(
        self, regex: str, anchors: str = "", *, weight: float = 0.0, passing: bool = False, unless: str = ""
    ) -> None:
        self.regex, self.weight, self.passing, self.unless = regex, weight, passing, unless
        words = anchors.split("|") if anchors else []
        self.suffixes = frozenset(normalize(a[1:]) for a in words if a.startswith("*"))
        self.anchors = tuple(normalize(a.removeprefix("*")) for a in words) or find_anchors(regex)
        if not self.anchors or any(len(a) < MIN_ANCHOR or "0" in a for a in self.anchors):
            raise ValueError(
                f"pattern {regex!r}: its anchors {self.anchors} must have {MIN_ANCHOR} or more letters and no digits"
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


def weighted(weight: float, *given: str | Pattern) -> tuple[Pattern, ...]:
    """Return patterns of one weight, except for those that have their own."""
    patterns = tuple(Pattern(p) if isinstance(p, str) else p for p in given)
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
    echo: bool = False  # only reports that something else failed
    emitters: frozenset[str] = frozenset()  # whose lines may show it; empty: any
    ends_job: bool = True  # a job that goes on after it has survived it
    # a value that the program printed: it counts at any log level, and as long as it is repeated
    measured: bool = False

    def accepts(self, emitter: str) -> bool:
        """Return whether a line of this emitter may show the class; a line of allranks only if the class says so."""
        return emitter in self.emitters if self.emitters else emitter != "allranks"


# A token of a regular expression: the start of a group, the end of one, a set of characters, a class, a digit, or a run
# of literal characters; and how often it may occur.
_TOKEN = re.compile(
    r"(\((?:\?(?:P<\w+>|<?[=!]|-?i:|:))?|[|)]|\[\^?\]?(?:\\.|[^\]\\])*\]|\\\w|[.^$\d]"
    r"|(?:(?:\\\W|[^\\()[\]|.^$\d*+?{])(?![*+?{]))+|\\?.)([*+?]\??|\{\d*,?\d*\}\??)?"
)
_OPTIONAL = ("*", "?", "{0", "{,")
_NO_LETTER = frozenset([r"\b", r"\s", r"\W", r"\d", "^", "$", *"0123456789"])
_END_OF_WORD = re.compile(r"\\[bsW]|\\[^\w]|[ $:;,=\"'/_-]")
_SET_WITHOUT_LETTERS = re.compile(r"\[(?!\^)(?:\\[dsW]|\\\W|[^\\A-Za-z])*\]")
# Words of so many lines that they select hardly any.
_FREQUENT = re.compile(
    r" *(?:all|batch|data|device|epoch|error|exit|failed|from|gpu|host|job|loss|memory|model|nccl|node|process|ranks?|set|state|step|time"
    r"|torch|with|worker) *"
)
_INSIDE_WORD, _AFTER_GAP, _WORD_START = range(3)
_Words = dict[str, int]  # a match contains one of them; how much it is worth


def find_anchors(regex: str) -> tuple[str, ...]:
    """Return words, as in `normalize`, one of which every match of `regex` contains at the start of a word; the rarest
    such set, or none.

    What follows a gap, as in `error.{0,40}timeout`, is taken to begin a word.
    """
    return tuple(_AnchorSearch(regex).alternatives(_WORD_START, False)[0])


class _AnchorSearch:
    """Go once through the tokens of an expression."""

    def __init__(self, regex: str) -> None:
        self._tokens, self._i = _TOKEN.findall(regex), 0
        self._ends: dict[int, int] = {}  # the end of each group, by its start
        begun = []
        for i, (part, _) in enumerate(self._tokens):
            if part[0] == "(":
                begun.append(i)
            elif part == ")":
                self._ends[begun.pop()] = i

    def alternatives(self, start: int, ends: bool) -> tuple[_Words, int]:
        """Return the words of a group, and whether a word may begin after it.

        Args:
            start: whether a word may begin with the group.
            ends: whether a word ends with the group.
        """
        branches, starts = [], []
        while True:
            words, after = self._sequence(start, ends)
            branches.append(words)
            starts.append(after)
            if self._i == len(self._tokens) or self._tokens[self._i][0] == ")":
                return {k: v for branch in branches for k, v in branch.items()} if all(branches) else {}, min(starts)
            self._i += 1

    def _sequence(self, start: int, ends: bool) -> tuple[_Words, int]:
        """Return the same for tokens up to the next `|` or the end of the group."""
        best: _Words = {}
        run, run_start = "", start
        while self._i < len(self._tokens) and self._tokens[self._i][0] not in ("|", ")"):
            at = self._i
            part, repeat = self._tokens[at]
            self._i += 1
            words: _Words = {}
            if part[0] == "(":
                words, after = self.alternatives(start, self._ends_word(self._ends[at] + 1, ends))
                repeat = self._tokens[self._i][1]
                self._i += 1
                if part[-1] in "=!":  # it looks ahead or behind
                    words, after, repeat = {}, start, ""
            elif part in _NO_LETTER or _SET_WITHOUT_LETTERS.fullmatch(part):
                after = _WORD_START
            elif part[0] in ".[" or (part[0] == "\\" and part[1].isalnum()):
                after = _AFTER_GAP if part == "." else _INSIDE_WORD
            else:
                text = normalize(re.sub(r"\\(.)", r"\1", part) if "\\" in part else part)
                after = _WORD_START if text[-1] == " " else _INSIDE_WORD
                if not repeat or repeat[0] == "+":
                    run_start = run_start if run else start
                    run += text
                if not repeat:
                    start = after
                    continue
            if repeat.startswith(_OPTIONAL):
                words, after = {}, after if part == "." else min(start, after)
            best = _rarer(_rarer(best, _worth(run, run_start, self._ends_word(at, ends))), words)
            run, start = "", after
        return _rarer(best, _worth(run, run_start, ends)), start

    def _ends_word(self, i: int, ends: bool) -> bool:
        """Return whether the character at a token is none of a word; `ends`: whether that is so after the group."""
        part, repeat = self._tokens[i] if i < len(self._tokens) else (")", "")
        return ends if part == ")" else not repeat.startswith(_OPTIONAL) and _END_OF_WORD.match(part) is not None


def _worth(run: str, start: int, ends: bool) -> _Words:
    """Return literal characters, from the start of a word on, with their worth."""
    if start == _INSIDE_WORD:
        run, start = run.lstrip("abcdefghijklmnopqrstuvwxyz"), _WORD_START
    run = run.lstrip() + (" " if ends and run[-1:].isalpha() else "")
    letters = len(run) - run.count(" ")
    worth = 1 if _FREQUENT.fullmatch(run) else 2 * letters - (3 if start == _AFTER_GAP else 0)
    return {run: worth} if letters >= MIN_ANCHOR else {}


def _rarer(one: _Words, other: _Words) -> _Words:
    if not one or not other:
        return one or other
    return max(one, other, key=lambda words: (min(words.values()), -len(words)))


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

    Text is normalised without changing positions. One regular expression searches anchors at the start of words; a
    second one searches the few that may end a longer word, in the reversed text.
    """

    def __init__(self, rules: Sequence[ScanRule]) -> None:
        self.rules = list(rules)
        self._heads: dict[bytes, set[int]] = {}
        self._tails: dict[bytes, set[int]] = {}  # by the reversed anchor
        for rule in self.rules:
            for anchor in rule.anchors:
                self._heads.setdefault(anchor.lstrip(), set()).add(rule.index)
            for anchor in rule.pattern.suffixes:
                self._tails.setdefault(anchor.encode()[::-1], set()).add(rule.index)
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
        words = normalized(line)
        hits = set[int]()
        for anchor in self._head.findall(words):
            hits |= self._heads[anchor]
        for anchor in self._tail.findall(words[::-1]):
            hits |= self._tails[anchor]
        rules = (self.rules[i] for i in sorted(hits))
        return [rule for rule in rules if any(anchor in words for anchor in rule.anchors)]

    def telling(self, text: bytes) -> set[int]:
        """Return indices of a text's lines that may contain an anchor. One search for all is faster than one each."""
        words = normalized(text)
        heads, tail = self._fast if len(text) >= FAST_BYTES else ((self._head,), self._tail)
        places = [match.start() for head in heads for match in head.finditer(words)]
        places += [len(text) - match.start() - 1 for match in tail.finditer(words[::-1])]
        telling, line, counted = set[int](), 0, 0
        for place in sorted(places):
            line += text.count(b"\n", counted, place)
            telling.add(line)
            counted = place
        return telling

    @cached_property
    def _fast(self) -> tuple[tuple[re.Pattern[bytes], ...], re.Pattern[bytes]]:
        """Patterns without groups for anchors after a blank or digit: `re` finds one literal faster than one of two."""
        heads = _trie(self._heads)
        tail = re.compile(b" (?=" + _trie(self._tails) + b")")
        return (re.compile(b" (?=" + heads + b")"), re.compile(b"0(?=" + heads + b")")), tail


def normalized(text: bytes) -> bytes:
    """Return text as `normalize`, with a blank before and after it."""
    return b" " + text.translate(_LETTERS) + b" "


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
