"""Rules for usual commands of the shell: input that a command does not read, and formats of dates."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.text import lazy_regex

# ------------------------------------------------------------------------- input that nothing reads

INPUT_WHY = "The command takes its words from its arguments only: what it gets through the pipe, < or << is lost."
READS_NOTHING = {"echo", "printf", "ls", "kill", "mkdir", "touch", "dirname", "basename", "realpath", "export"}
PRINT = {"echo", "printf"}
INPUT_CURES = {"echo": "cat", "printf": "cat", "kill": "xargs -r kill", "export": 'export NAME="$(command)"'}
NUMBER_WHY = "A number without - is the name of a file: 'cannot open', and the value is empty."
FEEDS = ("<", "<<", "<<-", "<<<")


def input_not_read(job: JobDescription) -> Iterator[Violation]:
    """Report ``command | echo``, ``echo < file`` and ``echo <<EOF``."""
    if job.kind != "script":
        return
    for call in job.calls:
        first = call.args[0].text if call.args else ""
        if call.written in ("head", "tail") and call.before in ("|", "|&") and re.fullmatch(r"\d{1,4}", first):
            text = f"{call.written} reads a file called {first}, and not its input"
            yield Violation(call.offset, text, why=NUMBER_WHY, cure=f"{call.written} -n {first}")
            continue
        if call.written not in READS_NOTHING or any(c.program in ("xargs", "parallel") for c in call.under):
            continue
        fed = next((r.operator for r in call.redirects if r.operator in FEEDS and r.target != "/dev/null"), None)
        piped = call.before in ("|", "|&") and not _is_in_group(job, call) and not _is_fed_silence(job, call)
        words = " ".join(a.text for a in call.args)
        if call.written not in PRINT and any(not a.text.startswith("-") for a in call.args):
            continue  # it has what it needs, and the input is only a message
        if not (fed or piped) or re.search(
            r"\$\(|`|/dev/stdin|<\(", words + job.line_of(call.offset)[-200:] * bool(fed)
        ):
            continue
        what = f"{fed} ..." if fed else "a pipe"
        text = f"{call.written} does not read its input: what {what} gives it is lost"
        name = INPUT_CURES.get(call.written, f"xargs {call.written}")
        yield Violation(call.offset, text, why=INPUT_WHY, cure=name)
        return


TEE_WHY = "Without a pipe tee reads the input of the script, which is empty in a batch job: the file stays empty."


def tee_without_pipe(job: JobDescription) -> Iterator[Violation]:
    """Report ``command && tee FILE``, where ``command | tee FILE`` was meant."""
    if job.kind != "script":
        return
    for call in job.calls:
        if call.written != "tee" or call.before not in ("&&", "||") or call.in_function or call.in_substitution:
            continue
        files = [a.text for a in call.args if not a.text.startswith("-")]
        if files and not any(r.operator in FEEDS for r in call.redirects) and not call.in_loop:
            yield Violation(
                call.offset,
                f"tee gets nothing from the command in front of {call.before}: {files[0]} stays empty",
                why=TEE_WHY,
                cure="command |& tee FILE",
            )


def _is_in_group(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the command is the first of a group or a loop, whose other commands may read."""
    return re.search(r"(?:[{(]|\bdo|\bthen)\s*\Z", job.text[max(0, call.offset - 40) : call.offset]) is not None


