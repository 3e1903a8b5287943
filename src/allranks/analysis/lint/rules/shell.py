"""Rules for shell syntax that loses a value or a line, scripts for other shells, and placeholders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, Edit, ProgramCall, Violation
from allranks.analysis.lint.rules.commands import without_program
from allranks.analysis.lint.rules.dataflow import MORE_READ
from allranks.utils.text import lazy_regex

BRACKET_WHY = (
    "[ is a command, and ] is its last argument: without the blank it stops with 'missing ]', and the test is false."
)
BRACKET_CURE = "put a blank before ] and around = and =="
LINE_WHY = "The command ends here. What follows runs as another command, and its options are lost."
LINE_CURE = (
    "end every line of the command but the last with a backslash that nothing follows; put comments above the command"
)
ASSIGN_WHY = "An assignment has no blanks: this runs a program of that name."
TYPOGRAPHIC_WHY = "The shell takes it as part of the word: the option or the quotation is not recognised."
TYPOGRAPHIC_CURE = 'type - or " or a blank again; text copied from a web page or a document has others'
EQUALS_WHY = "The option takes = as its value, and the value that was meant becomes the program's name."
NAME_WHY = "The shell expands $NAME first, or says 'not a valid identifier', and goes on."
CSH_WHY = "The variable is not set: an empty value is used later, or that of the environment."
QUOTE_WHY = "An unquoted variable is split at blanks, and its [ ] * are matched against files; if it is empty, the word is missing."
QUOTE_CURE = 'quote it: "$NAME"'
LITERAL_WHY = "Inside of double quotes single quotes are ordinary characters: the value begins and ends with one."
LITERAL_CURE = '"${1:-value}" without the inner quotes'
ARGUMENTS_WHY = '"$@" on a line of its own runs the first argument as a program.'
ARGUMENTS_CURE = 'write the program before it: python train.py "$@"'
UNTERMINATED_WHY = "The shell reads everything up to the next quote as text, and stops with a syntax error at the end."
UNTERMINATED_CURE = "close it"
PLACEHOLDER_WHY = "The file is a template; these parts are to be replaced before it runs."
PLACEHOLDER_CURE = "replace them"


def brackets(job: JobDescription) -> Iterator[Violation]:
    yield from _invalid_names(job)
    for call in job.calls:
        last = call.args[-1].text if call.args else ""
        if call.program == "[" and last != "]":
            glued = last.endswith("]") and len(last) > 1
            text = "the blank before ] is missing" if glued else "[ without ]"
            yield Violation(call.offset, text, fix=_blank_before_bracket(job, call) if glued else ())
        elif re.match(r"(?:if|elif|while)\[|\[\[?(?:-[a-zA-Z]\Z|[$\"])", call.written) and call.program != "[":
            yield Violation(call.offset, "the blank after [ is missing")
        elif call.program == "[" and any(
            r.operator in (">", "<") and re.fullmatch(r"\d+|\$\w+", r.target) for r in call.redirects
        ):
            sign = next(r for r in call.redirects if r.operator in (">", "<"))
            text = f"{sign.operator} in [ ] is a redirection to or from a file called {sign.target}, not a comparison"
            yield Violation(call.offset, text, cure="-gt or -lt")
        elif call.program == "[" and len(call.args) == 2 and re.search(r"[^=!]==?[^=]|.!=[^=]", call.args[0].text):
            yield Violation(call.offset, "the test is always true: blanks around = are missing", severity="warning")
        elif (
            call.args
            and call.args[0].text == "="
            and re.fullmatch(r"[A-Za-z_]\w*", call.written)
            and not call.args[0].quoted
        ):
            yield Violation(
                call.offset,
                f"{call.written} = ... is a command, not an assignment",
                why=ASSIGN_WHY,
                cure=f"{call.written}=value",
            )


EXPORTS = lazy_regex(r"(?m)^[ \t]*export[ \t]+(\$\{?\w+\}?|[A-Za-z_]\w*-[\w-]*)=")


def _invalid_names(job: JobDescription) -> Iterator[Violation]:
    """Report ``export $NAME=value`` and names with a dash."""
    for found in EXPORTS.finditer(job.text) if job.kind == "script" else ():
        if not job.in_comment(found.start(1)):
            name = found[1].strip("${}").replace("-", "_")
            text = f"{found[1]} is not the name of a variable: nothing is set"
            yield Violation(found.start(1), text, why=NAME_WHY, cure=f"export {name}=...")


def _blank_before_bracket(job: JobDescription, call: ProgramCall) -> tuple[Edit, ...]:
    last = call.args[-1]
    end = job.text.find("\n", last.offset)
    word = re.match(r"[^\s;&|]*?\](?=[\s;&|]|\Z)", job.text[last.offset : end if end >= 0 else None])
    if word is None or word[0].count("]") != 1:
        return ()
    place = last.offset + word.end() - 1
    return (Edit(place, place, " "),)


def literal_quotes(job: JobDescription) -> Iterator[Violation]:
    """Report quotes that become part of a value: single quotes of a default inside of double quotes."""
    for found in re.finditer(r"\"[^\"\n]*?(\$\{(\w+):?[-=]'[^'\n\"]*'\})", job.text):
        before = job.text[job.text.rfind("\n", 0, found.start()) + 1 : found.start()]
        alone = re.search(r"(?:^|[;&|])[ \t]*:[ \t]+\Z", before) is not None
        idle = alone and found[2] not in job.reading.exported and sum(u.name == found[2] for u in job.uses) == 1
        if not job.in_comment(found.start(1)):
            empty = re.search(r"'\s*'\}\Z", found[1])  # meant as no value: often the caller sets one
            text = f"the quotes of {found[1]} become part of the value"
            yield Violation(found.start(1), text, severity="note" if empty or idle else None)


TYPOGRAPHIC = {
    "\u2013": "an en dash", "\u2014": "an em dash", "\u2212": "a minus sign", "\u201c": "a curly quote", "\u201d": "a curly quote",
    "\u2018": "a curly quote", "\u2019": "a curly quote", "\u00a0": "a no-break space", "\u200b": "a zero-width space",
}  # fmt: skip
BLANKS = ("\u00a0", "\u200b")
TYPOGRAPHIC_WORD = lazy_regex(
    r"(?:(?<=\s)|(?<=\s-)|(?<==)|^)(?:[\u2013\u2014\u2212][\u2013\u2014\u2212-]*(?=[A-Za-z])|[\u201c\u201d\u2018\u2019](?=\S))|[\u00a0\u200b]",
    re.MULTILINE,
)


def typographic(job: JobDescription) -> Iterator[Violation]:
    """Report dashes, quotes and blanks of a word processor where the shell needs those of ASCII."""
    if job.text.isascii():
        return
    words = [a for c in job.calls if c.program not in ("echo", "printf") for a in c.args]
    inside = {p for a in words if not a.quoted for p in a.source.at} | {p for a in job.assignments for p in a.source.at}
    inside |= {c.offset for c in job.calls if c.written[:1] in TYPOGRAPHIC}  # a dash of an option read as a program
    quoted = {p for a in words if a.quoted for p in a.source.at}
    commands = {job.lines.place(a.offset)[0] for a in words}
    seen: set[int] = set()
    for found in TYPOGRAPHIC_WORD.finditer(job.text):
        line = job.lines.place(found.start())[0]
        directive = job.lines.line(line).startswith("#SBATCH") or (line == 1 and job.text.startswith("#!"))
        blank = (
            found[0] in BLANKS
            and line in commands
            and found.start() not in quoted
            and not job.in_comment(found.start())
        )
        if (
            line not in seen
            and (directive or blank or found.start() in inside)
            and not _in_directive_comment(job, found.start())
        ):
            seen.add(line)
            yield Violation(
                found.start(), f"{TYPOGRAPHIC[found[0][0]]} (U+{ord(found[0][0]):04X}) instead of the ASCII character"
            )


def _in_directive_comment(job: JobDescription, offset: int) -> bool:
    line, column = job.lines.place(offset)
    text = job.lines.line(line)
    return text.startswith("#SBATCH") and "#" in text[7:column]


def equals(job: JobDescription) -> Iterator[Violation]:
    """Report a blank before the = of an option of a launcher."""
    for launch in job.launches:
        for name, option in launch.options.items():
            if (option.value or "").startswith("=") and "=" not in option.arg.text:
                text = f"{option.arg.text} {option.value}: an option has no blank before its ="
                yield Violation(option.arg.offset, text, cure=f"--{name}=value")


CSH_WORDS = {"setenv", "unsetenv", "endif", "foreach", "endsw"}
CSH_SWITCHES = {
    "echo",
    "verbose",
    "noclobber",
    "ignoreeof",
    "noglob",
    "nonomatch",
    "autolist",
    "filec",
    "notify",
    "history",
}
"""Variables of csh that need no value."""
SH_ONLY = lazy_regex(
    r"^[ \t]*(?:export[ \t]|[A-Za-z_]\w*=|fi\b|done\b|esac\b|function\b|\.[ \t]|\[\[?[ \t]|\w+[ \t]*\(\))|\$\(|2>|&>",
    re.MULTILINE,
)
"""What csh does not understand."""


def _may_be_csh(job: JobDescription) -> bool:
    """Return whether nothing names a shell, and all lines are csh, too: PBS runs such a script with the user's login shell."""
    named = job.text.startswith("#!") or re.search(r"(?m)^#(?:PBS|\$)[ \t]+-S\b", job.text)
    return job.pbs is not None and not named and SH_ONLY.search(job.code) is None


