"""Rules for how files are started: without their folder, without the interpreter, or with that of another language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath

from allranks.analysis.lint.command_options import PYTHON, SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placement import MPI
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.utils.text import lazy_regex

START_WHY = (
    "A name without a folder is looked for in PATH, to which the current folder does not belong: 'command not found'."
)
START_CURE = "python train.py; bash run.sh; or ./run.sh, if it is executable"
ITSELF_WHY = "Without python in front the file itself is the program: 'Permission denied', unless it is executable and begins with #!/usr/bin/env python."
LANGUAGE_WHY = "The file is read as a program of the other language: it stops at its first line with a syntax error, or runs its words as commands."
SCRIPT_FILE = lazy_regex(r"[A-Za-z_][\w.-]*\.(?:py|sh|bash)")
OWN_NAMES = lazy_regex(
    r"(?i)(?:my[-_]?)?(?:train|main|fine[-_]?tun(?:e|ing)|pre[-_]?train|test|eval|evaluate|inference|predict|run|job|submit|script|demo)"
    r"[-_.]?\d*\.(?:py|sh|bash)"
)
LIKELY_NAMES = lazy_regex(r"(?i)(?:train|main|finetune|pretrain|test|eval|run)(?:[-_]\w[\w-]*)?\.py|train[-_]\w+\.sh")
"""Names of a project's own files, and those that may also be of a package that a module or a sourced file adds to PATH.

Others, such as ``basecall.py`` and ``start-master.sh``, may be programs that are installed.
"""
SAME_FOLDER = {"env", "time", "nohup", "timeout", "nice", "numactl", "stdbuf", "taskset", *SHELLS}
SEARCHES_HERE = {"srun", *MPI}
SHELL_FILE = lazy_regex(r"[\w./${}~-]+\.(?:sh|bash|sbatch|slurm)")
PYTHON_FILE = lazy_regex(r"[\w./${}~-]+\.py")
PYTHON_FLAGS = {"-u", "-B", "-E", "-I", "-O", "-s"}
MAKES_RUNNABLE = lazy_regex(r"(?m)^[^#\n]*\bchmod\b|\bsetfacl\b|\bln\s+-s")
NO_CONDA = lazy_regex(r"(?i)conda|mamba|cuda|venv|/env")


def without_folder(job: JobDescription) -> Iterator[Violation]:
    """Report ``train.py`` and ``srun train.py`` as commands."""
    if job.kind != "script" or _searches_more(job) or "\\\r\n" in job.text:  # which ends no line for bash
        return
    for call in job.calls:
        if not SCRIPT_FILE.fullmatch(call.written) or call.in_substitution or call.before == "|":
            continue
        if not _is_own(job, call) or _is_function(job, call.written):
            continue
        starters = {c.program for c in call.under}
        if starters <= SAME_FOLDER or call.under[-1].program in SHELLS:
            python = call.written.endswith(".py")
            cure = f"python {call.written}" if python else f"bash {call.written}"
            yield Violation(
                call.offset, f"{call.written} without its folder: the shell looks for it in PATH only", cure=cure
            )
        elif call.written.endswith(".py") and starters <= SAME_FOLDER | SEARCHES_HERE and _is_program(call):
            if not MAKES_RUNNABLE.search(job.text) and not _is_executable(job, call.written):
                starter = next(c.program for c in reversed(call.under) if c.program in SEARCHES_HERE)
                text = f"{starter} starts {call.written} itself, without python"
                cure = f"{starter} ... python {call.written}"
                yield Violation(call.under[0].offset, text, cure=cure, why=ITSELF_WHY, severity="warning")


def _is_program(call: ProgramCall) -> bool:
    """Return whether no other program stands in front of it: ``mpirun nrniv -python run.py``."""
    return _are_options([a.text for a in call.under[-1].args])


def _searches_more(job: JobDescription) -> bool:
    """Return whether PATH may have the current folder, or that of the project."""
    return any(not NO_CONDA.search(a.value) for a in job.set_values("PATH")) or "path+=" in job.text


def _is_own(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the file is the project's: by its name, because it lies here, or because the template asks for its path."""
    likely = LIKELY_NAMES.fullmatch(call.written) and not job.unknown_settings
    if (
        likely
        or OWN_NAMES.fullmatch(call.written)
        or (job.folder is not None and (job.folder / call.written).is_file())
    ):
        return True
    return any(a.value == call.written for a in job.set_values("application"))


