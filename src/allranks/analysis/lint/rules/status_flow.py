"""Rules that follow the exit code of the work to the end of a script: what replaces it, and what is done with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, ProgramCall, Violation
from allranks.analysis.lint.rules.conditions import TESTS
from allranks.analysis.lint.rules.exit_codes import (
    ERROR_TEXT,
    ZERO_WHY,
    is_suspended,
    shell_flags,
    status_of_pipe,
)
from allranks.analysis.lint.rules.waiting import FUNCTION
from allranks.utils.text import lazy_regex

# --------------------------------------------------------------------- what stands between work and $?

MESSAGES = {"echo", "printf", "date"}
HARMLESS = MESSAGES | {"sleep", "hostname", "pwd", "expr", "bc", "seq", "wc", "whoami", "basename", "dirname"}
STATUS_CURE = "rc=$? directly after the command, then exit $rc"
PLAIN_STATUS = lazy_regex(r"\$\?|\$\{\?\}")


def own_calls(job: JobDescription) -> list[ProgramCall]:
    """Return the commands of the script's own shell in the order of the file."""
    own = (c for c in job.calls if not c.under and not c.in_substitution)
    return sorted(own, key=lambda c: c.offset)


def of_other_command(job: JobDescription) -> Iterator[Violation]:
    """Report ``$?`` that is the exit code of an echo or an assignment behind the work, and not that of the work."""
    own = own_calls(job)
    kept = [a.offset for a in job.assignments if a.value == "$?" and not a.under]
    kept += [c.offset for c in own if c.program in ("exit", *TESTS) and any(a.text == "$?" for a in c.args)]
    kept = [k for k in kept if "$?" in job.text[k : k + 200].split("\n")[0]]
    printed = [c.offset for c in own if c.program in MESSAGES and any("$?" in a.text for a in c.args)]
    works = {w.offset for w in job.work}
    for place in sorted({*kept, *printed}):
        before = [c for c in own if c.offset < place]
        number = len(before)
        while number and (before[number - 1].program in HARMLESS and before[number - 1].after in ("\n", ";")):
            number -= 1
        work = before[number - 1] if number else None
        between = before[number:]
        if work is None or work.offset not in works or work.after in ("&", "&&", "||", "|", "|&") or work.tested:
            continue
        if any(c.branch != work.branch for c in between) or any(work.offset in a.source.at for a in job.assignments):
            continue  # in another branch; or it stands in a variable, and where it runs is unknown here
        items = [a for a in job.assignments if work.offset < a.offset < place and not a.under and not a.in_substitution]
        items = [a for a in items if not any(c.offset > a.offset and a in c.prefix for c in own)]
        if not all(_is_harmless(job, a) for a in items):
            continue
        first = min([*(c.offset for c in between), *(a.offset for a in items)], default=None)
        seen = [*kept, *printed] if place in printed and place not in kept else kept
        inner = _behind_substitution(job, place) if place in printed else None
        if first is None and inner is None:
            continue
        if first is not None and any(work.offset < p <= first for p in seen):
            continue
        if first is None:
            other = inner
        else:
            item = next((a for a in items if a.offset == first), None)
            other = f"{item.name}=..." if item else next(c.written for c in between if c.offset == first)
        text = f"$? is the exit code of '{other}', not that of {work.written}"
        yield Violation(place, text, cure=STATUS_CURE)
        return


def _is_harmless(job: JobDescription, item: Assignment) -> bool:
    """Return whether nobody means the exit code of an assignment: a plain value, a number, a date."""
    if item.value == "$?":
        return False
    line = job.text[item.offset : job.text.find("\n", item.offset) % (len(job.text) + 1)]
    if "$(" not in line.replace("$((", "") and "`" not in line:
        return not any(c.offset > item.offset and c.offset < item.offset + len(line) for c in job.calls)
    inside = [c for c in job.calls if c.in_substitution and item.offset < c.offset < item.offset + len(line)]
    return bool(inside) and all(c.program in HARMLESS for c in inside)


def _behind_substitution(job: JobDescription, place: int) -> str | None:
    """Return the ``$(...)`` of a message in front of its ``$?``, which is then the exit code of that."""
    line = job.text[place : job.text.find("\n", place) % (len(job.text) + 1)]
    status = PLAIN_STATUS.search(line)
    if status is None:
        return None
    found = re.search(r"(?<!\\)(\$\((?!\()[^()`]*\)|`[^`]*`)", line[: status.start()])
    if found is None or re.search(r"[;|]|&&|'", line[: found.start()] + line[found.end() : status.start()]):
        return None
    return found[1]


