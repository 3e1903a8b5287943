"""Rules for batch scripts: #SBATCH lines, exit codes, exports and other shell errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath

from allranks.analysis.lint.command_options import LONG, PYTHON, slurm_option
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Assignment, Edit, ProgramCall, Violation
from allranks.analysis.lint.rules.directives import GLUED_COMMENT
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
OUTPUT_CURE = "create the folder before sbatch (mkdir -p), or use an existing one"
SHEBANG_WHY = "sbatch refuses a script whose first line does not start with #!."
PATHS = ("output", "error", "chdir", "input")
WITHOUT_EFFECT_ON_JOB = {"job-name", "comment", "mail-user", "mail-type", "wckey"}
"""Options whose value changes neither what the job gets nor what it does."""


def variable(job: JobDescription) -> Iterator[Violation]:
    for item in job.directives:
        value = item.value or ""
        if item.late:
            continue
        name = f"--{item.name}={value}" if item.name else value
        if re.search(r"(?<!\\)\$[A-Za-z_{(]|`", value):
            severity = "note" if item.name in WITHOUT_EFFECT_ON_JOB else None
            yield Violation(item.offset, f"#SBATCH {name}: variables are not expanded here", severity=severity)
        elif item.name in PATHS and value.startswith("~"):
            yield Violation(item.offset, f"#SBATCH {name}: ~ is not expanded here")


FILLED_IN = re.compile(r"<%|\{%|\{\{|(?<!\$)\{[A-Za-z_]\w*\}|(?<![\w.])@[A-Z_]+\b|![A-Z]+_\w+|##\w+##|£\w")
"""Marks of programs that fill in a template."""


def _is_template(job: JobDescription) -> bool:
    """Return whether a line for the batch system, or what stands above it, is to be filled in by a program."""
    lines = job.text.splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith(("#SBATCH", "#PBS"))), default=0)
    return any(
        FILLED_IN.search(line) or line.startswith("% ") for line in lines[: last + 1] if not line.startswith("# ")
    )


def late(job: JobDescription) -> Iterator[Violation]:
    if _is_template(job):
        return
    if job.pbs is not None and job.pbs.late:
        lines = [job.lines.place(offset)[0] for offset in job.pbs.late]
        many = f"{len(lines)} #PBS lines (to line {lines[-1]}) come" if len(lines) > 1 else "#PBS comes"
        why = "qsub stops reading options at the first command; the option has no effect, and there is no warning."
        cure = "move all #PBS lines up, directly below the first line"
        yield Violation(job.pbs.late[0], f"{many} after the first command", why=why, cure=cure)
    items = [item for item in job.directives if item.late and item.name]
    if not items or not job.source.text.startswith("#!"):
        return  # without #! sbatch refuses the script
    lines = [job.lines.place(item.offset)[0] for item in items]
    if job.lines.line(lines[0] - 1).startswith("#!") and lines[0] > 2:
        return  # another script begins here
    before = [c for c in job.calls if not c.under and not c.in_substitution and c.offset < items[0].offset]
    if before and all(c.written.startswith("$") for c in before) and any("${" in i.text for i in job.directives):
        return  # a template, which a program fills in: $PARTITION_OPTION stands for an #SBATCH line
    command = f", {before[0].written!r} in line {job.lines.place(before[0].offset)[0]}" if before else ""
    many = f"{len(set(lines))} #SBATCH lines (to line {lines[-1]}) come"
    what = many if len(set(lines)) > 1 else f"#SBATCH --{items[0].name} comes"
    yield Violation(items[0].offset, f"{what} after the first command{command}")


OTHER_CASE = re.compile(r"#(?!PBS|BSUB)((?i:pbs)|(?!bsub)(?i:bsub))[ \t]+-")


def _in_other_case(job: JobDescription) -> Iterator[Violation]:
    """Report ``#Pbs`` and ``#BSub`` beside lines that the batch system reads."""
    for comment in job.reading.comments:
        found = OTHER_CASE.match(comment.text)
        if found and job.lines.place(comment.offset)[1] == 1:
            right = f"#{found[1].upper()}"
            if re.search(rf"(?m)^{right}\s", job.text):
                text = f"#{found[1]} is not {right}"
                why = "The batch system reads only lines in capital letters: this is an ordinary comment."
                yield Violation(comment.offset, text, why=why, cure=right)


