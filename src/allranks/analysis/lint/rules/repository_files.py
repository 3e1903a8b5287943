"""Rules for what a script and the files beside it show together: files that it sources, scripts that it starts, and folders that it enters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.readers import ShellReader
from allranks.analysis.lint.records import ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import GUARDS, INHERITED, PRINTING, is_only_shown
from allranks.analysis.lint.rules.empty_values import ANY_NAME
from allranks.analysis.lint.rules.mismatched_names import missing_names
from allranks.analysis.lint.rules.unset_variables import OUTSIDE_NAMES, USUAL_OUTSIDE
from allranks.analysis.lint.shell_tokens import MappedText
from allranks.utils.text import lazy_regex

MOST_FOLDERS = 8
MOST_BYTES = 200_000


def _places(job: JobDescription) -> list[Path]:
    """Return the folders from which the script may be started: the current one, its own, and those above it in its repository."""
    if job.folder is None:
        return []
    found = [Path.cwd(), job.folder]
    for above in job.folder.parents:
        if (found[-1] / ".git").exists() or len(found) > MOST_FOLDERS:
            break
        found.append(above)
    return found


def _read(job: JobDescription, word: str) -> ShellReader | None:
    """Read the file that a word names, with or without a variable for its folder; None if it is not here."""
    name = re.sub(r"\A(?:\"?\$(?:\([^)]*\)|\{[^}]*\}|\w+)\"?/)+", "", word.strip("\"'"))
    if not re.fullmatch(r"[\w./-]+", name) or name.startswith("/"):
        return None
    for place in _places(job):
        path = place / name
        try:
            if not path.is_file() or path.stat().st_size > MOST_BYTES:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        reading = ShellReader()
        reading.read(MappedText(text))
        return reading
    return None


EARLY_WHY = "The shell expands a variable when it reads the line, not when the value is used: it is still empty there."


def before_source(job: JobDescription) -> Iterator[Violation]:
    """Report a variable that stands above the line that sources the file that sets it."""
    if job.kind != "script" or job.folder is None:
        return
    guarded = {u.name for u in job.uses if u.operator.startswith(GUARDS) or u.program in ("[", "[[", "test", "case")}
    above: set[str] = set()
    for call in job.calls:
        if (
            call.program not in ("source", ".")
            or not call.args
            or call.under
            or call.in_function
            or call.in_substitution
        ):
            continue
        reading = _read(job, call.args[0].text)
        if reading is None:
            return  # what it sets is unknown
        own = {a.name for a in reading.assignments if not a.removed and not a.in_function}
        own -= {u.name for u in reading.uses if u.operator.startswith(GUARDS)} | above
        for use in job.uses:
            known = (
                use.name in guarded | INHERITED
                or OUTSIDE_NAMES.match(use.name)
                or job.has(use.name)
                or use.name in job.reading.named
            )
            if (
                use.offset > call.offset
                or use.name not in own
                or known
                or use.under
                or use.in_function
                or use.program in PRINTING
            ):
                continue
            line = job.lines.place(call.offset)[0]
            text = f"${use.name} is used above line {line}, which sources the file that sets it"
            yield Violation(use.offset, text, why=EARLY_WHY, cure=f"move line {line} up")
            return
        above |= own


CHILD_WHY = "A script that is started, not sourced, gets the exported variables only: there it is empty."
STARTS = {"bash", "sh", "sbatch", "srun"}


def read_by_child(job: JobDescription) -> Iterator[Violation]:
    """Report a variable that a script of the repository reads, and that its caller sets without export."""
    if job.kind != "script" or job.folder is None or re.search(r"\bset\s+-(?:\w*a\w*|o\s+allexport)\b", job.code):
        return
    for call in job.calls:
        script = _script_of(call)
        if script is None or any(a.text.startswith("--export") for c in (call, *call.under) for a in c.args):
            continue
        names = [
            a
            for a in job.set_values_at_top()
            if a.offset < call.offset and not a.exported and a.value and not a.in_function
        ]
        names = [
            a
            for a in names
            if a.name not in job.reading.exported | INHERITED and not any(o.exported for o in job.by_name[a.name])
        ]
        reading = _read(job, script) if names else None
        if reading is None:
            continue
        guarded = {
            u.name for u in reading.uses if u.operator.startswith(GUARDS) or u.program in ("[", "[[", "test", "case")
        }
        known = guarded | {a.name for a in reading.assignments} | reading.named
        sources = any(c.program in ("source", ".") for c in reading.calls)
        needed = {u.name for u in reading.uses if not u.in_function and u.program not in PRINTING} - known
        for item in names if not sources else ():
            if item.name in needed and not OUTSIDE_NAMES.match(item.name):
                text = f"{script} reads ${item.name}, which is not exported here"
                yield Violation(item.offset, text, why=CHILD_WHY, cure=f"export {item.name}")
                return


def _script_of(call: ProgramCall) -> str | None:
    """Return the shell script that a command starts in a shell of its own."""
    if call.in_substitution or call.in_function:
        return None
    if call.written.endswith((".sh", ".bash")) and all(c.program in ("srun", "time", "nohup") for c in call.under):
        return call.written
    if call.program in STARTS and not call.under:
        words = [a.text for a in call.args if not a.text.startswith("-")]
        return next((w for w in words if w.endswith((".sh", ".bash", ".sbatch", ".slurm"))), None)
    return None


FOLDER_WHY = "A relative path counts from the folder in which the shell is: after cd it names another file, which does not exist."


def other_folder(job: JobDescription) -> Iterator[Violation]:
    """Report a program whose path counts from the folder that the script has left."""
    if job.kind != "script" or not job.in_repository:
        return
    entered: str | None = None
    for call in job.calls:
        if call.in_substitution or call.in_function:
            continue
        if call.program in ("cd", "pushd", "popd"):
            first = call.args[0].text.rstrip("/").removeprefix("./") if call.args else ""
            plain = entered is None and call.program == "cd" and re.fullmatch(r"[A-Za-z][\w.-]*(?:/[\w.-]+)*", first)
            loose = call.branch or call.in_loop or call.subshell is not None or call.under
            entered = first if plain and not loose else ""
        if (
            not entered
            or not PYTHON.match(call.program)
            or any(c.program not in ("srun", "time", "nohup") for c in call.under)
        ):
            continue
        program = next((a.text for a in call.args if not a.text.startswith("-")), "")
        if not re.fullmatch(r"[\w-][\w.-]*(?:/[\w.-]+)*\.py", program) or any(a.text == "-m" for a in call.args):
            continue
        places = [p for p in _places(job) if (p / entered).is_dir()]
        if (
            places
            and not any((p / entered / program).exists() for p in places)
            and any((p / program).is_file() for p in places)
        ):
            text = f"after cd {entered} there is no {program}: the path counts from the folder above"
            back = "../" * (entered.count("/") + 1)
            yield Violation(call.offset, text, why=FOLDER_WHY, cure=f"{back}{program}, or without cd {entered}")
            return


MAKES = {"mkdir", "cp", "mv", "rsync", "touch", "tee"}


def inside_itself(job: JobDescription) -> Iterator[Violation]:
    """Report a path below folder a that was made before ``cd a``, and is used after it: it would be a/a/..."""
    if job.kind != "script":
        return
    made: set[str] = set()
    entered = ""
    for call in sorted((c for c in job.calls if not c.in_substitution), key=lambda c: c.offset):
        if call.in_function:
            return
        words = [a.text for a in call.args if not a.text.startswith("-")]
        paths = [_plain_path(w) for w in (*words, *(r.target for r in call.redirects if r.operator != "<<"))]
        if call.program in ("cd", "pushd", "popd"):
            loose = call.branch or call.in_loop or call.subshell is not None or call.under or call.program != "cd"
            if loose:
                return
            entered = paths[0] if not entered and paths and "/" not in paths[0] else ""
            made = made if entered else set()
        elif not entered:
            made.update(path for path in paths if "/" in path and call.program in MAKES)
            made.update(_plain_path(r.target) for r in call.redirects if ">" in r.operator and "/" in r.target)
        elif call.program == "mkdir":
            if any(path.startswith(entered) for path in paths):
                return
        else:
            own = [
                p
                for p in paths
                if p.startswith(f"{entered}/") and any(f"{p}/".startswith(f"{m}/") for m in made - {""})
            ]
            if own:
                text = f"after cd {entered} there is no {own[0]}: the path counts from the folder above"
                severity = None if call.program in MAKES else "warning"  # a program may take a name of this form
                cure = own[0].removeprefix(f"{entered}/")
                yield Violation(call.offset, text, why=FOLDER_WHY, cure=cure, severity=severity)
                return


def _plain_path(word: str) -> str:
    """Return a relative path without ./ and the / at its end; empty if it is none."""
    path = word.removeprefix("./").rstrip("/")
    return path if re.fullmatch(r"[\w][\w.-]*(?:/[\w.*-]+)*", path) else ""


# --------------------------------------------------------------------------- set by no file at all

NOWHERE_WHY = "Neither this script nor another file of the repository sets it: unless the caller's shell happens to have it, it is empty."
OF_THE_SITE = lazy_regex(
    r"(?i).*(?:dir|home|root|path|prefix|account|stages|scratch|work|proj\w*|user|host|bin|lib|env|image|sif|token|key|args?|opts?|options|flags?|"
    r"extra\w*|params?|id|hash)\Z|(?:GITHUB|CI|KUBERNETES|LS|LSB|EB|CRAY|OLCF|NERSC|TACC|DGX|MPI|ROCM|JOB)\w*"
)
OWN_NAMES = 4
MOST_FILES, MOST_DEPTH = 3000, 6
SHELL_FILE = lazy_regex(
    r"\.(?:sh|bash|sbatch|slurm|slrm|pbs|lsf|job|sub|batch|env|mk|md|rst|txt|ya?ml|toml|cfg|zsh|cmd)\Z|(?:\A|/)(?:Makefile|README|justfile|run|submit)[^/.]*\Z"
)


def set_nowhere(job: JobDescription) -> Iterator[Violation]:
    """Report the one variable that nothing sets, in a script of a repository that sets the others itself."""
    if (
        job.kind != "script"
        or not job.in_repository
        or job.sources_files
        or job.placeholders
        or job.submits
        or job.heads("export")
    ):
        return
    if ANY_NAME.search(job.code):
        return
    missing = {
        n: u for n, u in missing_names(job).items() if not (USUAL_OUTSIDE.fullmatch(n) or OF_THE_SITE.fullmatch(n))
    }
    if len(missing) != 1:
        return
    name, use = next(iter(missing.items()))
    own = [n for n, items in job.by_name.items() if n.isupper() == name.isupper() and any(not a.under for a in items)]
    line = job.line_of(use.offset)
    handed_on = re.match(rf"[ \t]*(?:export[ \t]+)?\w+=[\"']?\$\{{?{name}\}}?[\"']?[ \t]*(?:[;#]|$)", line)
    if len(name) < 2 or len(own) < OWN_NAMES or use.in_function or use.under or handed_on or is_only_shown(job, name):
        return
    if not _is_in_other_file(job, name):
        text = f"${name} is set nowhere, neither here nor in another file of the repository"
        yield Violation(use.offset, text, why=NOWHERE_WHY, severity="note")  # it may be one of this site's


def _is_in_other_file(job: JobDescription, name: str) -> bool:
    """Return whether another file of the repository may set the variable; True if there are too many to look through."""
    root = next((p for p in _places(job)[1:] if (p / ".git").exists()), None)
    if root is None:
        return True
    inside = re.compile(rf"\b{re.escape(name)}\b")
    in_python = re.compile(rf"[\"']{re.escape(name)}[\"']|--export[^\n]*\b{re.escape(name)}\b|\b{re.escape(name)}=\{{")
    count = 0
    for folder, folders, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = [f for f in folders if f not in (".git", "node_modules", "__pycache__") and depth < MOST_DEPTH]
        for file in files:
            path = Path(folder) / file
            python = file.endswith(".py")
            if not (python or SHELL_FILE.search(file)):
                continue
            count += 1
            if count > MOST_FILES:
                return True
            try:
                text = path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size <= MOST_BYTES else ""
            except OSError:
                continue
            if text != job.text and (in_python if python else inside).search(text):
                return True
    return False
