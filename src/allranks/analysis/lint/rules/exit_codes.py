"""Rules for failures that a script hides or takes for its own end: lost exit codes, set -e and set -u, blocks that end in a message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.analysis.lint.command_options import SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, Edit, ProgramCall, Violation
from allranks.analysis.lint.rules.conditions import TESTS
from allranks.utils.text import lazy_regex


def shell_flags(job: JobDescription, until: int | None = None) -> tuple[bool, bool]:
    """Return whether set -e, and whether pipefail, is active in the batch shell, or in front of a place."""
    first = job.lines.line(1)
    errexit = bool(re.match(r"#!\S*sh\s+-\w*e", first))
    pipefail = False
    for call in job.calls:
        if call.program == "set" and not call.under and (until is None or call.offset < until):
            words = [a.text for a in call.args]
            errexit = (
                errexit or any(re.match(r"-\w*e", w) for w in words) or ("-o" in " ".join(words) and "errexit" in words)
            )
            pipefail = pipefail or "pipefail" in words
    return errexit, pipefail


EXIT_WHY = "The job's state is the exit code of its last command. A failed training is reported as COMPLETED, and dependent jobs start."
EXIT_CURE = "set -eo pipefail at the top of the script"
LAST = {"exit", "true", ":", "wait", "trap", "fi", "done", "return", "}", "set", "unset", "export"}


def exit_code(job: JobDescription) -> Iterator[Violation]:
    """Report an exit code that is lost: behind a pipe, by `exit 0`, or because another command is the last one."""
    errexit, pipefail = shell_flags(job)
    doubtful: list[Violation] = []
    for outer in job.work:
        if outer.in_substitution:
            continue
        what = name_of_work(job, outer)
        if outer.tested:
            last = _end_of_pipe(job, outer) if outer.is_piped and not pipefail else None
            if last is not None and last.program == "tee" and last.tested and "PIPESTATUS" not in job.code:
                text = f"{what} is piped: the condition is the exit code of tee, which is 0, and not that of {what}"
                yield Violation(outer.offset, text, fix=_add_pipefail(job, errexit))
                return
            continue
        other = status_of_pipe(job, outer) if outer.is_piped and not pipefail else None
        if other is not None:
            text = f"{what} is piped: $? below is the exit code of {other.written}, not that of {what}"
            yield Violation(outer.offset, text, fix=_add_pipefail(job, errexit))
            return
        if outer.before == "||" or (outer.in_function and not (outer.is_piped and job.is_job)):
            continue
        ignored = _ignored(job, outer)
        if ignored is not None and job.is_job and not outer.in_loop and len(job.work) == 1:
            yield Violation(
                ignored.offset,
                f"|| {' '.join([ignored.written, *(a.text for a in ignored.args)])} reports success, even if {what} failed",
                cure="remove it, or || exit 1",
            )
            return
        if outer.is_piped and not pipefail and not is_looked_at(job, outer):
            text = f"{what} is piped, so its exit code is lost: a pipe returns that of its last command"
            last = _end_of_pipe(job, outer)
            tee = last is not None and last.program == "tee"
            asked = job.is_job or outer.program == "srun" or _ends_with(job, outer, last)
            place = last.offset if last is not None and tee else outer.offset
            used = errexit or _pipe_is_tested(job, outer) or (asked and tee)
            hit = Violation(place, text, fix=_add_pipefail(job, errexit), severity=None if used else "note")
            if used:
                yield hit
                return
            doubtful.append(hit)
            continue
        if outer.after in ("||", "&&", "&", "|", "|&") or errexit or is_looked_at(job, outer):
            continue
        later = commands_after(job, outer)
        end = later[-1] if later else None
        if end is None or any(w.offset == end.offset for w in job.work) or (pipefail and end.before in ("|", "|&")):
            continue
        if end.program == "exit" and [a.text for a in end.args] == ["0"] and not end.branch and not end.in_loop:
            sure = job.runs_unattended and end.before not in ("&&", "||")
            text = f"exit 0 reports success, even if {what} failed"
            hit = Violation(
                end.offset, text, cure="remove it, or exit with the result", severity=None if sure else "note"
            )
            if sure:
                yield hit
                return
            doubtful.append(hit)
        elif job.is_batch and end.program not in LAST | {"srun"} and not is_stored(job, outer):
            text = f"the job ends with the exit code of '{end.written}', even if {what} failed"
            doubtful.append(Violation(end.offset, text, cure=EXIT_CURE, severity="note"))
    yield from doubtful[:1]


def is_stored(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the command stands in the value of a variable, so that the place where it runs is unknown."""
    return any(call.offset in a.source.at for a in job.assignments)