def _is_function(job: JobDescription, name: str) -> bool:
    return re.search(rf"(?m)^[ \t]*(?:function[ \t]+)?{re.escape(name)}[ \t]*\(\)|\balias[ \t]+{re.escape(name)}=", job.text) is not None  # fmt: skip


def _is_executable(job: JobDescription, name: str) -> bool:
    path = job.folder / name if job.folder is not None else None
    return path is not None and path.is_file() and bool(path.stat().st_mode & 0o100)


def other_language(job: JobDescription) -> Iterator[Violation]:
    """Report ``bash train.py`` and ``python run.sh``."""
    for call in job.calls:
        words = [a for a in call.args if not a.text.startswith("-")]
        flags = [a.text for a in call.args if a.text.startswith("-")]
        if not words or call.in_substitution:
            continue
        first = words[0]
        name = PurePosixPath(first.text).name
        shell = call.program in SHELLS or call.program in ("source", ".")
        if shell and PYTHON_FILE.fullmatch(first.text) and not any("c" in f or "s" in f or "O" in f for f in flags):
            text = f"{call.program} reads {name} as a script of the shell: it is a Python program"
            yield Violation(call.offset, text, why=LANGUAGE_WHY, cure=f"python {first.text}")
        elif PYTHON.match(call.program) and SHELL_FILE.fullmatch(first.text):
            if not {a.text for a in call.args[: call.args.index(first)]} <= PYTHON_FLAGS:
                continue
            text = f"{call.program} reads {name} as a Python program: it is a script of the shell"
            yield Violation(call.offset, text, why=LANGUAGE_WHY, cure=f"bash {first.text}")


FUNCTION_WHY = "It is a function of this shell, and no program of this name exists: the command ends with 'No such file or directory'."
SHELL_WHY = "Functions stay in the shell that defines them, unless export -f passes them on: the new shell does not find the command."
FUNCTION = lazy_regex(r"(?m)^[ \t]*(?:function[ \t]+([\w-]+)|([\w-]+)[ \t]*\(\))")
PASSED_ON = lazy_regex(r"\bexport[ \t]+-\w*f|\b(?:declare|typeset)[ \t]+-\w*f|\bset[ \t]+-\w*a\b|\bBASH_ENV\b")


def functions(job: JobDescription) -> Iterator[Violation]:
    """Report ``srun run_one`` and ``srun bash -c run_one`` for a function of the script."""
    names = {m[1] or m[2]: m.start() for m in FUNCTION.finditer(job.code)}
    for call in job.calls:
        if call.written not in names or not call.under or call.in_substitution:
            continue
        starter = call.under[-1]
        if starter.program in {"timeout", "xargs", "env", "nice", "numactl", *SEARCHES_HERE}:
            text = f"{starter.program} starts programs, and {call.written} is a function of the script"
            yield Violation(
                call.offset, text, why=FUNCTION_WHY, cure=f"export -f {call.written}, and bash -c {call.written}"
            )
        elif starter.program in SHELLS and not PASSED_ON.search(job.text) and not _defines(job, call):
            text = f"{call.written} is a function of the script, which the inner {starter.program} does not have"
            yield Violation(call.offset, text, why=SHELL_WHY, cure=f"export -f {call.written}")


