"""Rules for what sbatch reads of a script: its first line, the #SBATCH lines and their values, the folder of the log."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import LONG, slurm_option
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placeholders import PLACEHOLDER
from allranks.analysis.lint.records import Assignment, Directive, Violation
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex, nearest_name

# ------------------------------------------------------ lines that are read, and lines that are not

VARIABLE_WHY = "sbatch reads these lines as text before any shell runs: $NAME, ~ and `...` are not expanded, and the option is refused or means another file."
VARIABLE_CURE = "set it on the command line, where a shell expands it (sbatch --nodes=$N job.sh), or use Slurm's patterns (%x name, %j job, %u user)"
PATHS = ("output", "error", "chdir", "input")
WITHOUT_EFFECT_ON_JOB = {"job-name", "comment", "mail-user", "mail-type", "wckey"}
"""Options whose value changes neither what the job gets nor what it does."""


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
    """Return whether a program fills in the variables: in a folder of templates, or where a whole line is one that nothing sets."""
    folder = job.folder.name.lower() if job.folder else ""
    lines = any(not job.has(found[1]) for found in ALONE.finditer(job.text))
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


LATE_WHY = "sbatch stops reading options at the first command; the option has no effect, and there is no warning."
LATE_CURE = "move all #SBATCH lines up, directly below the first line"


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
    parked = all(_is_parked(job, line) for line in lines) and any(not d.late for d in job.directives)
    command = f", {before[0].written!r} in line {job.lines.place(before[0].offset)[0]}" if before else ""
    many = f"{len(set(lines))} #SBATCH lines (to line {lines[-1]}) come"
    what = many if len(set(lines)) > 1 else f"#SBATCH --{items[0].name} comes"
    yield Violation(items[0].offset, f"{what} after the first command{command}", severity="note" if parked else None)


def _is_parked(job: JobDescription, line: int) -> bool:
    """Return whether the line is kept for later: below the last command, behind ``exit`` or among other comments."""
    offset = job.lines.start(line)
    if any(c.offset > offset for c in (*job.calls, *job.assignments)):
        return False
    last = max((c for c in job.calls if not c.under), key=lambda c: c.offset, default=None)
    beside = [job.lines.line(n).lstrip() for n in (line - 1, line + 1)]
    return (last is not None and last.program == "exit") or any(
        near.startswith("#") and not near.startswith("#SBATCH") for near in beside
    )


OTHER_CASE = lazy_regex(r"#(?!PBS\b|BSUB\b)((?i:pbs)|PSB|BPS|PBSS|PPBS|(?!bsub)(?i:bsub)|BUSB|BSBU|BSUBB|SBUB)[ \t]+-")


def _in_other_case(job: JobDescription) -> Iterator[Violation]:
    """Report ``#Pbs``, ``#PSB`` and ``#BSub`` beside lines that the batch system reads."""
    for comment in job.reading.comments:
        found = OTHER_CASE.match(comment.text)
        if found and job.lines.place(comment.offset)[1] == 1:
            right = "#BSUB" if "U" in found[1].upper() else "#PBS"
            if re.search(rf"(?m)^{right}\s", job.text):
                text = f"#{found[1]} is not {right}"
                why = f"The batch system reads only lines that begin with {right}: this is an ordinary comment."
                yield Violation(comment.offset, text, why=why, cure=right)


UNREAD_WHY = "sbatch treats this as an ordinary comment."


MANY_SUCH = 5