def csh(job: JobDescription) -> Iterator[Violation]:
    """Report commands of csh: in sh and bash ``set NAME = value`` sets the positional parameters."""
    if _may_be_csh(job):
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program == "set" and words and not call.args[0].quoted:
            spaced = re.fullmatch(r"[A-Za-z_]\w*", words[0]) and words[1:2] and words[1].startswith("=")
            glued = re.match(r"[A-Za-z_]\w*=", words[0])
            if spaced or glued:
                name = words[0].partition("=")[0]
                yield Violation(call.offset, f"set {name} = ... is csh: here it sets $1, and {name} stays as it was")
            elif len(words) == 1 and words[0] in CSH_SWITCHES and not re.search(r"\$\{?[1@*#]", job.code):
                cure = "set -x" if words[0] == "echo" else "set -o <option>"
                text, why = (
                    f"set {words[0]} is csh: here it only sets $1",
                    "The word becomes the first argument of the script.",
                )
                yield Violation(call.offset, text, why=why, cure=cure, severity="warning")
        elif call.program in CSH_WORDS and not re.search(rf"(?m)^\s*(?:function\s+)?{call.program}\s*\(\)", job.text):
            yield Violation(call.offset, f"{call.program} is csh: sh and bash have no such command")


def runs_arguments(job: JobDescription) -> Iterator[Violation]:
    """Report a command line that is only the script's arguments, if these are values that the script reads by number."""
    numbered = any(u.name in ("1", "2") for u in job.uses) or re.search(r"=\"?\$\{?1\b", job.text)
    if not numbered or any(c.program in ("shift", "getopts") for c in job.calls):
        return
    for call in job.calls:
        if (
            call.written in ("$@", "$*", "${@}")
            and not call.under
            and not call.in_function
            and not call.in_substitution
        ):
            yield Violation(call.offset, "the first argument runs as a command, but the script reads it as a value")
            return


