"""Tokens to simple commands: what is between operators, without the shell's own words around it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from allranks.lint.tokens import BREAKS, KEYWORDS, REDIRECTS, Lexed, Token, Word

ENDINGS = {"fi", "done", "esac", "}"}
Branch = tuple[tuple[int, int], ...]
"""Which way of which ``if`` or ``case``, outermost first: (number of the if, number of its way)."""


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


class _State:
    """Where in loops, functions and conditions the next command stands."""

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
        """``else``, ``elif`` or ``;;``: what follows runs instead of what was before."""
        if self.branch:
            self.branch[-1] = (self.branch[-1][0], self.branch[-1][1] + 1)


def commands(lexed: Lexed) -> Iterator[RawCommand]:
    """Simple commands in the order of the text."""
    state = _State()
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
            if not pattern:
                yield from _finish(words, redirects, state, token.operator)
            if token.operator.startswith(";;") or token.operator == ";&":
                state.next_way()
            words, redirects = [], []
            state.before = "" if token.operator == "(" else token.operator


def _finish(words: list[Word], redirects: list[RawRedirect], state: _State, after: str) -> Iterator[RawCommand]:
    words = list(words)
    negated = False
    while words and (plain := words[0].plain) is not None and (plain in KEYWORDS | ENDINGS):
        state.keyword(plain)
        negated = negated or plain == "!"
        words.pop(0)
    loop_name = None
    if words and words[0].plain in ("for", "select"):
        loop_name = words[1].plain if len(words) > 1 else None
        words = words[3:]
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
            tuple(words),
            tuple(redirects),
            state.before,
            after,
            state.loops > 0,
            state.function_at is not None,
            state.tested or negated,
            loop_name,
            tuple(state.branch),
        )
