"""What sbatch reads of a script: #SBATCH lines, the folder of the script and of the log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from allranks.analysis.lint.command_options import LONG, slurm_option
from allranks.analysis.lint.files import PLACEHOLDER
from allranks.analysis.lint.job import JobDescription, count_gpus
from allranks.analysis.lint.records import Violation
from allranks.analysis.lint.rules import also, error, note, warning
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex, nearest_name

PATHS = ("output", "error", "chdir", "input")
WITHOUT_EFFECT_ON_JOB = {"job-name", "comment", "mail-user", "mail-type", "wckey"}
"""Options whose value changes neither what the job gets nor what it does."""


@error(
    "variable-in-directive",
    why="sbatch reads these lines as text: $NAME, ~ and `...` are not expanded, and the option is refused or means "
    "another file.",
    cure="set it on the command line, where a shell expands it (sbatch --nodes=$N job.sh), or use Slurm's patterns (%x "
    "name, %j job, %u user)",
    source="tested with Slurm 22.05",
    bad="#SBATCH --nodes=$NODES\nsrun torchrun train.py",
    good="# sbatch --nodes=$NODES job.sbatch\nsrun torchrun train.py",
)
def variable(job: JobDescription) -> Iterator[Violation]:
    for item in job.directives:
        value = item.value or ""
        if item.late:
            continue
        name = f"--{item.name}={value}" if item.name else value
        inside = job.source.text != job.text  # the shell that submits it has expanded $1 and ${1}
        if re.search(r"(?<!\\)\$(?:[A-Za-z_(]|\{[A-Za-z_])|`" + ("" if inside else r"|\$\{?\d"), value):
            severity = "note" if item.name in WITHOUT_EFFECT_ON_JOB or _is_filled_in(job) else None
            yield Violation(item.offset, f"#SBATCH {name}: variables are not expanded here", severity=severity)
        elif item.name in PATHS and value.startswith("~"):
            yield Violation(item.offset, f"#SBATCH {name}: ~ is not expanded here")


ALONE = lazy_regex(r"(?m)^\$\{([A-Z][A-Z0-9_]*)\}[ \t]*$")


def _is_filled_in(job: JobDescription) -> bool:
    """Return whether a program fills in the variables: in a folder of templates, or if an unset one is a whole line."""
    folder = job.folder.name.lower() if job.folder else ""
    lines = any(not job.has(match[1]) for match in ALONE.finditer(job.text))
    return folder in ("template", "templates") or lines or re.search(r"£[\w({]", job.text) is not None


FILLED_IN = lazy_regex(r"<%|\{%|\{\{|(?<!\$)\{[A-Za-z_][\w.]*\}|(?<![\w.])@[A-Z_]+\b|![A-Z]+_\w+|##\w+##|£\w")
"""Marks of programs that fill in a template."""


def _is_template(job: JobDescription) -> bool:
    """Return whether a line for the batch system, or what stands above it, is to be filled in by a program."""
    lines = job.text.splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith(("#SBATCH", "#PBS"))), default=0)
    return any(
        FILLED_IN.search(line) or line.startswith("% ") for line in lines[: last + 1] if not line.startswith("# ")
    )


@error(
    "directive-too-late",
    why="sbatch stops reading options at the first command; the option has no effect, and there is no warning.",
    cure="move all #SBATCH lines up, directly below the first line",
    source="tested with Slurm 22.05",
    bad="#SBATCH --nodes=2\nset -e\n#SBATCH --time=01:00:00\nsrun torchrun train.py",
    good="#SBATCH --nodes=2\n#SBATCH --time=01:00:00\nset -e\nsrun torchrun train.py",
)
def late(job: JobDescription) -> Iterator[Violation]:
    if _is_template(job):
        return
    items = [item for item in job.directives if item.late and item.name]
    if not items or not job.source.text.startswith("#!"):
        return  # without #! sbatch refuses the script
    lines = [job.lines.place(item.offset)[0] for item in items]
    if job.lines.line(lines[0] - 1).startswith("#!") and lines[0] > 2:
        return  # another script begins here
    before = [c for c in job.calls if not c.under and not c.in_substitution and c.offset < items[0].offset]
    if before and all(c.written.startswith("$") for c in before) and any("${" in i.text for i in job.directives):
        return  # a template, which a program fills in: $PARTITION_OPTION stands for an #SBATCH line
    later = any(c.offset > job.lines.start(lines[0]) for c in (*job.calls, *job.assignments))
    parked = not later and any(not d.late for d in job.directives)  # kept for later, below the last command
    command = f", {before[0].written!r} in line {job.lines.place(before[0].offset)[0]}" if before else ""
    many = f"{len(set(lines))} #SBATCH lines (to line {lines[-1]}) come"
    what = many if len(set(lines)) > 1 else f"#SBATCH --{items[0].name} comes"
    yield Violation(items[0].offset, f"{what} after the first command{command}", severity="note" if parked else None)


NEARLY = lazy_regex(r"#((?:[!$][ \t]*)?|[ \t]+(?=SBATCH))([A-Za-z]{5,7})[:=]?\s+(-\S+)")


@warning(
    "directive-not-read",
    why="sbatch treats this as an ordinary comment.",
    cure="write it as #SBATCH at the start of the line",
    source="tested with Slurm 22.05",
    bad="#SBATCH --nodes=2\n#SBTACH --time=01:00:00\nsrun torchrun train.py",
    good="#SBATCH --nodes=2\n#SBATCH --time=01:00:00\nsrun torchrun train.py",
)
def unread(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch and not any(u.name.startswith("SLURM_") for u in job.uses):
        return
    first = min((c.offset for c in job.calls), default=len(job.text))
    # In a here-document of <<- the tabs in front are not part of the line.
    starts = {job.source.where(match.start()) for match in re.finditer(r"(?m)^#", job.source.text)}
    for comment in job.reading.comments:
        line, column = job.lines.place(comment.offset)
        alone = not job.lines.line(line)[: column - 1].strip()
        if column > 1 and alone and comment.offset not in starts and comment.text.startswith("#SBATCH"):
            yield Violation(comment.offset, "this #SBATCH is indented, so it is not read")
            continue
        match = NEARLY.match(comment.text)
        if column > 1 or match is None or re.match(r"#SBATCH\s", comment.text):
            continue
        word = match[2].upper()
        if (
            word not in ("SBATCH", "SLURM", "BATCH")
            and sorted(word) != sorted("SBATCH")
            and not nearest_name(word, ["SBATCH"], 0.8)
        ):
            continue
        if re.match(r"#sbatch\s", comment.text) and comment.offset > first:
            continue  # a command that is switched off: sbatch --dependency=... next.sh
        harmless = slurm_option(match[3])[0] in WITHOUT_EFFECT_ON_JOB or match[1].startswith("!")
        text, severity = f"{comment.text.split()[0]} is not #SBATCH", "note" if harmless else None
        if match[1].isspace():
            text = "# SBATCH with a space is a comment (write ##SBATCH if it is intended)"
            severity = "note" if job.is_batch else "warning"
        yield Violation(comment.offset, text, severity=severity)
    yield from _misspelled(job)


def _misspelled(job: JobDescription) -> Iterator[Violation]:
    """Report options that sbatch does not know, or whose value it takes for another word."""
    why, said = "sbatch refuses it.", set[int]()
    for item in job.directives:
        word, value, filled_in = item.text.partition(" ")[0], item.value or "", False
        near = nearest_name(item.name, LONG, 0.85) if len(item.name) > 1 and item.name not in LONG else None
        if re.match(r"-[a-z]{2,}[a-z-]*=", word):
            text, cure = f"{word}: a long option needs two dashes", f"-{word}"
        elif item.name == "gres" and re.fullmatch(r"\d+|(?:gpus|GPU|GPUs|Gpu)(?::[\w:]+)?", value):
            text, cure = f"--gres={value}: the name of the resource is gpu", "--gres=gpu:<n>"
        elif item.name and value.startswith("=") and re.match(r"--[\w-]+\s", item.text):
            text, cure = f"--{item.name} {value}: a blank before = is not allowed", "--name=value"
            said.add(job.lines.place(item.offset)[0])
        elif not item.name and value and value not in ("hetjob", "packjob") and not item.late:
            line = job.lines.place(item.offset)[0]
            if line in said or re.search(r"<%|\{\{|\{\(|\[[A-Za-z]|<-{3,}|\d#", job.lines.line(line)):
                continue  # to be filled in, or a comment that begins behind a number
            said.add(line)
            text, cure = f"... {value}: not an option; a blank before or after = is not allowed", "--name=value"
        elif near:
            text, cure, filled_in = f"--{item.name}: sbatch has no such option", f"--{near}", True
        else:
            continue
        yield Violation(
            item.offset, f"#SBATCH {text}", cure=cure, severity="error", why=why, whatever_is_filled_in=filled_in
        )


MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
# Options of srun, of other batch systems, and prefixes of several options.
FOREIGN = {
    "walltime": "--time", "queue": "--partition", "memory": "--mem", "ngpus": "--gpus-per-node",
    "cores": "--cpus-per-task", "gpu": "--gpus-per-node", "name": "--job-name", "stdout": "--output",
    "stderr": "--error", "cpus": "--cpus-per-task", "cpu-bind": "srun --cpu-bind", "project": "--account",
    "kill-on-bad-exit": "srun --kill-on-bad-exit", "pty": "srun --pty", "mpi": "srun --mpi",
    "gpus_per_node": "--gpus-per-node", "email": "--mail-user", "cpus_per_task": "--cpus-per-task",
    "ntasks_per_node": "--ntasks-per-node", "job_name": "--job-name", "mem-per-task": "--mem-per-cpu",
    "mem-per-node": "--mem", "num-nodes": "--nodes", "num_nodes": "--nodes", "num-gpus": "--gpus", "nproc": "--ntasks",
    "runtime": "--time",
}  # fmt: skip
TEMPLATE = lazy_regex(r"[@{}!<>*#%]|__")


@error(
    "directive-refused",
    why="sbatch refuses the script: no job is submitted.",
    source="tested with Slurm 22.05",
    bad="#SBATCH --nodes=1\n#SBATCH --time=24h\nsrun torchrun train.py",
    good="#SBATCH --nodes=1\n#SBATCH --time=24:00:00\nsrun torchrun train.py",
)
def refused(job: JobDescription) -> Iterator[Violation]:
    if not job.source.text.startswith("#!"):
        return
    for item in job.directives:
        if item.late or not item.name or "$" in item.text or "`" in item.text or PLACEHOLDER.search(item.text):
            continue
        right = FOREIGN.get(item.name) if item.text.startswith("--") else None
        what = invalid(item.name, item.value) if item.value is not None else None
        if re.match(r"-[A-Za-z]=\S", item.text):
            word = item.text.split()[0]
            what = (
                f"{word}: the = becomes part of the value, because a short option has no =",
                f"-{item.text[1]} {item.value}",
            )
        elif right and not re.match(rf"--{right.removeprefix('--')}\b", item.text):
            what = f"--{item.name}: sbatch has no such option", right
        if what:
            yield Violation(item.offset, f"#SBATCH {what[0]}", cure=what[1])
    memory = [job.heading[name] for name in MEMORY if name in job.heading and not job.heading[name].late]
    if len(memory) > 1:
        names = " and ".join(f"--{d.name}" for d in sorted(memory, key=lambda d: d.offset))
        text = f"{names}: sbatch accepts only one of them"
        yield Violation(max(d.offset for d in memory), text, cure="remove one of the two")


MAIL = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(?:_[589]0)?|ARRAY_TASKS"
TIME_CURE = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
)
COUNTS = (
    "ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "cpus-per-task",
    "cpus-per-gpu", "mincpus", "cores-per-socket", "sockets-per-node", "threads-per-core",
)  # fmt: skip
GPUS = r"(?!.*(?:gpu[=(-]\d|gpu::|:\Z)).*"
FORMS: dict[str, tuple[str, str, str]] = {
    "time": (r"(?:\d+-\d*|\d+)(?::\d+){0,2}|infinite|unlimited|-1|[^\d:].*", "is no time limit", TIME_CURE),
    **dict.fromkeys(MEMORY, (r"\d+(?:[kmgt]b?)?|\D.*", "is no size", "a whole number with K, M, G or T: --mem=1536M")),
    **dict.fromkeys(COUNTS, (r"\d+|\D.*", "is no number", "a whole number")),
    "nodes": (r"\d+[km]?(?:-\d*[km]?)?|[\d,:-]+|[^\d:].*", "is no number of nodes", "--nodes=<n>"),
    "signal": (r"(?:[BR]+:)?(?:(?:SIG)?[A-Z]+\d?|\d+)(?:@\d*)?", "is no signal", "--signal=B:USR1@<seconds>"),
    "exclusive": ("user|mcs|topo|exclusive", "takes no such value", "--exclusive"),
    "open-mode": ("[at].*", "is an unknown mode", "--open-mode=append"),
    "mail-type": (rf"(?:.*,\s*)?(?:{MAIL})(?:\s*,.*)?", "is unknown", "--mail-type=END,FAIL"),
    **dict.fromkeys(
        ("gres", "gpus", "gpus-per-node", "gpus-per-task"), (GPUS, "is no count of GPUs", "--gres=gpu:<n>")
    ),
}
"""The values that sbatch 22.05 accepts, as tried; what another one is; what to write."""


def invalid(name: str, value: str) -> tuple[str, str] | None:
    """Return what is wrong with a value, and what to write."""
    form = FORMS.get(name)
    if form is None or not value or UNRESOLVED_OPEN in value or (name != "signal" and TEMPLATE.search(value)):
        return None
    accepted, wrong, cure = form
    return None if re.fullmatch(accepted, value, re.IGNORECASE) else (f"--{name}={value} {wrong}", cure)


OWN_PATH = lazy_regex(r"\$\{?(?:0|BASH_SOURCE)(?![0-9A-Za-z_])")


@warning(
    "script-folder",
    why="sbatch runs a copy of the script in the node's spool folder: $0 and BASH_SOURCE point there, where no other "
    "files are.",
    cure='cd "$SLURM_SUBMIT_DIR", the folder where sbatch was called (or use a full path)',
    source="Slurm's sbatch and srun manuals",
    bad='cd "$(dirname "$0")"\nsrun torchrun train.py',
    good='cd "$SLURM_SUBMIT_DIR"\nsrun torchrun train.py',
)
def script_folder(job: JobDescription) -> Iterator[Violation]:
    if not job.is_batch or job.submits or re.search(r"SLURM_SUBMIT_DIR|scontrol\s+show\s+job\b", job.text):
        return  # one that submits itself determines its folder before that
    named = [c for c in job.calls if c.program in ("dirname", "readlink", "realpath") and not c.under]
    places = [c.offset for c in named if any(OWN_PATH.match(a.text) for a in c.args)]
    used = {u.name for u in job.uses if u.program not in ("echo", "printf")}
    unused = {
        job.lines.place(a.offset)[0] for a in job.all_values if a.name not in used and not a.exported and not a.under
    }
    places = [place for place in places if job.lines.place(place)[0] not in unused]
    places += [a.offset for a in job.assignments if not a.under and re.match(r"\$\{(?:0|BASH_SOURCE)[^}]*%", a.value)]
    if places:
        yield Violation(min(places), "the folder of the script: under sbatch this is Slurm's spool folder")


@also("directive-refused")
def counted_gpus(job: JobDescription) -> Iterator[Violation]:
    """Compare the GPUs that ``--gpus``, ``--gpus-per-node`` and ``--gres`` ask for: sbatch and srun do as well."""
    per_node, of_gres = count_gpus(job.heads("gpus-per-node"), None)[0], count_gpus(None, job.heads("gres"))[0]
    count, steps = (
        job.heading.get("gpus-per-node"),
        any(c.program == "srun" and not c.in_substitution for c in job.calls),
    )
    if count and not count.late and per_node and of_gres and per_node != of_gres and steps:
        text = (
            f"--gpus-per-node={count.value}, but --gres={job.heads('gres')}: srun asks for the one and the job has the "
            "other"
        )
        why = "srun stops with 'Invalid generic resource (gres) specification', or uses a part of the GPUs."
        yield Violation(count.offset, text, why=why, cure="remove one of the two")
    each, count, nodes = per_node or of_gres, job.heading.get("gpus"), job.number(job.heads("nodes"))
    whole = job.number((job.heads("gpus") or "").rpartition(":")[2])
    if count is None or count.late or not each or not whole or "gpus-per-socket" in job.heading:
        return
    if whole < each or (nodes and whole != each * nodes):
        text = (
            f"--gpus={count.value} is the total, but the job requests {each} GPU{'s' * (each > 1)} on each of "
            f"{nodes or 'its'} nodes"
        )
        yield Violation(count.offset, text, cure=f"remove --gpus, or --gpus={each * (nodes or 1)}")


@note(
    "placeholder",
    why="The file is a template; these parts are to be replaced before it runs.",
    cure="replace them",
    source="the file itself",
    bad="#SBATCH --account=<account>\nsrun torchrun train.py",
    good="#SBATCH --account=project1\nsrun torchrun train.py",
)
def placeholder(job: JobDescription) -> Iterator[Violation]:
    if job.placeholders:
        lines: dict[str, int] = {}
        for offset, text in job.placeholders:
            lines.setdefault(text, job.lines.place(offset)[0])
        shown = ", ".join(f"{text} (line {line})" for text, line in list(lines.items())[:6])
        more = f" and {len(lines) - 6} more" if len(lines) > 6 else ""
        yield Violation(job.placeholders[0][0], f"to be filled in: {shown}{more}")


FIRST_THAT_CREATES = (23, 2)


@warning(
    "output-folder",
    why="Slurm opens the output file before the script runs. Before 23.02 it creates no folder: the job fails at once "
    "without a log.",
    cure="create the folder before sbatch (mkdir -p), or use an existing one",
    source="release notes of Slurm 23.02; tested with Slurm 22.05",
    bad="#SBATCH --output=logs/%j.txt\nsrun torchrun train.py",
    good="#SBATCH --output=%x-%j.out\nsrun torchrun train.py",
)
def output(job: JobDescription) -> Iterator[Violation]:
    if job.slurm_version is None or job.slurm_version >= FIRST_THAT_CREATES:
        return
    made = {w.text.rstrip("/") for c in job.calls if c.program == "mkdir" and not c.under for w in c.args}
    said: set[str] = set()
    for name in ("output", "error"):
        option = job.heading.get(name)
        folder = str(PurePosixPath(option.value).parent) if option and option.value else "."
        if option is None or folder == "." or folder in said:
            continue
        said.add(folder)
        cure = f"--{name}=<existing folder>/%x-%j.out"
        if re.search(r"%\d*[jJAN]", folder):
            text = f"nobody creates the folder {folder} of --{name}: its name is known when the job exists"
            yield Violation(option.offset, text, cure=cure)
        elif folder in made:
            yield Violation(option.offset, f"the folder {folder} is created by the script, too late for --{name}")
        elif job.is_missing(folder.replace("%x", job.heads("job-name") or "%x")):
            text = f"there is no folder {folder} for --{name}, neither here nor next to the script"
            yield Violation(option.offset, text)