def _defines(job: JobDescription, call: ProgramCall) -> bool:
    """Return whether the inner shell may define the function itself, or read it from a file."""
    inner = [c.program for c in job.calls if call.under[-1] in c.under and c.offset < call.offset]
    start = call.under[-1].offset
    inside = re.search(rf"(?:function[ \t]+{re.escape(call.written)}\b|\b{re.escape(call.written)}[ \t]*\(\))", job.text[start : call.offset])  # fmt: skip
    return inside is not None or any(p in ("source", ".", "eval") for p in inner)


WORD_WHY = "The quotes make one word of the command: a program is looked for whose name contains the blanks, 'No such file or directory'."
COMMAND = lazy_regex(
    r"(?s)\s*(?:\S*/)?(?:python[\d.]*|torchrun|deepspeed|accelerate|bash|sh|\./\S+|[\w./-]+\.(?:sh|bash|py))\s+\S"
)
EXECUTES = {"srun", "timeout", "env", "nice", "numactl", "taskset", "stdbuf", "xargs"}


def command_in_one_word(job: JobDescription) -> Iterator[Violation]:
    """Report ``srun "$CMD"`` and ``srun "python train.py"``."""
    for call in job.calls:
        if call.in_substitution:
            continue
        starter, word = call, None
        if call.under and COMMAND.match(call.written):
            starter, word = call.under[-1], call.written if call.under[-1].program in EXECUTES else None
        elif call.program in SHELLS and call.args and call.args[0].quoted:
            word = call.args[0].text
        elif call.program in {"singularity", "apptainer", *MPI} and len(call.args) > 1 and call.args[-1].quoted:
            words = [a.text for a in call.args]
            image = words[0] == "exec" and not words[-2].startswith("-")
            word = words[-1] if (_are_options(words[:-1]) if call.program in MPI else image) else None
        if word and COMMAND.match(word):
            shown = " ".join(word.split())[:60]
            yield Violation(
                starter.offset,
                f"{starter.program} gets one word, {shown!r}, and no program",
                why=WORD_WHY,
                cure=f"{starter.program} without the quotes; or bash -c in front of them",
            )


def _are_options(words: list[str]) -> bool:
    """Return whether all words are options and their values."""
    return all(w.startswith("-") or before.startswith("-") for before, w in pairwise(["", *words]))


# --------------------------------------------------------------------------------- new folders

OF_JOB = lazy_regex(r"\$\{?(?:SLURM_JOB_?ID|PBS_JOBID|LSB_JOBID|JOB_ID)\b|\$\(mktemp[ \t]+-\w*d")
NEW_WHY = (
    "The folder has been made for this job, and is empty: the program is not found there, and the job fails at once."
)
FILLS = {
    "cp", "mv", "ln", "rsync", "scp", "tar", "unzip", "git", "wget", "curl", "sbcast", "cat", "tee", "install", "gunzip", "7z", "aws", "gsutil",
    "rclone", "stage_in", "dvc", "jar", "cpio", "bbcp", "parallel", "find", "xargs", "sed", "awk", "srun", "eval", "source", ".", "make", "mpirun", "pbsdsh",
    "pdcp", "svn", "unsquashfs", "dcp",
}  # fmt: skip
"""Commands that may put files into a folder."""


