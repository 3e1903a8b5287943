"""Rules for what a subshell or a pipe changes and the rest of the script does not get."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, ProgramCall, VariableUse, Violation
from allranks.analysis.lint.rules.dataflow import HARMLESS
from allranks.analysis.lint.rules.exit_codes import shell_flags
from allranks.analysis.lint.shell_tokens import MappedText

LOST_WHY = (
    "The parts of a pipe, ( ... ) and commands in the background run in shells of their own: what they set, load, activate or change is gone "
    "when they end."
)
LOST_CURE = "run it in the script's own shell: { ...; } instead of ( ... ), and no pipe or & behind it"
READ_CURE = 'read A B <<< "$(command)", or done < <(command) behind the loop'
EXIT_WHY = "exit ends only the shell of ( ... ); without set -e the script goes on after the error."
EXIT_CURE = "command || { echo message; exit 1; }"

SETS_UP = re.compile(r"(?:\bactivate|\.?bashrc|(?<![\w-])profile|conda\.sh|mamba\.sh|setvars\.sh|modules?\.sh)\Z")
OWN_LAST_PART = re.compile(r"#!\S*(?:zsh|ksh)|#!\s*/usr/bin/env\s+(?:zsh|ksh)")
COUNTED = re.compile(r"(?:\(\(|let[ \t]+)[ \t]*([A-Za-z_]\w*)(?:\+\+|--|[-+*/]=)")
PARTS = ("|", "|&")


def keeps_last_part(job: JobDescription) -> bool:
    """Return whether the last part of a pipe runs in the script's own shell."""
    return bool(OWN_LAST_PART.match(job.lines.line(1))) or "lastpipe" in job.text


def lost(job: JobDescription) -> Iterator[Violation]:
    """Report activations, modules, folders and variables that end with the shell in which they are set."""
    own = [c for c in job.calls if not c.under and not c.in_substitution]
    for call in own:
        what = sets_up(call)
        if not what or not any(c.offset > call.offset and c.subshell is None for c in own):
            continue
        if call.after == "&":
            yield Violation(call.offset, f"& runs '{what}' in a shell of its own: the script goes on without it")
        elif call.after in PARTS or (call.before in PARTS and not _in_group(job, call) and not keeps_last_part(job)):
            yield Violation(call.offset, f"the pipe runs '{what}' in a shell of its own: the script goes on without it")
        elif call.subshell is not None and job.source.text[call.subshell : call.subshell + 1] == "(":
            if _is_last(job, call) and not call.in_function:
                text = f"'{what}' is the last command in ( ... ): the script goes on without it"
                yield Violation(call.offset, text)
    yield from _lost_values(job)


def sets_up(call: ProgramCall) -> str | None:
    """Return the command if it is only there to change its own shell."""
    words = [a.text for a in call.args]
    first = words[0] if words else ""
    if call.tested or call.program not in ("conda", "mamba", "micromamba", "source", ".", "module", "ml", "cd"):
        return None
    changes = {
        "conda": first == "activate",
        "mamba": first == "activate",
        "micromamba": first == "activate",
        "module": first in ("load", "add", "use", "swap", "restore"),
        "source": SETS_UP.search(first) is not None,
        ".": SETS_UP.search(first) is not None,
        "cd": call.after not in ("&&", "||") and call.before not in PARTS and bool(first),
    }.get(call.program, False)
    return " ".join([call.program, *words])[:60] if changes else None


