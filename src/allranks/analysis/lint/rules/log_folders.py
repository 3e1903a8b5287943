"""Rules about the folders of a job's logs, which Slurm opens before the script runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from allranks.analysis.lint.command_options import SHELLS
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Violation
from allranks.utils.text import lazy_regex

OUTPUT_WHY = (
    "Slurm opens the output file before the script runs. Before version 23.02 it does not create a missing folder: the job fails at "
    "once without a log. Newer versions create it."
)
OUTPUT_SOURCE = "release notes of Slurm 23.02; tested with Slurm 22.05"
FIRST_THAT_CREATES = (23, 2)
OUTPUT_CURE = "create the folder before sbatch (mkdir -p), or use an existing one"


SUBMIT_FOLDER = lazy_regex(
    r"\A(?:\$(?:SLURM_SUBMIT_DIR|PWD|\(pwd\)|\{(?:PWD|SLURM_SUBMIT_DIR(?::?-[^{}]*)?)\})|`pwd`)/"
)


def output(job: JobDescription) -> Iterator[Violation]:
    """Report log folders that do not exist when the job starts, unless Slurm is known to create them."""
    version = job.slurm_version
    if version is not None and version >= FIRST_THAT_CREATES:
        return
    made = set(_made_folders(job))
    reported: set[str] = set()
    for name in ("output", "error"):
        found = job.heading.get(name)
        if found is None or not found.value or "/" not in found.value:
            continue
        folder = str(PurePosixPath(found.value).parent)
        place = _named(job, folder)
        both = "--output and --error" if _same_folder(job, folder) else f"--{name}"
        if folder in reported:
            continue
        reported.add(folder)
        pattern = re.search(r"([^/\s]*%\d*[jJAaNnst][^/\s]*)/", found.value)
        if pattern:
            text = f"nobody creates the folder {pattern[1]} of {both}, whose name is known only when the job exists"
            known = re.search(r"%\d*[jJAN]", pattern[1]) is None  # the numbers of an array's tasks are known before
            cure = f"--{name}=<existing folder>/%x-%j.out"
            yield Violation(found.offset, text, cure=cure, severity="note" if known else None)
        elif own := [m for m in made if _is_within(m, place)]:
            text = f"the folder {folder} is created by the script, too late for {both}"
            missing = _may_be_missing(job, place, exactly=any(m.count("/") == place.count("/") for m in own))
            yield Violation(found.offset, text, severity="warning" if missing else "note")
        else:
            missing, inside = job.is_missing(place)
            if missing and not _written_by_another(job):
                text = f"there is no folder {folder} for {both}, neither here nor next to the script"
                # Of 46 such scripts that were looked up in their repositories, 40 had no such folder there. A file alone shows nothing.
                known = (inside or version is not None) and not _is_created_later(job, place, made)
                yield Violation(found.offset, text, severity="warning" if known else "note")


MADE_BY_PROGRAMS = {"lightning_logs", "mlruns", "runs", "wandb"}
"""Folders that libraries create at their first run, in the current folder."""

BRACES = lazy_regex(r"\A([^{}]*)\{([^{}$]*,[^{}$]*)\}([^{}]*)\Z")


def _made_folders(job: JobDescription) -> Iterator[str]:
    """Yield the folders that the script creates on the job's first node, as the options of sbatch would name them."""
    for call in job.calls:
        words = [a.text for a in call.args]
        creates = call.program == "mkdir" or (call.program == "install" and bool({"-d", "--directory"} & set(words)))
        if not creates or any(c.program not in (*SHELLS, "srun", "sudo") for c in call.under):
            continue
        for word in words:
            if word.startswith("-"):
                continue
            several = BRACES.match(word)
            for path in [several[1] + w + several[3] for w in several[2].split(",")] if several else [word]:
                yield _named(job, SUBMIT_FOLDER.sub("", _as_pattern(path)).removeprefix("./").rstrip("/"))


def _is_within(made: str, place: str) -> bool:
    """Return whether a folder is that of the log or inside it; ``%u`` is any user, whose name the script may have written out."""
    user = re.escape(place).replace("%u", r"(?:[\w.-]+|\$\{?(?:USER|LOGNAME)\}?)")
    return re.match(rf"{user}(?:/|\Z)", made) is not None


def _named(job: JobDescription, folder: str) -> str:
    return folder.replace("%x", job.heads("job-name") or "%x")


def _written_by_another(job: JobDescription) -> bool:
    """Return whether the job's script is written by one that creates folders, too."""
    return job.source.text != job.text and "mkdir" in job.text


def _as_pattern(path: str) -> str:
    """Return a path of the shell with sbatch's patterns in the place of Slurm's variables."""
    return re.sub(r"\$\{?SLURM_JOB_(NAME|ID)\b\}?", lambda m: "%x" if m[1] == "NAME" else "%j", path)


def _may_be_missing(job: JobDescription, folder: str, *, exactly: bool) -> bool:
    """Return whether the script's own ``mkdir`` is all that is known about a folder of logs."""
    # A full path whose parts the script only completes exists already, as results of earlier jobs do.
    elsewhere = folder.startswith(("~", "$")) or (folder.startswith("/") and not exactly)
    return not (
        elsewhere or _is_advised(job, folder) or job.submits or job.has_folder(folder) or _written_by_another(job)
    )


