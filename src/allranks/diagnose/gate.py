"""Which patterns a line could match: decided by the words in it, learned once a word."""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.diagnose.benign import BENIGN
from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.catalogue.entry import Pattern
from allranks.diagnose.facts import FACTS, PROGRESS

STEM = 2
MAX_WORDS = 200_000
_LETTERS = bytes(c if 97 <= c <= 122 else c + 32 if 65 <= c <= 90 else 32 for c in range(256))
_WORD = re.compile(r"[a-z]{2,}")
_DIGIT_LITERAL = re.compile(r"(?<![\\{,\d])\d(?![\d,]*\})")


class Rule:
    """A pattern, and what it stands for: ``kind`` is class, fact, benign or progress; ``owner`` its name."""

    __slots__ = ("anchors", "exact", "index", "kind", "owner", "pattern")

    def __init__(self, index: int, kind: str, owner: str, pattern: Pattern) -> None:
        self.index, self.kind, self.owner, self.pattern = index, kind, owner, pattern
        self.anchors = tuple(a.encode() for a in pattern.anchors)
        # a pattern with digits of its own must be tried on each line: lines are remembered with their digits blanked
        self.exact = not (
            _DIGIT_LITERAL.search(pattern.regex) or _DIGIT_LITERAL.search(pattern.unless) or "[1-9]" in pattern.regex
        )


def all_rules() -> list[Rule]:
    """Every pattern there is, in a fixed order, so that an index means the same in each process."""
    pairs = [("class", e.id, p) for e in CATALOGUE.values() for p in e.patterns]
    pairs += [("fact", name, p) for name, patterns in FACTS.items() for p in patterns]
    pairs += [("benign", b.id, p) for b in BENIGN.values() for p in b.patterns]
    pairs.append(("progress", "progress", PROGRESS))
    return [Rule(i, *pair) for i, pair in enumerate(pairs)]


class Gate:
    """Learns which words can be part of a match."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = list(rules)
        self._stems: dict[str, list[tuple[str, list[int]]]] = {}
        self._words: dict[bytes, tuple[int, ...]] = {}
        by_stem: dict[str, list[int]] = {}
        for rule in self.rules:
            for anchor in rule.pattern.anchors:
                by_stem.setdefault(_stem(anchor), []).append(rule.index)
        for stem, indexes in by_stem.items():
            self._stems.setdefault(stem[:STEM], []).append((stem, indexes))

    def candidates(self, line: bytes) -> list[Rule]:
        """The rules of which a line holds an anchor."""
        words = line.translate(_LETTERS).split()
        known, found = self._words, None
        for word in words:
            rules = known.get(word)
            if rules is None:
                rules = self._learn(word)
            if rules:
                found = set(rules) if found is None else found.union(rules)
        if not found:
            return []
        low = line.lower()
        rules = (self.rules[i] for i in sorted(found))
        return [rule for rule in rules if any(anchor in low for anchor in rule.anchors)]

    def _learn(self, word: bytes) -> tuple[int, ...]:
        if len(self._words) > MAX_WORDS:
            self._words.clear()
        text, found = word.decode(), set[int]()
        for i in range(len(text) - STEM + 1):
            for stem, indexes in self._stems.get(text[i : i + STEM], ()):
                if text.startswith(stem, i):
                    found.update(indexes)
        rules = tuple(sorted(found))
        self._words[word] = rules
        return rules


def _stem(anchor: str) -> str:
    """The longest run of letters in an anchor."""
    words = _WORD.findall(anchor)
    if not words:
        raise ValueError(f"anchor {anchor!r} has no word of {STEM} letters")
    return max(words, key=len)
