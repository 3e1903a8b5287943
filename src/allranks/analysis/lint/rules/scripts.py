"""Rules for batch scripts: #SBATCH lines, exit codes, exports and other shell errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from allranks.analysis.lint.command_options import LONG, PYTHON, SHELLS
from allranks.analysis.lint.job import JobDescription, LauncherCall
from allranks.analysis.lint.records import ProgramCall, VariableUse, Violation
from allranks.analysis.lint.rules.tasks import sources_settings
from allranks.utils.text import nearest_name

VARIABLE_WHY = "sbatch reads these lines as text before any shell runs: $NAME, ~ and `...` are not expanded, and the option is refused or means another file."
VARIABLE_CURE = "set it on the command line, where a shell expands it (sbatch --nodes=$N job.sh), or use Slurm's patterns (%x name, %j job, %u user)"
LATE_WHY = "sbatch stops reading options at the first command; the option has no effect, and there is no warning."
LATE_CURE = "move all #SBATCH lines up, directly below the first line"
UNREAD_WHY = "sbatch treats this as an ordinary comment."
OUTPUT_WHY = (
    "Slurm opens the output file before the script runs. If the folder is missing, the job fails at once without a log."
)
OUTPUT_CURE = "create the folder before sbatch, or use an existing one"
SHEBANG_WHY = "sbatch refuses a script whose first line does not start with #!."
PATHS = ("output", "error", "chdir", "input")


def variable(job: JobDescription) -> Iterator[Violation]:
    for item in job.directives:
        value = item.value or ""
        if item.late:
            continue
        name = f"--{item.name}={value}" if item.name else value
        if re.search(r"(?<!\\)\$[A-Za-z_{(]|`", value):
            yield Violation(item.offset, f"#SBATCH {name}: variables are not expanded here")
        elif item.name in PATHS and value.startswith("~"):
            yield Violation(item.offset, f"#SBATCH {name}: ~ is not expanded here")


def late(job: JobDescription) -> Iterator[Violation]:
    items = [item for item in job.directives if item.late]
    if not items:
        return
    lines = [job.lines.place(item.offset)[0] for item in items]
    before = [c for c in job.calls if not c.under and not c.in_substitution and c.offset < items[0].offset]
    command = f", {before[0].written!r} in line {job.lines.place(before[0].offset)[0]}" if before else ""
    many = f"{len(set(lines))} #SBATCH lines (to line {lines[-1]}) come"
    what = many if len(set(lines)) > 1 else f"#SBATCH --{items[0].name} comes"
    yield Violation(items[0].offset, f"{what} after the first command{command}")


def unread(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch:
        return
    for comment in job.reading.comments:
        line, column = job.lines.place(comment.offset)
        text = job.lines.line(line)
        if column > 1 and comment.text.startswith("#SBATCH") and not text[: column - 1].strip():
            yield Violation(comment.offset, "this #SBATCH is indented, so it is not read")
        elif column == 1 and re.match(r"#(?:sbatch|Sbatch|SBATCH[:=]|SLURM)\s+-", comment.text):
            yield Violation(comment.offset, f"{comment.text.split()[0]} is not #SBATCH")
        elif column == 1 and re.match(r"#[ \t]+SBATCH\s+-", comment.text):
            yield Violation(
                comment.offset, "# SBATCH with a space is a comment (write ##SBATCH if it is intended)", severity="note"
            )
    yield from _misspelled(job)


def _misspelled(job: JobDescription) -> Iterator[Violation]:
    for item in job.directives:
        word = item.text.split()[0] if item.text.split() else ""
        if re.match(r"-[a-z]{2,}[a-z-]*=", word) and not word.startswith("--"):
            yield Violation(
                item.offset,
                f"#SBATCH {word}: a long option needs two dashes",
                cure=f"-{word}",
                severity="error",
                why="sbatch refuses it.",
            )
        elif not item.name and item.value:
            yield Violation(item.offset, f"#SBATCH ... {item.value}: not an option; a blank before or after = is not allowed", severity="error",
                      why="sbatch treats it as the script's name, or refuses it.", cure="--name=value")  # fmt: skip
        elif len(item.name) > 1 and item.name not in LONG:
            near = nearest_name(item.name, LONG, 0.85)
            if near:
                yield Violation(
                    item.offset,
                    f"#SBATCH --{item.name}: sbatch has no such option",
                    cure=f"--{near}",
                    severity="error",
                    why="sbatch refuses it.",
                )


def output(job: JobDescription) -> Iterator[Violation]:
    made = {
        p.text.rstrip("/")
        for c in job.calls
        if c.program == "mkdir" and not c.under
        for p in c.args
        if not p.text.startswith("-")
    }
    for name in ("output", "error"):
        found = job.heading.get(name)
        folder = str(PurePosixPath(found.value).parent) if found and found.value and "/" in found.value else None
        if (
            found
            and folder
            and any(m == folder or m.startswith(folder + "/") or m.removeprefix("./") == folder for m in made)
        ):
            yield Violation(found.offset, f"the folder {folder} is created by the script, too late for --{name}")


def shebang(job: JobDescription) -> Iterator[Violation]:
    if job.source.text.startswith("\ufeff"):
        yield Violation(
            0,
            "the file starts with a byte order mark instead of #!",
            cure="save it as UTF-8 without a byte order mark",
        )
    elif job.is_batch and not job.source.text.startswith("#!"):
        yield Violation(job.source.where(0), "the first line of the batch script does not start with #!")


CRLF_WHY = "sbatch refuses scripts with DOS line breaks; elsewhere the carriage return becomes part of the last word of every line."
EXIT_WHY = "The job's state is the exit code of its last command. A failed training is reported as COMPLETED, and dependent jobs start."
EXIT_CURE = "set -eo pipefail at the top of the script"
SET_E_WHY = (
    "With set -e the shell exits at the first command that fails, even if the script checks the exit code afterwards."
)
SET_E_CURE = "srun ... || rc=$?"
BUFFERED_WHY = "Python buffers some kB of output if it does not write to a terminal; when a rank is killed, its last lines are lost."
EXPORT_WHY = "A shell started by srun or bash -c only has the exported variables; this one is empty there, and its option gets no value or the next word."
FOLDER_WHY = "sbatch copies the script to the node's spool folder and runs the copy: $0 and BASH_SOURCE point to that folder, which contains no other files."
FOLDER_CURE = 'cd "$SLURM_SUBMIT_DIR", the folder where sbatch was called (or use a full path)'
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


def line_breaks(job: JobDescription) -> Iterator[Violation]:
    count = job.text.count("\r\n")
    if count:
        yield Violation(job.text.index("\r\n"), f"{count} line{'s' * (count > 1)} with DOS line breaks (CR LF)")


def _flags(job: JobDescription) -> tuple[bool, bool]:
    """Return whether set -e, and whether pipefail, is active in the batch shell."""
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


def _outer(launch: LauncherCall) -> ProgramCall:
    return launch.call.under[0] if launch.call.under else launch.call


def not_exported(job: JobDescription) -> Iterator[Violation]:
    """Report variables set in the outer shell, used by an inner one, and never exported."""
    if sources_settings(job) or re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.text):
        return
    said: set[str] = set()
    for use in job.uses:
        shells = [c for c in use.under if c.program in SHELLS]
        if not shells or use.name in said or use.operator or not _lost(job, use):
            continue
        said.add(use.name)
        yield Violation(
            use.offset,
            f"${use.name} is set in the script but not exported: it is empty in this shell",
            cure=f"export {use.name}",
        )


def _lost(job: JobDescription, use: VariableUse) -> bool:
    name = use.name
    own = [a for a in job.assignments if a.name == name and not a.removed]
    outer = [a for a in own if not a.under and not a.in_substitution and a.offset < use.offset]
    if not outer or len(outer) < len(own) or name in INHERITED or name in job.reading.exported:
        return False
    given = any(f"{name}=" in a.text for call in use.under if call.program not in SHELLS for a in call.args)
    set_otherwise = re.search(rf"\b(?:for|read|mapfile|readarray|printf\s+-v)\s[^\n;]*\b{name}\b", job.text)
    kept = any(a.exported or re.search(rf"\$\{{?{name}\b", a.value) for a in outer)
    return not (given or set_otherwise or kept)


def script_folder(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch or re.search(r"SLURM_SUBMIT_DIR|scontrol\s+show\s+job\b", job.text):
        return
    if any(c.program == "sbatch" for c in job.calls):
        return  # it submits itself, and determines its folder before that
    places = [
        c.offset
        for c in job.calls
        if c.program in ("dirname", "readlink", "realpath")
        and not c.under
        and any(OWN_PATH.match(a.text) for a in c.args)
    ]
    places += [a.offset for a in job.assignments if not a.under and re.match(r"\$\{(?:0|BASH_SOURCE)[^}]*%", a.value)]
    if places:
        yield Violation(min(places), "the folder of the script: under sbatch this is Slurm's spool folder")


def exit_code(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch:
        return
    errexit, pipefail = _flags(job)
    for launch in job.launches:
        outer = _outer(launch)
        if launch.call.in_function or outer.tested or outer.before in ("&&", "||") or outer.after in ("||", "&&", "&"):
            continue
        if outer.after in ("|", "|&"):
            if not pipefail:
                yield Violation(
                    outer.offset,
                    f"{launch.kind} is piped, so its exit code is lost: a pipe returns that of its last command",
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
            yield Violation(
                later[-1].offset,
                f"the job ends with the exit code of '{later[-1].written}', even if {launch.kind} failed",
                cure=EXIT_CURE,
            )
            return


def _looks(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the exit code is checked after the call."""
    rest = job.text[outer.offset :]
    return bool(
        re.search(r"\$\?|PIPESTATUS|\btrap\b.*\bE(?:RR|XIT)\b", rest)
        or re.search(r"trap\s.*\b(?:ERR|EXIT)\b", job.text)
    )


def set_e(job: JobDescription) -> Iterator[Violation]:
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
                yield Violation(item.offset, f"{item.name}=$? is never reached if the command above fails")
    for call in job.calls:
        if (
            re.match(r"\(\(\$\(\(\s*\w+(?:\+\+|--)\s*\)\)", call.written)
            and not call.tested
            and call.after not in ("||", "&&")
        ):
            yield Violation(call.offset, "((x++)) returns 1 if x was 0, which ends the script", cure="x=$((x + 1))")


def _suspended(job: JobDescription, offset: int) -> bool:
    """Return whether `set +e` is active here."""
    last = [c for c in job.calls if c.program == "set" and not c.under and c.offset < offset]
    return bool(last) and any(re.match(r"\+\w*e", a.text) for a in last[-1].args)


def buffered(job: JobDescription) -> Iterator[Violation]:
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
                yield Violation(
                    call.offset,
                    "Python's output is buffered: no PYTHONUNBUFFERED and no -u (torchrun passes -u itself, srun does not)",
                )
                return
