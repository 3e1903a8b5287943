"""Split shell text into words with their quoting, operators, comments and here-documents.

Unlike parsers for complete programs, it continues after syntax it does not understand, keeps each
character's position through nested quoting, and parses `bash -c '...'` and variables' values again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from allranks.analysis.lint.shell_tokens import (
    BREAKS,
    KEYWORDS,
    UNRESOLVED_CLOSE,
    UNRESOLVED_OPEN,
    LexResult,
    MappedText,
    ShellSyntaxError,
    Token,
    Word,
    WordPart,
    join_texts,
)
from allranks.utils.text import lazy_regex

MAX_DEPTH = 24  # nested substitutions; each level costs a few Python frames
PLAIN = lazy_regex(r"[^\s'\"\\$`;&|<>()#" + UNRESOLVED_OPEN + "]+")
NAME = lazy_regex(r"[A-Za-z_][A-Za-z0-9_]*")
ARRAY = lazy_regex(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^\]\s]*\])?\+?=\Z")
OLD_ARITHMETIC = lazy_regex(r"\$\[(?:[^\[\]\n'\"`;]|\[[^\[\]\n]*\])*\]")  # $[1 + 2]
DOUBLE_STOP = lazy_regex(r"[\"\\$`]")


class WordReader(ABC):
    """Read words of a `MappedText`; `i` is the current position."""

    def __init__(self, source: MappedText, depth: int = 0, start: int = 0) -> None:
        self.source, self.text, self.i, self.depth = source, source.text, start, depth

    @abstractmethod
    def _inside(self, start: int) -> tuple[list[Token], int]:
        """Return the tokens from `start` to the ``)`` that ends them, and the position after it."""

    def fail(self, index: int, what: str) -> ShellSyntaxError:
        """Return the exception to raise; `index` is a position in this text."""
        return ShellSyntaxError(self.source.where(index), what)

    def word(self) -> Word | None:
        """Return the word that starts here, or None."""
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
                if text.startswith("\\\n", self.i):
                    self.i += 2
                else:
                    self._add_text(parts, self.i + 1, min(self.i + 2, len(text)), True)
            elif char == "'":
                self._single(parts, self.i + 1)
            elif char == '"':
                self._double(parts)
            elif char in "$`":
                self._expansion(parts, quoted=False)
            elif char == UNRESOLVED_OPEN:
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

    def _add_text(self, parts: list[WordPart], start: int, end: int, quoted: bool) -> None:
        parts.append(WordPart("text", self.source.part(start, end), quoted))
        self.i = end

    def _single(self, parts: list[WordPart], start: int) -> None:
        end = self.text.find("'", start)
        if end < 0:
            raise self.fail(start - 1, "the closing ' is missing")
        self._add_text(parts, start, end, True)
        self.i = end + 1

    def _double(self, parts: list[WordPart]) -> None:
        begun = self.i
        self.i += 1
        parts.append(WordPart("text", self.source.part(self.i, self.i), True))
        while True:
            stop = DOUBLE_STOP.search(self.text, self.i)
            if stop is None:
                raise self.fail(begun, 'the closing " is missing')
            mark = self.text.find(UNRESOLVED_OPEN, self.i, stop.start())
            if mark >= 0:  # an unknown value may contain quotes of its own
                self._quoted_text(parts, mark)
                self._frozen(parts, quoted=True)
                continue
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

    def _quoted_text(self, parts: list[WordPart], end: int) -> None:
        """Add text in double quotes, which may contain unresolved variables."""
        while self.i < end:
            mark = self.text.find(UNRESOLVED_OPEN, self.i, end)
            stop = end if mark < 0 else mark
            if stop > self.i:
                self._add_text(parts, self.i, stop, True)
            if mark >= 0:
                self._frozen(parts, quoted=True)

    def _frozen(self, parts: list[WordPart], *, quoted: bool) -> None:
        end = self.text.find(UNRESOLVED_CLOSE, self.i)
        end = len(self.text) if end < 0 else end + 1
        parts.append(WordPart("frozen", self.source.part(self.i, end), quoted))
        self.i = end

    def _expansion(self, parts: list[WordPart], *, quoted: bool) -> None:
        text, begun = self.text, self.i
        if text[begun] == "`":
            self._backquoted(parts, quoted)
        elif text.startswith("$((", begun) and (end := self._arithmetic_or_none(begun + 3)):
            parts.append(WordPart("arithmetic", self.source.part(begun + 3, end - 2), quoted))
            self.i = end
        elif old := OLD_ARITHMETIC.match(text, begun):
            parts.append(WordPart("arithmetic", self.source.part(begun + 2, old.end() - 1), quoted))
            self.i = old.end()
        elif text.startswith("$(", begun):
            self.i += 1
            self._substitution(parts, quoted)
        elif text.startswith("${", begun):
            end = self._brace_end(begun + 2, quoted)
            parts.append(WordPart("variable", self.source.part(begun + 2, end - 1), quoted))
            self.i = end
        elif text.startswith("$'", begun) and not quoted:
            self._dollar_single(parts)
        elif match := NAME.match(text, begun + 1):
            parts.append(WordPart("variable", self.source.part(begun + 1, match.end()), quoted))
            self.i = match.end()
        elif text[begun + 1 : begun + 2] in set("0123456789@*#?$!-"):
            parts.append(WordPart("variable", self.source.part(begun + 1, begun + 2), quoted))
            self.i = begun + 2
        else:
            self._add_text(parts, begun, begun + 1, quoted)

    def _dollar_single(self, parts: list[WordPart]) -> None:
        end = begun = self.i + 2
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.fail(self.i, "the closing ' of $'...' is missing")
        self._add_text(parts, begun, end, True)
        self.i = end + 1

    def _backquoted(self, parts: list[WordPart], quoted: bool) -> None:
        begun = end = self.i + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise self.fail(self.i, "the closing ` is missing")
        parts.append(WordPart("command", self.source.part(begun, end), quoted))
        self.i = end + 1

    def _substitution(self, parts: list[WordPart], quoted: bool) -> None:
        """Parse ``( ... )`` with `i` at the parenthesis; its end is found by parsing the content."""
        if self.depth >= MAX_DEPTH:
            raise self.fail(self.i, f"more than {MAX_DEPTH} nested substitutions")
        begun = self.i + 1
        _, self.i = self._inside(begun)
        parts.append(WordPart("command", self.source.part(begun, self.i - 1), quoted))

    def _array(self) -> tuple[Word, ...]:
        tokens, self.i = self._inside(self.i + 1)
        return tuple(token.word for token in tokens if token.word is not None)

    def _extended_glob(self, parts: list[WordPart]) -> None:
        begun, level = self.i, 0
        for end in range(begun, len(self.text)):
            level += {"(": 1, ")": -1}.get(self.text[end], 0)
            if level == 0:
                self._add_text(parts, begun, end + 1, False)
                return
        raise self.fail(begun, "the closing ) is missing")

    def _arithmetic_or_none(self, start: int) -> int | None:
        """Return None if ``$((`` starts a command in a subshell, ``$( (a) && b)``."""
        try:
            return self._arithmetic_end(start)
        except ShellSyntaxError:
            return None

    def _arithmetic_end(self, start: int) -> int:
        """Return the position after the ``))``."""
        level, i = 0, start
        while i < len(self.text):
            if self.text.startswith("))", i) and level == 0:
                return i + 2
            level += {"(": 1, ")": -1}.get(self.text[i], 0)
            if level < 0 or self.text[i] == "\n":
                break
            i += 1
        raise self.fail(start, "the end of (( ... )) is missing")

    def _brace_end(self, start: int, quoted: bool) -> int:
        """Return the position after the ``}`` of ``${...}``; skip quotes and nested expansions."""
        default = not quoted and re.compile(r"\w+(?:\[[^\]]*\])?:?[-=+?]").match(self.text, start)
        if self.depth >= MAX_DEPTH:
            raise self.fail(start, f"more than {MAX_DEPTH} nested expansions")
        inner = type(self)(self.source, self.depth + 1, start)
        parts: list[WordPart] = []
        while inner.i < len(self.text):
            char = self.text[inner.i]
            if char == "}":
                return inner.i + 1
            if char == '"':
                inner._double(parts)
            elif char == "'" and default and (end := self.text.find("'", inner.i + 1)) > 0:
                inner.i = end + 1
            elif char in "$`":
                inner._expansion(parts, quoted=True)
            else:
                inner.i += 2 if char == "\\" else 1
        raise self.fail(start, "the end of ${ ... } is missing")


def _without_tabs(body: MappedText) -> MappedText:
    """Return a here-document of ``<<-`` as the shell passes it on: without the tabs at the start of its lines."""
    parts = [body.part(*match.span(1)) for match in re.finditer(r"\t*([^\n]*\n|[^\n]+)", body.text)]
    return join_texts(parts) if parts else body


OPERATOR = lazy_regex(r";;&|;;|;&|;|&&|&>>|&>|&|\|\||\|&|\||<<<|<<-|<<|<&|<>|<|>>|>&|>\||>|\(|\)|\n")


def lex(source: MappedText, depth: int = 0) -> LexResult:
    """Return all tokens up to the end, or up to the position where parsing fails."""
    reader = Lexer(source, depth)
    try:
        reader.read_until(closing=False)
    except ShellSyntaxError as trouble:
        return LexResult(reader.tokens, reader.comments, (trouble.offset, trouble.what))
    return LexResult(reader.tokens, reader.comments)


class Lexer(WordReader):
    """One pass over a `MappedText`; `i` is the current position."""

    def __init__(self, source: MappedText, depth: int = 0, start: int = 0) -> None:
        super().__init__(source, depth, start)
        self.tokens: list[Token] = []
        self.comments: list[tuple[int, str]] = []
        self._waiting: list[tuple[str, bool, bool, int]] = []  # here-documents whose bodies come after this line
        self._in_test = False  # between [[ and ]], where ( | < are not operators
        self._cases: list[bool] = []  # for every open case: whether a pattern is expected, whose ) closes nothing

    def read_until(self, *, closing: bool) -> None:
        """Parse to the end of the text, or with `closing` to the ``)`` that ends a substitution."""
        level, begun = 0, self.i
        text, size = self.text, len(self.text)
        while self.i < size:
            char = text[self.i]
            if char in " \t\r" or (char == "\\" and text.startswith("\\\n", self.i)):
                self.i += 2 if char == "\\" else 1
            elif self._in_test and char in ";&|()<>":
                self.i += 1
            elif char == "#":
                self._comment()
            elif text.startswith("((", self.i) and self._at_arithmetic() and self._arithmetic_or_none(self.i + 2):
                self._arithmetic_command()
            elif char in ";&|()\n" or (char in "<>" and not text.startswith(("<(", ">("), self.i)):
                level += self._operator()
                if closing and level < 0:
                    return
                level = max(level, 0)
            else:
                self._word_token()
        if closing:
            raise self.fail(begun, "the end of $( ... ) is missing")
        if self._waiting:
            raise self.fail(
                self._waiting[0][3], f"the here-document's end, a line with only {self._waiting[0][0]}, is missing"
            )

    def _at_command(self) -> bool:
        last = self.tokens[-1] if self.tokens else None
        starts = KEYWORDS | {"for"}  # for ((i = 0; i < n; i++))
        return last is None or last.operator in BREAKS or (last.word is not None and last.word.plain in starts)

    def _at_arithmetic(self) -> bool:
        """Return whether ``((`` begins arithmetic here: a command, or the head of ``for ((...))``."""
        last = self.tokens[-1] if self.tokens else None
        return self._at_command() or (last is not None and last.word is not None and last.word.plain == "for")

    def _comment(self) -> None:
        end = self.text.find("\n", self.i)
        end = len(self.text) if end < 0 else end
        self.comments.append((self.source.where(self.i), self.text[self.i : end]))
        self.i = end

    def _arithmetic_command(self) -> None:
        begun, end = self.i, self._arithmetic_end(self.i + 2)
        part = WordPart("arithmetic", self.source.part(begun + 2, end - 2), False)
        self.i = end
        head = WordPart("text", self.source.part(begun, begun + 2), False)
        word = Word((head, part), self.source.where(begun), self.source.where(end))
        self.tokens.append(Token("", word.offset, word))

    def _operator(self) -> int:
        """Parse one operator; return how it changes the level of parentheses."""
        match = OPERATOR.match(self.text, self.i)
        assert match is not None  # the caller has seen its first character
        operator, begun = match[0], self.i
        self.i = match.end()
        if operator in "|(" and self._cases and self._cases[-1]:
            return 0  # case x in (a|b)
        self._in_test = False
        self.tokens.append(Token(operator, self.source.where(begun)))
        if operator in ("<<", "<<-"):
            self._here_begins(operator, begun)
        elif operator == "\n" and self._waiting:
            self._here_bodies()
        elif operator in (";;", ";&", ";;&") and self._cases:
            self._cases[-1] = True
        elif operator == ")" and self._cases and self._cases[-1]:
            self._cases[-1] = False
            return 0
        return {"(": 1, ")": -1}.get(operator, 0)

    def _here_begins(self, operator: str, begun: int) -> None:
        while self.text[self.i : self.i + 1] in (" ", "\t"):
            self.i += 1
        word = self.word()
        if word is None:
            return
        name = "".join(p.source.text for p in word.parts)
        quoted = any(p.quoted for p in word.parts) or "\\" in self.text[begun : self.i]
        self._waiting.append((name, quoted, operator == "<<-", begun))
        self.tokens[-1] = Token(operator, self.source.where(begun), word)

    def _here_bodies(self) -> None:
        for name, quoted, tabs, begun in self._waiting:
            start = self.i
            while True:
                if self.i >= len(self.text):
                    self._waiting = []
                    self._attach(self.source.where(begun), self.source.part(start, self.i), quoted)
                    raise self.fail(begun, f"the here-document's end, a line with only {name}, is missing")
                end = self.text.find("\n", self.i)
                end = len(self.text) if end < 0 else end
                line = self.text[self.i : end].rstrip("\r")
                position, self.i = self.i, min(end + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line) == name:
                    break
            body = self.source.part(start, position)
            self._attach(self.source.where(begun), _without_tabs(body) if tabs else body, quoted)
        self._waiting = []

    def _attach(self, offset: int, body: MappedText, quoted: bool) -> None:
        for index in range(len(self.tokens) - 1, -1, -1):
            token = self.tokens[index]
            if token.offset == offset and token.operator in ("<<", "<<-"):
                self.tokens[index] = Token(token.operator, offset, token.word, body, quoted)
                return

    def _word_token(self) -> None:
        command = self._at_command()
        word = self.word()
        if word is None:  # no word starts here: continue after it
            self.i += 1
            return
        self.tokens.append(Token("", word.offset, word))
        self._in_test = (self._in_test or (command and word.plain == "[[")) and word.plain != "]]"
        if command and word.plain == "case":
            self._cases.append(False)
        elif command and word.plain == "esac" and self._cases:
            self._cases.pop()
        elif word.plain == "in" and self._cases and self._is_case_in():
            self._cases[-1] = True
        elif self._cases and self._cases[-1] and word.plain == "esac":
            self._cases.pop()

    def _is_case_in(self) -> bool:
        before = [t.word.plain if t.word else t.operator for t in self.tokens[-3:-2]]
        return before == ["case"]

    def _inside(self, start: int) -> tuple[list[Token], int]:
        inner = Lexer(self.source, self.depth + 1, start)
        inner.read_until(closing=True)
        return inner.tokens, inner.i