def unread(job: JobDescription) -> Iterator[Violation]:
    yield from _in_other_case(job)
    if not job.is_batch and not any(u.name.startswith("SLURM_") for u in job.uses):
        return
    for comment in job.reading.comments:
        line, column = job.lines.place(comment.offset)
        text = job.lines.line(line)
        if column > 1 and comment.text.startswith("#SBATCH") and not text[: column - 1].strip():
            yield Violation(comment.offset, "this #SBATCH is indented, so it is not read")
        elif column == 1 and re.match(r"#sbatch\s.*[\w}]\.(?:\w+[\"']?)\s*$", comment.text):
            continue  # a command that is switched off: sbatch --dependency=... next.sh
        elif column == 1 and re.match(
            r"#(?:(?!SBATCH)(?i:sbatch)|SBATCH[:=]|SLURM|BATCH|[!$]\s*SBATCH)\s+-", comment.text
        ):
            severity = "note" if _changes_nothing(comment.text) and not _keeps_together(job, comment.text) else None
            yield Violation(comment.offset, f"{comment.text.split()[0]} is not #SBATCH", severity=severity)
        elif column == 1 and (typo := re.match(r"#(S[A-Z]{4,6})\s+-", comment.text)) and typo[1] != "SBATCH":
            if sorted(typo[1]) == sorted("SBATCH") or nearest_name(typo[1], ["SBATCH"], 0.8):
                severity = "note" if _changes_nothing(comment.text) else None
                yield Violation(comment.offset, f"#{typo[1]} is not #SBATCH", severity=severity)
        elif column == 1 and re.match(r"#[ \t]+SBATCH\s+-", comment.text):
            yield Violation(
                comment.offset,
                "# SBATCH with a space is a comment (write ##SBATCH if it is intended)",
                severity="note" if job.is_batch else "warning",
            )
    yield from _misspelled(job)


def _changes_nothing(line: str) -> bool:
    """Return whether the job is the same without this line: a name, an address for mails, or a default."""
    name, value, follows = slurm_option(line.split()[1])
    value = "".join(line.split()[2:3]) if follows else value
    return name in WITHOUT_EFFECT_ON_JOB or (name in ("nodes", "ntasks", "ntasks-per-node") and value == "1")


def _keeps_together(job: JobDescription, line: str) -> bool:
    """Return whether the line asks for one node in a job of several tasks or GPUs, which Slurm may spread without it."""
    one = re.match(r"(?:--nodes[= ]|-N ?)1(?:\s|\Z)", line.partition(" ")[2].strip()) is not None
    several = any((job.number(job.heads(name)) or 1) > 1 for name in ("ntasks", "gpus"))
    return one and "nodes" not in job.heading and several


def _misspelled(job: JobDescription) -> Iterator[Violation]:
    said: set[int] = set()
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
        elif item.name == "gres" and re.fullmatch(r"\d+|(?:gpus|GPU|GPUs|Gpu)(?::[\w:]+)?", item.value or ""):
            yield Violation(
                item.offset,
                f"#SBATCH --gres={item.value}: the name of the resource is gpu",
                cure="--gres=gpu:<n>",
                severity="error",
                why="sbatch refuses it: invalid generic resource specification.",
            )
        elif item.name and (item.value or "").startswith("=") and re.match(r"--[\w-]+\s", item.text):
            text = f"#SBATCH --{item.name} {item.value}: a blank before = is not allowed"
            yield Violation(
                item.offset, text, severity="error", why="sbatch takes = as part of the value.", cure="--name=value"
            )
        elif not item.name and item.value and not item.late:
            line = job.lines.place(item.offset)[0]
            if any(
                GLUED_COMMENT.fullmatch(d.value or "") for d in job.directives if job.lines.place(d.offset)[0] == line
            ):
                continue  # of a comment; its first word is part of the value before it
            if line in said or re.search(r"<%|\{\{|\{\(|\[[A-Za-z]|<-{3,}", job.lines.line(line)):
                continue  # to be filled in
            said.add(line)
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
                    whatever_is_filled_in=re.match(r"--[a-z-]+(?:[=\s]|\Z)", item.text) is not None,
                )


