"""Shell text to tokens: words with their quoting, operators, comments, here-documents.

Written for this because a linter needs what parsers of whole programs do not give: it reads on after what it does not
understand, keeps each character's place through nested quoting, and re-reads `bash -c '...'` and variables' values.
"""

from __future__ import annotations

import re

from allranks.lint.source import Source
from allranks.lint.tokens import BREAKS, KEYWORDS, Lexed, Part, Token, Unreadable, Word
from allranks.lint.words import WordReader

OPERATOR = re.compile(r";;&|;;|;&|;|&&|&>>|&>|&|\|\||\|&|\||<<<|<<-|<<|<&|<>|<|>>|>&|>\||>|\(|\)|\n")


def lex(source: Source, depth: int = 0) -> Lexed:
    """All tokens up to the end, or up to where the text cannot be followed."""
    reader = Lexer(source, depth)
    try:
        reader.read_until(closing=False)
    except Unreadable as trouble:
        return Lexed(reader.tokens, reader.comments, (trouble.offset, trouble.what))
    return Lexed(reader.tokens, reader.comments)


class Lexer(WordReader):
    """One pass over a `Source`; `i` is the place reached."""

    def __init__(self, source: Source, depth: int = 0, start: int = 0) -> None:
        super().__init__(source, depth, start)
        self.tokens: list[Token] = []
        self.comments: list[tuple[int, str]] = []
        self._waiting: list[tuple[str, bool, bool, int]] = []  # here-documents whose bodies come after this line
        self._in_test = False  # between [[ and ]], where ( | < are no operators
        self._cases: list[bool] = []  # for every open case: whether a pattern is expected, whose ) closes nothing

    def read_until(self, *, closing: bool) -> None:
        """To the end of the text, or with `closing` to the ``)`` that ends a substitution."""
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
            elif text.startswith("((", self.i) and self._at_command() and self._arithmetic_or_none(self.i + 2):
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
        return last is None or last.operator in BREAKS or (last.word is not None and last.word.plain in KEYWORDS)

    def _comment(self) -> None:
        end = self.text.find("\n", self.i)
        end = len(self.text) if end < 0 else end
        self.comments.append((self.source.where(self.i), self.text[self.i : end]))
        self.i = end

    def _arithmetic_command(self) -> None:
        begun, end = self.i, self._arithmetic_end(self.i + 2)
        part = Part("arithmetic", self.source.part(begun + 2, end - 2), False)
        self.i = end
        word = Word(
            (Part("text", self.source.part(begun, begun + 2), False), part),
            self.source.where(begun),
            self.source.where(end),
        )
        self.tokens.append(Token("", word.offset, word))

    def _operator(self) -> int:
        """Take one operator; how it changes the level of parentheses."""
        found = OPERATOR.match(self.text, self.i)
        assert found is not None  # the caller has seen its first character
        operator, begun = found[0], self.i
        self.i = found.end()
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
                    raise self.fail(begun, f"the here-document's end, a line with only {name}, is missing")
                end = self.text.find("\n", self.i)
                end = len(self.text) if end < 0 else end
                line = self.text[self.i : end].rstrip("\r")
                here, self.i = self.i, min(end + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line) == name:
                    break
            self._attach(self.source.where(begun), self.source.part(start, here), quoted)
        self._waiting = []

    def _attach(self, offset: int, body: Source, quoted: bool) -> None:
        for index in range(len(self.tokens) - 1, -1, -1):
            token = self.tokens[index]
            if token.offset == offset and token.operator in ("<<", "<<-"):
                self.tokens[index] = Token(token.operator, offset, token.word, body, quoted)
                return

    def _word_token(self) -> None:
        command = self._at_command()
        word = self.word()
        if word is None:  # nothing that begins a word: go on behind it
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
