"""What shell text is made of: words with their quoting, operators, comments, here-documents."""

from __future__ import annotations

from typing import Literal

import msgspec

from allranks.lint.source import Source

REDIRECTS = {"<<<", "<<-", "<<", "<&", "<>", "<", ">>", ">&", ">|", ">", "&>", "&>>"}
BREAKS = {";", "&", "&&", "||", "|", "|&", "\n", "(", ")", ";;", ";&", ";;&"}
KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"}


class Unreadable(Exception):
    """The text ends inside of something; `offset` is where that began."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(what)
        self.offset, self.what = offset, what


class Part(msgspec.Struct, frozen=True):
    """A piece of a word. ``text``: literal characters, a variable's ``NAME`` with its operator, a command."""

    kind: Literal["text", "variable", "command", "arithmetic", "frozen"]
    source: Source
    quoted: bool


class Word(msgspec.Struct, frozen=True):
    """One word; `items` are the words of an array's value, ``a=(...)``."""

    parts: tuple[Part, ...]
    offset: int
    end: int
    items: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str | None:
        """The characters, if nothing in it is expanded."""
        return "".join(p.source.text for p in self.parts) if all(p.kind == "text" for p in self.parts) else None

    @property
    def plain(self) -> str | None:
        """The characters, if nothing is quoted either: only such words are keywords."""
        return None if any(p.quoted for p in self.parts) else self.literal


class Token(msgspec.Struct, frozen=True):
    """An operator, a word, or a here-document's ``<<`` with its body."""

    operator: str
    offset: int
    word: Word | None = None
    body: Source | None = None
    body_quoted: bool = False


class Lexed(msgspec.Struct, frozen=True):
    tokens: list[Token]
    comments: list[tuple[int, str]]  # offset and text from # on
    trouble: tuple[int, str] | None = None  # where reading ended too early, and in what
