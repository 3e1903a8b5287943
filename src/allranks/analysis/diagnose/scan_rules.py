"""All rules of the scanner, and a search for the literal words (anchors) that select the rules to try on a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.catalogue.messages import BENIGN_MESSAGES, FACT_PATTERNS, PROGRESS_PATTERN
from allranks.analysis.diagnose.catalogue.signs import FAILURE_SIGNS
from allranks.analysis.diagnose.patterns import Pattern
from allranks.analysis.diagnose.structured import STRUCTURED

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


class Meaning(NamedTuple):
    """What a matched line means: a rule's own kind, owner and weight, or what a parser read from its fields."""

    rule: ScanRule
    kind: str
    owner: str
    weight: float
    groups: dict[str, str]
    rank: int | None


def all_rules() -> list[ScanRule]:
    """Return all patterns in a fixed order, so that an index is the same in each process."""
    pairs = [("class", e.id, p) for e in CATALOGUE.values() for p in e.patterns]
    pairs += [("fact", name, p) for name, patterns in FACT_PATTERNS.items() for p in patterns]
    pairs += [("benign", b.id, p) for b in BENIGN_MESSAGES.values() for p in b.patterns]
    pairs += [("sign", s.id, p) for s in FAILURE_SIGNS.values() for p in s.patterns]
    pairs += [("structured", m.id, m.pattern) for m in STRUCTURED.values()]
    pairs.append(("progress", "progress", PROGRESS_PATTERN))
    return [ScanRule(i, *pair) for i, pair in enumerate(pairs)]


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
