"""Which patterns a line could match: decided by the words in it, in one search of a trie of all anchors, for a line or a whole block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from allranks.diagnose.benign import BENIGN
from allranks.diagnose.catalogue import CATALOGUE
from allranks.diagnose.catalogue.entry import Pattern
from allranks.diagnose.facts import FACTS, PROGRESS

_LETTERS = bytes(
    c if 97 <= c <= 122 else c + 32 if 65 <= c <= 90 else 48 if 48 <= c <= 57 else 32 for c in range(256)
)  # small letters, digits as 0, anything else blank
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

    Text and anchors are brought to one form, in which places stay the same: letters, 0 for digits, blanks. Anchors are
    looked for at the beginnings of words, by one regular expression; the few that may end a longer word, in the reversed
    text by another.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = list(rules)
        self._heads: dict[bytes, set[int]] = {}
        self._tails: dict[bytes, set[int]] = {}  # by the reversed anchor
        for rule in self.rules:
            for anchor in rule.pattern.anchors:
                words = _words(anchor)
                self._heads.setdefault(words, set()).add(rule.index)
                if anchor in rule.pattern.suffixes:
                    self._tails.setdefault(words[::-1], set()).add(rule.index)
        # an anchor that begins another one stands for both: the search ends at the shorter
        # (looked ahead at, so that one within another is found too)
        self._head = re.compile(b"[ 0](?=(" + _trie(self._heads) + b"))")
        self._tail = re.compile(b" (?=(" + _trie(self._tails) + b"))")
        for table in (self._heads, self._tails):
            for longer in list(table):
                for shorter in (longer[:end] for end in range(1, len(longer))):
                    if shorter in table:
                        table[shorter] |= table[longer]

    def candidates(self, line: bytes) -> list[Rule]:
        """The rules of which a line holds an anchor."""
        words = _blanked(line)
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

    def telling(self, lines: Sequence[bytes]) -> set[int]:
        """Which of many lines may hold an anchor: their indices. One search for all costs far less than one for each."""
        text = b"\n".join(lines)
        words = _blanked(text)
        places = [found.start() for found in self._head.finditer(words)]
        places += [len(text) - found.start() - 1 for found in self._tail.finditer(words[::-1])]
        telling, line, counted = set[int](), 0, 0
        for place in sorted(places):
            line += text.count(b"\n", counted, place)
            telling.add(line)
            counted = place
        return telling


def _blanked(text: bytes) -> bytes:
    return b" " + text.translate(_LETTERS) + b" "


def _words(anchor: str) -> bytes:
    """An anchor as `_blanked` text holds it, from its first letter on."""
    words = anchor.encode().translate(_LETTERS).lstrip()
    if not words.strip():
        raise ValueError(f"anchor {anchor!r} has no letter")
    return words


def _trie(anchors: Iterable[bytes]) -> bytes:
    """A regular expression for the shortest of the anchors that begin at a place."""
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