def _is_fed_silence(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the output of the command in front is thrown away on purpose, or ends with a test of its result."""
    before = [c for c in job.calls if c.offset < call.offset and c.under == call.under]
    return bool(before) and before[-1].program in ("true", ":", "yes")


# ------------------------------------------------------------------------ options that take the name

MODE_WHY = (
    "-m takes the next word as the mode of the folder, and no name is left: 'missing operand', and no folder is made."
)


def mode_without_name(job: JobDescription) -> Iterator[Violation]:
    """Report ``mkdir -m $DIR``, where -p was meant."""
    for call in job.calls if job.kind == "script" else ():
        words = [a.text for a in call.args]
        if call.program == "mkdir" and len(words) == 2 and re.fullmatch(r"-[pv]*m", words[0]):
            text = f"{words[0]} takes the name as the mode: mkdir makes no folder"
            yield Violation(call.offset, text, why=MODE_WHY, cure="mkdir -p <folder>")


# ------------------------------------------------------------------------------- commas between values

COMMA_WHY = "A blank ends the value, and the shell knows no commas between assignments: the comma is part of the value."
LISTED_WHY = (
    "The shell separates arguments at blanks: the program looks for a file or folder whose name ends with a comma."
)
WITH_COMMA = lazy_regex(r"(?m)^[ \t]*export[ \t]+(\w+)=([^\s\"'#,]+),[ \t]+\w+=")


def commas_between(job: JobDescription) -> Iterator[Violation]:
    """Report ``export A=1, B=2``, ``CUDA_VISIBLE_DEVICES=0, 1, 2 python`` and ``--data a/x, a/y``."""
    if job.kind != "script":
        return
    for found in WITH_COMMA.finditer(job.code):
        if any(a.offset == found.start(1) and a.name == found[1] for a in job.assignments):
            text = f"{found[1]} is '{found[2]},': the comma becomes part of the value"
            yield Violation(found.start(1), text, why=COMMA_WHY, cure=f"export {found[1]}={found[2]} and no comma")
    for call in job.work_calls:
        for arg, following in call.pairs():
            path = arg.text.removesuffix(",")
            listed = "/" in path and path != arg.text and not arg.text.startswith("-") and " " not in path
            if listed and following is not None and re.match(r"[\w./~$-]*/", following.text):
                text = f"{arg.text[-60:]} ends with a comma, which is part of the path"
                yield Violation(
                    arg.offset, text, why=LISTED_WHY, cure="a blank between the paths, and no comma", severity="warning"
                )
                return
    for call in job.calls:
        last = call.prefix[-1] if call.prefix else None
        if last is not None and last.value.endswith(",") and re.fullmatch(r"\d+,", call.written):
            text = f"{last.name} ends at the blank, and {call.written} runs as a command"
            yield Violation(call.offset, text, why=COMMA_WHY, cure=f"{last.name}=0,1,2 without blanks")


# ---------------------------------------------------------------------------------- formats of dates

DATE_WHY = "The printed time is wrong; where it is part of a name, runs that start at different times get the same one."
JOINER = r"[^%\w]{0,2}"
DATE_SLIPS = (
    (lazy_regex(rf"%[HIkl](?:{JOINER}|h)%m(?!{JOINER}%[dYy])"), "%m is the month", "%M for the minutes"),
    (lazy_regex(rf"%m{JOINER}%S"), "%m is the month", "%M for the minutes"),
    (lazy_regex(rf"%[Yy]{JOINER}%M{JOINER}%d|%d{JOINER}%M{JOINER}%[Yy]|%M[-/]%d[-/]%[Yy]"), "%M are the minutes", "%m for the month"),
    (lazy_regex(r"%h[:._]?%[mM]"), "%h is the name of the month", "%H for the hours"),
    (lazy_regex(r"%M[:._-]?%s"), "%s are the seconds since 1970", "%S for the seconds"),
)  # fmt: skip


def date_format(job: JobDescription) -> Iterator[Violation]:
    """Report ``date +%H:%m`` and ``date +%Y-%M-%d``."""
    for call in job.calls if job.kind == "script" else ():
        if call.program != "date":
            continue
        for arg in call.args:
            found = next(((m, slip) for slip in DATE_SLIPS if (m := slip[0].search(arg.source.text))), None)
            if found and arg.text.startswith("+"):
                shown, (_, what, cure) = found[0][0], found[1]
                place = arg.source.where(found[0].start())
                yield Violation(place, f"date {shown}: {what}", why=DATE_WHY, cure=cure)
                return