def unread(job: JobDescription) -> Iterator[Violation]:
    yield from _in_other_case(job)
    if not job.is_batch and not any(u.name.startswith("SLURM_") for u in job.uses):
        return
    first = min((c.offset for c in job.calls), default=len(job.text))
    # In a here-document of <<- the tabs in front are not part of the line.
    starts = {job.source.where(found.start()) for found in re.finditer(r"(?m)^#", job.source.text)}
    for comment in job.reading.comments:
        line, column = job.lines.place(comment.offset)
        text = job.lines.line(line)
        if (
            column > 1
            and comment.offset not in starts
            and comment.text.startswith("#SBATCH")
            and not text[: column - 1].strip()
        ):
            yield Violation(comment.offset, "this #SBATCH is indented, so it is not read")
        elif re.match(r"#sbatch\s", comment.text) and (
            comment.offset > first or re.search(r"[\w}]\.(?:\w+[\"']?)\s*$", comment.text)
        ):
            continue  # a command that is switched off: sbatch --dependency=... next.sh
        elif column == 1 and re.match(
            r"#(?:(?!SBATCH)(?i:sbatch)|SBATCH[:=]|SLURM|BATCH|[!$]\s*SBATCH)\s+-", comment.text
        ):
            severity = "note" if _changes_nothing(comment.text) and not _keeps_together(job, comment.text) else None
            if (
                comment.text.startswith("#! ")
                and len(re.findall(r"(?m)^#![ \t](?!.*\bSBATCH\b)", job.text)) >= MANY_SUCH
            ):
                severity = "note"  # the template's mark of comments
            yield Violation(comment.offset, f"{comment.text.split()[0]} is not #SBATCH", severity=severity)
        elif column == 1 and (typo := re.match(r"#(S(?!BATCH(?:[a-z]|\b))[A-Za-z]{4,6})\s+-", comment.text)):
            word = typo[1].upper()
            if sorted(word) == sorted("SBATCH") or nearest_name(word, ["SBATCH"], 0.8):
                severity = "note" if _changes_nothing(comment.text) else None
                yield Violation(comment.offset, f"#{typo[1]} is not #SBATCH", severity=severity)
        elif column == 1 and re.match(r"#[ \t]+SBATCH\s+-", comment.text):
            yield Violation(
                comment.offset,
                "# SBATCH with a space is a comment (write ##SBATCH if it is intended)",
                severity="note" if job.is_batch else "warning",
            )
    yield from _misspelled(job)
    for call in job.calls:
        if call.written == "SBATCH" and call.args and call.args[0].text.startswith("-") and not call.under:
            yield Violation(
                call.offset,
                "SBATCH without # is a command: the option is not read",
                cure="#SBATCH at the start of the line",
            )


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
        elif not item.name and item.value in ("hetjob", "packjob"):
            continue  # the next component of a heterogeneous job
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


# ----------------------------------------------------------------------- values that sbatch refuses

REFUSED_WHY = "sbatch refuses the script: no job is submitted."
TIME_CURE = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
)
MEMORY_CURE = "a whole number with K, M, G or T: --mem=1536M"
COUNTS = {
    "ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "cpus-per-task", "cpus-per-gpu", "mincpus",
    "cores-per-socket", "sockets-per-node", "threads-per-core",
}  # fmt: skip
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
# All forms were tried with sbatch 22.05.
TIME = lazy_regex(r"(?:\d+-\d*|\d+)(?::\d+){0,2}|(?i:infinite|unlimited)|-1")
SIZE = lazy_regex(r"\d+(?i:[kmgt]b?)?")
NODES = lazy_regex(r"\d+[kKmM]?(?:-\d*[kKmM]?)?|[\d,:-]+")
SIGNAL = lazy_regex(r"(?:[BR]+:)?(?:(?:SIG)?[A-Z]+\d?|\d+)(?:@\d*)?", re.IGNORECASE)
MAIL = {
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80",
    "TIME_LIMIT_50", "ARRAY_TASKS",
}  # fmt: skip
# Options of srun, of other batch systems, and prefixes of several options.
FOREIGN = {
    "walltime": "--time", "queue": "--partition", "memory": "--mem", "ngpus": "--gpus-per-node", "cores": "--cpus-per-task",
    "name": "--job-name", "stdout": "--output", "stderr": "--error", "cpus": "--cpus-per-task", "gpu": "--gpus-per-node",
    "cpu-bind": "srun --cpu-bind", "cpu_bind": "srun --cpu-bind", "label": "srun --label", "unbuffered": "srun --unbuffered",
    "kill-on-bad-exit": "srun --kill-on-bad-exit", "pty": "srun --pty", "mpi": "srun --mpi", "multi-prog": "srun --multi-prog",
    "accel-bind": "srun --accel-bind", "ntasks-per-nodes": "--ntasks-per-node", "gpus_per_node": "--gpus-per-node",
    "cpus_per_task": "--cpus-per-task", "ntasks_per_node": "--ntasks-per-node", "mem_per_cpu": "--mem-per-cpu", "job_name": "--job-name",
    "group": "--account", "project": "--account", "email": "--mail-user", "email-type": "--mail-type",
    "cores-per-task": "--cpus-per-task", "cpu_per_gpu": "--cpus-per-gpu",
    "mem-per-task": "--mem-per-cpu", "mem-per-node": "--mem", "ram": "--mem", "num-nodes": "--nodes", "num_nodes": "--nodes",
    "num-gpus": "--gpus", "nproc": "--ntasks", "nprocs": "--ntasks", "log": "--output", "logfile": "--output", "runtime": "--time", "mca": "mpirun --mca",
}  # fmt: skip
TEMPLATE = lazy_regex(r"[@{}!<>*#%]|__")
GLUED_COMMENT = lazy_regex(r"\d[\d:.,-]*[KMGTkmgt]?#+[A-Za-z]*")
"""A number with a # behind it, and no blank between: the # begins no comment."""
SHORT_EQUALS = lazy_regex(r"-[A-Za-z]=\S")
NO_VALUE = {"p", "J", "o", "e", "A", "w", "x", "C", "q", "D"}
"""Short options that take any text: the = becomes the first character of the name."""


