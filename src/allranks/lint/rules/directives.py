"""``#SBATCH`` lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from allranks.lint.job import Job
from allranks.lint.options import LONG
from allranks.lint.records import Hit

VARIABLE_WHY = "sbatch reads these lines as text before any shell runs: $NAME, ~ and `...` stay as they are, and the option is refused or means another file."
VARIABLE_CURE = "give it on the command line, where a shell expands it (sbatch --nodes=$N job.sh), or use Slurm's patterns (%x name, %j job, %u user)"
LATE_WHY = "sbatch stops reading options at the first command; the option has no effect, without a word."
LATE_CURE = "move all #SBATCH lines up, directly below the first line"
UNREAD_WHY = "For sbatch this is an ordinary comment."
OUTPUT_WHY = "Slurm opens the output file before the script runs. If the folder is missing the job fails at once and leaves no log at all."
OUTPUT_CURE = "make the folder before sbatch, or choose one that is there"
SHEBANG_WHY = "sbatch refuses a script whose first line does not begin with #!."
PATHS = ("output", "error", "chdir", "input")


def variable(job: Job) -> Iterator[Hit]:
    for item in job.directives:
        value = item.value or ""
        if item.late:
            continue
        name = f"--{item.name}={value}" if item.name else value
        if re.search(r"(?<!\\)\$[A-Za-z_{(]|`", value):
            yield Hit(item.offset, f"#SBATCH {name}: nothing is expanded here")
        elif item.name in PATHS and value.startswith("~"):
            yield Hit(item.offset, f"#SBATCH {name}: ~ is not expanded here")


def late(job: Job) -> Iterator[Hit]:
    items = [item for item in job.directives if item.late]
    if not items:
        return
    lines = [job.lines.place(item.offset)[0] for item in items]
    before = [c for c in job.calls if not c.under and not c.in_substitution and c.offset < items[0].offset]
    command = f", {before[0].written!r} in line {job.lines.place(before[0].offset)[0]}" if before else ""
    many = f"{len(set(lines))} #SBATCH lines (to line {lines[-1]}) come"
    what = many if len(set(lines)) > 1 else f"#SBATCH --{items[0].name} comes"
    yield Hit(items[0].offset, f"{what} after the first command{command}")


def unread(job: Job) -> Iterator[Hit]:
    if not job.is_batch:
        return
    for comment in job.reading.comments:
        line, column = job.lines.place(comment.offset)
        text = job.lines.line(line)
        if column > 1 and comment.text.startswith("#SBATCH") and not text[: column - 1].strip():
            yield Hit(comment.offset, "this #SBATCH is indented, and not read")
        elif column == 1 and re.match(r"#(?:sbatch|Sbatch|SBATCH[:=]|SLURM)\s+-", comment.text):
            yield Hit(comment.offset, f"{comment.text.split()[0]} is not #SBATCH")
        elif column == 1 and re.match(r"#[ \t]+SBATCH\s+-", comment.text):
            yield Hit(
                comment.offset, "# SBATCH with a space is a comment (write ##SBATCH if that is meant)", severity="note"
            )
    yield from _misspelled(job)


def _misspelled(job: Job) -> Iterator[Hit]:
    for item in job.directives:
        word = item.text.split()[0] if item.text.split() else ""
        if re.match(r"-[a-z]{2,}[a-z-]*=", word) and not word.startswith("--"):
            yield Hit(
                item.offset,
                f"#SBATCH {word}: a long option needs two dashes",
                cure=f"-{word}",
                severity="error",
                why="sbatch refuses it.",
            )
        elif not item.name and item.value:
            yield Hit(item.offset, f"#SBATCH ... {item.value}: no option; a blank before or after = is not allowed", severity="error",
                      why="sbatch takes it for the script's name, or refuses it.", cure="--name=value")  # fmt: skip
        elif len(item.name) > 1 and item.name not in LONG:
            near = difflib.get_close_matches(item.name, LONG, n=1, cutoff=0.85)
            if near:
                yield Hit(
                    item.offset,
                    f"#SBATCH --{item.name}: sbatch has no such option",
                    cure=f"--{near[0]}",
                    severity="error",
                    why="sbatch refuses it.",
                )


def output(job: Job) -> Iterator[Hit]:
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
            yield Hit(found.offset, f"the folder {folder} is made by the script, too late for --{name}")


def shebang(job: Job) -> Iterator[Hit]:
    if job.source.text.startswith("\ufeff"):
        yield Hit(
            0,
            "the file begins with a byte order mark, and so not with #!",
            cure="save it as UTF-8 without a byte order mark",
        )
    elif job.is_batch and not job.source.text.startswith("#!"):
        yield Hit(job.source.where(0), "a batch script without #! in its first line")
