"""Rules for places that the grammar of the shell does not allow: blocks without a command, operators without one, and redirections without a file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules.shell import FILLED_IN
from allranks.utils.text import lazy_regex

GRAMMAR_WHY = "bash stops with a syntax error when it reads this place; what stands before it has run."
BASH = lazy_regex(r"#!\s*\S*(?:/|env\s+)(?:ba|da|k)?sh\b|(?!#!)")
OTHER_ELSE = lazy_regex(r"(?m)^[ \t]*(elseif|elsif)[ \t]+\[[^\n]*\bthen\b")
EMPTY_BLOCK = lazy_regex(
    r"(?m)^[ \t]*(?:(?:if|elif|while|until|for)\b[^\n]*[;\s](then|do)|(then|do|else))[ \t]*(?:#[^\n]*)?\n((?:[ \t]*(?:#[^\n]*)?\n)*)[ \t]*(fi|done|else|elif)\b"
)
NO_CONDITION = lazy_regex(r"(?m)^[ \t]*(elif)[ \t]*(?:#[^\n]*)?\n(?=[^\n]*)")
EMPTY_FUNCTION = lazy_regex(
    r"(?m)^[ \t]*(?:function[ \t]+)?[\w-]+[ \t]*\(\)[ \t]*\{[ \t]*\n((?:[ \t]*(?:#[^\n]*)?\n)*)[ \t]*\}"
)
DOUBLE = lazy_regex(
    r"(?m)(?<![&|;\\<>])(&[ \t]*;(?!;)|;[ \t]*;(?![;&])|;[ \t]*(?:&&|\|\|)|(?:&&|\|\|)[ \t]*;|&[ \t]+(?:&&|\|\|)|\|[ \t]*;)"
)
LEADING = lazy_regex(r"(?m)^[ \t]*(&&|\|\||\|(?![|&])|;(?!;))(?![&|;])")
THREE = lazy_regex(r"(?<=[\s\w\"'}])>>>(?!>)[ \t]*[\w./\"$-]")


def syntax(job: JobDescription) -> Iterator[Violation]:
    """Report what bash refuses: an empty block, two operators in a row, and an operator at the start of a line."""
    if job.kind != "script" or not (job.is_job or job.text.startswith("#!")) or not BASH.match(job.text):
        return
    if (
        job.reading.trouble
        or job.reading.unbalanced
        or (job.source.text is not job.text and len(job.source.text) != len(job.text))
    ):
        return
    if FILLED_IN.search(job.text) or "{{" in job.text or "extglob" in job.text:
        return
    code = without_texts(job)
    for found in OTHER_ELSE.finditer(code):
        text = f"{found[1]} is no word of the shell: then, behind it, is a syntax error"
        yield Violation(found.start(1), text, why=GRAMMAR_WHY, cure="elif")
        return
    yield from _unfinished(job, code)
    yield from _closing_words(code)
    yield from _extended_patterns(job, code)
    for found in EMPTY_BLOCK.finditer(code):
        word = found[1] or found[2]
        place = found.start(4)
        if word == "else" and found[4] in ("else", "elif", "done"):
            continue
        yield Violation(
            place,
            f"{word} has no command: {found[4]} follows at once",
            why=GRAMMAR_WHY,
            cure="a command, or : which does nothing",
        )
        return
    for found in EMPTY_FUNCTION.finditer(code):
        yield Violation(
            found.end() - 1, "the function has no command", why=GRAMMAR_WHY, cure="a command, or : which does nothing"
        )
        return
    for pattern, what in ((DOUBLE, "two operators with no command between them"), (THREE, ">>> is no redirection")):
        for found in pattern.finditer(code):
            if pattern is DOUBLE and (
                re.search(r"\bcase\b|\bfor[ \t]*\(\(", code[: found.start()]) and found[1].replace(" ", "") == ";;"
            ):
                continue
            yield Violation(
                found.start(),
                f"{what}: {found[0].strip()[:12]}" if pattern is DOUBLE else what,
                why=GRAMMAR_WHY,
                cure=">>" if pattern is THREE else "one operator",
            )
            return
    for found in LEADING.finditer(code):
        before = code[: found.start()].rstrip(" \t\n")
        if (
            job.text[max(0, found.start() - 2) : found.start()].endswith("\\\n")
            or before.endswith(("\\", "|", "&&"))
            or not before
        ):
            continue
        line = job.lines.place(found.start())[0]
        above = next(
            (job.lines.line(n) for n in range(line - 1, 0, -1) if not re.match(r"[ \t]*#", job.lines.line(n))), ""
        )
        if above.rstrip().endswith("\\"):
            continue  # comments between the parts: another rule
        yield Violation(
            found.start(1),
            f"{found[1]} stands at the start of a command",
            why=GRAMMAR_WHY,
            cure="a backslash at the end of the line before it",
        )
        return


ON_ONE_LINE = lazy_regex(
    r"(?m)^[ \t]*(?:function[ \t]+[\w-]+(?:[ \t]*\(\))?|[\w-]+[ \t]*\(\))[ \t]*\{[ \t]([^\n{}#]*[^\s{};&|)\]#])[ \t]+(\})[ \t]*$"
)
BEFORE_BRACE = lazy_regex(r"(?:\A|[\s;])(?:fi|done|esac)\Z")
BRACE_WHY = (
    "} closes a block only where a command can begin. Here it is one more argument: the function goes on, "
    "and bash stops with a syntax error at the end of the script."
)


def _closing_words(code: str) -> Iterator[Violation]:
    """Report ``run() { python x.py }``, whose last command has no ``;``."""
    text = re.sub(r"\$\{[^{}\n]*\}", lambda found: "_" * len(found[0]), code)
    for found in ON_ONE_LINE.finditer(text):
        if not BEFORE_BRACE.search(found[1]):
            yield Violation(
                found.start(2), "no ; before }: it is an argument of the command", why=BRACE_WHY, cure="; }"
            )
            return


EXTENDED = lazy_regex(r"(?<=[ \t\w/.\"'_}])([!@?*+])\([^()\n]*\)")
EXTENDED_WHY = "bash knows such patterns in scripts only after shopt -s extglob: it stops with a syntax error at the (."
STARTS_COMMAND = lazy_regex(
    r"(?:\A|[\n;&|({]|\b(?:if|elif|while|until|then|do|else|time|case|in|for)|!)[ \t]*(?:\w+=\S*[ \t]+)*\Z"
)
CALCULATES = lazy_regex(r"(?:\A|[\s;&|])(?:let|expr|echo|printf|declare|local|typeset|readonly|export)[ \t][^\n;&|]*\Z")


def _extended_patterns(job: JobDescription, code: str) -> Iterator[Violation]:
    """Report patterns such as ``!(*.err)`` in a script that does not turn them on."""
    for found in EXTENDED.finditer(code):
        line = code.rfind("\n", 0, found.start()) + 1
        before = code[line : found.start()]
        if STARTS_COMMAND.search(before) or CALCULATES.search(before) or not re.search(r"\w[ \t]", before):
            continue
        text = f"{job.text[found.start() : found.end()][:30]} is a pattern that bash does not know without extglob"
        yield Violation(found.start(), text, why=EXTENDED_WHY, cure="shopt -s extglob on a line of its own above")
        return


HEADS = lazy_regex(r"(?m)^[ \t]*(if|elif|for|while|until)\b(?!=)[ \t]*(?=[^\s=])[^\n]*")
OF_HEAD = {"if": "then", "elif": "then", "for": "do", "while": "do", "until": "do"}
ENDS = {
    "then": lazy_regex(r"(?m)\bthen\b|^[ \t]*(?:fi|elif|else|done)\b"),
    "do": lazy_regex(r"(?m)(?:\bdo\b|\{)|^[ \t]*(?:done|fi|else|elif)\b"),
}


def _unfinished(job: JobDescription, code: str) -> Iterator[Violation]:
    """Report ``if`` without ``then``, ``for`` without ``do``, and an operator at the end of the script."""
    for found in HEADS.finditer(code):
        needed = OF_HEAD[found[1]]
        end = ENDS[needed].search(code, found.end(1))
        if end is None or end[0].strip() not in ("then", "do", "{"):
            text = f"the {needed} of this {found[1]} is missing"
            yield Violation(found.start(1), text, why=GRAMMAR_WHY, cure=f"{found[1]} ...; {needed}")
            return
    end = re.search(r"(\|\|?|&&)\s*\Z", code)
    if end is not None:
        yield Violation(
            end.start(), f"nothing follows {end[1]} at the end of the script", why=GRAMMAR_WHY, cure="remove it"
        )


def without_texts(job: JobDescription) -> str:
    """Return the script with blanks in the place of comments, quoted texts and here-documents."""
    text = list(job.code)
    for start, end in _texts(job):
        for i in range(start, min(end, len(text))):
            if text[i] != "\n":
                text[i] = "_"
    return "".join(text)


HEREDOC = lazy_regex(r"(?<!<)<<-?[ \t]*([\"']?)\\?([^\s\"'`;&|<>()$\\]+)\1")


def _texts(job: JobDescription) -> Iterator[tuple[int, int]]:
    """Yield where quoted texts, parameter expansions, arithmetic and here-documents begin and end."""
    code = job.code
    i = 0
    pending: list[str] = []
    while i < len(code):
        c = code[i]
        if c == "\\":
            i += 2
        elif c == "\n":
            i += 1
            while pending:
                end = re.compile(rf"(?m)^[ \t]*{re.escape(pending.pop(0))}[ \t]*$").search(code, i)
                stop = end.end() if end else len(code)
                yield i, stop
                i = stop
        elif c in "\"'":
            end = _closing(code, i)
            yield i, end
            i = end
        elif code.startswith(("$((", "((", "[["), i):
            closer = "]]" if code.startswith("[[", i) else "))"
            stop = code.find(closer, i)
            stop = stop + 2 if stop >= 0 and "\n\n" not in code[i:stop] else i + 2
            yield i, stop
            i = stop
        elif (found := HEREDOC.match(code, i)) is not None:
            pending.append(found[2])
            yield i, found.end()
            i = found.end()
        else:
            i += 1


def _closing(code: str, start: int) -> int:
    quote, i = code[start], start + 1
    while i < len(code):
        if quote == '"' and code[i] == "\\":
            i += 2
            continue
        if quote == '"' and code.startswith("$(", i):
            depth, i = 1, i + 2
            while i < len(code) and depth:
                depth += {"(": 1, ")": -1}.get(code[i], 0)
                i += 1
            continue
        if code[i] == quote:
            return i + 1
        i += 1
    return len(code)