def output(job: JobDescription) -> Iterator[Violation]:
    """Report log folders that do not exist when the job starts."""
    made = {
        p.text.rstrip("/").removeprefix("./")
        for c in job.calls
        if c.program == "mkdir" and not c.under
        for p in c.args
        if not p.text.startswith("-")
    }
    reported: set[str] = set()
    for name in ("output", "error"):
        found = job.heading.get(name)
        if found is None or not found.value or "/" not in found.value:
            continue
        folder = str(PurePosixPath(found.value).parent)
        both = "--output and --error" if _same_folder(job, folder) else f"--{name}"
        if folder in reported:
            continue
        reported.add(folder)
        pattern = re.search(r"([^/\s]*%\d*[jJAaNnst][^/\s]*)/", found.value)
        if pattern:
            text = f"nobody creates the folder {pattern[1]} of {both}, whose name is known only when the job exists"
            yield Violation(found.offset, text, cure=f"--{name}=<existing folder>/%x-%j.out")
        elif any(m == folder or m.startswith(folder + "/") for m in made):
            # Whoever writes a full path has this folder already, as the script's author has that of earlier jobs.
            missing, certain = job.is_missing(folder)
            text = f"the folder {folder} is created by the script, too late for {both}"
            yield Violation(found.offset, text, severity="warning" if missing and certain else "note")
        else:
            missing, certain = job.is_missing(folder.replace("%x", job.heads("job-name") or "%x"))
            if missing:
                text = f"there is no folder {folder} for {both}, neither here nor next to the script"
                yield Violation(found.offset, text, severity="warning" if certain else "note")


def _same_folder(job: JobDescription, folder: str) -> bool:
    return all(str(PurePosixPath(job.heads(name) or "").parent) == folder for name in ("output", "error"))


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
FOLDER_WHY = "sbatch copies the script to the node's spool folder and runs the copy: $0 and BASH_SOURCE point to that folder, which contains no other files."
FOLDER_CURE = 'cd "$SLURM_SUBMIT_DIR", the folder where sbatch was called (or use a full path)'
OWN_PATH = re.compile(r"\$\{?(?:0|BASH_SOURCE)(?![0-9A-Za-z_])")
LAST = {"exit", "true", ":", "wait", "trap", "fi", "done", "return", "}", "set", "unset", "export"}


def line_breaks(job: JobDescription) -> Iterator[Violation]:
    count = job.text.count("\r\n")
    if count:
        yield Violation(job.text.index("\r\n"), f"{count} line{'s' * (count > 1)} with DOS line breaks (CR LF)")


def shell_flags(job: JobDescription) -> tuple[bool, bool]:
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
    used = {u.name for u in job.uses if u.program not in ("echo", "printf")}
    unused = [a for a in job.assignments if a.name not in used and not a.exported and not a.under]
    places = [
        p for p in places if not any(a.value.startswith("$(") and p in range(a.offset, _end(job, a)) for a in unused)
    ]
    places += [a.offset for a in job.assignments if not a.under and re.match(r"\$\{(?:0|BASH_SOURCE)[^}]*%", a.value)]
    if places:
        yield Violation(min(places), "the folder of the script: under sbatch this is Slurm's spool folder")


def _end(job: JobDescription, item: Assignment) -> int:
    """Return the end of the line of an assignment."""
    end = job.text.find("\n", item.offset)
    return end if end >= 0 else len(job.text)


def exit_code(job: JobDescription) -> Iterator[Violation]:
    """Report an exit code that is lost: behind a pipe, by `exit 0`, or because another command is the last one."""
    errexit, pipefail = shell_flags(job)
    yield from _of_echo(job)
    for outer in job.work:
        if outer.in_function or outer.in_substitution or outer.tested or outer.before in ("&&", "||"):
            continue
        what = _name_of_work(job, outer)
        ignored = _ignored(job, outer)
        if ignored is not None and job.is_job and not outer.in_loop and len(job.work) == 1:
            yield Violation(
                ignored.offset,
                f"|| {ignored.written} reports success, even if {what} failed",
                cure="remove it, or || exit 1",
            )
            return
        other = _status_of_pipe(job, outer) if outer.after in ("|", "|&") and not pipefail else None
        if other is not None:
            text = f"{what} is piped: $? below is the exit code of {other.written}, not that of {what}"
            yield Violation(outer.offset, text, fix=_add_pipefail(job, errexit))
            return
        if outer.after in ("|", "|&") and not pipefail and not _looks(job, outer):
            text = f"{what} is piped, so its exit code is lost: a pipe returns that of its last command"
            # Without set -e, or a test, nothing in the script depends on it.
            severity = None if errexit or _pipe_is_tested(job, outer) else "note"
            yield Violation(outer.offset, text, fix=_add_pipefail(job, errexit), severity=severity)
            return
        if outer.after in ("||", "&&", "&", "|", "|&") or errexit or _looks(job, outer):
            continue
        later = _after(job, outer)
        end = later[-1] if later else None
        if end is None or any(w.offset == end.offset for w in job.work):
            continue
        if end.program == "exit" and [a.text for a in end.args] == ["0"] and not end.branch and not end.in_loop:
            yield Violation(end.offset, f"exit 0 reports success, even if {what} failed", severity="note")
            return
        if job.is_batch and end.program not in LAST and end.program != "srun":
            text = f"the job ends with the exit code of '{end.written}', even if {what} failed"
            yield Violation(end.offset, text, cure=EXIT_CURE, severity="note")
            return


