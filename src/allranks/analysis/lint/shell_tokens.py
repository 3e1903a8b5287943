"""Tokens of shell text, and their grouping into simple commands.

Every character keeps its position in the file, so that text inside a variable or a quoted script can be located.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from allranks.utils.text import lazy_regex

# Text that an outer shell has expanded before an inner one reads it: OPEN name CLOSE. Private-use characters, removed
# from files.
UNRESOLVED_OPEN, UNRESOLVED_CLOSE = "\ue000", "\ue001"
_UNRESOLVED = lazy_regex(f"{UNRESOLVED_OPEN}([^{UNRESOLVED_OPEN}{UNRESOLVED_CLOSE}]*){UNRESOLVED_CLOSE}")


class MappedText:
    """``text[i]`` is at offset ``at[i]`` of the file."""

    __slots__ = ("at", "text")

    def __init__(self, text: str, at: Sequence[int] | None = None) -> None:
        self.text = text
        self.at = range(len(text)) if at is None else at

    def where(self, index: int) -> int:
        """Return the offset in the file; after the last character for an index at the end. Of an empty text: 0."""
        if not len(self.at):
            return 0
        return self.at[index] if index < len(self.at) else self.at[-1] + 1

    def part(self, start: int, end: int) -> MappedText:
        return MappedText(self.text[start:end], self.at[start:end])


def unresolved_text(content: str, offset: int) -> MappedText:
    """Return a placeholder for a variable or substitution that is already expanded, but with an unknown value."""
    inner = content.replace(UNRESOLVED_OPEN, "").replace(UNRESOLVED_CLOSE, "")
    text = f"{UNRESOLVED_OPEN}{inner}{UNRESOLVED_CLOSE}"
    return MappedText(text, [offset] * len(text))


def join_texts(parts: Sequence[MappedText]) -> MappedText:
    if len(parts) == 1:
        return parts[0]
    at: list[int] = []
    for part in parts:
        at.extend(part.at)
    return MappedText("".join(part.text for part in parts), at)


def restore_variables(text: str) -> str:
    """Return the text as the user wrote it: unresolved variables as ``$NAME`` or ``${NAME:-x}`` again."""
    return _UNRESOLVED.sub(_as_written, text) if UNRESOLVED_OPEN in text else text


def _as_written(match: re.Match[str]) -> str:
    simple = match[1].isidentifier() or match[1].startswith("(") or len(match[1]) == 1
    return f"${match[1]}" if simple else f"${{{match[1]}}}"


class LineIndex:
    """Convert offsets to lines and columns, both counted from 1."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]

    def place(self, offset: int) -> tuple[int, int]:
        number = bisect_right(self._starts, min(max(offset, 0), len(self.text)))
        return number, offset - self._starts[number - 1] + 1

    def start(self, number: int) -> int:
        return self._starts[number - 1]

    def line(self, number: int) -> str:
        """Return a line without its line break; nothing above the first and below the last line."""
        if not 0 < number <= len(self._starts):
            return ""
        start = self._starts[number - 1]
        end = self._starts[number] - 1 if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r")


REDIRECTS = {"<<<", "<<-", "<<", "<&", "<>", "<", ">>", ">&", ">|", ">", "&>", "&>>"}
BREAKS = {";", "&", "&&", "||", "|", "|&", "\n", "(", ")", ";;", ";&", ";;&"}
KEYWORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time"}


class ShellSyntaxError(Exception):
    """The text ends inside of a construct; `offset` is where that construct starts."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(what)
        self.offset, self.what = offset, what


class WordPart(msgspec.Struct, frozen=True):
    """A piece of a word. ``text``: literal characters, a variable's ``NAME`` with its operator, a command."""

    kind: Literal["text", "variable", "command", "arithmetic", "frozen"]
    source: MappedText
    quoted: bool


class Word(msgspec.Struct, frozen=True):
    """One word; `items` are the words of an array's value, ``a=(...)``."""

    parts: tuple[WordPart, ...]
    offset: int
    end: int
    items: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str | None:
        """Return the characters, if nothing in it is expanded."""
        return "".join(p.source.text for p in self.parts) if all(p.kind == "text" for p in self.parts) else None

    @property
    def plain(self) -> str | None:
        """Return the characters, if nothing is quoted either: only such words are keywords."""
        return None if any(p.quoted for p in self.parts) else self.literal


class Token(msgspec.Struct, frozen=True):
    """An operator, a word, or a here-document's ``<<`` with its body."""

    operator: str
    offset: int
    word: Word | None = None
    body: MappedText | None = None
    body_quoted: bool = False


class LexResult(msgspec.Struct, frozen=True):
    tokens: list[Token]
    comments: list[tuple[int, str]]  # offset and text from # on
    trouble: tuple[int, str] | None = None  # where parsing stopped, and in which construct


ENDINGS = {"fi", "done", "esac", "}"}
Branch = tuple[tuple[int, int], ...]
"""The enclosing branches of ``if`` and ``case``, outermost first: (number of the if, number of its branch)."""


class RawRedirect(msgspec.Struct, frozen=True):
    token: Token
    target: Word | None