def refused(job: JobDescription) -> Iterator[Violation]:
    """Report options whose value sbatch does not accept."""
    if not job.source.text.startswith("#!"):
        return
    for item in job.directives:
        value = item.value
        if item.late or not item.name or "$" in item.text or "`" in item.text or PLACEHOLDER.search(item.text):
            continue
        what = _short_equals(item) or _unknown(item) or (invalid(item.name, value) if value is not None else None)
        if what:
            text, cure = what
            yield Violation(item.offset, f"#SBATCH {text}", cure=cure)
    memory = [job.heading[name] for name in MEMORY if name in job.heading and not job.heading[name].late]
    if len(memory) > 1:
        names = " and ".join(f"--{d.name}" for d in sorted(memory, key=lambda d: d.offset))
        yield Violation(
            max(d.offset for d in memory), f"{names}: sbatch accepts only one of them", cure="remove one of the two"
        )


def _short_equals(item: Directive) -> tuple[str, str] | None:
    found = SHORT_EQUALS.match(item.text)
    if found is None:
        return None
    letter = item.text[1]
    kept = f"the = becomes part of the {item.name}" if letter in NO_VALUE else f"the value is '={item.value}'"
    return f"{item.text.split()[0]}: {kept}, because a short option has no =", f"-{letter} {item.value}"


def _unknown(item: Directive) -> tuple[str, str] | None:
    right = FOREIGN.get(item.name) if item.text.startswith("--") else None
    if right is None or re.match(rf"--{right.removeprefix('--')}\b", item.text):
        return None
    return f"--{item.name}: sbatch has no such option", right


def invalid(name: str, value: str) -> tuple[str, str] | None:
    """Return what is wrong with a value, and what to write."""
    if (
        value
        and GLUED_COMMENT.fullmatch(value)
        and name in (*COUNTS, *MEMORY, "nodes", "time", "gpus", "gpus-per-node")
    ):
        return f"--{name}={value}: a # without a blank before it begins no comment", "a blank before the #"
    if not value or UNRESOLVED_OPEN in value or (name != "signal" and TEMPLATE.search(value)):
        return None
    filled_in = value[0].isdigit() or value[0] == ":"
    shown = f"--{name}={value}"
    if name == "time" and filled_in and not TIME.fullmatch(value):
        return f"{shown} is no time limit", TIME_CURE
    if name in MEMORY and filled_in and not SIZE.fullmatch(value):
        return f"{shown} is no size", MEMORY_CURE
    if name in COUNTS and filled_in and not re.fullmatch(r"\d+", value):
        return f"{shown} is no number", f"--{name}=<n>"
    if name == "nodes" and filled_in and not NODES.fullmatch(value):
        return f"{shown} is no number of nodes", "--nodes=<n>"
    if name == "signal" and not SIGNAL.fullmatch(value):
        return f"{shown} is no signal", "--signal=B:USR1@<seconds>"
    if name == "exclusive" and value not in ("user", "mcs", "topo", "exclusive"):
        return f"{shown}: this option takes no such value", "--exclusive"
    if name == "open-mode" and value[0] not in "at":
        return f"{shown}: unknown mode", "--open-mode=append"
    if name == "mail-type":
        words = [w.strip() for w in value.split(",")]
        if not any(w.upper() in MAIL for w in words):  # sbatch skips unknown words beside known ones
            return f"{shown}: {words[0] or 'an empty word'} is unknown", "--mail-type=END,FAIL"
    if name in ("gres", "gpus", "gpus-per-node", "gpus-per-task") and re.search(r"gpu[=(-]\d|gpu::|:\Z", value):
        return f"{shown} is no count of GPUs", "--gres=gpu:<n>"
    return None