def _pipe_is_tested(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the script depends on the exit code of the pipe that begins with this command: ``... | tee log || exit 1``."""
    later = (c for c in job.calls if c.offset > outer.offset and not c.under and not c.in_substitution)
    last = next((c for c in later if c.before in ("|", "|&") and c.after not in ("|", "|&")), None)
    return last is not None and (last.after in ("||", "&&") or last.tested)


PASSES_THROUGH = {"tee", "ts", "grep", "egrep", "sed", "awk", "cat", "tail", "head", "logger", "tr"}


def _status_of_pipe(job: JobDescription, outer: ProgramCall) -> ProgramCall | None:
    """Return the last command of the pipe if the next command uses its ``$?``."""
    own = [c for c in job.calls if c.offset > outer.offset and not c.under and not c.in_substitution]
    number = next((n for n, c in enumerate(own) if c.before in ("|", "|&") and c.after not in ("|", "|&")), None)
    if number is None or own[number].program not in PASSES_THROUGH or "PIPESTATUS" in job.text[outer.offset :]:
        return None
    last, following = own[number], own[number + 1] if number + 1 < len(own) else None
    end = following.offset if following else len(job.text)
    kept = any(last.offset < a.offset < end and a.value == "$?" and not a.under for a in job.assignments)
    used = following is not None and any("$?" in a.text for a in following.args)
    apart = following is not None and (following.in_function != last.in_function or following.written == "trap")
    return last if (kept or used) and not apart and last.after in ("\n", ";") else None


def _of_echo(job: JobDescription) -> Iterator[Violation]:
    """Report ``$?`` that is the exit code of an echo behind the work, and not that of the work."""
    own = [c for c in job.calls if not c.under and not c.in_substitution]
    places = [a.offset for a in job.assignments if a.value == "$?" and not a.under]
    places += [c.offset for c in own if c.program in ("exit", "[", "[[") and any(a.text == "$?" for a in c.args)]
    starts = sorted([c for c in job.calls if not c.in_substitution], key=lambda c: c.offset)
    works = {w.offset for w in job.work}
    for place in sorted(places):
        before = [c for c in starts if c.offset < place and not c.under]
        if (
            len(before) > 1
            and before[-1].program in ("echo", "printf", "date")
            and before[-1].branch == before[-2].branch
        ):
            between = any(
                before[-1].offset < a.offset < place for a in job.assignments if not a.under and "$(" in a.value
            )
            again = any(p < before[-1].offset and p > before[-2].offset for p in places)
            if before[-2].offset in works and not between and not again:
                text = f"$? is the exit code of '{before[-1].written}', not that of {before[-2].written}"
                yield Violation(place, text, cure="rc=$? directly after the command, then exit $rc")
                return


def _ignored(job: JobDescription, outer: ProgramCall) -> ProgramCall | None:
    """Return the ``true`` of ``work || true``."""
    if outer.after != "||":
        return None
    following = next((c for c in job.calls if c.offset > outer.offset and c.before == "||" and not c.under), None)
    return following if following is not None and following.program in ("true", ":") else None


ERROR_TEXT = re.compile(
    r"(?i)\berror\b|\bfail|\bmissing\b|not found|\bno \w+ (?:assigned|found|available)|\bexiting\b|usage:|cannot|could not|abort"
)


def exit_zero(job: JobDescription) -> Iterator[Violation]:
    """Report ``exit 0`` directly after an error message."""
    for before, call in pairwise(c for c in job.calls if not c.in_substitution):
        zero = re.match(r"exit[ \t]+0\b", job.text[call.offset :]) and call.branch
        if zero and before.program in ("echo", "printf") and ERROR_TEXT.search(" ".join(a.text for a in before.args)):
            if before.branch == call.branch:
                yield Violation(call.offset, "exit 0 after an error message reports success", cure="exit 1")


def _after(job: JobDescription, outer: ProgramCall) -> list[ProgramCall]:
    """Return the commands of the script's own shell that run after a command."""
    return [
        c
        for c in job.calls
        if c.offset > outer.offset and not c.under and not c.in_substitution and not c.in_function
        if not c.instead_of(outer)
    ]


def _name_of_work(job: JobDescription, outer: ProgramCall) -> str:
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


def _looks(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the exit code is checked after the call."""
    rest = job.text[outer.offset :]
    return bool(
        re.search(r"\$\?|PIPESTATUS|\btrap\b.*\bE(?:RR|XIT)\b", rest)
        or re.search(r"trap\s.*\b(?:ERR|EXIT)\b", job.text)
    )


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


WAIT_WHY = "The job ends when the batch script ends, and Slurm then kills all its processes."
WAIT_CURE = "wait, as the last line"


def background(job: JobDescription) -> Iterator[Violation]:
    work = _background_work(job)
    for outer in reversed(work):
        if not job.is_batch and (not outer.in_loop or re.search(r"\b(?:nohup|setsid|tmux|screen|disown)\b", job.text)):
            continue
        if outer.after == "&" and not outer.in_function and not outer.in_substitution:
            later = [c for c in job.calls if c.offset > outer.offset and not c.under]
            awaited = any(c.program in ("wait", "tail", "exec", "source", ".") for c in later) or _is_watched(
                job, outer
            )
            last = [w for w in work if w.offset > outer.offset and w.after != "&"]
            if not awaited and not last:
                yield Violation(
                    outer.offset, f"{outer.program} runs in the background, and the script ends without wait"
                )
                return
            if (
                not awaited
                and _script_of(outer)
                and all(_script_of(w) == _script_of(outer) for w in last)
                and job.is_batch
            ):
                text = f"{_script_of(outer)} runs in the background, and the script ends when the last one in the foreground has ended"
                yield Violation(outer.offset, text)
                return


def _is_watched(job: JobDescription, outer: ProgramCall) -> bool:
    """Return whether the script keeps the process id, and asks later for the process, or ends it."""
    after = job.text[outer.offset :]
    kept = re.match(r"(?:[^\n\\]|\\.|\\\n)*&[ \t]*[\n;]\s*(\w+)=\$!", after)
    return kept is not None and re.search(rf"\b(?:kill|ps|pgrep|wait)\b[^\n]*\$\{{?{kept[1]}\b", after) is not None


def _script_of(call: ProgramCall) -> str:
    """Return the name of the Python program; empty if there is none."""
    return next((a.text for a in call.args if a.text.endswith(".py")), "")


def _background_work(job: JobDescription) -> list[ProgramCall]:
    """Return the commands that do the job's work, with calls of functions that contain it instead of what they contain."""
    inside = [w for w in job.work if w.in_function]
    outside = [w for w in job.work if not w.in_function]
    if not inside or any(c.program == "wait" and c.in_function for c in job.calls):
        return outside
    functions = set(re.findall(r"(?m)^\s*(?:function\s+)?([A-Za-z_][\w-]*)\s*\(\)", job.text))
    calls = [
        c
        for c in job.calls
        if not c.in_function
        and not c.in_substitution
        and (c.program in functions or (c.program == "ssh" and c.after == "&"))
    ]
    found = {c.offset: c for c in [*outside, *calls]}
    return [found[offset] for offset in sorted(found)]


ZERO_WHY = "Slurm and the shell take exit code 0 for success: the job is COMPLETED, and dependent jobs start."
ENDLESS_WHY = "wait without arguments waits for all background processes: the job runs until its time limit."
ENDLESS_CURE = 'keep the process id of the training: train & pid=$!; wait "$pid"; rc=$?; kill %1; exit $rc'
RESULT_WHY = "wait without arguments returns 0, whatever the background commands returned: a failed training is reported as COMPLETED."
RESULT_CURE = 'keep the process ids, and wait for each: srun ... & pids+=($!); for pid in "${pids[@]}"; do wait "$pid" || rc=$?; done'


def wait_result(job: JobDescription) -> Iterator[Violation]:
    """Report a plain ``wait`` whose result is used."""
    own = [c for c in job.calls if not c.under and not c.in_substitution]
    if not any(c.after == "&" or (c.under and c.under[0].after == "&") for c in job.calls):
        return
    for call, following in pairwise([*own, None]):
        if call is None or call.program != "wait" or call.args:
            continue
        end = following.offset if following else len(job.text)
        kept = [a for a in job.assignments if a.value == "$?" and not a.under and call.offset < a.offset < end]
        used = (
            following
            and following.program in ("exit", "return", "[", "[[", "test")
            and any("$?" in a.text for a in following.args)
        )
        if kept or used or call.tested or call.after == "||":
            yield Violation(call.offset, "wait without arguments returns 0, even if a background command failed")
            return