class RawCommand(msgspec.Struct, frozen=True):
    """Words of one command, not yet expanded. `loop_name` is set for the head of a ``for``."""

    words: tuple[Word, ...]
    redirects: tuple[RawRedirect, ...]
    before: str
    after: str
    in_loop: bool
    in_function: bool
    tested: bool
    loop_name: str | None = None
    branch: Branch = ()


class _ParserState:
    """Position of the next command in loops, functions and conditions."""

    def __init__(self) -> None:
        self.loops = self.braces = self.level = 0
        self.function_at: int | None = None
        self.tested = False
        self.before = ""
        self.seen = 0
        self.branch: list[tuple[int, int]] = []

    def keyword(self, word: str) -> None:
        if word == "do":
            self.loops += 1
        elif word == "done":
            self.loops = max(0, self.loops - 1)
        elif word == "{":
            self.braces += 1
        elif word == "}":
            self.braces -= 1
            if self.function_at is not None and self.braces <= self.function_at:
                self.function_at = None
        elif word in ("if", "case"):
            self.seen += 1
            self.branch.append((self.seen, 0))
        elif word in ("elif", "else"):
            self.next_way()
        elif word in ("fi", "esac") and self.branch:
            self.branch.pop()
        if word in ("if", "elif", "while", "until"):
            self.tested = True
        elif word in ("then", "do", "else"):
            self.tested = False

    def next_way(self) -> None:
        """Start the next branch at ``else``, ``elif`` or ``;;``: it runs instead of the previous one."""
        if self.branch:
            self.branch[-1] = (self.branch[-1][0], self.branch[-1][1] + 1)


def split_commands(lexed: LexResult) -> Iterator[RawCommand]:
    """Yield simple commands in the order of the text."""
    state = _ParserState()
    words: list[Word] = []
    redirects: list[RawRedirect] = []
    tokens = lexed.tokens
    i = 0
    while i <= len(tokens):
        token = tokens[i] if i < len(tokens) else Token("\n", tokens[-1].offset if tokens else 0)
        i += 1
        if token.word is not None and token.operator == "":
            words.append(token.word)
        elif token.operator in REDIRECTS:
            target = token.word
            if target is None and i < len(tokens) and tokens[i].operator == "" and tokens[i].word is not None:
                target = tokens[i].word
                i += 1
            if words and (words[-1].plain or "").isdigit() and words[-1].end == token.offset:
                words.pop()  # the 2 of 2>
            redirects.append(RawRedirect(token, target))
        elif token.operator in BREAKS:
            if token.operator == "(" and len(words) == 1 and i < len(tokens) and tokens[i].operator == ")":
                state.function_at = state.braces
                words, i = [], i + 1
                continue
            pattern = token.operator == ")" and state.level == 0
            state.level = max(0, state.level + {"(": 1, ")": -1}.get(token.operator, 0))
            if pattern:
                _first_pattern(words, state)
            else:
                yield from _finish(words, redirects, state, token.operator)
            if token.operator.startswith(";;") or token.operator == ";&":
                state.next_way()
            words, redirects = [], []
            state.before = "" if token.operator == "(" else token.operator


def _first_pattern(words: list[Word], state: _ParserState) -> None:
    """Note the words before the first pattern of ``case $x in a)``, if all stand in one line."""
    for word in words if any(w.plain == "case" for w in words) else ():
        if word.plain in KEYWORDS | ENDINGS or word.plain == "case":
            state.keyword(word.plain or "")
        if word.plain not in KEYWORDS | ENDINGS:
            return


def _finish(words: list[Word], redirects: list[RawRedirect], state: _ParserState, after: str) -> Iterator[RawCommand]:
    words = list(words)
    negated = False
    while words and (plain := words[0].plain) is not None and (plain in KEYWORDS | ENDINGS):
        state.keyword(plain)
        negated = negated or plain == "!"
        words.pop(0)
        while plain == "time" and words and words[0].plain in ("-p", "--"):
            words.pop(0)
    loop_name = None
    if len(words) > 1 and words[0].plain == "for" and any(part.kind == "arithmetic" for part in words[1].parts):
        if len(words) > 2 and words[2].plain in ("do", "{"):  # for ((...)) do
            state.keyword(words[2].plain)
        words = words[1:2]
    elif words and words[0].plain in ("for", "select"):
        loop_name = words[1].plain if len(words) > 1 else None
        if len(words) > 2 and words[2].plain == "do":  # for NAME do
            state.keyword("do")
        counts = len(words) > 1 and any(p.kind == "arithmetic" for p in words[1].parts)  # for ((i = 0; i < n; i++))
        words = words[1:2] if counts else words[3:]
    elif words and words[0].plain == "case":
        state.keyword("case")
        words = []
    elif words and words[0].plain == "function":
        state.function_at = state.braces
        words = words[2:]
        while words and words[0].plain == "{":
            state.keyword("{")
            words.pop(0)
    if words or redirects or loop_name:
        yield RawCommand(
            tuple(words), tuple(redirects), state.before, after, in_loop=state.loops > 0,
            in_function=state.function_at is not None, tested=state.tested or negated, loop_name=loop_name,
            branch=tuple(state.branch),
        )  # fmt: skip