def _is_created_later(job: JobDescription, folder: str, made: Collection[str]) -> bool:
    """Return whether there are signs that the folder exists when the job is submitted, or that it is submitted from elsewhere."""
    elsewhere = any(m.endswith(f"/{folder}") for m in made)  # $SCRATCH/logs
    return elsewhere or job.submits or bool(MADE_BY_PROGRAMS & set(folder.split("/"))) or _is_advised(job, folder)


def _is_advised(job: JobDescription, folder: str) -> bool:
    """Return whether a comment of the script says that the folder is to be created first."""
    return any("mkdir" in c.text and folder.removeprefix("./") in c.text for c in job.reading.comments)


def _same_folder(job: JobDescription, folder: str) -> bool:
    return all(str(PurePosixPath(job.heads(name) or "").parent) == folder for name in ("output", "error"))


OF_OTHERS = lazy_regex(r"(?m)^#(?:(PBS)|(BSUB)|(\$))[ \t]+-([oe])[ \t]+([\w.-]+(?:/[\w.-]+)*/)([\w.%$&-]*)[ \t]*$")
LATER_WHY = "{} writes the file when the job ends: without the folder the log is not delivered, and stays on the node or comes by mail."
BEFORE_WHY = (
    "Grid Engine opens the file before the script runs: without the folder the job goes into the error state Eqw."
)


def of_other_systems(job: JobDescription) -> Iterator[Violation]:
    """Report folders for the logs of PBS, LSF and Grid Engine that a checkout does not have and the job does not create."""
    if job.kind != "script" or job.is_batch or not job.in_repository or job.source.text != job.text:
        return
    for found in OF_OTHERS.finditer(job.text):
        folder = found[5].removeprefix("./").rstrip("/")
        made = found[3] is None and any(_is_within(m, folder) for m in _made_folders(job))
        if folder.startswith("..") or made or job.has_folder(folder) or _is_advised(job, folder) or job.submits:
            continue
        text = f"there is no folder {folder} for -{found[4]}, neither here nor next to the script"
        why = BEFORE_WHY if found[3] else LATER_WHY.format("PBS" if found[1] else "LSF")
        yield Violation(found.start(), text, why=why, source="manuals of qsub and bsub, options -o and -e")
        return


def log_in_root(job: JobDescription) -> Iterator[Violation]:
    """Report a log directly in ``/``, where users cannot write."""
    for name in ("output", "error"):
        found = job.heading.get(name)
        if found and re.fullmatch(r"/[^/\s]+", found.value or "") and "/" not in (found.value or "")[1:]:
            text = f"--{name}={found.value} is in /, where only root can write"
            yield Violation(
                found.offset, text, cure=f"--{name}={(found.value or '')[1:]}, in the folder where sbatch is called"
            )
            return


REDIRECTED_WHY = "The shell opens the file before it starts the command: if the folder is missing, the command is not started at all."
TEE_WHY = "tee cannot open the file: the output is not kept, and with pipefail the command counts as failed."
REDIRECTED_CURE = "mkdir -p {folder} in front of it"
STAYS_HERE = lazy_regex(
    r"\$\{?(?:SLURM_SUBMIT_DIR|PBS_O_WORKDIR|LS_SUBCWD|SGE_O_WORKDIR|PWD)\b|\.\Z|\$\(pwd\)|\$\(dirname"
)
IS_RELATIVE = lazy_regex(r"(?:\./)?([\w.-]+(?:/[\w.-]+)*)/[^/]+")


def redirected(job: JobDescription) -> Iterator[Violation]:
    """Report output that is redirected into a relative folder that is nowhere, and that nothing in the script names before."""
    if job.kind != "script" or job.folder is None or job.heads("chdir") or job.submits or job.source.text != job.text:
        return
    headed = {str(PurePosixPath(job.heads(n) or "").parent) for n in ("output", "error")}
    for call in job.calls:
        if call.program in ("cd", "pushd") and not (call.args and STAYS_HERE.match(call.args[0].text)):
            return
        if call.in_substitution or any(c.program not in ("srun", "time", "nohup", "env") for c in call.under):
            continue
        targets = [r.target for r in call.redirects if r.operator in (">", ">>", ">|", "&>", "&>>")]
        targets += [a.text for a in call.args if not a.text.startswith("-")] if call.program == "tee" else []
        for target in targets:
            found = IS_RELATIVE.fullmatch(target)
            if found is None or found[1].startswith("..") or found[1] in headed or job.has_folder(found[1]):
                continue
            top = found[1].split("/")[0]
            if _is_named_before(job, top, call.offset) or MADE_BY_PROGRAMS & set(found[1].split("/")):
                continue
            tee = call.program == "tee"
            text = f"there is no folder {found[1]} for {target}, neither here nor next to the script"
            why, cure = TEE_WHY if tee else REDIRECTED_WHY, REDIRECTED_CURE.format(folder=found[1])
            # Of 16 such scripts that were looked up in their repositories, 11 had no such folder there: too few without a checkout.
            yield Violation(call.offset, text, why=why, cure=cure, severity="warning" if job.in_repository else "note")
            return


def _is_named_before(job: JobDescription, folder: str, offset: int) -> bool:
    """Return whether a command above a place names the folder, and may have created it, or a comment advises to."""
    name = re.compile(rf"(?<![\w.-]){re.escape(folder)}(?![\w.-])")
    calls = (c for c in job.calls if c.offset < offset and c.program not in ("echo", "printf", "tee"))
    return any(name.search(a.text) for c in calls for a in c.args) or _is_advised(job, folder)