FILLED_IN = lazy_regex(r"<%|\{%|%\(\w+\)[ds]|£[\w({]|\$\$\(")
"""Marks of a template, whose lines a program replaces before a shell reads them."""


def unterminated(job: JobDescription) -> Iterator[Violation]:
    """Report where a quote or a here-document is not closed: the shell refuses the script, or reads it differently."""
    for offset, what in job.reading.trouble:
        start = offset
        if FILLED_IN.search(job.line_of(offset)):
            continue
        if what.startswith('the closing "'):
            start = _first_open_quote(job, offset)
        if what.startswith("the here-document's end"):
            why = "The here-document takes all lines to the end of the file; bash only warns."
            yield Violation(start, what, why=why, severity="warning")
        else:
            yield Violation(start, what)
    for offset, what in job.reading.unbalanced:
        if FILLED_IN.search(job.line_of(offset)):
            continue
        yield Violation(
            offset, what, why="bash stops with a syntax error when it reads this place; what stands before it has run."
        )


def _first_open_quote(job: JobDescription, last: int) -> int:
    """Return the quote that is probably not closed: its text goes on to a later line, up to the quote that opens another value."""
    places = [m.start() for m in re.finditer(r'(?<!\\)"', job.text[: last + 1]) if not job.in_comment(m.start())]
    for start, end in zip(places[::2], places[1::2], strict=False):
        inside = job.text[start + 1 : end]
        if "\n" in inside and re.search(r"\n.*\w=\Z", inside):
            return start
    return last