def bad_counts(job: JobDescription) -> Iterator[Violation]:
    """Report counts of GPUs, arrays and logs in a form that sbatch, or the kernel, refuses."""
    if not job.source.text.startswith("#!"):
        return
    for item in job.directives:
        value = item.value or ""
        wrong = None
        if item.late or "$" in value or re.search(r"[{}<>]", value):
            continue
        if item.name in ("gpus", "gpus-per-node", "gpus-per-task") and re.fullmatch(
            r"\d+:[A-Za-z]\w*|[A-Za-z]\w*=\d+|-\d+", value
        ):
            wrong = "the form is <type>:<count>"
        elif item.name == "gres" and re.fullmatch(r"gpu\d+|gpu:(?:\w+:)?-\d+|gpu:\d+:[A-Za-z]\w*", value):
            wrong = "the form is gpu:<type>:<count>"
        elif item.name == "array" and re.fullmatch(r"\d+(?:\.\.|:|to)\d+", value):
            wrong = "the form is <first>-<last>"
        elif item.name == "nodes" and re.fullmatch(r"\d+,", value):
            wrong = "it ends with a comma"
        elif item.name in ("output", "error") and value.endswith("/"):
            wrong = "it is a folder, no file"
        if wrong:
            yield Violation(item.offset, f"#SBATCH --{item.name}={value}: {wrong}", cure=f"--{item.name}=<value>")


FOLDER_WHY = "sbatch copies the script to the node's spool folder and runs the copy: $0 and BASH_SOURCE point to that folder, which contains no other files."
FOLDER_CURE = 'cd "$SLURM_SUBMIT_DIR", the folder where sbatch was called (or use a full path)'
OWN_PATH = lazy_regex(r"\$\{?(?:0|BASH_SOURCE)(?![0-9A-Za-z_])")


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


HOME_WHY = "PBS starts the script in the home folder, not in the folder of qsub, unless the site has changed this."


def in_home(job: JobDescription) -> Iterator[Violation]:
    """Report a program without a folder in a job of PBS that never changes its folder."""
    if (
        job.pbs is None
        or job.is_batch
        or re.search(r"PBS_O_WORKDIR|PBS_O_INITDIR|(?m:^#PBS\s.*(?:-[dw]\s|\bwd\b|sandbox))", job.text)
    ):
        return
    moves = any(
        c.program in ("cd", "pushd", "source", ".", "eval", "exec", "qsub") and not c.in_substitution for c in job.calls
    )
    inside = any(a.text in ("--pwd", "-w", "--workdir", "-wdir", "--wdir") for c in job.calls for a in c.args)
    if moves or inside or job.submits or job.placeholders:
        return
    for call in job.work_calls:
        name = next((a.text for a in call.args if a.text.endswith(".py")), "")
        if (
            name
            and re.match(r"(?:\./|\.\./|[A-Za-z])[\w./-]*\Z", name)
            and not call.in_function
            and not call.in_substitution
        ):
            yield Violation(
                call.offset,
                f"{name} is looked for in the home folder",
                why=HOME_WHY,
                cure="cd $PBS_O_WORKDIR above it",
                severity="note",
            )
            return


def home_as_base(job: JobDescription) -> Iterator[Violation]:
    """Report ``BASE=$PWD`` in a job of PBS that has not changed its folder, where the base is that of programs."""
    if job.is_batch or not re.search(r"(?m)^#PBS\s", job.text) or job.submits:
        return
    if re.search(r"PBS_O_WORKDIR|PBS_O_INITDIR|(?m:^#PBS\s.*(?:-[dw]\s|\bwd\b|sandbox))", job.text):
        return
    moves = [c.offset for c in job.calls if c.program in ("cd", "pushd", "source", ".", "eval") and not c.under]
    for item in job.assignments:
        written = item.value.strip("\"'")
        if (
            written not in ("$PWD", "${PWD}", "$(pwd)", "`pwd`")
            or item.under
            or item.in_function
            or item.in_substitution
        ):
            continue
        if item.name in ("PWD", "OLDPWD") or any(m < item.offset for m in moves):
            continue
        if not re.search(r"pwd|PWD", job.line_of(item.offset)):
            continue  # the folder in which the submitting script runs
        name = rf"\$\{{?{re.escape(item.name)}\}}?"
        if found := re.search(rf"{name}/[\w./-]*\.(?:sh|py)\b", job.code):
            text = f"{item.name}={written} is the home folder, where {found[0]} is looked for"
            yield Violation(item.offset, text, why=HOME_WHY, cure=f"{item.name}=$PBS_O_WORKDIR")
            return


OWN_FOLDER = lazy_regex(r"(?:^|[\s=\"'(])(\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/\*\})")


