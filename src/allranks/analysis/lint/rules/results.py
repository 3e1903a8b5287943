"""Rules for results that the last lines of a job replace: groups piped into tee, messages after a failure, and over a log."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.conditions import TESTS
from allranks.analysis.lint.rules.exit_codes import (
    ERROR_TEXT,
    ZERO_WHY,
    commands_after,
    in_braces,
    is_looked_at,
    name_of_work,
    shell_flags,
    words_of,
)
from allranks.utils.text import lazy_regex

# --------------------------------------------------------------------------- groups and last blocks

GROUP_END = lazy_regex(r"[ \t]*(?:\)|\}|done|fi)[ \t]*(?:2>&1[ \t]*)?\|&?[ \t]*tee\b")
NEXT_LINES = 400


def piped_group(job: JobDescription) -> Iterator[Violation]:
    """Report the work as the last command of a group whose pipe to tee replaces its result."""
    if not job.is_job or "pipefail" in job.text or "PIPESTATUS" in job.text:
        return
    errexit, _ = shell_flags(job)
    for outer in job.work:
        if outer.in_loop and not errexit:
            continue  # repetitions whose results are read from their logs
        if outer.in_function or outer.in_substitution or outer.tested or outer.after not in ("\n", ";", ")", ""):
            continue
        later = commands_after(job, outer)
        if not later or later[0].program != "tee" or later[0].before not in ("|", "|&") or is_looked_at(job, outer):
            continue
        line = job.lines.start(job.lines.place(later[0].offset)[0])
        if GROUP_END.match(job.text[line : later[0].offset + 3]):
            text = f"the group with {name_of_work(job, outer)} is piped, so its exit code is lost: a pipe returns that of its last command"
            yield Violation(later[0].offset, text)
            return


LAST_BLOCK = lazy_regex(
    r"(?m)^else[ \t]*(?:#.*)?\n((?:[ \t]*(?:echo|printf|date)\b[^\n]*\n|[ \t]*#[^\n]*\n|[ \t]*\n)+)fi[ \t]*(?:#.*)?\s*\Z"
)


def told_failure(job: JobDescription) -> Iterator[Violation]:
    """Report ``if work; then ...; else echo failed; fi`` as the end of a job, which then succeeds."""
    found = LAST_BLOCK.search(job.text) if job.is_job else None
    if found is None or not ERROR_TEXT.search(found[1]) or re.search(r">>|>[ \t]*[^&\s]", found[1]):
        return  # the result may be in the file
    block = [c for c in job.calls if c.offset >= found.start(1) and not c.in_substitution]
    number = block[0].branch[-1:] if block else ()
    tested = [
        c
        for c in job.calls
        if c.tested and not c.in_substitution and c.branch[-1:] and number and c.branch[-1][0] == number[0][0]
    ]
    works = {w.offset for w in job.work}
    ran = [c for c in tested if c.offset in works or c.program == "eval"]
    status = [
        c
        for c in tested
        if c.program in TESTS
        and [a.text for a in c.args[:3]] in (["$?", "-eq", "0"], ["$?", "==", "0"], ["$?", "=", "0"])
    ]
    if ran or status:
        text = "the job ends with this message after a failure, and reports success"
        yield Violation(
            found.start(1) + len(found[1]) - len(found[1].lstrip()),
            text,
            why=ZERO_WHY,
            cure="exit 1 behind the message",
        )


# ------------------------------------------------------------------------------- messages over a log

OVER_LOG_WHY = "tee without -a, and >, empty the file that they open: the message is all that stays of the log."


def message_over_log(job: JobDescription) -> Iterator[Violation]:
    """Report a message behind the work that truncates the log of the work."""
    own = sorted((c for c in job.calls if not c.under and not c.in_substitution), key=lambda c: c.offset)
    works = {w.offset for w in job.work}
    for number, call in enumerate(own):
        if call.offset not in works:
            continue
        log = truncated_file(own, number)
        if log is None or log.startswith("/dev/"):
            continue
        for later, message in enumerate(own[number + 1 :], number + 1):
            between = job.text[call.offset : message.offset]
            if message.offset in works or re.search(r"(?m)^[ \t]*(?:\}|\)|done\b)|\(\)[ \t]*\{", between):
                break
            words = [a.text for a in message.args]
            if message.program in ("cd", "pushd", "mv", "eval", "source", "."):
                break
            if message.program in ("echo", "printf", "date") and truncated_file(own, later) == log:
                if message.branch[: len(call.branch)] == call.branch and message.in_loop == call.in_loop:
                    text = (
                        f"the message truncates {log}, the log of the program in line {job.lines.place(call.offset)[0]}"
                    )
                    yield Violation(message.offset, text, why=OVER_LOG_WHY, cure="tee -a, or >>")
                    return
            reads = any(log in w for w in words) and message.program not in ("tee", "echo", "printf")
            if reads or any(f"${n}" in log or f"${{{n}" in log for n in _set_between(job, call, message)):
                break


def truncated_file(own: list[ProgramCall], number: int) -> str | None:
    """Return the file that a command, or the tee that its pipe ends in, empties and writes."""
    call = own[number]
    for redirect in call.redirects:
        if redirect.operator in (">", "&>"):
            return redirect.target
    following = own[number + 1] if number + 1 < len(own) else None
    if not call.is_piped or following is None or following.program != "tee" or len(following.args) != 1:
        return None
    return following.args[0].text


def _set_between(job: JobDescription, first: ProgramCall, second: ProgramCall) -> list[str]:
    return [a.name for a in job.assignments if first.offset < a.offset < second.offset]


MESSAGES = {"echo", "printf", "date"}
APPENDED_WHY = "> empties the file when the program starts: what the lines above have written into it with >> is lost."


def log_over_messages(job: JobDescription) -> Iterator[Violation]:
    """Report a program whose > empties the file to which the lines above have appended."""
    appended: dict[str, ProgramCall] = {}
    for call in sorted((c for c in job.calls if not c.under), key=lambda c: c.offset):
        if call.in_substitution or call.in_function or call.in_loop or call.branch or call.subshell is not None:
            continue
        for redirect in call.redirects:
            target = redirect.target
            if redirect.operator in (">>", "&>>"):
                appended.setdefault(target, call)
            elif redirect.operator in (">", "&>") and target in appended and not target.startswith(("/dev/", "&")):
                first = appended[target]
                between = [c for c in job.calls if first.offset < c.offset < call.offset and c.program not in MESSAGES]
                read = any(target in a.text for c in between for a in c.args)
                read = read or any(r.operator == "<" and r.target == target for c in between for r in c.redirects)
                if not read and not _set_between(job, first, call):
                    line = job.lines.place(first.offset)[0]
                    text = f"> {target} empties the file to which line {line} has written"
                    yield Violation(call.offset, text, why=APPENDED_WHY, cure=f">> {target}")
                    return


# ------------------------------------------------------------------------- exits behind a message

EXIT_OF_MESSAGE = lazy_regex(r"exit(?:[ \t]+0\b|(?=[ \t]*(?:[;}#\n]|\Z)))")
NO_ERROR = lazy_regex(r"(?i)\balready\b|finish|complete|\bdone\b|\bskip|\bno more\b|\bnothing to\b|\bmax|\breached\b")
ASKED_FOR_HELP = lazy_regex(r"[\"'\s(|](?:-h|--help|-\?|help)[\"'\s)|]")


CASE_LABEL = lazy_regex(r"(?m)^[ \t]*\(?([^\s()#=\"']+)\)")
LONG_HELP = 2000


def exit_zero(job: JobDescription) -> Iterator[Violation]:
    """Report ``exit 0``, or ``exit`` alone, directly after an error message."""
    calls = [c for c in job.calls if not c.in_substitution]
    for number, call in enumerate(calls):
        zero = EXIT_OF_MESSAGE.match(job.text, call.offset)
        before = _error_message(calls[:number], call) if zero else None
        if zero is None or before is None:
            continue
        chained = call.before == "&&" and before.before in ("&&", "||") and before is calls[number - 1]
        grouped = before.before in ("&&", "||") and in_braces(job, before, call)
        asked = ASKED_FOR_HELP.search(job.text[max(0, before.offset - 200) : before.offset])
        labels = CASE_LABEL.findall(job.text, max(0, before.offset - LONG_HELP), before.offset)
        asked = asked or (labels and ASKED_FOR_HELP.search(f" {labels[-1]} "))
        if asked or not (call.branch or chained or grouped):
            continue
        if not call.branch and not ERROR_TEXT.search(re.sub(r"(?i)\bexiting\b", "", words_of(before))):
            continue  # a script that has nothing to do here
        # The user sees how a script that submits jobs is to be called.
        usage = not job.is_job and re.search(r"(?i)\busage\b", job.line_of(before.offset))
        what = "exit 0" if zero[0] != "exit" else "exit without a number"
        text = f"{what} after an error message reports success"
        note = usage or (zero[0] == "exit" and not job.runs_unattended)
        yield Violation(call.offset, text, cure="exit 1", severity="note" if note else None)


def _error_message(calls: list[ProgramCall], end: ProgramCall) -> ProgramCall | None:
    """Return the error message among the messages directly before a command, of the same branch."""
    for call in reversed(calls):
        if call.program not in ("echo", "printf") or call.branch != end.branch or call.is_piped:
            return None
        if ERROR_TEXT.search(words := words_of(call)):
            return None if NO_ERROR.search(words) else call
    return None


# --------------------------------------------------------------------- programs of all kinds behind tee

STARTS_WORK = {
    *(
        "srun",
        "mpirun",
        "mpiexec",
        "mpiexec.hydra",
        "orterun",
        "jsrun",
        "aprun",
        "ibrun",
        "lrun",
        "prun",
        "flux",
        "horovodrun",
        "mpirun_rsh",
    ),
    *(
        "singularity",
        "apptainer",
        "shifter",
        "docker",
        "podman",
        "enroot",
        "charliecloud",
        "ch-run",
        "time",
        "timeout",
        "numactl",
        "nsys",
        "ncu",
    ),
    *(
        "julia",
        "matlab",
        "Rscript",
        "R",
        "octave",
        "java",
        "node",
        "make",
        "snakemake",
        "nextflow",
        "gmx",
        "gmx_mpi",
        "lmp",
        "vasp_std",
        "namd2",
    ),
}


def piped_script(job: JobDescription) -> Iterator[Violation]:
    """Report a script, or a step of unknown content, as the last command of a job, whose result a pipe to tee replaces."""
    if not job.is_job or "pipefail" in job.code or "PIPESTATUS" in job.code:
        return
    works = {w.offset for w in job.work}
    own = [c for c in job.calls if not c.under and not c.in_substitution and not c.in_function]
    if len(own) < 2 or own[-1].program != "tee" or own[-1].before not in ("|", "|&"):
        return
    last = next((c for c in reversed(own[:-1]) if c.is_piped and c.before not in ("|", "|&")), None)
    if last is None or last.offset in works or last.tested or last.in_loop:
        return
    program = PYTHON.match(last.program) is not None or last.program in STARTS_WORK
    script = last.written.endswith(".sh") or (last.program in SHELLS and any(a.text.endswith(".sh") for a in last.args))
    own = re.match(r"\.{0,2}/|\$", last.written) is not None and not last.written.startswith(("/bin/", "/usr/bin/"))
    if program or script or own:
        text = f"{last.written} is piped, so its exit code is lost: a pipe returns that of its last command"
        yield Violation(last.offset, text)