def continued(job: JobDescription) -> Iterator[Violation]:
    """Report commands that end earlier than their writer meant: after a comment or a blank behind the backslash."""
    reported: set[int] = set()
    for comment in job.reading.comments:
        line, column = job.lines.place(comment.offset)
        if line == 1 or job.lines.line(line)[: column - 1].strip():
            continue
        above = job.lines.line(line - 1)
        if not above.endswith("\\") or above.lstrip().startswith("#"):
            continue
        after = _next_line(job, line)
        if after and re.match(r"\s*-{1,2}[A-Za-z]|\s+\S", job.lines.line(after)) and _continues(job, line):
            reported.add(after)
            yield Violation(comment.offset, f"the comment ends the command: line {after} is not part of it")
    for call in job.calls:
        for arg in call.args:
            place = arg.source.where(0)
            if arg.text.strip() or not arg.text or job.text[place - 1 : place] != "\\":
                continue
            line = job.lines.place(place)[0]
            if not job.lines.line(line)[job.lines.place(place)[1] - 1 :].split("#")[0].strip():
                reported.add(line + 1)
                if job.text[place : place + 1] == "\r":
                    continue  # dos-line-breaks says it once for the file
                yield Violation(
                    place - 1, "a blank follows the backslash, so the command ends here", fix=_strip(job, line, place)
                )
    for call in job.calls:
        line, column = job.lines.place(call.offset)
        if job.lines.line(line)[: column - 1].strip():
            continue  # command -v, exec -a
        if (
            (not call.under or (call.under[-1].program in SHELLS and "\\\r\n" not in job.text))
            and re.match(r"--?[A-Za-z][\w-]*", call.written)
            and line not in reported
            and not call.in_substitution
        ):
            above = _line_above(job, line)
            yield Violation(
                above if above is not None else call.offset,
                f"no backslash at the end of the line: {call.written.split('=')[0]} in line {line} runs as a command",
            )
            reported.add(line)
    yield from _split_values(job)
    yield from _swallowed(job)
    yield from without_program(job)


SWALLOWED = {
    "echo", "wait", "srun", "export", "cd", "python", "python3", "torchrun", "exit", "module", "source", "conda", "mkdir", "date", "fi", "done",
}  # fmt: skip


def _swallowed(job: JobDescription) -> Iterator[Violation]:
    """Report a command that became an argument, because the line above it ends with a backslash."""
    for call in job.work_calls:
        for before, arg in pairwise(call.args):
            if arg.text not in SWALLOWED or arg.quoted or arg.source.where(0) != arg.offset:
                continue
            line, column = job.lines.place(arg.offset)
            complete = not before.text.startswith("-") or "=" in before.text
            if line > 1 and complete and not job.lines.line(line)[: column - 1].strip():
                if job.lines.line(line - 1).endswith("\\") and any(a.text.endswith(".py") for a in call.args):
                    text = f"the line ends with a backslash: '{arg.text}' in line {line} becomes an argument"
                    yield Violation(job.lines.start(line - 1), text)
                    return


def _line_above(job: JobDescription, line: int) -> int | None:
    """Return where the nearest line above that has text begins; None if it is a comment."""
    while line > 1:
        line -= 1
        text = job.lines.line(line)
        if text.lstrip().startswith("#"):
            return None
        if text.strip():
            return job.lines.start(line) + len(text) - len(text.lstrip())
    return None


