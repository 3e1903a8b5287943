"""One word of shell text: quotes, variables, substitutions, arrays, arithmetic."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from allranks.lint.source import CLOSE, OPEN, Source
from allranks.lint.tokens import Part, Token, Unreadable, Word

MAX_DEPTH = 24  # nested substitutions; each level costs a few Python frames
PLAIN = re.compile(r"[^\s'\"\\$`;&|<>()#" + OPEN + "]+")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]\s]*\])?\+?=\Z")
DOUBLE_STOP = re.compile(r"[\"\\$`]")


class WordReader(ABC):
    """Reads words of a `Source`; `i` is the place reached."""

    def __init__(self, source: Source, depth: int = 0, start: int = 0) -> None:
        self.source, self.text, self.i, self.depth = source, source.text, start, depth

    @abstractmethod
    def _inside(self, start: int) -> tuple[list[Token], int]:
        """The tokens from `start` to the ``)`` that ends them, and the place behind it."""

    def fail(self, index: int, what: str) -> Unreadable:
        """What to raise; `index` is a place in this text."""
        return Unreadable(self.source.where(index), what)

    def word(self) -> Word | None:
        """The word that begins here, or None if none does."""
        begun, parts, text = self.i, [], self.text
        items: tuple[Word, ...] | None = None
        while self.i < len(text):
            char = text[self.i]
            plain = PLAIN.match(text, self.i)
            if plain:
                self._add_text(parts, self.i, plain.end(), False)
            elif char == "#" and self.i > begun:
                self._add_text(parts, self.i, self.i + 1, False)
            elif char == "\\":
                self._escaped(parts)
            elif char == "'":
                self._single(parts, self.i + 1)
            elif char == '"':
                self._double(parts)
            elif char in "$`":
                self._expansion(parts, quoted=False)
            elif char == OPEN:
                self._frozen(parts, quoted=False)
            elif char in "<>" and text.startswith("(", self.i + 1) and self.i == begun:
                self.i += 1
                self._substitution(parts, quoted=False)
            elif char == "(" and self.i > begun and ARRAY.match(text[begun : self.i]):
                items = self._array()
                break
            elif char == "(" and self.i > begun and text[self.i - 1] in "@!?*+":
                self._extended_glob(parts)
            else:
                break
        if self.i == begun:
            return None
        return Word(tuple(parts), self.source.where(begun), self.source.where(self.i), items)

    def _add_text(self, parts: list[Part], start: int, end: int, quoted: bool) -> None:
        parts.append(Part("text", self.source.part(start, end), quoted))
        self.i = end

    def _escaped(self, parts: list[Part]) -> None:
        if self.text.startswith("\\\n", self.i):
            self.i += 2
        else:
            self._add_text(parts, self.i + 1, min(self.i + 2, len(self.text)), True)

    def _single(self, parts: list[Part], start: int) -> None:
        end = self.text.find("'", start)
        if end < 0:
            raise self.fail(start - 1, "the closing ' is missing")
        self._add_text(parts, start, end, True)
        self.i = end + 1

    def _double(self, parts: list[Part]) -> None:
        begun = self.i
        self.i += 1
        parts.append(Part("text", self.source.part(self.i, self.i), True))
        while True:
            stop = DOUBLE_STOP.search(self.text, self.i)
            if stop is None:
                raise self.fail(begun, 'the closing " is missing')
            self._quoted_text(parts, stop.start())
            if stop[0] == '"':
                self.i += 1
                return
            if stop[0] == "\\":
                follows = self.text[self.i + 1 : self.i + 2]
                if follows == "\n":
                    self.i += 2
                else:
                    self._add_text(parts, self.i + (1 if follows in '$`"\\' else 0), self.i + 2, True)
            else:
                self._expansion(parts, quoted=True)

    def _quoted_text(self, parts: list[Part], end: int) -> None:
        """Text in double quotes may hold frozen variables."""
        while self.i < end:
            mark = self.text.find(OPEN, self.i, end)
            stop = end if mark < 0 else mark
            if stop > self.i:
                self._add_text(parts, self.i, stop, True)
            if mark >= 0:
                self._frozen(parts, quoted=True)

    def _frozen(self, parts: list[Part], *, quoted: bool) -> None:
        end = self.text.find(CLOSE, self.i)
        end = len(self.text) if end < 0 else end + 1
        parts.append(Part("frozen", self.source.part(self.i, end), quoted))
        self.i = end

    def _expansion(self, parts: list[Part], *, quoted: bool) -> None:
        text, begun = self.text, self.i
        if text[begun] == "`":
            self._backquoted(parts, quoted)
        elif text.startswith("$((", begun) and (end := self._arithmetic_or_none(begun + 3)):
            parts.append(Part("arithmetic", self.source.part(begun + 3, end - 2), quoted))
            self.i = end
        elif text.startswith("$(", begun):
            self.i += 1
            self._substitution(parts, quoted)
        elif text.startswith("${", begun):
            end = self._brace_end(begun + 2)
            parts.append(Part("variable", self.source.part(begun + 2, end - 1), quoted))
            self.i = end
        elif text.startswith("$'", begun) and not quoted:
            self._dollar_single(parts)
        elif found := NAME.match(text, begun + 1):
            parts.append(Part("variable", self.source.part(begun + 1, found.end()), quoted))
            self.i = found.end()
        elif text[begun + 1 : begun + 2] in set("0123456789@*#?$!-"):
            parts.append(Part("variable", self.source.part(begun + 1, begun + 2), quoted))
            self.i = begun + 2
        else:
            self._add_text(parts, begun, begun + 1, quoted)

    def _dollar_single(self, parts: list[Part]) -> None:
        end = begun = self.i + 2
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.fail(self.i, "the closing ' of $'...' is missing")
        self._add_text(parts, begun, end, True)
        self.i = end + 1

    def _backquoted(self, parts: list[Part], quoted: bool) -> None:
        begun = end = self.i + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.fail(self.i, "the closing ` is missing")
        parts.append(Part("command", self.source.part(begun, end), quoted))
        self.i = end + 1

    def _substitution(self, parts: list[Part], quoted: bool) -> None:
        """``( ... )`` with `i` at the parenthesis; its end is found by reading what is in it."""
        if self.depth >= MAX_DEPTH:
            raise self.fail(self.i, f"more than {MAX_DEPTH} nested substitutions")
        begun = self.i + 1
        _, self.i = self._inside(begun)
        parts.append(Part("command", self.source.part(begun, self.i - 1), quoted))

    def _array(self) -> tuple[Word, ...]:
        tokens, self.i = self._inside(self.i + 1)
        return tuple(token.word for token in tokens if token.word is not None)

    def _extended_glob(self, parts: list[Part]) -> None:
        begun, level = self.i, 0
        for end in range(begun, len(self.text)):
            level += {"(": 1, ")": -1}.get(self.text[end], 0)
            if level == 0:
                self._add_text(parts, begun, end + 1, False)
                return
        raise self.fail(begun, "the closing ) is missing")

    def _arithmetic_or_none(self, start: int) -> int | None:
        """None where ``$((`` begins a command in a subshell, ``$( (a) && b)``."""
        try:
            return self._arithmetic_end(start)
        except Unreadable:
            return None

    def _arithmetic_end(self, start: int) -> int:
        """Behind the ``))``."""
        level, i = 0, start
        while i < len(self.text):
            if self.text.startswith("))", i) and level == 0:
                return i + 2
            level += {"(": 1, ")": -1}.get(self.text[i], 0)
            if level < 0 or self.text[i] == "\n":
                break
            i += 1
        raise self.fail(start, "the end of (( ... )) is missing")

    def _brace_end(self, start: int) -> int:
        """Behind the ``}`` of ``${...}``; quotes and further expansions in it are skipped."""
        if self.depth >= MAX_DEPTH:
            raise self.fail(start, f"more than {MAX_DEPTH} nested expansions")
        inner = type(self)(self.source, self.depth + 1, start)
        parts: list[Part] = []
        while inner.i < len(self.text):
            char = self.text[inner.i]
            if char == "}":
                return inner.i + 1
            if char == '"':
                inner._double(parts)
            elif char in "$`":
                inner._expansion(parts, quoted=True)
            else:
                inner.i += 2 if char == "\\" else 1
        raise self.fail(start, "the end of ${ ... } is missing")