def _ends_with(job: JobDescription, outer: ProgramCall, last: ProgramCall | None) -> bool:
    """Return whether a launch script ends with this pipe: its caller takes the result of tee for that of the launcher."""
    launched = any(la.call.starter is outer and la.kind != "python" for la in job.launches)
    if last is None or not launched or outer.in_loop or outer.branch or outer.in_function or last.after == "&":
        return False
    return not any(c.offset > last.offset and not c.in_function for c in job.calls) and len(job.work) == 1


def _pipe_is_tested(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the script depends on the exit code of the pipe that begins with this command: ``... | tee log || exit 1``."""
    last = _end_of_pipe(job, outer)
    return last is not None and (last.after in ("||", "&&") or last.tested)


def _end_of_pipe(job: JobDescription, outer: ProgramCall) -> ProgramCall | None:
    """Return the last command of the pipe that begins with this command."""
    later = iter(job.calls[job.calls.index(outer) + 1 :])
    own = (c for c in later if not c.under and not c.in_substitution)
    return next((c for c in own if c.before in ("|", "|&") and not c.is_piped), None)


PASSES_THROUGH = {"tee", "ts", "grep", "egrep", "sed", "awk", "cat", "tail", "head", "logger", "tr"}


def status_of_pipe(job: JobDescription, outer: ProgramCall) -> ProgramCall | None:
    """Return the last command of the pipe if the next command uses its ``$?``."""
    own = [c for c in job.calls if c.offset > outer.offset and not c.under and not c.in_substitution]
    number = next((n for n, c in enumerate(own) if c.before in ("|", "|&") and not c.is_piped), None)
    if number is None or own[number].program not in PASSES_THROUGH or "PIPESTATUS" in job.code[outer.offset :]:
        return None
    last, following = own[number], own[number + 1] if number + 1 < len(own) else None
    end = following.offset if following else len(job.text)
    kept = any(last.offset < a.offset < end and a.value == "$?" and not a.under for a in job.assignments)
    used = following is not None and any("$?" in a.text for a in following.args)
    apart = following is not None and (following.in_function != last.in_function or following.written == "trap")
    return last if (kept or used) and not apart and last.after in ("\n", ";") else None


def _ignored(job: JobDescription, outer: ProgramCall) -> ProgramCall | None:
    """Return the ``true`` of ``work || true``, and the ``exit`` of ``work || exit 0``."""
    if outer.after != "||":
        return None
    following = next((c for c in job.calls if c.offset > outer.offset and c.before == "||" and not c.under), None)
    zero = following is not None and following.program == "exit" and [a.text for a in following.args] == ["0"]
    return following if following is not None and (zero or following.program in ("true", ":")) else None


ERROR_TEXT = lazy_regex(
    r"(?i)\berror\b|\bfail|\bmissing\b|not found|\bno \w+ (?:assigned|found|available)|\bexiting\b|usage:|cannot|could not|abort|"
    r"\b(?:illegal|invalid|wrong|unknown|bad|not enough|too (?:few|many)|insufficient)\b|\bnot set\b|\bdoes not exist|\bdoesn't exist|\bunsupported\b|"
    r"\bmust (?:be|provide|specify|pass|give)\b|\b(?:please|need to) (?:provide|specify|pass|set|give)\b|\bnot supported\b"
)
ZERO_WHY = "Slurm and the shell take exit code 0 for success: the job is COMPLETED, and dependent jobs start."


def commands_after(job: JobDescription, outer: ProgramCall) -> list[ProgramCall]:
    """Return the commands of the script's own shell that run after a command."""
    return [
        c
        for c in job.calls
        if c.offset > outer.offset and not c.under and not c.in_substitution and not c.in_function
        if not c.instead_of(outer)
    ]


def name_of_work(job: JobDescription, outer: ProgramCall) -> str:
    launch = next((la for la in job.launches if la.call.starter is outer), None)
    return launch.kind if launch and launch.kind != "python" else outer.program


def _add_pipefail(job: JobDescription, errexit: bool) -> tuple[Edit, ...]:
    """Return the edit that adds ``set -o pipefail`` above the first command; none where it could end the script early."""
    if errexit or not re.match(r"#!\S*(?:/|env\s+)(?:ba|k|z)sh\b", job.lines.line(1)):
        return ()
    first = min((c.offset for c in [*job.calls, *job.assignments]), default=None)
    if first is None:
        return ()
    start = first - job.lines.place(first)[1] + 1
    if job.text[start - 2 : start - 1] == "\\" or job.lines.place(first)[0] == 1:
        return ()
    newline = "\r\n" if "\r\n" in job.text else "\n"
    return (Edit(start, start, f"set -o pipefail{newline}"),)


def is_looked_at(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the exit code is checked after the call."""
    rest = job.code[outer.offset :]
    return bool(
        re.search(r"\$\?|PIPESTATUS|\btrap\b.*\bE(?:RR|XIT)\b", rest)
        or re.search(r"trap\s.*\b(?:ERR|EXIT)\b", job.code)
    )


SET_E_WHY = (
    "With set -e the shell exits at the first command that fails, even if the script checks the exit code afterwards."
)
SET_E_CURE = "srun ... || rc=$?"


def set_e(job: JobDescription) -> Iterator[Violation]:
    errexit, _ = shell_flags(job)
    if not errexit:
        return
    outers = [la.call.starter for la in job.launches if not la.call.in_function]
    for item in job.assignments:
        if item.value != "$?" or item.under:
            continue
        before = [o for o in outers if o.offset < item.offset]
        if (
            before
            and not before[-1].tested
            and before[-1].after not in ("||", "&&", "&", "|")
            and not is_suspended(job, item.offset)
        ):
            if not any(
                before[-1].offset < c.offset < item.offset and not c.under and not c.in_substitution
                for c in job.calls[job.calls.index(before[-1]) + 1 :]
            ):
                yield Violation(item.offset, f"{item.name}=$? is never reached if the command above fails")
    for call in job.calls:
        if (
            re.match(r"\(\(\$\(\(\s*\w+(?:\+\+|--)\s*\)\)", call.written)
            and not call.tested
            and call.after not in ("||", "&&")
        ):
            yield Violation(call.offset, "((x++)) returns 1 if x was 0, which ends the script", cure="x=$((x + 1))")


def is_suspended(job: JobDescription, offset: int) -> bool:
    """Return whether `set +e` is active here."""
    last = [c for c in job.calls if c.program == "set" and not c.under and c.offset < offset]
    return bool(last) and any(re.match(r"\+\w*e", a.text) for a in last[-1].args)


GROUP_TO_TEE = lazy_regex(r"(?m)^([ \t]*)[)}][^\n|#]*\|&?[ \t]*(tee)\b")


def group_to_tee(job: JobDescription) -> Iterator[Violation]:
    """Report a group of commands whose output goes to tee, which hides from ``set -e`` that the work in it failed."""
    for found in GROUP_TO_TEE.finditer(job.code):
        begins = [m.end() for m in re.finditer(rf"(?m)^{found[1]}[({{][ \t]*$", job.code[: found.start()])]
        steps = [*job.work, *(c for c in job.calls if c.program == "srun" and not c.under)]
        inside = [w for w in steps if begins and begins[-1] < w.offset < found.start() and not w.in_substitution]
        errexit, pipefail = shell_flags(job, found.start())
        if inside and errexit and not pipefail and "PIPESTATUS" not in job.code:
            what = name_of_work(job, inside[0])
            text = f"the group with {what} is piped, so its exit code is lost: a pipe returns that of its last command"
            yield Violation(found.start(2), text, fix=_add_pipefail(job, errexit))
            return


# ------------------------------------------------------------------------------------------- set -u

UNBOUND_WHY = "With set -u the shell stops at a variable that is not set, with 'unbound variable'; a batch system need not set this one."
SEARCH_LISTS = {
    "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH",
    "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "XLA_FLAGS", "MANPATH", "INCLUDE", "DYLD_LIBRARY_PATH",
}  # fmt: skip
NOUNSET = lazy_regex(r"-\w*u\w*")
SETS_PYTHONPATH = lazy_regex(
    r"(?im)^\s*(?:module\s+(?:load|add)|ml)\s.*(?:scipy|pytorch|tensorflow|easybuild|spack|python|jax|rocm|paraview|openmm|LUMI|cray)|^\s*(?:source|\.)\s+\S*(?:setup|env)\w*\.(?:sh|bash)"
)


def unbound(job: JobDescription) -> Iterator[Violation]:
    """Report a list of folders that grows from nothing, ``A=/x:$A``, where set -u is on."""
    changes: list[tuple[int, bool]] = []
    if re.match(r"#!\S*sh\s+-\w*u", job.lines.line(1)):
        changes.append((0, True))
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program == "set" and not call.under and not call.in_substitution:
            if any(NOUNSET.fullmatch(w) for w in words) or "-o nounset" in " ".join(words):
                changes.append((call.offset, True))
            elif any(re.fullmatch(r"\+\w*u\w*", w) for w in words) or "+o nounset" in " ".join(words):
                changes.append((call.offset, False))
    if not changes:
        return
    yield from _never_set(job, changes)
    for use in job.uses:
        state = [on for place, on in changes if place < use.offset]
        if use.name not in SEARCH_LISTS or not state or not state[-1] or use.operator or use.under or use.in_function:
            continue
        earlier = [
            a for a in job.by_name.get(use.name, []) if job.lines.place(a.offset)[0] < job.lines.place(use.offset)[0]
        ]
        guarded = any(u.name == use.name and u.operator and u.offset <= use.offset for u in job.uses)
        if earlier or guarded or use.program in ("[", "[["):
            continue
        loaded = any(
            c.program in ("module", "ml", "source", ".", "eval", "spack") and c.offset < use.offset and not c.in_substitution
            and not re.search(r"bin/activate\Z|\bpurge\b|\buse\b", " ".join(a.text for a in c.args))
            for c in job.calls
        )  # fmt: skip
        sure = not loaded or (use.name == "PYTHONPATH" and not SETS_PYTHONPATH.search(job.text))
        text = f"set -u stops the script here if ${use.name} is not set"
        yield Violation(use.offset, text, why=UNBOUND_WHY, cure=f"{use.name}=/folder${{{use.name}:+:${use.name}}}",
                        severity=None if sure else "note")  # fmt: skip
        return


def _never_set(job: JobDescription, changes: list[tuple[int, bool]]) -> Iterator[Violation]:
    """Report a name in small letters that nothing in the script sets: an environment has none of these."""
    guarded = {u.name for u in job.uses if u.operator}
    if (
        job.sources_files
        or job.placeholders
        or any(c.program in ("eval", "set", "getopts") and c.args and c.program != "set" for c in job.calls)
    ):
        return
    for use in job.uses:
        state = [on for place, on in changes if place < use.offset]
        known = job.has(use.name) or use.name in job.reading.named | job.reading.exported | guarded
        if (
            not state
            or not state[-1]
            or known
            or use.under
            or use.in_function
            or not re.fullmatch(r"[a-z][a-z0-9_]+", use.name)
        ):
            continue
        if (
            re.search(
                rf"(?<![$\w{{]){use.name}(?:=|\+\+|\[)|-v[ \t]+{use.name}\b|[ \t]{use.name}\b[ \t]*(?:;|\n)", job.text
            )
            or "proxy" in use.name
        ):
            continue
        text = f"set -u stops the script here: nothing sets ${use.name}"
        yield Violation(use.offset, text, why="With set -u the shell stops at a variable that is not set, with 'unbound variable'.",
                        cure=f"${{{use.name}:-}}, or set it above")  # fmt: skip
        return


# ------------------------------------------------------------------------------- pipes and messages


def piped_inside(job: JobDescription) -> Iterator[Violation]:
    """Report a program in a pipe of an inner shell, and ``work || echo`` at the end of a job."""
    if "pipefail" in job.code or not job.is_job:
        return
    for call in job.work_calls:
        inner = next((c for c in reversed(call.under) if c.program in SHELLS), None)
        outer = call.under[0] if call.under else call
        if inner is None or not call.is_piped or call.in_substitution or call.in_function or outer.tested:
            continue
        if "PIPESTATUS" not in job.code and outer.after in ("\n", ";", ""):
            text = f"{call.program} is piped, so its exit code is lost: a pipe returns that of its last command"
            yield Violation(call.offset, text, cure=f"{inner.program} -c 'set -o pipefail; ...'")
            return


def echoed_failure(job: JobDescription) -> Iterator[Violation]:
    """Report ``work || echo failed`` as the last command: the job then succeeds."""
    if not job.is_job or len(job.work) != 1 or job.work[0].after != "||":
        return
    outer = job.work[0]
    later = [c for c in job.calls if c.offset > outer.offset and not c.under and not c.in_substitution]
    if outer.in_loop or outer.in_function or outer.tested or not later or outer in later:
        return
    rest = [c for c in later if c.program not in ("echo", "printf", "date")]
    if (
        later[0].before == "||"
        and later[0].program in ("echo", "printf")
        and not rest
        and later[0].after not in ("&&", ";")
    ):
        text = f"|| {later[0].written} reports success, even if {outer.program} failed"
        yield Violation(later[0].offset, text, cure="|| { echo ...; exit 1; }")


# -------------------------------------------------------------------------- blocks that end in exit

STATUS_WHY = "$? is the exit code of the command directly before it, here 0: the job is reported as COMPLETED."
HELPERS = {"echo", "printf", "date", "cp", "mv", "ln", "mkdir", "rm", "touch", "ls", "cat", *TESTS}
OF_WORK = lazy_regex(r"(?i)\b(?:pre-?)?train|fine-?tun|\bexperiment|\bjob\b|\binference|\bevaluation")


def status_of_block(job: JobDescription) -> Iterator[Violation]:
    """Report ``$?`` behind an ``if`` block that only copies or prints something, where the result of the work was meant."""
    if shell_flags(job)[0]:
        return
    own = [c for c in job.calls if not c.in_substitution and not c.under]
    works = {w.offset for w in job.work}
    starts = {(la.call.under[0] if la.call.under else la.call).offset for la in job.launches}
    for number, call in enumerate(own):
        if call.program not in TESTS or not any(a.text == "$?" for a in call.args) or call.in_function:
            continue
        line = job.lines.place(call.offset)[0]
        above = line - 1
        while above > 1 and re.match(r"[ \t]*(?:#|$)", job.lines.line(above)):
            above -= 1
        if not re.match(r"[ \t]*fi[ \t]*(?:#.*)?$", job.lines.line(above)) or not number:
            continue
        block = own[number - 1].branch[-1:]
        inside = [c for c in own[:number] if block and block[0][0] in dict(c.branch)]
        worked = any(
            c.offset in works and not _is_checked(c, after)
            for c, after in pairwise(own[: number + 1])
            if c.offset in starts or not starts
        )
        if not inside or not worked or any(c.program not in HELPERS for c in inside):
            continue
        said = "\n".join(
            job.lines.line(n) for n in range(above + 1, min(line + MESSAGE_LINES, job.text.count("\n") + 1))
        )
        if OF_WORK.search("\n".join(re.findall(r"(?m)^[ \t]*(?:#|echo\b|printf\b).*$", said.split("\nfi\n")[0]))):
            text = f"$? is the exit code of the if block that ends in line {above}, not that of the work above it"
            yield Violation(
                call.offset, text, why=STATUS_WHY, cure="rc=$? directly behind the command, then [ $rc -eq 0 ]"
            )
            return


MESSAGE_LINES = 25


def _is_checked(call: ProgramCall, after: ProgramCall) -> bool:
    """Return whether the script looks at the result of a command directly behind it."""
    return call.tested or call.after in ("||", "&&") or any(a.text == "$?" for a in after.args)


def words_of(call: ProgramCall) -> str:
    """Return the arguments of a command in one text."""
    return " ".join(a.text for a in call.args)


def in_braces(job: JobDescription, first: ProgramCall, last: ProgramCall) -> bool:
    """Return whether a group ``{ first; last; }`` contains both commands."""
    opened = re.search(r"\{\s*\Z", job.text[max(0, first.offset - 20) : first.offset])
    return opened is not None and re.match(r"exit[^\n;]*(?:;|\n)\s*\}", job.text[last.offset :]) is not None


DIRECT_STATUS = lazy_regex(r"\w+[ \t]+\"?\$\?|exit(?=[ \t]*(?:[;}#\n]|\Z))")
AFTER_FAILURE = lazy_regex(
    r"(?:\$\?[\"']?[ \t]*(?:-ne|!=|-gt)[ \t]*[\"']?0|\bif[ \t]+![ \t])[^\n]*\n?(?:[ \t]*then\b[^\n]*\n)?"
    r"(?:[ \t]*(?:echo|printf|date)\b[^\n]*\n?)*[ \t]*\Z"
)


def exit_of_message(job: JobDescription) -> Iterator[Violation]:
    """Report ``exit $?``, or ``exit``, behind the error message of ``if [ $? -ne 0 ]``, ``command || { echo ...; }`` and ``test && echo ...``."""
    for before, call in pairwise(c for c in job.calls if not c.in_substitution and not c.under):
        written = DIRECT_STATUS.match(job.text, call.offset)
        if call.program not in ("exit", "return") or written is None:
            continue
        said = before.program in ("echo", "printf") and before.branch == call.branch
        chained = call.before == "&&" and before.before in ("&&", "||") and ERROR_TEXT.search(words_of(before))
        grouped = before.before == "||" and before.after in (";", "\n") and in_braces(job, before, call)
        what = f"{call.program} $?" if "$" in written[0] else "exit without a number"
        text = f"$? is the exit code of '{before.written}': {what} reports success after the error"
        severity = "note" if what.endswith("number") and not job.is_job else None
        if said and (grouped or chained):
            yield Violation(call.offset, text, why=STATUS_WHY, cure=f"{call.program} 1", severity=severity)
            continue
        if not call.branch or call.in_function or call.program != "exit":
            continue
        failed = AFTER_FAILURE.search(job.text[max(0, call.offset - 600) : call.offset])
        message = before.program in ("echo", "printf", "date") and before.branch == call.branch
        tested = before.program in TESTS and job.lines.place(call.offset)[0] - job.lines.place(before.offset)[0] <= 2
        if failed and (message or tested):
            cure = "rc=$? directly behind the command, then exit $rc; or exit 1"
            yield Violation(call.offset, text, why=STATUS_WHY, cure=cure, severity=severity)


# ------------------------------------------------------------------- results that are always success

STARTED_WHY = "& starts a command and returns 0 at once: $? says nothing about the command, and the check never fires."
DECLARED_WHY = "export, local and declare return 0 of their own: the exit code of the command in $( ) is lost."
DECLARED_CURE = "NAME=$(command); rc=$?; and export NAME in a line of its own"
TRAPPED_WHY = "exit in a trap of EXIT replaces the exit code of the script: a failed job is reported as COMPLETED."
BEHIND_START = lazy_regex(r"(?<![&>])&(?![&>])[ \t]*(?:#[^\n]*)?[\s;]*[\w\s;+=()\[\]{}$!\"'-]*\Z")
FI = lazy_regex(r"(?m)(?:^|;)[ \t]*fi[ \t]*(?:;|$)")
BLOCK_WORDS = lazy_regex(r"\b(?:fi|done|esac|else|elif|wait)\b|[})]\s*\Z")
DECLARES = lazy_regex(r"[ \t]*(?:local|export|declare|typeset|readonly)[ \t]+(?:-\w+[ \t]+)*\w+=\"?(?:\$\((?!\()|`)")
CHECKED_DECLARATION = lazy_regex(r"[ \t]*(?:#[^\n]*)?\|\|[ \t]*(?:\\\n[ \t]*)?(exit|return|\{|die\b|error\b)")


def always_success(job: JobDescription) -> Iterator[Violation]:
    """Report a check of ``$?`` that is 0 whatever happened: behind ``&``, and behind ``export NAME=$(command)``."""
    if job.kind != "script":
        return
    calls = [c for c in job.calls if not c.under and not c.in_substitution]
    starts = {c.offset: c for c in calls}
    sets = {a.offset: a for a in job.assignments if not a.under and not a.in_substitution}
    for place, shown in _checks_of_status(job):
        before = max((o for o in (*starts, *sets) if o < place and not _is_bare_status(job, sets.get(o))), default=None)
        if before is None:
            continue
        call, item = starts.get(before), sets.get(before)
        if call is not None and call.after == "&":
            between = job.text[before:place]
            behind = BEHIND_START.search(between)
            ended = FI.sub("", between[behind.start() :]) if behind else ""
            blocks = len(FI.findall(between)) if behind else 0
            if behind and not BLOCK_WORDS.search(ended) and _only_starts(calls, call, blocks):
                text = f"{shown} is 0 whatever becomes of '{call.written}', which has only been started"
                yield Violation(place, text, why=STARTED_WHY, cure='wait "$pid"; rc=$?')
        elif item is not None and DECLARES.match(line := job.line_of(before)) and "$(" + "(" not in line:
            word = line.split()[0]
            text = f"{shown} is the exit code of {word}, which is 0, and not that of the command in $( )"
            yield Violation(place, text, why=DECLARED_WHY, cure=DECLARED_CURE)
    yield from _checked_declarations(job)


def _only_starts(calls: list[ProgramCall], last: ProgramCall, blocks: int) -> bool:
    """Return whether all branches of the blocks that end behind a start end in one, so that the result is 0 in any case."""
    numbers = [number for number, _ in last.branch[len(last.branch) - blocks :]] if blocks else []
    if len(numbers) < blocks:
        return False
    ends: dict[tuple[int, int], ProgramCall] = {}
    for call in calls:
        if call.offset <= last.offset and not call.tested:
            ends.update({way: call for way in call.branch if way[0] in numbers})
    return all(call.after == "&" for call in ends.values())


def _checks_of_status(job: JobDescription) -> Iterator[tuple[int, str]]:
    """Yield where ``$?`` decides something: in a test, in exit, or in a variable that something uses."""
    for item in job.assignments:
        kept = item.value == "$?" or (item.items is not None and [i.text for i in item.items] == ["$?"])
        if (kept or re.match(r"\+?=\(\$\?\)", job.text[item.offset + len(item.name) :][:8])) and not item.under:
            if item.name in job.used_names:
                yield item.offset, "$?"
    for call in job.calls:
        if call.program in TESTS or call.program in ("exit", "return"):
            written = job.line_of(call.offset)[job.lines.place(call.offset)[1] - 1 :]
            if not call.under and any(a.text == "$?" for a in call.args) and "$?" in written:
                yield call.offset, "$?"


def _is_bare_status(job: JobDescription, item: Assignment | None) -> bool:
    """Return whether an assignment keeps ``$!``, which leaves the result of the start at 0."""
    return item is not None and "$!" in job.text[item.offset : item.offset + len(item.name) + 8]


def _checked_declarations(job: JobDescription) -> Iterator[Violation]:
    """Report ``export NAME=$(command) || exit 1``."""
    for found in re.finditer(r"(?m)^" + DECLARES.pattern, job.text):
        if job.in_comment(found.start()):
            continue
        line = job.line_of(found.start())
        end = re.search(r"[)`]\"?(?=[ \t]*\|\|)", line)
        checked = CHECKED_DECLARATION.match(line, end.end()) if end else None
        inside = line[found.end() - found.start() : end.end()] if end else ""
        if checked and end and inside.count("(") + 1 == inside.count(")") + inside.count("`"):
            word = line.split()[0]
            text = f"|| {checked[1]} never runs: {word} returns 0, whatever the command in $( ) returned"
            yield Violation(found.start() + end.end(), text, why=DECLARED_WHY, cure=DECLARED_CURE)
            return


EXIT_TRAP = lazy_regex(
    r"(?m)^[ \t]*trap[ \t]+(?:'([^'\n]*)'|\"([^\"\n]*)\"|([\w-]+))[ \t]+(?:[A-Z]+[ \t]+)*(?:EXIT|0)\b"
)


def trapped_exit(job: JobDescription) -> Iterator[Violation]:
    """Report ``exit 0`` at the end of what a trap of EXIT runs."""
    if not job.is_job or not job.work:
        return
    for found in EXIT_TRAP.finditer(job.text):
        text, name = found[1] or found[2] or "", found[3]
        place = found.start() + len(found[0]) - len(found[0].lstrip())
        if name and name != "-":
            defined = re.search(
                rf"(?m)^([ \t]*)(?:function[ \t]+)?{re.escape(name)}[ \t]*(?:\(\))?[ \t]*\{{?[ \t]*\n(?:[ \t]*\{{[ \t]*\n)?"
                r"((?:(?!\1\})[^\n]*\n)*)\1\}",
                job.text,
            )
            text = defined[2].rstrip() if defined else ""
            place = defined.start(2) + text.rfind("exit") if defined else place
        last = text.rstrip("; \t").split("\n")[-1]
        if re.search(r"(?:^|;)[ \t]*exit[ \t]+0\Z", last) and not job.in_comment(found.start()):
            yield Violation(
                place, "exit 0 in the trap of EXIT reports success for every end of the job", why=TRAPPED_WHY,
                cure="leave exit out of the trap, or keep rc=$? as its first command and exit $rc",
            )  # fmt: skip
            return