def own_folder(job: JobDescription) -> Iterator[Violation]:
    """Report ``${0%/*}`` in a batch script."""
    if not job.is_batch or re.search(r"SLURM_SUBMIT_DIR|scontrol\s+show\s+job\b", job.text) or job.submits:
        return
    for found in OWN_FOLDER.finditer(job.text):
        line = job.lines.line(job.lines.place(found.start(1))[0])
        assigned = re.match(rf"\s*(?:export\s+)?\w+=[\"']?{re.escape(found[1])}", line)  # the other rule has it
        if not job.in_comment(found.start(1)) and not assigned:
            yield Violation(found.start(1), "the folder of the script: under sbatch this is Slurm's spool folder")
            return


# ----------------------------------------------------------------------- first line and line breaks

SHEBANG_WHY = "sbatch refuses a script whose first line does not start with #!."


def shebang(job: JobDescription) -> Iterator[Violation]:
    if job.source.text.startswith("\ufeff"):
        yield Violation(
            0,
            "the file starts with a byte order mark instead of #!",
            cure="save it as UTF-8 without a byte order mark",
        )
    elif job.is_batch and not job.source.text.startswith(("#!", "{%")):
        later = re.match(r"(?:[ \t]*(?:#(?!!).*)?\r?\n)+(?=#!\s*/)", job.source.text)
        text = "the first line of the batch script does not start with #!"
        if later:
            text += f", which stands in line {job.lines.place(job.source.where(later.end()))[0]}"
        yield Violation(job.source.where(later.end() if later else 0), text)
    elif job.kind == "script" and (
        found := re.match(r"#[ \t]?/(?:usr/)?bin/(?:env[ \t]+)?(?:ba|z|c|k)?sh\b", job.source.text)
    ):
        yield Violation(
            0, f"the ! is missing in {found[0]}: the line is a comment", why=NO_BANG_WHY, cure="#!" + found[0].lstrip("# \t"), severity="warning"
        )  # fmt: skip


NO_BANG_WHY = "Whoever starts the file chooses the shell: sh, or the login shell, and not the one that the line names."


INTERPRETER_WHY = (
    "The kernel starts the program that the first line names: the job fails at once with 'No such file or directory'."
)


SEVERAL_WORDS = lazy_regex(r"#!\s*/usr/bin/env[ \t]+((?!-)[\w.-]+[ \t]+[^\s#][^\n]*?)[ \t]*(?:\n|\Z)")


def interpreter(job: JobDescription) -> Iterator[Violation]:
    """Report a first line whose program has no full path, or gets several words through env."""
    found = re.match(r"#!\s*(\S+)", job.source.text)
    if found and job.is_job and not found[1].startswith("/") and not re.search(r"[{}$<>@%]", found[0]):
        text = f"{found[1]} is no full path"
        yield Violation(job.source.where(0), text, why=INTERPRETER_WHY, cure="#!/bin/bash")
    elif found and job.is_job and (several := SEVERAL_WORDS.match(job.source.text)):
        text = f"env looks for a program called '{several[1]}': the kernel passes what follows as one word"
        yield Violation(job.source.where(0), text, why=INTERPRETER_WHY, cure=f"#!/bin/{several[1]}, or env -S")


CRLF_WHY = "sbatch refuses scripts with DOS line breaks; elsewhere the carriage return becomes part of the last word of every line."


def line_breaks(job: JobDescription) -> Iterator[Violation]:
    count = job.text.count("\r\n")
    if count:
        yield Violation(job.text.index("\r\n"), f"{count} line{'s' * (count > 1)} with DOS line breaks (CR LF)")


PBS_LETTER_WHY = "qsub reads the words behind #PBS as its own arguments: a word that is no option is a directive error, and no such resource is requested."
PBS_WITHOUT_LETTER = lazy_regex(r"(?m)^#PBS[ \t]+((?!-)[A-Za-z_]\w*)=\S+[ \t]*(?:#.*)?$")


def pbs_without_letter(job: JobDescription) -> Iterator[Violation]:
    """Report ``#PBS ngpus=1``, which has no option letter."""
    if job.pbs is None:
        return
    for found in PBS_WITHOUT_LETTER.finditer(job.source.text):
        text = f"#PBS {found[1]}=... has no option letter in front"
        yield Violation(
            job.source.where(found.start(1)), text, why=PBS_LETTER_WHY, cure="#PBS -l select=1:ngpus=1, or #PBS -o FILE"
        )
