"""Rules for lines of a script that are joined, cut or quoted in another way than meant, and for results that are lost."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import LAUNCHERS, PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Argument, Violation

GLUED_WHY = "The shell removes the backslash and the line break, and nothing stays between the two words."
GLUED_CURE = "a blank before the backslash"
CUT_WHY = (
    "The command ends at the line without a backslash: the rest are assignments of the shell, which no program gets."
)
CUT_CURE = "end every line of the command but the last with a backslash"
HASH_WHY = "Inside of quotes # begins no comment: the words behind it are passed to the program."
HASH_CURE = "remove the line, or use an array, in which comments are possible"
JOINED = re.compile(r"[^\s\\]\\\r?\n(?=[-A-Za-z$\"'/])")


def joined_words(job: JobDescription) -> Iterator[Violation]:
    """Report two words that a backslash without a blank before it joins."""
    if job.kind != "script" or "\\\n" not in job.text:
        return
    ends = {found.start(): found.end() for found in JOINED.finditer(job.text) if not job.in_comment(found.start())}
    for call in job.work_calls if ends else ():
        for arg in call.args:
            places = set(arg.source.at)
            for start, end in ends.items():
                if start in places and end in places and not _inside_quotes(job, arg):
                    line = job.lines.place(start)[0]
                    text = f"the words of line {line} and {line + 1} become one: {_around(arg, start)!r}"
                    yield Violation(start, text, why=GLUED_WHY, cure=GLUED_CURE, severity="error")
                    return


def _inside_quotes(job: JobDescription, arg: Argument) -> bool:
    first = arg.source.where(0)
    return job.text[max(0, first - 1) : first] in ("'", '"')


def _around(arg: Argument, start: int) -> str:
    index = list(arg.source.at).index(start)
    return arg.source.text[max(0, index - 15) : index + 16]


def assignments_of_command(job: JobDescription) -> Iterator[Violation]:
    """Report ``name=value`` lines that were meant as arguments of the command above, whose last line has no backslash."""
    if job.kind != "script":
        return
    works = {job.lines.place(c.offset)[0]: c for c in job.work_calls}
    for item in job.set_values_at_top():
        line, column = job.lines.place(item.offset)
        above = job.lines.line(line - 1) if line > 1 else ""
        before = job.lines.line(line - 2) if line > 2 else ""
        if item.exported or column == 1 or not before.endswith("\\") or above.endswith("\\") or not above.strip():
            continue
        indented = len(above) - len(above.lstrip()) == column - 1
        same_form = re.match(r"\s*[+~]*[\w.@/-]+=\S", above)
        started = next((works[n] for n in range(line - 2, max(0, line - 60), -1) if n in works), None)
        between = started and all(
            job.lines.line(n).endswith("\\") for n in range(job.lines.place(started.offset)[0], line - 1)
        )
        if indented and same_form and between and item.name not in job.used_names:
            start = job.lines.start(line - 1) + len(above) - len(above.lstrip())
            text = f"no backslash at the end of the line: {item.name}=... in line {line} is a variable of the shell, no argument"
            yield Violation(start, text, why=CUT_WHY, cure=CUT_CURE)
            return


def hash_in_quotes(job: JobDescription) -> Iterator[Violation]:
    """Report a commented line inside of a quoted list of options."""
    for call in job.work_calls:
        for arg, following in call.pairs():
            word = arg.text
            if not re.fullmatch(r"#+|#+-{1,2}[A-Za-z][\w-]*(?:=\S*)?", word) or arg.quoted or following is None:
                continue
            place = arg.source.where(0)
            line, column = job.lines.place(place)
            if job.lines.line(line)[: column - 1].strip() in ("", '"', "'") and line != job.lines.place(call.offset)[0]:
                yield Violation(place, "# inside of quotes begins no comment: the program gets the words of this line",
                                why=HASH_WHY, cure=HASH_CURE)  # fmt: skip
                return


# ------------------------------------------------------------------------------ names with a lone $

LONE_WHY = "A $ that no name follows is an ordinary character: the name is the same in every job, and the jobs overwrite each other's file."
LONE_CURE = "$$, the shell's process id; or $SLURM_JOB_ID"
LONE = re.compile(r"[\w.)-]\$(?:\.\w{1,10}|/.*|_.*|-.*)?\Z")
PATTERN_NAME = re.compile(r"(?i).*(?:regex|pattern|expr|match|filter|grep|sed|re|prompt|ps1|exclude|include)\w*")
FILE_PROGRAMS = {"mkdir", "touch", "cd", "cp", "mv", "tee", "mktemp", "ln"}


def lone_dollar(job: JobDescription) -> Iterator[Violation]:
    """Report names of files that end in, or contain, a ``$`` without a name."""
    if job.kind != "script":
        return
    said: set[int] = set()
    places: list[tuple[int, str]] = [
        (a.offset, a.value)
        for a in job.assignments
        if not (a.removed or a.items or PATTERN_NAME.fullmatch(a.name) or a.name.endswith("PORT") or a.in_substitution)
    ]
    for call in job.calls:
        if not call.in_substitution:
            places += [(call.offset, r.target) for r in call.redirects if r.operator.startswith((">", "&>"))]
            places += [(a.offset, a.text) for a in call.args if call.program in FILE_PROGRAMS]
    for offset, value in places:
        line = job.lines.place(offset)[0]
        written = job.lines.line(line)
        if (
            line in said
            or not LONE.search(value)
            or re.search(r"[\s^*|\\()\[\]]", re.sub(r"\$\([^)]*\)|\$\{[^}]*\}", "", value))
        ):
            continue
        if re.search(r"[\w.)-]\$(?![\w({$@#?!*\"'-])", written) and not re.search(r"'[^'\n]*\$[^'\n]*'", written):
            said.add(line)
            yield Violation(offset, f"the $ in {value} is an ordinary character", why=LONE_WHY, cure=LONE_CURE)


TAKES_WORDS = {"module", "ml", "export", "cd", "source", ".", "mkdir", "conda", "ulimit", "unset", "pip", "pip3"}


def swallowed_by(job: JobDescription) -> Iterator[Violation]:
    """Report a launch that became the arguments of the command above, which ends with a backslash."""
    for call in job.calls:
        if call.program not in TAKES_WORDS or call.in_substitution:
            continue
        for arg in call.args[1:]:
            line, column = job.lines.place(arg.source.where(0))
            starts = arg.text in LAUNCHERS | {"srun", "mpirun"} or PYTHON.fullmatch(arg.text) is not None
            if (
                starts
                and not arg.quoted
                and not job.lines.line(line)[: column - 1].strip()
                and job.lines.line(line - 1).endswith("\\")
            ):
                text = (
                    f"the line ends with a backslash: '{arg.text}' in line {line} becomes an argument of {call.written}"
                )
                yield Violation(job.lines.start(line - 1), text)
                return