PATH_LIST = lazy_regex(r"(?!\w+://)[^\s=;|&]*/[^\s=;|&]*:[/$~][^\s;|&]*\Z")


def _split_values(job: JobDescription) -> Iterator[Violation]:
    """Report a list of paths that runs as a command: the rest of a value that was broken over two lines."""
    for call in job.calls:
        line, column = job.lines.place(call.offset)
        if line == 1 or call.args or job.lines.line(line)[: column - 1].strip():
            continue
        if not PATH_LIST.match(call.written):
            continue
        above = job.lines.line(line - 1)
        named = re.match(r"\s*(?:export\s+)?([A-Za-z_]\w*)=", above)
        if named and not above.rstrip().endswith("\\"):
            yield Violation(
                call.offset,
                f"the value of {named[1]} ends in line {line - 1}; its rest runs as a command",
                cure="write the value in one line",
            )


def _next_line(job: JobDescription, line: int) -> int | None:
    total = job.text.count("\n") + 1
    number = line + 1
    while number <= total and job.lines.line(number).lstrip().startswith("#"):
        number += 1
    return number if number <= total and job.lines.line(number).strip() else None


def _continues(job: JobDescription, line: int) -> bool:
    """Return whether the command above has no complete program yet, or options follow: else the comment is its end."""
    after = _next_line(job, line)
    text = job.lines.line(after).strip() if after else ""
    return (
        text.startswith("-")
        or job.lines.line(line).endswith("\\")
        or bool(re.match(r"\S+\.py\b|\$\{?\w+\}?\s*\\?$", text))
        or bool(after and GOES_ON.match(text) and _is_indented(job, line, after))
    )


GOES_ON = lazy_regex(
    r"[\"']?\$\{?\w+\}?[\"']?(?:\s|$)|\S+\.(?:sif|simg|sqsh|sh)\b|(?:ba)?sh\s+-|python[\d.]*\s|torchrun\s|accelerate\s"
)
"""An image, a script or a program."""


def _is_indented(job: JobDescription, comment: int, after: int) -> bool:
    """Return whether the line below a comment is indented as the lines of the command above, and deeper than its first line."""
    first = comment - 1
    while first > 1 and (job.lines.line(first - 1).endswith("\\") or job.lines.line(first).lstrip().startswith("#")):
        first -= 1

    def depth(number: int) -> int:
        text = job.lines.line(number)
        return len(text) - len(text.lstrip())

    return first < comment - 1 and depth(after) == depth(comment - 1) > depth(first)


def _strip(job: JobDescription, line: int, place: int) -> tuple[Edit, ...]:
    column = job.lines.place(place)[1]
    rest = job.lines.line(line)[column - 1 :]
    return () if rest.strip() else (Edit(place, place + len(rest), ""),)


def unquoted(job: JobDescription) -> Iterator[Violation]:
    for call in job.calls:
        for before, arg in zip((None, *call.args), call.args, strict=False):
            if not arg.is_open:
                continue
            name = _name_at(job, arg)
            if name is None:
                continue
            start = job.text.rindex("$", 0, arg.offset + 1)
            fix = (Edit(start, start + len(name), f'"{name}"'),)
            if call.program == "[" and before is not None and before.text == "-n" and len(call.args) == 3:
                always_set = job.is_batch and name.strip("${}") in ("SLURM_JOB_ID", "SLURM_JOBID")
                severity = "note" if always_set else "warning"
                text = f"[ -n {name} ] is true if the variable is empty"
                yield Violation(arg.offset, text, severity=severity, fix=fix)
            elif call.program == "scontrol" and "NODELIST" in name:
                yield Violation(arg.offset, f"{name} is not quoted", fix=fix)


def _name_at(job: JobDescription, arg: Argument) -> str | None:
    start = job.text.rfind("$", max(0, arg.offset - 2), arg.offset + 1)  # the word's offset is that of the name
    found = (
        re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})(?=[\s;)|]|\Z)").match(job.text, start) if start > 0 else None
    )
    return found[0] if found and job.text[start - 1].isspace() else None


# ------------------------------------------------------------------------------- placeholders


