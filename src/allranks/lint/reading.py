"""Reads commands one after another as a shell would, without running any: variables, nested shells, substitutions."""

from __future__ import annotations

import re

import msgspec

from allranks.lint.calls import SHELLS, open_command
from allranks.lint.grouping import RawCommand, RawRedirect, commands
from allranks.lint.lexer import lex
from allranks.lint.records import Arg, Assignment, Call, Comment, Redirect, Use
from allranks.lint.source import CLOSE, OPEN, Source, frozen, joined, shown
from allranks.lint.tokens import Part, Word
from allranks.lint.words import MAX_DEPTH

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?)=")
DECLARING = {"export", "declare", "typeset", "local", "readonly"}
VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?")
INNER_NAMES = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
DEFAULTS = (":-", "-", ":=", "=")
MAX_SHELLS = 6  # shells in shells
MAX_VALUE = 20_000  # characters a variable may grow to: x=$x$x grows without end


class Value(msgspec.Struct, frozen=True):
    source: Source
    exported: bool = False
    items: tuple[Source, ...] | None = None


class Reading:
    """What was read: calls, assignments, uses of variables, comments, and where reading failed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.assignments: list[Assignment] = []
        self.uses: list[Use] = []
        self.comments: list[Comment] = []
        self.trouble: list[tuple[int, str]] = []
        self.variables: dict[str, Value] = {}
        self.exported: set[str] = set()  # `export NAME` without a value
        self.submitted: list[Source] = []  # batch scripts that a here-document gives to sbatch
        self.files: dict[str, Source] = {}  # written by here-documents, and perhaps run later

    def read(self, source: Source, under: tuple[Call, ...] = (), depth: int = 0, substitution: bool = False) -> None:
        """Walk a script, or the inner one of ``bash -c``; `under` are the calls that run it."""
        lexed = lex(source, min(depth, MAX_DEPTH))
        self.comments += [Comment(offset, text) for offset, text in lexed.comments]
        if (
            lexed.trouble and OPEN not in source.text
        ):  # quotes may close in what is not known here: eval "set -- $quoted"
            self.trouble.append(lexed.trouble)
        for raw in commands(lexed):
            _Step(self, raw, under, depth, substitution).take()


class _Step:
    """One command on its way into a `Reading`."""

    def __init__(
        self, reading: Reading, raw: RawCommand, under: tuple[Call, ...], depth: int, substitution: bool
    ) -> None:
        self.reading, self.raw, self.under, self.depth, self.substitution = reading, raw, under, depth, substitution
        self.program = "="

    def take(self) -> None:
        words = list(self.raw.words)
        first = next((w for w in words if not self._assigns(w)), None)
        self.program = (first.literal or "?") if first else "="
        if self.raw.loop_name:
            self.program = "for"
            self.reading.variables.pop(self.raw.loop_name, None)
        for word in [*words, *(r.target for r in self.raw.redirects if r.target)]:
            self._note_uses(word)
        if self.raw.loop_name:
            return
        if self.program in DECLARING and self.program != "local":
            self._declare(
                words, exported=self.program == "export" or any((w.plain or "").startswith("-x") for w in words)
            )
        elif self.program == "local":
            self._declare(words, exported=False)
        elif self.program == "unset":
            self._unset(words)
        elif first is None:
            for word in words:
                self._assign(word, exported=False)
        else:
            self._command(words)

    def _assigns(self, word: Word) -> re.Match[str] | None:
        head = word.parts[0] if word.parts else None
        return ASSIGNMENT.match(head.source.text) if head and head.kind == "text" and not head.quoted else None

    def _declare(self, words: list[Word], exported: bool) -> None:
        for word in words[1:]:
            name = word.plain or ""
            if self._assigns(word):
                self._assign(word, exported, masked=any(p.kind == "command" for p in word.parts))
                continue
            if exported and not name.startswith("-"):
                self.reading.exported.add(name)
            if name in self.reading.variables and exported:
                old = self.reading.variables[name]
                self.reading.variables[name] = Value(old.source, True, old.items)

    def _unset(self, words: list[Word]) -> None:
        for word in words[1:]:
            name = word.literal or ""
            if not name.startswith("-"):
                self.reading.variables.pop(name, None)
                gone = Assignment(name, Source(""), word.offset, under=self.under, removed=True)
                self.reading.assignments.append(gone)

    def _assign(self, word: Word, exported: bool, masked: bool = False, keep: bool = True) -> Assignment | None:
        found = self._assigns(word)
        if found is None:
            return None
        name, appends = found[1], bool(found[3])
        head = word.parts[0].source
        rest = (Part("text", head.part(found.end(), len(head.text)), False), *word.parts[1:])
        source = self._flatten(rest)
        items = None if word.items is None else tuple(self._flatten(item.parts) for item in word.items)
        if items is not None:
            source = joined([p for item in items for p in (item, Source(" ", [word.offset]))]) if items else Source("")
        old = self.reading.variables.get(name)
        if appends and old:
            source = joined([old.source, source])
            items = (*old.items, *items) if old.items is not None and items is not None else items
        if len(source.text) > MAX_VALUE:
            source = frozen(name, word.offset)
        exported = exported or (old is not None and old.exported)
        made = Assignment(name, source, word.offset, exported, self.under, "", items, False, masked, self.substitution)
        if keep:
            self.reading.assignments.append(made)
            if found[2] is None:
                self.reading.variables[name] = Value(source, exported, items)
        return made

    def _note_uses(self, word: Word) -> None:
        for part in word.parts:
            if part.kind == "variable":
                found = VARIABLE.match(part.source.text.lstrip("!#"))
                if found:
                    self._use(found[1], part.source.where(0), part.source.text[found.end() :])
                    for name in INNER_NAMES.findall(part.source.text[found.end() :]):
                        self._use(name, part.source.where(0), "")
            elif part.kind == "arithmetic":
                for name in dict.fromkeys(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", part.source.text)):
                    self._use(name, part.source.where(0), "")
            elif part.kind == "command" and self.depth < MAX_DEPTH:
                self.reading.read(part.source, self.under, self.depth + 1, substitution=True)
        for item in word.items or ():
            self._note_uses(item)

    def _use(self, name: str, offset: int, operator: str) -> None:
        self.reading.uses.append(Use(name, offset, self.under, self.program, operator, self.raw.in_function))

    def _flatten(self, parts: tuple[Part, ...]) -> Source:
        """What the shell makes of the parts; the unknown stays frozen."""
        pieces = [self._piece(part) for part in parts if part.source.text]
        return joined(pieces) if pieces else Source("")

    def _piece(self, part: Part) -> Source:
        text = part.source.text
        if part.kind in ("text", "frozen"):
            return part.source
        if part.kind == "command":
            return frozen(f"({shown(text)})", part.source.where(0))
        if part.kind == "arithmetic":
            return frozen(f"(({shown(text)}))", part.source.where(0))
        found = VARIABLE.match(text)
        known = self.reading.variables.get(found[1]) if found else None
        if found is None or known is None:
            return frozen(shown(text), part.source.where(0))
        index, operator = (found[2] or "")[1:-1], text[found.end() :]
        if operator and not operator.startswith(DEFAULTS):
            return frozen(shown(text), part.source.where(0))
        if known.items is not None and index not in ("@", "*"):
            number = int(index) if index.isdecimal() and len(index) < 6 else 0
            return known.items[number] if number < len(known.items) else Source("")
        return known.source

    def _args(self, words: list[Word]) -> list[Arg]:
        args: list[Arg] = []
        for word in words:
            source = self._flatten(word.parts)
            if len(source.text) > MAX_VALUE * 4:
                source = source.part(0, MAX_VALUE)
            parts = [p for p in word.parts if p.kind != "text" or p.source.text]
            single = len(parts) == 1 and parts[0].kind == "variable"
            name = VARIABLE.match(parts[0].source.text) if single else None
            known = self.reading.variables.get(name[1]) if name else None
            if known is not None and known.items is not None and (name and name[2] in ("[@]", "[*]")):
                args += [Arg(item, word.offset, True) for item in known.items]
            elif any(p.kind == "variable" and not p.quoted for p in word.parts):
                args += [Arg(piece, piece.where(0)) for piece in _fields(source)]
            else:
                quoted = any(p.quoted for p in word.parts)
                if source.text or quoted:
                    args.append(Arg(source, word.offset, quoted))
        return args

    def _command(self, words: list[Word]) -> None:
        prefix: list[Assignment] = []
        while words and self._assigns(words[0]):
            made = self._assign(words.pop(0), exported=True, keep=False)
            if made:
                prefix.append(made)
        args = self._args(words)
        if not args:
            return
        redirects = tuple(Redirect(r.token.operator, self._target(r)) for r in self.raw.redirects)
        raw, shared_prefix = self.raw, tuple(prefix)

        def make(program: str, rest: tuple[Arg, ...], at: Arg, under: tuple[Call, ...], module: bool = False) -> Call:
            return Call(
                program, rest, at.offset, under, shared_prefix, redirects, raw.before, raw.after, raw.in_loop,
                raw.in_function, self.substitution, raw.tested, module, at.text, raw.branch,
            )  # fmt: skip

        opened = open_command(args, make, self.under)
        self.reading.calls += opened.calls
        for call in opened.calls:
            if call.program == "env":
                prefix += [_from_env(a, call) for a in call.args if ASSIGNMENT.match(a.text)]
        inner = opened.calls[-1].under if opened.calls else self.under
        self.reading.assignments += [msgspec.structs.replace(a, under=inner) for a in prefix]
        self._inner(opened.script, opened.calls)

    def _target(self, redirect: RawRedirect) -> str:
        return shown(self._flatten(redirect.target.parts).text) if redirect.target else ""

    def _inner(self, script: Arg | None, calls: tuple[Call, ...]) -> None:
        """Read what a nested shell is given: ``-c``'s word, a here-document, or a file written before."""
        if not calls or self.depth >= MAX_SHELLS:
            return
        last = calls[-1]
        under = (*last.under, last)
        body = next((r for r in self.raw.redirects if r.token.body is not None), None)
        document = self._document(body) if body else None
        if script is not None:
            self._nested(script.source, under)
        elif document is not None and (last.program in SHELLS or (last.program == "srun" and not last.under)):
            self._nested(document, under)
        elif document is not None and last.program == "sbatch":
            self.reading.submitted.append(document)
        elif document is not None:
            for redirect in last.redirects:
                if redirect.operator in (">", ">|"):
                    self.reading.files[redirect.target] = document
            if last.program == "tee" and last.args:
                self.reading.files[last.args[-1].text] = document
        elif last.program == "eval":
            self._nested(
                joined([p for a in last.args for p in (a.source, Source(" ", [a.offset]))] or [Source("")]), last.under
            )
        else:
            self._written(last, under)

    def _written(self, last: Call, under: tuple[Call, ...]) -> None:
        """A script that a here-document wrote, now run."""
        named = (
            [last.written, *(a.text for a in last.args[:2])]
            if last.program in {*SHELLS, "source", "."}
            else [last.written]
        )
        for name in named:
            text = self.reading.files.get(name)
            if text is not None and (name.endswith((".sh", ".bash")) or text.text.startswith("#!/bin/")):
                self._nested(text, under)
                return

    def _nested(self, source: Source, under: tuple[Call, ...]) -> None:
        before = dict(self.reading.variables)
        self.reading.read(source, under, self.depth + 1, self.substitution)
        self.reading.variables = before

    def _document(self, redirect: RawRedirect) -> Source | None:
        body = redirect.token.body
        if body is None or redirect.token.body_quoted:
            return body
        # Expansions happen as between double quotes, but " itself is an ordinary character.
        pieces: list[Source] = []
        i = 0
        for found in re.finditer(r"\\[$`\\]|\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$([A-Za-z_][A-Za-z0-9_]*)", body.text):
            pieces.append(body.part(i, found.start()))
            i = found.end()
            name = found[1] or found[2]
            if name is None:
                pieces.append(body.part(i - 1, i))
                continue
            self._use(name, body.where(found.start()), "")
            known = self.reading.variables.get(name)
            pieces.append(known.source if known else frozen(name, body.where(found.start())))
        return joined([*pieces, body.part(i, len(body.text))])


def _from_env(arg: Arg, call: Call) -> Assignment:
    name, _, _ = arg.text.partition("=")
    return Assignment(name, arg.source.part(len(name) + 1, len(arg.source.text)), arg.offset, True, call.under)


def _fields(source: Source) -> list[Source]:
    """Split at blanks as the shell does with an unquoted variable; frozen parts stay whole."""
    found: list[Source] = []
    start, inside = None, False
    for i, char in enumerate(source.text):
        inside = (inside or char == OPEN) and char != CLOSE
        blank = char.isspace() and not inside
        if not blank and start is None:
            start = i
        if blank and start is not None:
            found.append(source.part(start, i))
            start = None
    if start is not None:
        found.append(source.part(start, len(source.text)))
    return found