def _in_group(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the command is the first in a group behind a pipe, ``| { read a; ...; }``."""
    return re.search(r"[{(]\s*\Z", job.text[max(0, call.offset - 40) : call.offset]) is not None


def _is_last(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether nothing follows in the same ( ... ); for cd, whose result may be tested, its end must be that of the line."""
    if call.after not in (")", "\n", ";"):
        return False
    if any(i.subshell == call.subshell and i.offset > call.offset for i in (*job.calls, *job.assignments)):
        return False
    rest = re.match(r"[^()]*\)([^\n]*)", job.text[call.offset :])
    return rest is not None and (call.program != "cd" or re.fullmatch(r"[ \t]*(?:#.*|;[ \t]*)?", rest[1]) is not None)


def _lost_values(job: JobDescription) -> Iterator[Violation]:
    """Report variables that a piped loop, ( ... ) or ``| read`` sets, and that are used behind it."""
    said: set[str] = set()
    piped = not keeps_last_part(job)
    for call in job.calls if piped else ():
        if call.program not in ("read", "mapfile", "readarray") or call.before not in PARTS or call.under:
            continue
        if call.tested or call.in_substitution or call.in_function or call.after in PARTS or _in_group(job, call):
            continue
        names = [a.text for a in call.args if re.fullmatch(r"[A-Za-z_]\w*", a.text)] or ["REPLY"]
        for name in names:
            used = any(u.name == name and u.offset > call.offset for u in job.uses)
            if used and not job.has(name) and name not in said:
                said.add(name)
                text = f"{call.program} behind a pipe sets {name} in a shell of its own: ${name} is empty below"
                yield Violation(call.offset, text, cure=READ_CURE)
    counted = [
        Assignment(found[1], MappedText(""), c.offset, subshell=c.subshell)
        for c in job.calls
        if c.subshell is not None and not c.under and (found := COUNTED.match(job.text, c.offset))
    ]
    for item in [*job.assignments, *counted]:
        if item.subshell is None or item.removed or item.under or item.in_substitution or item.name in said:
            continue
        loop = job.source.text[item.subshell : item.subshell + 1] != "("
        counts = item in counted
        if item.in_function or (loop and not piped) or not _is_needed(job, item, counts):
            continue
        said.add(item.name)
        where = "in a loop behind a pipe" if loop else "in ( ... )"
        cure = READ_CURE if loop else None
        yield Violation(item.offset, f"{item.name} is set {where}: ${item.name} below has its old value", cure=cure)


def _is_needed(job: JobDescription, item: Assignment, counts: bool) -> bool:
    """Return whether the variable is used behind its subshell, and no other value reaches that use."""
    others = [a for a in job.by_name.get(item.name, []) if a.subshell != item.subshell]
    if any(a.offset > item.offset or a.under for a in others) or (item.name in job.reading.named and not counts):
        return False
    use = next((u for u in job.uses if u.name == item.name and _is_behind(job, u, item)), None)
    if use is None or use.operator or use.in_function:
        return False
    return use.program not in HARMLESS - {"[", "[[", "echo", "printf"}


def _is_behind(job: JobDescription, use: VariableUse, item: Assignment) -> bool:
    """Return whether the command that contains the use is one of the script's own shell, below the subshell."""
    outer = (i for i in (*job.calls, *job.assignments) if not i.under and not i.in_substitution)
    last = max((i for i in outer if i.offset <= use.offset), key=lambda i: i.offset, default=None)
    return last is not None and last.subshell is None and last.offset > item.offset


MESSAGES = {"echo", "printf", "exit", "date", "logger", ">&2"}


def exit_inside(job: JobDescription) -> Iterator[Violation]:
    """Report ``command || (echo message; exit 1)``, which does not end the script."""
    if shell_flags(job)[0]:
        return
    for call in job.calls:
        place = call.subshell
        if call.program != "exit" or place is None or call.under or call.in_substitution or call.in_function:
            continue
        if job.source.text[place : place + 1] != "(" or call.after != ")":
            continue
        inside = [c.program for c in job.calls if c.subshell == place]
        above = job.text[max(0, place - 40) : place]
        behind = re.search(r"(?:\|\||&&)\s*(?:\\\n\s*)?\Z", above) or (
            call.branch and re.search(r"(?:\n|;|\bthen)[ \t]*\Z", above)
        )
        rest = re.match(r"[^()\n]*\)[ \t]*(?:\\\n[ \t]*)?(\S*)", job.text[call.offset :])
        if behind and set(inside) <= MESSAGES and rest and rest[1][:2] in ("", "#", ";") and rest[1] != "&":
            if any(c.offset > call.offset and c.subshell is None and not c.in_function for c in job.calls):
                yield Violation(call.offset, "exit in ( ... ) does not end the script", why=EXIT_WHY, cure=EXIT_CURE)