def placeholder(job: JobDescription) -> Iterator[Violation]:
    """Report all placeholders once, at the first one."""
    if job.placeholders:
        lines: dict[str, int] = {}
        for offset, text in job.placeholders:
            lines.setdefault(text, job.lines.place(offset)[0])
        shown = ", ".join(f"{text} (line {line})" for text, line in list(lines.items())[:6])
        more = f" and {len(lines) - 6} more" if len(lines) > 6 else ""
        yield Violation(job.placeholders[0][0], f"to be filled in: {shown}{more}")


# -------------------------------------------------------------------------------------- assignments

COLON_NAME = lazy_regex(r"([A-Z][A-Z0-9_]+):[\w./-]*")


def colon_assignment(job: JobDescription) -> Iterator[Violation]:
    """Report ``OMP_NUM_THREADS:4`` as a command."""
    for call in job.calls:
        found = COLON_NAME.fullmatch(call.written)
        if found and not call.args and not call.in_substitution and MORE_READ.match(found[1]):
            yield Violation(
                call.offset,
                f"{call.written} runs as a command: a value is assigned with =",
                cure=f"export {found[1]}=...",
            )


LIBRARY_NAME = lazy_regex(
    r"(?:NCCL|CUDA|TORCH|OMP|MKL|MASTER|SLURM|WANDB|HF|PYTHON|LD|GLOO|TF|TRANSFORMERS|ROCR|HIP)_?[A-Z_]*"
)
UNSET_WHY = "unset takes names: anything else is 'not a valid identifier', and the variable keeps its value."


def unset_value(job: JobDescription) -> Iterator[Violation]:
    """Report ``unset NAME=value`` and ``unset $NAME``."""
    for item in job.assignments:
        if item.removed and (found := re.match(r"([A-Za-z_]\w*)=", item.name)):
            text = f"unset {item.name[:60]}: nothing is unset"
            yield Violation(item.offset, text, why=UNSET_WHY, cure=f"unset {found[1]}")
    for found in re.finditer(r"(?m)^[ \t]*unset[ \t]+(?:-v[ \t]+)?(\$\{?(\w+)\}?)(?=[ \t]*(?:$|#|;))", job.text):
        if LIBRARY_NAME.fullmatch(found[2]) and not job.in_comment(found.start(1)) and not _is_set_plain(job, found[2]):
            text = f"unset {found[1]} unsets the variable that the value of {found[2]} names"
            yield Violation(found.start(1), text, why=UNSET_WHY, cure=f"unset {found[2]}")


def _is_set_plain(job: JobDescription, name: str) -> bool:
    return any(re.fullmatch(r"[A-Za-z_]\w*", a.value) for a in job.by_name.get(name, ()))


# ------------------------------------------------------------------------------------- other shells


ZSH_WHY = "zsh refuses a command with a pattern that matches no file ('no matches found'), and does not run it."
ZSH_SPLIT_WHY = "zsh does not split the value of a variable at blanks: the program gets all options as one argument."
ZSH_EQUALS_WHY = "zsh takes ==, as a word, for =NAME, the path of a command: '= not found'."
SH_WHY = "On Debian and Ubuntu /bin/sh is dash, which does not know it and gives no error."
ZSH = lazy_regex(r"#!.*\bzsh\b")
SH = lazy_regex(r"#!\s*(?:/usr)?/bin/(?:env\s+)?(?:sh|dash)(?:\s|$)")
PATTERN = lazy_regex(r"\w\[[\w,-]+\]|\w\?(?:\w|\Z)")
IN_SH: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (lazy_regex(r"(?m)(?:^|[ \t])(?<![<>&])&>{1,2}[ \t]*[\w./$\"]"), "&> runs the command in the background, and empties the file", "> file 2>&1"),
    (lazy_regex(r"(?m)^[ \t]*for[ \t]+\w+[ \t]+in[ \t]+\{\d+\.\.\d+\}"), "{a..b} is a text: the loop runs once", "$(seq a b)"),
)  # fmt: skip


