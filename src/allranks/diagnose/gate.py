"""Which patterns a line could match: decided by the words in it, in one search of a trie of all anchors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from allranks.diagnose.benign import BENIGN
from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.catalogue.entry import Pattern
from allranks.diagnose.facts import FACTS, PROGRESS

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
        texts = (pattern.regex, pattern.unless)
        self.exact = not any(_DIGIT_LITERAL.search(t) or "[1-9]" in t or "[0-6]" in t for t in texts)


def all_rules() -> list[Rule]:
    """Every pattern there is, in a fixed order, so that an index means the same in each process."""
    pairs = [("class", e.id, p) for e in CATALOGUE.values() for p in e.patterns]
    pairs += [("fact", name, p) for name, patterns in FACTS.items() for p in patterns]
    pairs += [("benign", b.id, p) for b in BENIGN.values() for p in b.patterns]
    pairs.append(("progress", "progress", PROGRESS))
    return [Rule(i, *pair) for i, pair in enumerate(pairs)]


class Gate:
    """Finds the rules of which a line holds an anchor.

    Of each anchor the longest word (its stem) is looked for at the beginnings of words, by one regular expression; of the few that may
    end a longer word, in the reversed line by another.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = list(rules)
        self._stems: dict[bytes, set[int]] = {}
        self._suffixes: dict[bytes, set[int]] = {}  # by the reversed stem
        for rule in self.rules:
            for anchor in rule.pattern.anchors:
                stem = _stem(anchor).encode()
                self._stems.setdefault(stem, set()).add(rule.index)
                if anchor in rule.pattern.suffixes:
                    self._suffixes.setdefault(stem[::-1], set()).add(rule.index)
        # a stem that begins another one stands for both: the search ends at the shorter
        self._search = re.compile(b" (" + _trie(self._stems) + b")").findall
        self._search_back = re.compile(b" (" + _trie(self._suffixes) + b")").findall
        for table in (self._stems, self._suffixes):
            for stem in table:
                for longer in table:
                    if longer != stem and longer.startswith(stem):
                        table[stem] = table[stem] | table[longer]

    def candidates(self, line: bytes) -> list[Rule]:
        """The rules of which a line holds an anchor."""
        words = b" " + line.translate(_LETTERS) + b" "
        found = set[int]()
        for stem in self._search(words):
            found |= self._stems[stem]
        for stem in self._search_back(words[::-1]):
            found |= self._suffixes[stem]
        if not found:
            return []
        low = line.lower()
        rules = (self.rules[i] for i in sorted(found))
        return [rule for rule in rules if any(anchor in low for anchor in rule.anchors)]


def _stem(anchor: str) -> str:
    """The longest run of letters in an anchor."""
    words = _WORD.findall(anchor)
    if not words:
        raise ValueError(f"anchor {anchor!r} has no word of two letters")
    return max(words, key=len)


def _trie(stems: Iterable[bytes]) -> bytes:
    """A regular expression for the shortest of the stems that begin at a place."""
    tree: dict[int, dict] = {}
    for stem in sorted(stems):
        node = tree
        for i, char in enumerate(stem):
            node = node.setdefault(char, {})
            if node.get(0) is not None:
                break  # a shorter stem ends here
            if i == len(stem) - 1:
                node.clear()
                node[0] = {}
    return _branches(tree)


def _branches(tree: dict[int, dict]) -> bytes:
    parts = [bytes([char]) + (b"" if 0 in below else _branches(below)) for char, below in tree.items()]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
