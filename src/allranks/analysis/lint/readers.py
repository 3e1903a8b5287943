"""Read the text of a script, an environment file or a spec: program calls, variable assignments. Nothing is executed.

Commands are read in the shell's order, with variables, nested shells and substitutions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import msgspec

from allranks.analysis.lint import shell_tokens as shell
from allranks.analysis.lint.command_options import SHELLS, unwrap_command
from allranks.analysis.lint.records import Argument, Assignment, Comment, ProgramCall, Redirect, VariableUse
from allranks.analysis.lint.shell_lexer import MAX_DEPTH, lex
from allranks.analysis.lint.shell_tokens import MappedText, Word
from allranks.utils.text import lazy_regex

ASSIGNMENT = lazy_regex(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?(\+?)=")
DECLARING = {"export", "declare", "typeset", "local", "readonly"}
NAMING = {"read", "mapfile", "readarray", "getopts", "printf", "let", "declare", "typeset", "local", "readonly", "set"}
VARIABLE = lazy_regex(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]]*\])?")
COMMAND_INSIDE = lazy_regex(r"`[^`]*`|\$\((?!\()(?:[^()]|\([^()]*\))*\)")
INNER_NAMES = lazy_regex(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
EXPANDED_IN_DOCUMENT = lazy_regex(
    r"\\[$`\\]|\$\{([A-Za-z_]\w*(?:\[[^\]{}\n]*\])?[^\[{}\n]*)\}|\$([A-Za-z_]\w*)", re.ASCII
)
DEFAULTS = (":-", "-", ":=", "=")
MAX_SHELLS = 6  # nested shells
MAX_VALUE = 20_000  # maximum length of a variable: x=$x$x grows without limit


class ShellVariable(msgspec.Struct, frozen=True):
    source: MappedText
    exported: bool = False
    items: tuple[MappedText, ...] | None = None


class ShellReader:
    """Result of reading: calls, assignments, uses of variables, comments, and errors."""

    def __init__(self) -> None:
        self.calls: list[ProgramCall] = []
        self.assignments: list[Assignment] = []
        self.uses: list[VariableUse] = []
        self.comments: list[Comment] = []
        self.trouble: list[tuple[int, str]] = []
        self.variables: dict[str, ShellVariable] = {}
        self.exported: set[str] = set()  # `export NAME` without a value
        self.named: set[str] = set()  # set in another way: by for, read, mapfile, printf -v, arithmetic, declare
        self.submitted: list[MappedText] = []  # batch scripts that a here-document passes to sbatch
        self.submitting: list[ProgramCall] = []  # the calls of sbatch that read them
        self.files: dict[str, MappedText] = {}  # files written by here-documents, which may be run later

    def read(
        self,
        source: MappedText,
        under: tuple[ProgramCall, ...] = (),
        depth: int = 0,
        substitution: bool = False,
        in_function: bool = False,
    ) -> None:
        """Read a script, or the inner one of ``bash -c``; `under` are the calls that run it."""
        lexed = lex(source, min(depth, MAX_DEPTH))
        self.comments += [Comment(offset, text) for offset, text in lexed.comments]
        # quotes may close in an unknown part: eval "set -- $quoted"
        if lexed.trouble and shell.UNRESOLVED_OPEN not in source.text:
            self.trouble.append(lexed.trouble)
        for raw in shell.split_commands(lexed):
            inside = in_function and not raw.in_function
            part = msgspec.structs.replace(raw, in_function=True) if inside else raw
            _CommandReader(self, part, under, depth, substitution).take()


class _CommandReader:
    """Read one command into a `ShellReader`."""

    def __init__(
        self, reading: ShellReader, raw: shell.RawCommand, under: tuple[ProgramCall, ...], depth: int, in_command: bool
    ) -> None:
        self.reading, self.raw, self.under, self.depth, self.in_command = reading, raw, under, depth, in_command
        self.program = "="
        self.redirects = False  # the words of redirections are being read

    def take(self) -> None:
        words = list(self.raw.words)
        first = next((w for w in words if not self._assigns(w)), None)
        self.program = (first.literal or "?") if first else "="
        if self.raw.loop_name:
            self.program = "for"
            self.reading.variables.pop(self.raw.loop_name, None)
            self.reading.named.add(self.raw.loop_name)
        if self.program in NAMING:
            self.reading.named.update(w.literal or "" for w in words)
        if self.program == "let":
            texts = ["".join(part.source.text for part in w.parts) for w in words[1:]]
            self.reading.named.update(match[0] for text in texts if (match := VARIABLE.match(text)))
        for word in words:
            self._note_uses(word)
        self.redirects = True
        for redirect in self.raw.redirects:
            if redirect.target:
                self._note_uses(redirect.target)
        self.redirects = False
        if self.raw.loop_name:
            return
        if self.program in DECLARING and self.program != "local":
            self._declare(
                words, exported=self.program == "export" or any((w.plain or "").startswith("-x") for w in words)
            )
        elif self.program == "local":
            self._declare(words, exported=False)
        elif self.program == "unset":
            for word in words[1:]:
                name = word.literal or ""
                if not name.startswith("-"):
                    self.reading.variables.pop(name, None)
                    gone = Assignment(name, MappedText(""), word.offset, under=self.under, removed=True)
                    self.reading.assignments.append(gone)
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
                self._assign(word, exported)
                continue
            if exported and not name.startswith("-"):
                self.reading.exported.add(name)
            if name in self.reading.variables and exported:
                old = self.reading.variables[name]
                self.reading.variables[name] = ShellVariable(old.source, True, old.items)

    def _assign(self, word: Word, exported: bool, keep: bool = True) -> Assignment | None:
        assignment = self._assigns(word)
        if assignment is None:
            return None
        name, appends = assignment[1], bool(assignment[3])
        head = word.parts[0].source
        rest = (shell.WordPart("text", head.part(assignment.end(), len(head.text)), False), *word.parts[1:])
        source = self._flatten(rest)
        items = None if word.items is None else tuple(self._flatten(item.parts) for item in word.items)
        if items is not None:
            source = (
                shell.join_texts([p for item in items for p in (item, MappedText(" ", [word.offset]))])
                if items
                else MappedText("")
            )
        old = self.reading.variables.get(name)
        if appends and old:
            source = shell.join_texts([old.source, source])
            items = (*old.items, *items) if old.items is not None and items is not None else items
        if len(source.text) > MAX_VALUE:
            source = shell.unresolved_text(name, word.offset)
        exported = exported or (old is not None and old.exported)
        made = Assignment(
            name, source, word.offset, exported, self.under, items, False, self.in_command, self.raw.in_function,
        )  # fmt: skip
        if keep:
            self.reading.assignments.append(made)
            if assignment[2] is None:
                self.reading.variables[name] = ShellVariable(source, exported, items)
        return made

    def _note_uses(self, word: Word) -> None:
        for part in word.parts:
            if part.kind == "variable":
                match = VARIABLE.match(part.source.text.lstrip("!#"))
                if match:
                    rest = part.source.text.lstrip("!#")[match.end() :]
                    self._use(match[1], part.source.where(0), rest)
                    for name in INNER_NAMES.findall(part.source.text[match.end() :]):
                        self._use(name, part.source.where(0), "")
            elif part.kind == "arithmetic":
                text = COMMAND_INSIDE.sub(
                    lambda m: " ".join(f"${n}" for n in INNER_NAMES.findall(m[0])), part.source.text
                )
                changed = re.findall(r"([A-Za-z_][A-Za-z0-9_]*)\s*(?:\+\+|--|[-+*/%]?=(?!=))", text)
                self.reading.named.update(changed)
                for name in changed:
                    self.reading.variables.pop(name, None)  # its value is unknown from here on
                for name in dict.fromkeys(re.findall(r"(?<![0-9#\w])[A-Za-z_][A-Za-z0-9_]*", text)):
                    self._use(name, part.source.where(0), "")
            elif part.kind == "command" and self.depth < MAX_DEPTH:
                inside = self.raw.in_function
                self.reading.read(part.source, self.under, self.depth + 1, substitution=True, in_function=inside)
        for item in word.items or ():
            self._note_uses(item)

    def _use(self, name: str, offset: int, operator: str) -> None:
        raw = self.raw
        use = VariableUse(
            name, offset, self.under, self.program, operator, raw.in_function, raw.in_loop, self.redirects
        )
        self.reading.uses.append(use)

    def _flatten(self, parts: tuple[shell.WordPart, ...]) -> MappedText:
        """Expand the parts as the shell does; unknown values stay unresolved."""
        pieces = [self._piece(part) for part in parts if part.source.text]
        return shell.join_texts(pieces) if pieces else MappedText("")

    def _piece(self, part: shell.WordPart) -> MappedText:
        text = part.source.text
        if part.kind in ("text", "frozen"):
            return part.source
        if part.kind == "command":
            program = re.fullmatch(r"\s*(?:which|command\s+-v|type\s+-p)\s+([\w./-]+)\s*", text)
            if program:
                return part.source.part(*program.span(1))
            return shell.unresolved_text(f"({shell.restore_variables(text)})", part.source.where(0))
        if part.kind == "arithmetic":
            return shell.unresolved_text(f"(({shell.restore_variables(text)}))", part.source.where(0))
        return self._value(text, part.source.where(0))

    def _value(self, text: str, offset: int) -> MappedText:
        """Return what the shell puts in the place of ``${text}``."""
        match = VARIABLE.match(text)
        known = self.reading.variables.get(match[1]) if match else None
        if match is None or known is None:
            return shell.unresolved_text(shell.restore_variables(text), offset)
        index, operator = (match[2] or "")[1:-1], text[match.end() :]
        if operator and not operator.startswith(DEFAULTS):
            return shell.unresolved_text(shell.restore_variables(text), offset)
        if known.items is not None and index not in ("@", "*"):
            first = known.items[0].text if known.items else ""
            # of several commands, the first stands for all
            if index and not index.isdecimal() and not re.search(r"\s", first):
                return shell.unresolved_text(shell.restore_variables(text), offset)
            number = int(index) if index.isdecimal() and len(index) < 6 else 0
            return known.items[number] if number < len(known.items) else MappedText("")
        return known.source

    def _args(self, words: list[Word]) -> list[Argument]:
        args: list[Argument] = []
        for word in words:
            source = self._flatten(word.parts)
            if len(source.text) > MAX_VALUE * 4:
                source = source.part(0, MAX_VALUE)
            parts = [p for p in word.parts if p.kind != "text" or p.source.text]
            single = len(parts) == 1 and parts[0].kind == "variable"
            name = VARIABLE.match(parts[0].source.text) if single else None
            known = self.reading.variables.get(name[1]) if name else None
            if known is not None and known.items is not None and (name and name[2] in ("[@]", "[*]")):
                args += [Argument(item, word.offset, True) for item in known.items]
            elif any(p.kind == "variable" and not p.quoted for p in word.parts):
                split = [p.kind == "variable" and not p.quoted for p in parts for _ in self._piece(p).text]
                fields = _fields(source, split)
                # A program whose name alone is in a variable stands where it is called: $PYTHON train.py
                called = word.offset if not args and len(fields) == 1 and len(words) > 1 else None
                args += [Argument(piece, piece.where(0) if called is None else called) for piece in fields]
            else:
                quoted = any(p.quoted for p in word.parts)
                if source.text or quoted:
                    args.append(Argument(source, word.offset, quoted))
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
        redirects = tuple(
            Redirect(r.token.operator, shell.restore_variables(self._flatten(r.target.parts).text) if r.target else "")
            for r in self.raw.redirects
        )
        raw, shared_prefix = self.raw, tuple(prefix)

        def make(
            program: str, rest: tuple[Argument, ...], at: Argument, under: tuple[ProgramCall, ...], module: bool = False
        ) -> ProgramCall:
            return ProgramCall(
                program, rest, at.offset, under, shared_prefix, redirects, raw.before, raw.after, raw.in_loop,
                raw.in_function, self.in_command, raw.tested, module, at.text, raw.branch,
            )  # fmt: skip

        opened = unwrap_command(args, make, self.under)
        self.reading.calls += opened.calls
        for call in opened.calls:
            if call.program == "env":
                prefix += [_from_env(a, call) for a in call.args if ASSIGNMENT.match(a.text)]
        inner = opened.calls[-1].under if opened.calls else self.under
        self.reading.assignments += [msgspec.structs.replace(a, under=inner) for a in prefix]
        self._inner(opened.script, opened.calls)

    def _inner(self, script: Argument | None, calls: tuple[ProgramCall, ...]) -> None:
        """Read the script of a nested shell: the word after ``-c``, a here-document, or a file written before."""
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
        elif last.program == "sbatch" and document is not None:
            self.reading.submitted.append(document)
            self.reading.submitting.append(last)
        elif document is not None:
            for redirect in last.redirects:
                if redirect.operator in (">", ">|"):
                    self.reading.files[redirect.target] = document
            if last.program == "tee" and last.args:
                self.reading.files[last.args[-1].text] = document
        elif last.program == "eval":
            self._nested(
                shell.join_texts(
                    [p for a in last.args for p in (a.source, MappedText(" ", [a.offset]))] or [MappedText("")]
                ),
                last.under,
            )
        else:
            self._written(last, under)

    def _written(self, last: ProgramCall, under: tuple[ProgramCall, ...]) -> None:
        """Read a script that a here-document wrote and that is now run."""
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

    def _nested(self, source: MappedText, under: tuple[ProgramCall, ...]) -> None:
        before = dict(self.reading.variables)
        self.reading.read(source, under, self.depth + 1, self.in_command)
        self.reading.variables = before

    def _document(self, redirect: shell.RawRedirect) -> MappedText | None:
        body = redirect.token.body
        if body is None or redirect.token.body_quoted:
            return body
        # Expansions happen as between double quotes, but " itself is an ordinary character.
        pieces: list[MappedText] = []
        i = 0
        for match in EXPANDED_IN_DOCUMENT.finditer(body.text):
            pieces.append(body.part(i, match.start()))
            i = match.end()
            inner = match[1] or match[2]
            name = VARIABLE.match(inner) if inner else None
            if name is None:
                pieces.append(body.part(i - 1, i))
                continue
            line = body.text[body.text.rfind("\n", 0, match.start()) + 1 :]
            if not line.startswith("#") or line.startswith(("#SBATCH", "#PBS", "#BSUB")):
                self._use(name[1], body.where(match.start()), inner[name.end() :])
            pieces.append(self._value(inner, body.where(match.start())))
        return shell.join_texts([*pieces, body.part(i, len(body.text))])


def _from_env(arg: Argument, call: ProgramCall) -> Assignment:
    name, _, _ = arg.text.partition("=")
    return Assignment(name, arg.source.part(len(name) + 1, len(arg.source.text)), arg.offset, True, call.under)


def _fields(source: MappedText, split: list[bool]) -> list[MappedText]:
    """Split at blanks of unquoted variables, marked by `split`, as the shell does; unresolved parts stay whole."""
    fields: list[MappedText] = []
    start, inside = None, False
    for i, char in enumerate(source.text):
        inside = (inside or char == shell.UNRESOLVED_OPEN) and char != shell.UNRESOLVED_CLOSE
        blank = char.isspace() and not inside and split[i]
        if not blank and start is None:
            start = i
        if blank and start is not None:
            fields.append(source.part(start, i))
            start = None
    if start is not None:
        fields.append(source.part(start, len(source.text)))
    return fields


NAME_VALUE_LINE = lazy_regex(
    r"[ \t]*(?:(?:export|declare -x|set -x)[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]?=", re.MULTILINE
)


def read_environment(text: str) -> ShellReader:
    """Read lines ``NAME=value``. A quoted value may span lines; in an `env` dump the first line of a value counts."""
    reading = ShellReader()
    offset = 0
    for line in text.splitlines(keepends=True):
        match = NAME_VALUE_LINE.match(line)
        if match:
            raw = line[match.end() :].rstrip("\r\n")
            value, start = _unquoted(raw)
            source = MappedText(value, range(offset + match.end() + start, offset + match.end() + start + len(value)))
            reading.assignments.append(Assignment(match[1], source, offset + match.start(1), True))
        offset += len(line)
    return reading


def _unquoted(raw: str) -> tuple[str, int]:
    value = raw.lstrip()
    start = len(raw) - len(value)
    if value[:1] in ("'", '"'):
        end = value.find(value[0], 1)
        return value[1 : end if end > 0 else len(value)], start + 1
    comment = re.search(r"\s#", value)
    return (value[: comment.start()] if comment else value).rstrip(), start


def read_spec(text: str, spec: Any) -> tuple[ShellReader, list[tuple[str, int]]]:
    """Return the assignments of ``cluster.env``, and the lines of ``cluster.setup`` with their offsets in the file."""
    reading = ShellReader()
    for name, value in spec.cluster.env.items():
        offset = _key(text, name)
        reading.assignments.append(Assignment(name, MappedText(str(value), [offset] * len(str(value))), offset, True))
    lines = [(line, max(0, text.find(line.split("\n")[0]))) for line in spec.cluster.setup]
    return reading, lines


def _key(text: str, name: str) -> int:
    match = re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}['\"]?\s*:", text)
    return match.start() if match else 0


def blank_comments(text: str, comments: list[Comment]) -> str:
    """Return the text with blanks instead of the comments."""
    for start, what in ((c.offset, c.text) for c in comments):
        if text.startswith(what, start):
            text = text[:start] + " " * len(what) + text[start + len(what) :]
    return text


def starts_with_mpi(call: ProgramCall) -> bool:
    return any(c.program in ("mpirun", "mpiexec", "orterun", "horovodrun") for c in call.under)


# --------------------------------------------------------------------------------------- arithmetic

ARITHMETIC = lazy_regex(r"\$\(\((.*)\)\)|\$\[(.*)\]|\$\(\s*expr\s+(.*)\)")
MAX_EXPRESSION = 200
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def calculate(text: str, value_of: Callable[[str], int | None]) -> int | None:
    """Return the value of ``$((...))``, ``$[...]`` or ``$(expr ...)``; None for other forms or unknown values."""
    form = ARITHMETIC.fullmatch(text)
    if form is None:
        return None
    unknown = False

    def number(match: re.Match[str]) -> str:
        nonlocal unknown
        value = value_of(match[1])
        unknown = unknown or value is None
        return str(value)

    expression = (form[1] or form[2] or form[3] or "").replace("\\*", "*")
    expression = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, expression).strip()
    if unknown or len(expression) > MAX_EXPRESSION or not re.fullmatch(r"[\d+\-*/%() ]+", expression):
        return None
    try:
        return _evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, ValueError):
        return None


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError("not an expression of whole numbers")
