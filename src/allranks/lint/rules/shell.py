"""Traps of the shell itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.calls import PYTHON, SHELLS
from allranks.lint.job import Job, Launch
from allranks.lint.records import Call, Hit, Use
from allranks.lint.rules.tasks import sources_settings

CRLF_WHY = "sbatch refuses scripts with DOS line breaks; elsewhere the carriage return becomes part of the last word of every line."
EXIT_WHY = "The job's state is the exit code of its last command. A failed training is reported as COMPLETED, and dependent jobs start."
EXIT_CURE = "set -eo pipefail at the top of the script"
SET_E_WHY = "With set -e the shell ends at the first command that fails, also where the script was about to look at the failure."
SET_E_CURE = "srun ... || rc=$?"
BUFFERED_WHY = "Python keeps some kB of output back when it does not write to a terminal; a rank that is killed takes its last lines along."
EXPORT_WHY = "A shell started by srun or bash -c has the exported variables only; this one is empty there, and its option gets no value or the next word."
FOLDER_WHY = "sbatch copies the script to the node's spool folder and runs the copy: $0 and BASH_SOURCE name that folder, which holds nothing else."
FOLDER_CURE = 'cd "$SLURM_SUBMIT_DIR", the folder from which sbatch was called (or a full path)'
OWN_PATH = re.compile(r"\$\{?(?:0|BASH_SOURCE)(?![0-9A-Za-z_])")
INHERITED = {
    "PATH",
    "HOME",
    "USER",
    "SHELL",
    "PWD",
    "LANG",
    "TERM",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "HOSTNAME",
}
LAST = {"exit", "true", ":", "wait", "trap", "fi", "done", "return", "}", "set", "unset", "export"}


def line_breaks(job: Job) -> Iterator[Hit]:
    count = job.text.count("\r\n")
    if count:
        yield Hit(job.text.index("\r\n"), f"{count} line{'s' * (count > 1)} with DOS line breaks (CR LF)")


def _flags(job: Job) -> tuple[bool, bool]:
    """Whether set -e, and whether pipefail, is in force in the batch shell."""
    first = job.lines.line(1)
    errexit = bool(re.match(r"#!\S*sh\s+-\w*e", first))
    pipefail = False
    for call in job.calls:
        if call.program == "set" and not call.under:
            words = [a.text for a in call.args]
            errexit = (
                errexit or any(re.match(r"-\w*e", w) for w in words) or ("-o" in " ".join(words) and "errexit" in words)
            )
            pipefail = pipefail or "pipefail" in words
    return errexit, pipefail


def _outer(launch: Launch) -> Call:
    return launch.call.under[0] if launch.call.under else launch.call


def not_exported(job: Job) -> Iterator[Hit]:
    """Set in the outer shell, used by an inner one, and exported nowhere."""
    if sources_settings(job) or re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.text):
        return
    said: set[str] = set()
    for use in job.uses:
        shells = [c for c in use.under if c.program in SHELLS]
        if not shells or use.name in said or use.operator or not _lost(job, use):
            continue
        said.add(use.name)
        yield Hit(
            use.offset,
            f"${use.name} is set in the script and not exported: empty in this shell",
            cure=f"export {use.name}",
        )


def _lost(job: Job, use: Use) -> bool:
    name = use.name
    own = [a for a in job.assignments if a.name == name and not a.removed]
    outer = [a for a in own if not a.under and not a.in_substitution and a.offset < use.offset]
    if not outer or len(outer) < len(own) or name in INHERITED or name in job.reading.exported:
        return False
    given = any(f"{name}=" in a.text for call in use.under if call.program not in SHELLS for a in call.args)
    set_otherwise = re.search(rf"\b(?:for|read|mapfile|readarray|printf\s+-v)\s[^\n;]*\b{name}\b", job.text)
    kept = any(a.exported or re.search(rf"\$\{{?{name}\b", a.value) for a in outer)
    return not (given or set_otherwise or kept)


def script_folder(job: Job) -> Iterator[Hit]:
    if not job.is_batch or re.search(r"SLURM_SUBMIT_DIR|scontrol\s+show\s+job\b", job.text):
        return
    if any(c.program == "sbatch" for c in job.calls):
        return  # it submits itself, and asks for its folder before that
    places = [
        c.offset
        for c in job.calls
        if c.program in ("dirname", "readlink", "realpath")
        and not c.under
        and any(OWN_PATH.match(a.text) for a in c.args)
    ]
    places += [a.offset for a in job.assignments if not a.under and re.match(r"\$\{(?:0|BASH_SOURCE)[^}]*%", a.value)]
    if places:
        yield Hit(min(places), "the folder of the script itself: under sbatch that is Slurm's spool folder")


def exit_code(job: Job) -> Iterator[Hit]:
    if not job.is_batch:
        return
    errexit, pipefail = _flags(job)
    for launch in job.launches:
        outer = _outer(launch)
        if launch.call.in_function or outer.tested or outer.before in ("&&", "||") or outer.after in ("||", "&&", "&"):
            continue
        if outer.after in ("|", "|&"):
            if not pipefail:
                yield Hit(
                    outer.offset, f"{launch.kind} is piped, and its exit code is lost: the pipe's is the last command's"
                )
                return
            outer = next(
                (c for c in job.calls if c.offset > outer.offset and c.before in ("|", "|&") and not c.under), outer
            )
        if errexit or _looks(job, outer):
            continue
        later = [
            c
            for c in job.calls
            if c.offset > outer.offset and not c.under and not c.in_substitution and not c.in_function
            if not c.instead_of(outer)
        ]
        if (
            later
            and later[-1].program not in LAST
            and not any(la.call is later[-1] for la in job.launches)
            and later[-1].program != "srun"
        ):
            yield Hit(
                later[-1].offset,
                f"the job ends with the exit code of '{later[-1].written}', whatever became of {launch.kind}",
                cure=EXIT_CURE,
            )
            return


def _looks(job: Job, outer: Call) -> bool:
    """Whether the exit code is looked at behind the call."""
    rest = job.text[outer.offset :]
    return bool(
        re.search(r"\$\?|PIPESTATUS|\btrap\b.*\bE(?:RR|XIT)\b", rest)
        or re.search(r"trap\s.*\b(?:ERR|EXIT)\b", job.text)
    )


def set_e(job: Job) -> Iterator[Hit]:
    errexit, _ = _flags(job)
    if not errexit:
        return
    outers = [_outer(la) for la in job.launches if not la.call.in_function]
    for item in job.assignments:
        if item.value != "$?" or item.under:
            continue
        before = [o for o in outers if o.offset < item.offset]
        if (
            before
            and not before[-1].tested
            and before[-1].after not in ("||", "&&", "&", "|")
            and not _suspended(job, item.offset)
        ):
            if not any(
                before[-1].offset < c.offset < item.offset and not c.under and not c.in_substitution
                for c in job.calls[job.calls.index(before[-1]) + 1 :]
            ):
                yield Hit(item.offset, f"{item.name}=$? is never reached when the command above fails")
    for call in job.calls:
        if (
            re.match(r"\(\(\$\(\(\s*\w+(?:\+\+|--)\s*\)\)", call.written)
            and not call.tested
            and call.after not in ("||", "&&")
        ):
            yield Hit(call.offset, "((x++)) counts as failed when x was 0, and ends the script", cure="x=$((x + 1))")


def _suspended(job: Job, offset: int) -> bool:
    """`set +e` before, and not taken back."""
    last = [c for c in job.calls if c.program == "set" and not c.under and c.offset < offset]
    return bool(last) and any(re.match(r"\+\w*e", a.text) for a in last[-1].args)


def buffered(job: Job) -> Iterator[Hit]:
    if job.has("PYTHONUNBUFFERED") or sources_settings(job) or not job.is_batch:
        return
    for call in job.calls:
        words = [a.text for a in call.args]
        alone = not call.under and not job.launches
        ranks = any(la.call is call for la in job.launches)
        if (
            PYTHON.match(call.program)
            and not call.module
            and (alone or ranks)
            and any(w.endswith(".py") for w in words)
        ):
            if not any(
                re.match(r"-[a-zA-Z]*u", w) for w in words[: next(i for i, w in enumerate(words) if w.endswith(".py"))]
            ):
                yield Hit(
                    call.offset,
                    "python writes through a buffer: no PYTHONUNBUFFERED and no -u (torchrun gives -u itself, srun does not)",
                )
                return