NO_PROGRAMS = {
    "echo", "printf", "cat", "date", "ls", "env", "nvidia-smi", "sed", "grep", "egrep", "awk", "tail", "head", "find", "sort", "printenv", "hostname",
    "set", "yes", "time", "pip", "conda", "module", "df", "du", "free", "lscpu", "tee",
}  # fmt: skip


def status_of_tee(job: JobDescription) -> Iterator[Violation]:
    """Report ``$?`` behind any program whose output a pipe gives to tee."""
    if shell_flags(job)[1] or job.kind != "script":
        return
    works = {w.offset for w in job.work}
    for call in own_calls(job):
        if not call.is_piped or call.before in ("|", "|&") or call.offset in works or call.program in NO_PROGRAMS:
            continue
        if call.program == "eval" and any(w.is_piped for w in job.work):
            continue  # what it runs is reported itself
        other = status_of_pipe(job, call)
        if other is not None and other.program == "tee" and not call.tested:
            text = f"{call.written} is piped: $? below is the exit code of tee, not that of {call.written}"
            yield Violation(call.offset, text)
            return


def piped_function(job: JobDescription) -> Iterator[Violation]:
    """Report a function with the job's work whose pipe to tee replaces its result."""
    if not job.is_job or "pipefail" in job.code or "PIPESTATUS" in job.code:
        return
    bodies = {m[1]: (m.start(2), m.end(2)) for m in FUNCTION.finditer(job.text)}
    own = own_calls(job)
    for call, following in pairwise(own):
        start, end = bodies.get(call.written, (0, 0))
        if call.in_function or call.tested or not call.is_piped or following.program != "tee":
            continue
        work = next((w for w in job.work if start < w.offset < end and not w.in_substitution), None)
        if work is not None and following.after in ("\n", ";", ""):
            text = f"{call.written}, which runs {work.written}, is piped, so its exit code is lost: a pipe returns that of its last command"
            yield Violation(call.offset, text)
            return


def exit_behind_script(job: JobDescription) -> Iterator[Violation]:
    """Report ``exit 0`` behind a script, or a step of unknown content, as the end of a job."""
    errexit, _ = shell_flags(job)
    own = [c for c in own_calls(job) if not c.in_function]
    if not job.is_job or errexit or job.work or len(own) < 2 or "$?" in job.code or "trap" in job.code:
        return
    end = own[-1]
    loud = [c for c in own[:-1] if c.program not in QUIET_END]
    if not _is_success(end) or end.branch or end.in_loop or end.before in ("&&", "||") or not loud:
        return
    last = loud[-1]
    script = last.written.endswith(".sh") or (last.program in SHELLS and bool(last.args))
    if (script or last.program in STARTS_WORK) and last.after in ("\n", ";") and not last.tested:
        yield Violation(end.offset, f"exit 0 reports success, even if {last.written} failed", cure="remove it")


STARTS_WORK = {"srun", "mpirun", "mpiexec", "apptainer", "singularity", "docker", "podman", "julia", "horovodrun"}

# ------------------------------------------------------------- exit codes that are only printed

KEPT_WHY = "The script catches the exit code and only prints it: the job ends with the result of its last command, and is reported as COMPLETED."
TO_A_FILE = lazy_regex(r">>?[ \t]*(?!&)\S|\|(?!\|)")
QUIET_END = MESSAGES | {
    "ls", "sleep", "cat", "deactivate", "conda", "module", "ml", "set", "unset", "export", "nvidia-smi", "kill", "hostname", "seff", "sacct", "true", ":",
    "du", "df", "grep", "sort", "tail", "head", "wc", "rm", "cp", "mv", "rsync", "cd", "mkdir", "find", "squeue", "sstat", "popd", "pkill", "ray", "tar",
    "awk", "sed", "local",
}  # fmt: skip
KEPT_CURE = 'exit "${name}" as the last line'


def only_printed(job: JobDescription) -> Iterator[Violation]:
    """Report ``rc=$?`` behind the work that a job prints, but does not return."""
    if not job.is_job:
        return
    errexit, _ = shell_flags(job)
    works = {w.offset: w for w in job.work}
    own = own_calls(job)
    for item in job.assignments:
        if item.value != "$?" or item.under or item.in_function or item.in_substitution:
            continue
        before = [c for c in own if c.offset < item.offset]
        work = works.get(before[-1].offset) if before else None
        if work is None or work.in_loop or work.branch or work.tested or work.after not in ("\n", ";"):
            continue
        if (errexit and not is_suspended(job, item.offset)) or not _is_only_printed(job, item, own):
            continue
        rest = [c for c in own if c.offset > item.offset and not c.in_function]
        if all(c.program in QUIET_END or _is_success(c) for c in rest):
            text = f"${item.name}, the exit code of {work.written}, is printed, and the job ends with success whatever it is"
            yield Violation(item.offset, text, why=KEPT_WHY, cure=KEPT_CURE.replace("name", item.name))
            return