def in_new_folder(job: JobDescription) -> Iterator[Violation]:
    """Report a relative program in a folder that the job has just made."""
    if not job.is_job:
        return
    own = [c for c in job.calls if not c.in_substitution and not c.in_function and not c.under]
    for number, call in enumerate(own):
        folder = call.args[0].text if call.program == "cd" and len(call.args) == 1 else ""
        made = [c for c in own[:number] if c.program == "mkdir" and any(a.text == folder for a in c.args)]
        if not OF_JOB.search(folder) or not made or call.branch or call.before in ("&&", "||"):
            continue
        work = next((w for w in job.work_calls if w.offset > call.offset), None)
        name = next((a.text for a in work.args if a.text.endswith(".py")), "") if work else ""
        if work is None or not re.fullmatch(r"(?:\./)?[A-Za-z_][\w.-]*(?:/[\w.-]+)*\.py", name):
            continue
        # The command that starts it may stand in a variable further up.
        others = [c for c in own if c.offset < work.offset and c not in work.under and c is not work]
        behind = [c for c in others if c.offset > made[-1].offset and c is not call]
        between = [c for c in others if any(folder in a.text for a in c.args)]
        moved = any(c.program in ("cd", "pushd") for c in behind if c.offset > call.offset)
        filled = any(_may_fill(c) for c in behind) or any(c not in (call, *made) for c in between)
        written = name.removeprefix("./").split("/")[0]
        if moved or filled or re.search(rf">[ \t]*(?:\./)?{re.escape(written)}", job.code):
            continue
        if not any(a.text in ("--pwd", "--chdir", "-D", "-w", "--workdir") for c in work.under for a in c.args):
            line = job.lines.place(call.offset)[0]
            text = f"{name} is looked for in the new folder of line {line}, into which nothing copies it"
            yield Violation(work.offset, text, why=NEW_WHY, cure=f"the full path of {name}; or cp it into the folder")
            return


def _may_fill(call: ProgramCall) -> bool:
    """Return whether a command may put files into the current folder: not what only sets up the shell."""
    if call.program in ("source", "."):
        return not any(re.search(r"activate|bashrc|profile|conda|modules|\.env\Z", a.text) for a in call.args[:1])
    return call.program in FILLS or call.written.startswith(("./", "/", "$")) or call.written.endswith((".sh", ".py"))


RELATIVE = lazy_regex(r"(?:\./)?[A-Za-z_][\w.-]*(?:/[\w.-]+)*/?")
TWICE_WHY = (
    "The path is relative, and the script is in that folder already: the name is looked for inside of it once more."
)


def relative_twice(job: JobDescription) -> Iterator[Violation]:
    """Report ``$ROOT/train.py`` behind ``cd $ROOT``, where ROOT is a relative folder."""
    if job.kind != "script":
        return
    moves = [c for c in job.calls if c.program in ("cd", "pushd", "popd") and not c.in_substitution]
    if len(moves) != 1 or moves[0].under or moves[0].in_function or moves[0].in_loop or moves[0].subshell is not None:
        return
    call = moves[0]
    found = re.match(r"cd[ \t]+\"?\$(?:\{(\w+)\}|(\w+))\"?[ \t]*(?:[;&|#\n]|\Z)", job.text[call.offset :])
    name = (found[1] or found[2]) if found else ""
    items = job.by_name.get(name, [])
    if call.branch or len(items) != 1 or items[0].offset > call.offset or items[0].under or name in job.reading.named:
        return
    folder = items[0].source.text.rstrip("/")
    if re.match(r"[A-Z]+_[A-Z_]+(?:/|\Z)", folder):
        return  # a program fills it in
    if not RELATIVE.fullmatch(folder) or job.has_folder(f"{folder}/{folder.removeprefix('./')}"):
        return
    behind = re.compile(rf"(?<![\w/.-])\"?\$(?:{name}\b|\{{{name}\}})\"?/[\w$]")
    for use in job.uses:
        if (
            use.name != name
            or use.offset < call.offset
            or use.under
            or use.in_function
            or use.program in ("echo", "printf")
        ):
            continue
        if use.program in ("=", "export", "[", "[[", "test") or use.operator:
            continue
        if behind.search(job.text, max(0, use.offset - 3), use.offset + len(name) + 5):
            line = job.lines.place(call.offset)[0]
            text = (
                f"${name}/ is {folder}/{folder.removeprefix('./')}/ here: the script is in {folder} since line {line}"
            )
            yield Violation(use.offset, text, why=TWICE_WHY, cure=f"{name}=$PWD/{folder.removeprefix('./')}")
            return