def other_shell(job: JobDescription) -> Iterator[Violation]:
    """Report what zsh and sh read in another way than bash does."""
    first = job.lines.line(1)
    if ZSH.match(first):
        yield from _zsh(job)
        return
    if SH.match(first):
        yield from _sourced_by_name(job)
    if SH.match(first) and not job.is_job and not job.runs_unattended and not job.placeholders:
        for use in job.uses:
            if use.name == "RANDOM" and not job.has("RANDOM") and not use.under:
                yield Violation(
                    use.offset, "$RANDOM is empty in sh: the value is always the same", why=SH_WHY, cure="#!/bin/bash"
                )
                break
        for pattern, what, cure in IN_SH:
            found = pattern.search(job.text)
            if found and not job.in_comment(found.end() - 1) and not job.in_quotes(found.end() - 1):
                yield Violation(found.end() - 1, f"{what} in sh", why=SH_WHY, cure=f"#!/bin/bash, or {cure}")


SOURCED_WHY = (
    "sh looks for a name without a slash in PATH only, not in the current folder, and the script ends there: '.: file not found'. "
    "dash, the sh of Debian and Ubuntu, has no source at all."
)
HAS_CURRENT_FOLDER = lazy_regex(r"PATH=\S*(?:(?<![\w./])\.(?=[:\"'\s]|$)|\$\{?PWD|\$\(pwd\)|`pwd`)", re.MULTILINE)


def _sourced_by_name(job: JobDescription) -> Iterator[Violation]:
    """Report ``. settings.sh`` in a script of sh."""
    for call in job.calls:
        name = call.args[0].text if call.args else ""
        if (
            call.program not in (".", "source")
            or call.under
            or not re.fullmatch(r"[\w-]+\.(?:sh|bash|env|rc|conf|cfg)", name)
        ):
            continue
        if not HAS_CURRENT_FOLDER.search(job.text):
            text = f"sh does not find {name} in the current folder"
            yield Violation(call.offset, text, why=SOURCED_WHY, cure=f". ./{name}, or #!/bin/bash")
            return


def _zsh(job: JobDescription) -> Iterator[Violation]:
    lenient = re.search(
        r"(?i)no_?nomatch|null_?glob|csh_?null|\bemulate\b|no_?glob|shwordsplit|sh_word_split", job.text
    )
    if lenient or (job.in_comment(0) and not ZSH.match(job.lines.line(1))):
        return
    said: set[str] = set()
    for call in job.calls:
        if call.in_substitution or (call.under and any(c.program in ("bash", "sh") for c in call.under)):
            continue
        if (
            call.program in ("[", "test")
            and any(a.text == "==" and not a.quoted for a in call.args)
            and "==" not in said
        ):
            said.add("==")
            yield Violation(
                call.offset,
                "[ ... == ... ] is an error in zsh",
                why=ZSH_EQUALS_WHY,
                cure="= in [ ], or [[ ... == ... ]]",
            )
        for arg in (
            call.args if call.program not in ("[", "[[", "test", "ls", "rm", "unset", "noglob", "declare") else ()
        ):
            place = arg.source.where(0)
            plain = arg.text == arg.source.text and job.text[place : place + len(arg.text)] == arg.text
            if plain and not arg.quoted and PATTERN.search(arg.text) and "[" not in said:
                said.add("[")
                text = f"{arg.text[:60]} is a pattern for names of files in zsh"
                yield Violation(place, text, why=ZSH_WHY, cure=f"'{arg.text[:60]}' in quotes")
    for use in job.uses:
        items = job.by_name.get(use.name, [])
        options = [
            a for a in items if re.match(r"\s*--?[A-Za-z][\w-]*[= ]\S+\s+--?[A-Za-z]", a.value) and a.items is None
        ]
        if use.quoted or use.operator or use.index or not options or len(options) < len(items) or use.under:
            continue
        if use.program not in ("echo", "printf", "=", "?", "eval", "export") and job.text[
            use.offset - 1 : use.offset
        ] not in ("=", "~"):
            yield Violation(
                use.offset,
                f"${use.name} is one argument in zsh",
                why=ZSH_SPLIT_WHY,
                cure=f"${{={use.name}}}, or an array",
            )
            return