def _is_success(call: ProgramCall) -> bool:
    return call.program == "exit" and [a.text for a in call.args] == ["0"]


def _is_only_printed(job: JobDescription, item: Assignment, own: list[ProgramCall]) -> bool:
    """Return whether every use of the name is in a message that does not go to a file."""
    uses = [u for u in job.uses if u.name == item.name]
    lines = {job.lines.place(u.offset)[0] for u in uses} | {
        job.lines.place(a.offset)[0] for a in job.by_name[item.name]
    }
    named = {
        job.lines.place(m.start())[0] for m in re.finditer(rf"(?<![\w-]){re.escape(item.name)}(?![\w-])", job.code)
    }
    if not uses or named - lines or any(a.value not in ("$?", "0") for a in job.by_name[item.name]):
        return False
    for use in uses:
        line = job.line_of(use.offset)
        if use.program not in ("echo", "printf") or use.under or TO_A_FILE.search(re.sub(r"\"[^\"]*\"", "", line)):
            return False
    return not any(
        c.program in ("exit", "return", "trap") and not _is_success(c) for c in own if c.offset > item.offset
    )


ELSE_AT_END = lazy_regex(r"(?m)^else[ \t]*(?:#.*)?\n(?:[^\n]*\n){1,8}fi\s*\Z")


def told_and_ignored(job: JobDescription) -> Iterator[Violation]:
    """Report a failure of the work that a job only tells, in front of a last message that ends the job with success."""
    if not job.is_job or re.search(r"\btrap\b|\bkill\b|\bexit[ \t]+(?!0)|\breturn\b|\bfalse\b", job.code):
        return
    errexit, _ = shell_flags(job)
    own = [c for c in own_calls(job) if not c.in_function]
    works = {w.offset for w in job.work}
    for number, call in enumerate(own):
        if not call.tested or call.in_loop or not call.branch or len(call.branch) != 1:
            continue
        if call.program in TESTS:
            words = [a.text for a in call.args[:3]]
            before = [c for c in own[:number] if not c.tested]
            meant = words[:1] == ["$?"] and words[1:] in (["-eq", "0"], ["==", "0"], ["-ne", "0"], ["!=", "0"])
            work = before[-1] if before and before[-1].offset in works else None
            if not meant or work is None or work.branch or (errexit and not is_suspended(job, call.offset)):
                continue
            if work.after not in ("\n", ";") or work.in_loop:
                continue
        elif call.offset not in works or call.after not in (";", "\n"):
            continue
        block = [c for c in own if c.branch[:1] and c.branch[0][0] == call.branch[0][0] and c is not call]
        rest = [c for c in own if c.offset > max(b.offset for b in [*block, call]) and c not in block]
        failed = [c for c in block if ERROR_TEXT.search(" ".join(a.text for a in c.args)) and c.program in MESSAGES]
        quiet = all(c.program in MESSAGES and not c.redirects and not c.is_piped for c in block)
        if not failed or not quiet or (not rest and ELSE_AT_END.search(job.text)) or len(works) != 1:
            continue
        if all(c.program in MESSAGES | {"deactivate", "sleep"} or _is_success(c) for c in rest):
            text = "the failure is only printed: the job ends with success"
            yield Violation(failed[0].offset, text, why=ZERO_WHY, cure="exit 1 behind the message")
            return


CANCEL_WHY = "scancel ends the job as CANCELLED, whatever the result of its work was: dependent jobs (afterok) never start, and a failure looks the same."
OWN_JOB = lazy_regex(r"\$\{?(?:SLURM_JOB_?ID|PBS_JOBID)\}?")


def cancels_itself(job: JobDescription) -> Iterator[Violation]:
    """Report a job that cancels itself as its end."""
    if not job.is_job:
        return
    for call in own_calls(job):
        words = [a.text for a in call.args]
        if call.program not in ("scancel", "qdel") or len(words) != 1 or not OWN_JOB.fullmatch(words[0]):
            continue
        if call.branch or call.in_function or call.in_loop or call.tested or call.before in ("&&", "||"):
            continue
        if call.after == "&" or not any(c.offset < call.offset for c in job.calls):
            continue
        text = f"{call.written} {words[0]}: the job cancels itself, and never ends with the result of its work"
        yield Violation(call.offset, text, why=CANCEL_WHY, cure="remove it: the job ends with the script")
        return
