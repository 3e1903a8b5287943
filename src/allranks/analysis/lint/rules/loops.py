"""Rules for loops, arrays, conditions and deletions that do something else than their writer meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN

FOR = re.compile(r"(?m)^[ \t]*for[ \t]+([A-Za-z_]\w*)[ \t]+in[ \t]+([^\n;#]+?)[ \t]*(?:;|\\?$|#)")
BRACES_WHY = "bash expands {a..b} before variables: the loop runs once, with the text."
BRACES_CURE = 'for i in $(seq 0 "$LAST"); do, or for ((i = 0; i < N; i++)); do'
FIRST_WHY = "$NAME of an array is its first element: the others are never used."
COMMA_WHY = "The comma becomes part of the word, and the program gets it."
SAME_WHY = "Every round runs the same command: nothing that depends on the loop reaches the program."
COUNTERS = re.compile(
    r"_+|[ijknxt]|(?:run|trial|rep|repeat|iter|attempt|round|retry|restart|try|time|count|idx|num|step)\w*",
    re.IGNORECASE,
)


def loops(job: JobDescription) -> Iterator[Violation]:
    """Report loops over a text, over the first element of an array, and loops whose variable nothing uses."""
    if job.kind != "script":
        return
    for found in FOR.finditer(job.text):
        if job.in_comment(found.start(1)) or not _is_code(job, found.start(1)):
            continue
        words = found[2].split()
        if (
            "$(" not in re.sub(r"\$\(\(", "", found[2])
            and re.search(r"\{[^{}]*\$[^{}]*\.\.|\.\.\s*\$", found[2])
            and _is_bash(job)
        ):
            yield Violation(found.start(2), f"{found[2].strip()} is not expanded", why=BRACES_WHY, cure=BRACES_CURE)
        elif (
            len(words) > 1
            and all(re.fullmatch(r"[\w.+-]+,", w) for w in words[:-1])
            and re.fullmatch(r"[\w.+-]+", words[-1])
        ):
            cure = f"for {found[1]} in {' '.join(w.rstrip(',') for w in words)}; do"
            yield Violation(
                found.start(2), f"the commas become part of the words: {words[0]!r}", why=COMMA_WHY, cure=cure
            )
        elif re.match(r"\[\w", words[0]) and re.search(r"\w\]\Z", words[-1]) and len(words) > 1:
            cure = f"for {found[1]} in {found[2].strip('[]')}; do"
            yield Violation(
                found.start(2), f"the brackets become part of the words: {words[0]!r}", why=COMMA_WHY, cure=cure
            )
        else:
            yield from _unused(job, found, words)
    yield from _first_only(job)


def _is_code(job: JobDescription, offset: int) -> bool:
    """Return whether the loop is one of the script, and not of a text that it writes or prints."""
    line = job.lines.place(offset)[0]
    return any(c.in_loop and job.lines.place(c.offset)[0] >= line for c in job.calls)


def _is_bash(job: JobDescription) -> bool:
    return re.match(r"#!.*\b(?:ba|da)?sh\b", job.lines.line(1)) is not None and "zsh" not in job.lines.line(1)


def _unused(job: JobDescription, found: re.Match[str], words: list[str]) -> Iterator[Violation]:
    name = found[1]
    literal = len(words) > 1 and all(re.fullmatch(r"[\w.+/-]+", w) for w in words) and len(set(words)) == len(words)
    if not literal or COUNTERS.fullmatch(name) or _mentions(job.text[found.end() :], name):
        return
    end = re.compile(r"(?m)^[ \t]*done\b").search(job.text, found.end())
    if end is None or re.search(r"(?m)^[ \t]*(?:for|while|until)\b", job.text[found.end() : end.start()]):
        return
    inside = [c for c in job.work if found.end() < c.offset < end.start()]
    whole = [c for c in job.calls if found.end() < c.offset < end.start() and c.in_loop]
    if inside and all(c in inside or c.program in ("echo", "date", "printf") or c.under for c in whole):
        yield Violation(
            found.start(1), f"nothing in the loop uses ${name}", why=SAME_WHY, cure=f"pass ${name} to the program"
        )


def _mentions(text: str, name: str) -> bool:
    """Return whether a text uses a variable: expanded, in arithmetic, or assigned."""
    return (
        re.search(rf"\$\{{?[!#]?{name}\b|\(\([^\n]*\b{name}\b|(?<![-\w]){name}(?:\+\+|--|[-+*/%]?=)", text) is not None
    )


def _first_only(job: JobDescription) -> Iterator[Violation]:
    """Report ``$NAME`` of an array in a loop, or as an argument of the program."""
    arrays = {
        name: items
        for name, items in job.by_name.items()
        if all(a.items is not None for a in items) and max(len(a.items or ()) for a in items) > 1
    }
    if not arrays:
        return
    said: set[str] = set()
    for use in job.uses:
        items = arrays.get(use.name)
        if not items or use.index or use.operator or use.name in said | job.reading.named or use.under:
            continue
        if items[0].offset > use.offset or job.text[use.offset - 1 : use.offset] in "#!" or _is_zsh(job):
            continue
        started = PYTHON.match(use.program) is not None or use.program in LAUNCHERS
        if use.program == "for" or started:
            said.add(use.name)
            count = len(items[0].items or ())
            text = f"${use.name} is the first of the {count} elements of the array"
            yield Violation(use.offset, text, why=FIRST_WHY, cure=f'"${{{use.name}[@]}}"')


def _is_zsh(job: JobDescription) -> bool:
    return "zsh" in job.lines.line(1)


# --------------------------------------------------------------------------------- array tasks

OUT_OF_RANGE_WHY = "An element that does not exist is empty: the option gets no value, or takes the next word."
OUT_OF_RANGE_CURE = "#SBATCH --array=0-<number of elements - 1>"
TASK = r"(?:\$\{?)?SLURM_ARRAY_TASK_ID\}?"
INDEX = re.compile(rf"\[(?:\$\(\()?\s*{TASK}\s*(?:([-+])\s*(\d{{1,4}}))?\s*(?:\)\))?\]")


def array_range(value: str | None) -> tuple[int, int] | None:
    """Return the first and the last number of ``--array=0-9,12%4``; None if it is not literal."""
    text = re.sub(r"%\d+\Z", "", (value or "").strip("[]\"'"))
    if not re.fullmatch(r"\d{1,7}(?:-\d{1,7}(?::\d{1,5})?)?(?:,\d{1,7}(?:-\d{1,7}(?::\d{1,5})?)?)*", text):
        return None
    low, high = [], []
    for part in text.split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        start, end = int(first), int(last or first)
        if end < start or (step and int(step) == 0):
            return None
        low.append(start)
        high.append(start + (end - start) // int(step or 1) * int(step or 1))
    return min(low), max(high)


def out_of_range(job: JobDescription) -> Iterator[Violation]:
    """Compare the numbers of a job array with the elements of a list that they select."""
    span = array_range(job.heads("array"))
    if span is None or job.submits:
        return
    for use in job.uses:
        items = job.by_name.get(use.name, [])
        found = INDEX.fullmatch(use.index)
        if not found or len(items) != 1 or items[0].items is None or items[0].offset > use.offset or use.operator:
            continue
        if any(not i.text or UNRESOLVED_OPEN in i.text or re.search(r"[*?{]", i.text) for i in items[0].items):
            continue
        if f"#{use.name}[" in job.text or re.search(r"(?m)^[^#\n]*\bSLURM_ARRAY_TASK_ID=", job.text):
            continue
        shift = int(found[2] or 0) * (-1 if found[1] == "-" else 1)
        count, last = len(items[0].items), span[1] + shift
        if last >= count > 1:
            text = (
                f"task {span[1]} of the array takes element {last} of {use.name}, which has {count} (0 to {count - 1})"
            )
            cure = f"#SBATCH --array={-shift}-{count - 1 - shift}" if shift <= 0 else None
            yield Violation(use.offset, text, cure=cure)
            return


# ------------------------------------------------------------------------------------ conditions

COMPARISONS = {"==", "!=", "-eq", "-ne", "-gt", "-lt", "-ge", "-le", "=~"}
COMPARED_WHY = "The shell runs the value as a command; without [ ] it compares nothing, and the condition is false."
ASSIGNED = re.compile(
    r"(?m)^[ \t]*(?:if|elif|while)[ \t]+([A-Za-z_]\w*)=([^\s=$`(;][^\s;]*|\"[^\"$`\n]*\")[ \t]*(?:;[ \t]*(?:then|do)\b.*)?$"
)
DOLLAR = re.compile(r"(?m)^[ \t]*\$\{?([A-Za-z_]\w*)\}?=(?=[^\s=~])")
LET = re.compile(r"(?m)^[ \t]*let[ \t]+([A-Za-z_]\w*)[ \t]+=")


def conditions(job: JobDescription) -> Iterator[Violation]:
    """Report comparisons without brackets, assignments as conditions, and ``$NAME=value``."""
    if job.kind != "script" or not (job.is_job or job.text.startswith("#!")):
        return
    for call in job.calls:
        first = call.args[0].text if call.args else ""
        plain = call.program not in ("[", "[[", "test", "expr", "((", "echo", "let") and not call.in_substitution
        if plain and first in COMPARISONS and len(call.args) == 2 and not call.args[0].quoted and not call.under:
            place = call.args[0].offset
            shown = re.search(r"(?:\$\{?\w+\}?|\"[^\"\n]*\")[ \t]+\Z", job.text[max(0, place - 60) : place])
            if shown and re.search(r"(?m)^[ \t]*(?:if|elif|while|until)\b", job.line_of(place)):
                text = f"{shown[0].strip()} {first} ... is a command, not a comparison"
                yield Violation(place, text, why=COMPARED_WHY, cure='if [ "$NAME" = value ]; then')
    for found in ASSIGNED.finditer(job.text):
        if not job.in_comment(found.start(1)) and any(a.offset == found.start(1) for a in job.assignments):
            text = f"{found[1]}={found[2]} is an assignment, which is always true"
            yield Violation(found.start(1), text, why="The branch is always taken, and the variable has another value.",
                            cure=f'[ "${found[1]}" = {found[2]} ]')  # fmt: skip
    starts = {c.offset for c in job.calls if not c.under}
    for found in DOLLAR.finditer(job.text):
        start = found.start() + len(found[0]) - len(found[0].lstrip())
        if not job.in_comment(start) and starts & {start, start + 1, start + 2}:
            text = f"${found[1]}=... runs as a command: an assignment begins with the name, without $"
            yield Violation(
                start,
                text,
                why="The shell expands $NAME first, and looks for a program of that name.",
                cure=f"{found[1]}=...",
            )
    for found in LET.finditer(job.text):
        if not job.in_comment(found.start(1)):
            yield Violation(found.start(1), "let takes each word as an expression of its own: = alone is a syntax error",
                            why="The variable is not set.", cure=f"{found[1]}=$((...))")  # fmt: skip


# ------------------------------------------------------------------------------------- deletions

REMOVES_WHY = (
    "rm -r does not ask, and what it removes here depends on a command or a variable that may fail or be empty."
)
EVERYTHING = re.compile(r"(?:\./)?\*|\.|\./|\*/|\./\*")


def deletions(job: JobDescription) -> Iterator[Violation]:
    """Report ``rm -r *`` behind a ``cd`` that may fail, and ``rm -r $NAME/*`` of a variable that nothing sets."""
    if job.kind != "script":
        return
    strict = re.search(r"(?m)^\s*set\s+-\w*e|^#!.*\s-\w*e|set\s+-o\s+errexit", job.text)
    nounset = re.search(r"(?m)^\s*set\s+-\w*u|set\s+-o\s+nounset", job.text)
    entered: ProgramCall | None = None
    for call in job.calls:
        if call.in_substitution:
            continue
        if call.program in ("cd", "pushd"):
            entered = call if call.args and call.after not in ("||", "&&") and call.args[0].text != "-" else None
        elif call.program == "rm" and any(re.match(r"-\w*[rR]|--recursive", a.text) for a in call.args):
            words = [a for a in call.args if not a.text.startswith("-")]
            everything = next((a for a in words if EVERYTHING.fullmatch(a.text)), None)
            if everything and entered and not strict and call.before != "&&":
                folder = entered.args[0].text
                text = f"rm -r {everything.text}: if 'cd {folder}' fails, it removes the files of the folder before"
                yield Violation(call.offset, text, why=REMOVES_WHY, cure=f"cd {folder} || exit 1")
                return
            for arg in words if not (nounset or job.unknown_settings or job.submits) else ():
                found = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?/(?:\*|)", arg.text)
                if found and not _may_be_set(job, found[1]) and not call.under:
                    left = "/*" if arg.text.endswith("*") else "/"
                    text = f"rm -r {arg.text}: nothing in this script sets ${found[1]}; if it is empty, this is {left}"
                    yield Violation(arg.offset, text, why=REMOVES_WHY, cure=f"${{{found[1]}:?}}/...")
                    return


def _may_be_set(job: JobDescription, name: str) -> bool:
    known = job.has(name) or name in job.reading.named or name in job.reading.exported
    outside = re.fullmatch(
        r"(?:HOME|TMPDIR|TMP|SCRATCH\w*|WORK\w*|PWD|SLURM_\w+|PBS_\w+|LOCAL_?SCRATCH|JOBDIR|JOB_?TMP\w*|LSCRATCH|XDG_\w+)",
        name,
    )
    tested = any(u.name == name and (u.operator or u.program in ("[", "[[", "test")) for u in job.uses)
    return bool(known or outside or tested)
