"""Rules for what a job requests: refused requests, units of other batch systems, options given twice, and resources and arrays that are not used."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import PYTHON
from allranks.analysis.lint.job import JobDescription, count_gpus
from allranks.analysis.lint.records import Argument, Directive, ProgramCall, Violation
from allranks.analysis.lint.rules.conditions import array_range
from allranks.analysis.lint.rules.unset_variables import RENDEZVOUS_OPTIONS
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex

# ---------------------------------------------------------------------- refused, or in another unit

LIKELY_HOURS = {24, 48, 72, 96, 144, 168}
SHORT_S = 600
PBS_TIME_WHY = "A single number is seconds for PBS, and two numbers are minutes and seconds: the job is ended long before it has finished."
GRID_TIME_WHY = "Grid Engine takes a number alone as seconds: the job is killed before it has done anything."
LSF_TIME_WHY = "LSF takes [hours:]minutes: a single number is minutes."
PATTERN_WHY = (
    "Only Slurm replaces these patterns: the file gets the name as written, and every job writes the same one."
)
BYTES_WHY = "PBS takes a number without a unit as bytes: the job is refused, or ended when it starts."
FORM_WHY = "The batch system does not accept this form, and no job is submitted."
PBS_LOG = lazy_regex(r"-[oe]\s*(\S*%[jJxAaN]\S*)")
LSF_LOG = lazy_regex(r"-(?:oo|eo|o|e)\s+(\S*%[jxAaN](?![a-z])\S*)")


def lines_of_system(job: JobDescription, system: str) -> Iterator[tuple[int, str]]:
    """Yield the lines for a batch system that is the only one of the file."""
    if job.is_batch or not job.is_job:
        return
    for comment in job.reading.comments:
        if re.match(rf"{system}\s", comment.text) and job.lines.place(comment.offset)[1] == 1:
            yield comment.offset, comment.text.rstrip()


def hours_as_minutes(job: JobDescription) -> Iterator[Violation]:
    """Report a time limit of PBS in seconds or minutes, or of LSF in minutes, where hours were meant."""
    for offset, line in lines_of_system(job, "#PBS"):
        found = re.search(r"\bwalltime=(\d{1,6})(?::(\d\d))?(?=[,\s]|\Z)", line)
        if found and found[2] is None and 0 < int(found[1]) < SHORT_S:
            text = f"walltime={found[1]} is {found[1]} second{'s' * (found[1] != '1')}"
            yield Violation(offset, text, why=PBS_TIME_WHY, cure=f"walltime={found[1]}:00:00")
        elif found and found[2] == "00" and int(found[1]) in LIKELY_HOURS:
            yield Violation(
                offset,
                f"walltime={found[1]}:00 is {found[1]} minutes",
                why=PBS_TIME_WHY,
                cure=f"walltime={found[1]}:00:00",
            )
    for comment in () if job.is_batch else job.reading.comments:
        found = re.match(r"#\$\s.*\b[hs]_rt=(\d{1,6})(?=[,\s]|\Z)", comment.text)
        if found and 0 < int(found[1]) < SHORT_S:
            text = f"h_rt={found[1]} is {found[1]} second{'s' * (found[1] != '1')}"
            yield Violation(comment.offset, text, why=GRID_TIME_WHY, cure=f"h_rt={found[1]}:00:00")
    for offset, line in lines_of_system(job, "#BSUB"):
        found = re.search(r"\s-W\s+(\d{1,3})(?=\s|\Z)", line)
        if found and int(found[1]) in LIKELY_HOURS and job.requests_gpus:
            yield Violation(offset, f"-W {found[1]} is {found[1]} minutes", why=LSF_TIME_WHY, cure=f"-W {found[1]}:00")


def refused_times(job: JobDescription) -> Iterator[Violation]:
    """Report a time limit in the form of another batch system."""
    for offset, line in lines_of_system(job, "#PBS"):
        found = re.search(r"\bwalltime=(\d+-[\d:]+)(?=[,\s]|\Z)", line)
        if found:
            yield Violation(
                offset, f"walltime={found[1]}: PBS takes no days", why=FORM_WHY, cure="walltime=<hours>:00:00"
            )
    for offset, line in lines_of_system(job, "#BSUB"):
        found = re.search(r"\s-W\s+(\d+:\d\d:\d\d|\d+-[\d:]+)(?=\s|\Z)", line)
        if found:
            yield Violation(
                offset, f"-W {found[1]}: LSF takes hours:minutes", why=FORM_WHY, cure="-W <hours>:<minutes>"
            )


def bytes_of_memory(job: JobDescription) -> Iterator[Violation]:
    """Report an amount of memory of PBS without a unit."""
    for offset, line in lines_of_system(job, "#PBS"):
        found = re.search(r"\b(p?v?mem)=(\d{1,6})(?=[,:\s]|\Z)", line)
        if found and re.search(r"\s-l\s*\S*\b" + re.escape(found[0]), line):
            yield Violation(offset, f"{found[0]} is {found[2]} bytes", why=BYTES_WHY, cure=f"{found[1]}={found[2]}gb")


def foreign_patterns(job: JobDescription) -> Iterator[Violation]:
    """Report a file name with a pattern of Slurm in a line for PBS or LSF."""
    for system, pattern, cure in (
        ("#PBS", PBS_LOG, "-o <folder>/, where PBS puts <name>.o<id>"),
        ("#BSUB", LSF_LOG, "%J for the job's number, %I for that of the array"),
    ):
        for offset, line in lines_of_system(job, system):
            found = pattern.search(line)
            if found:
                yield Violation(
                    offset,
                    f"{system} {found[0]}: {'PBS' if system == '#PBS' else 'LSF'} does not replace {re.findall('%[a-zA-Z]', found[1])[0]}",
                    why=PATTERN_WHY,
                    cure=cure,
                )
                return


# ------------------------------------------------------------------ options that exclude each other

EXCLUDES = (("ntasks-per-node", "ntasks-per-gpu"), ("cpus-per-task", "cpus-per-gpu"))
"""sbatch 22.05 takes only one of each pair."""


def exclusive_options(job: JobDescription) -> Iterator[Violation]:
    """Report options of sbatch that exclude each other."""
    for first, second in EXCLUDES:
        one, two = job.heading.get(first), job.heading.get(second)
        if one and two and not one.late and not two.late:
            # Slurm before 22.05 accepted the CPUs in both ways.
            severity = "error" if first.startswith("ntasks") else "warning"
            yield Violation(
                max(one.offset, two.offset),
                f"--{first} and --{second}: sbatch accepts only one of them",
                cure="remove one of the two",
                severity=severity,
            )


def counted_gpus(job: JobDescription) -> Iterator[Violation]:
    """Compare the GPUs that ``--gpus``, ``--gpus-per-node`` and ``--gres`` ask for: sbatch and srun do as well."""
    per_node, _ = count_gpus(job.heads("gpus-per-node"), None)
    of_gres, _ = count_gpus(None, job.heads("gres"))
    whole = job.number((job.heads("gpus") or "").rpartition(":")[2])
    found = job.heading.get("gpus-per-node")
    if found and not found.late and per_node and of_gres and per_node != of_gres and _starts_steps(job):
        text = f"--gpus-per-node={found.value}, but --gres={job.heads('gres')}: srun asks for the one and the job has the other"
        yield Violation(
            found.offset,
            text,
            why="srun stops with 'Invalid generic resource (gres) specification', or uses a part of the GPUs.",
            cure="remove one of the two",
        )
    each, found, nodes = per_node or of_gres, job.heading.get("gpus"), job.number(job.heads("nodes"))
    if found is None or found.late or not each or not whole or job.heading.keys() & {"gpus-per-socket"}:
        return
    if whole < each or (nodes and whole != each * nodes):
        text = f"--gpus={found.value} is the total, but the job requests {each} GPU{'s' * (each > 1)} on each of {nodes or 'its'} nodes"
        yield Violation(found.offset, text, cure=f"remove --gpus, or --gpus={each * (nodes or 1)}")


def _starts_steps(job: JobDescription) -> bool:
    return any(c.program == "srun" and not c.in_substitution for c in job.calls)


def misplaced_walltime(job: JobDescription) -> Iterator[Violation]:
    """Report a resource of the whole job in a chunk of PBS."""
    for offset, line in lines_of_system(job, "#PBS"):
        found = re.search(r"-l\s*select=\S*:(walltime|place|pmem|cput)=", line)
        if found:
            text = f"{found[1]} stands in select, which only takes resources of a chunk"
            yield Violation(offset, text, why=FORM_WHY, cure=f"-l select=... -l {found[1]}=...")


def cut_list(job: JobDescription) -> Iterator[Violation]:
    """Report a blank in a list of PBS resources: the list ends there."""
    for offset, line in lines_of_system(job, "#PBS"):
        found = re.search(r"-l\s*\w+=\S*,\s+(\w+=\S+)", line)
        if found:
            text = f"the list ends at the blank: {found[1]} is not part of it"
            yield Violation(
                offset,
                text,
                why="The resource is not requested, or no job is submitted.",
                cure="no blank after the comma",
            )


# --------------------------------------------------------------------------- requested and not used

HELD_WHY = "The job holds GPUs that no program uses, and others wait for them; the sleeping time counts against the project's budget."
HELD_CURE = (
    "start the training in the script; for interactive work use salloc or srun --pty, which end with the terminal"
)
LONG_S = 3600
# What prepares a job or prints something: a job of these alone does nothing with its GPUs.
PREPARING = {
    "echo", "printf", "cat", "date", "hostname", "module", "ml", "source", ".", "cd", "nvidia-smi", "conda", "mamba", "mkdir", "ls", "pwd", "env",
    "set", "unset", "which", "ulimit", "sleep", "head", "scontrol", "free", "uname", "whoami", "printenv", "eval", "true", "tail", "lscpu", "df",
}  # fmt: skip


def held(job: JobDescription) -> Iterator[Violation]:
    """Report a job with GPUs that only sleeps."""
    if not job.is_job or not job.requests_gpus or job.work or job.submits:
        return
    own = [c for c in job.calls if not c.in_substitution]
    if any(c.program not in PREPARING or c.after == "&" or c.in_function for c in own):
        return
    for call in own:
        duration = _sleeps_s(call)
        if duration is None or duration >= LONG_S:
            if call.program == "sleep" or _waits_for_ever(call):
                words = " ".join([call.written, *(a.text for a in call.args)])
                yield Violation(call.offset, f"'{words}' is all that this job does with its GPUs")
                return


IDLE_END_S = 300
IDLE_END_WHY = "The GPUs are reserved until the script ends, and its exit code is that of sleep: a failed job is reported as COMPLETED."


def sleeps_at_end(job: JobDescription) -> Iterator[Violation]:
    """Report ``sleep`` for minutes behind the work, as the end of a job with GPUs."""
    if not job.is_job or not job.requests_gpus or job.submits or not job.work:
        return
    own = [c for c in job.calls if not (c.in_substitution or c.under or c.in_function)]
    if any(c.after == "&" for c in own) or not own or own[-1].branch or own[-1].in_loop or own[-1].tested:
        return
    last, work = own[-1], job.work[-1]
    seconds = _sleeps_s(last) if last.program == "sleep" else 0.0
    if work.offset < last.offset and not work.in_function and (seconds is None or seconds >= IDLE_END_S):
        words = " ".join(["sleep", *(a.text for a in last.args)])
        text = f"'{words}' behind the work holds the GPUs, and hides its exit code"
        yield Violation(last.offset, text, why=IDLE_END_WHY, cure="remove it")


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _sleeps_s(call: ProgramCall) -> float | None:
    """Return the seconds that ``sleep`` waits; None for ever, 0 if this is unknown or another command."""
    if call.program != "sleep":
        return None if _waits_for_ever(call) else 0.0
    total = 0.0
    for arg in call.args:
        if arg.text in ("inf", "infinity"):
            return None
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", arg.text)
        total += float(found[1]) * SECONDS[found[2] or "s"] if found else 0.0
    return total


def _waits_for_ever(call: ProgramCall) -> bool:
    words = [a.text for a in call.args]
    return call.program == "tail" and "/dev/null" in words and any(w in ("-f", "-F") for w in words)


# ---------------------------------------------------------------------- options that replace others

TWICE_WHY = "The last value counts. The earlier one, which is often a mistyped name of another option, has no effect."
TWICE_CURE = "remove one of the two; perhaps another option was meant"
COUNTED = {
    "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gres", "gpus", "gpus-per-node", "gpus-per-task", "mem", "mem-per-cpu", "time", "array",
    "account", "export", "constraint", "dependency", "exclude", "nodelist", "signal", "partition", "qos",
}  # fmt: skip


def _names_kind(before: Directive, item: Directive) -> bool:
    """Return whether the later request only adds the kind of GPU: ``gpu:1`` and ``gpu:v100:1``, ``1`` and ``a100:1``."""
    old, new = (re.findall(r"[^:]+", d.value or "") for d in (before, item))
    return bool(old) and len(new) == len(old) + 1 and [new[0], new[-1]] in ([old[0], old[-1]], [new[0], old[0]])


def twice(job: JobDescription) -> Iterator[Violation]:
    """Report an option that is given twice with different values."""
    first: dict[str, Directive] = {}
    for item in job.directives:
        if item.text.rstrip() in ("hetjob", "packjob"):
            first = {}  # the request of another part of the job
        before = first.get(item.name)
        if before and before.value == ",":
            before = None  # the option as a manual writes it: -w, --nodelist=<nodes>
        if before and item.name in COUNTED and not item.late and before.value != item.value:
            line = job.lines.place(item.offset)[0]
            text = f"--{item.name}={before.value} is replaced by --{item.name}={item.value} in line {line}"
            yield Violation(before.offset, text, severity="note" if _names_kind(before, item) else None)
        first[item.name] = item
    for launch in job.launches:
        for name, option in launch.repeated:
            last = launch.options[name]
            if option.value != last.value:
                line = job.lines.place(last.arg.offset)[0]
                text = f"--{name} is given twice: {option.value} is replaced by {last.value} in line {line}"
                yield Violation(option.arg.offset, text, severity="warning" if name in RENDEZVOUS_OPTIONS else "note")


SETTING = lazy_regex(
    r"--?(?:lr|learning[-_]rate|(?:\w+[-_])?batch[-_]size|(?:num[-_]|max[-_]|n[-_])?(?:train[-_])?epochs?|seed|num[-_]workers|max[-_]steps|"
    r"weight[-_]decay|warmup[-_](?:steps|ratio)|gradient[-_]accumulation[-_]steps|dropout|(?:save|eval|logging)[-_]steps|hidden[-_](?:size|dim)|"
    r"num[-_](?:layers|heads)|momentum|max[-_](?:seq[-_])?len(?:gth)?)"
)
NUMBER = lazy_regex(r"-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
SWITCH = lazy_regex(
    r"--?(?:use|do|enable|with|load|save|fp16|bf16|tf32|train|freeze|gradient[-_]checkpointing)(?:[-_]\w+)?"
)
BOOLEAN = lazy_regex(r"(?i)true|false")
CHOICE = lazy_regex(
    r"--?(?:model[-_]name(?:[-_]or[-_]path)?|(?:output|save|log)[-_]dir|lr[-_]scheduler(?:[-_]type)?|optim(?:izer)?|(?:mixed[-_])?precision|"
    r"(?:evaluation|eval|save|logging)[-_]strategy|dtype|arch|(?:exp(?:eriment)?|run)[-_]name|c(?:heckpoint|kpt)[-_]path)"
)
WORD = lazy_regex(r"[\w./~][\w./:~@+-]*")


def _is_setting(name: str, value: str) -> bool:
    """Return whether a program can use only one value of the option: lists are given by others."""
    pairs = ((SETTING, NUMBER), (SWITCH, BOOLEAN), (CHOICE, WORD))
    return any(names.fullmatch(name) and values.fullmatch(value) for names, values in pairs)


def settings_twice(job: JobDescription) -> Iterator[Violation]:
    """Report an option of the program, such as its learning rate or model, that is given twice with different values."""
    for call in job.work_calls:
        first: dict[str, tuple[str, Argument]] = {}
        if any(a.source.text.startswith(UNRESOLVED_OPEN) for a in call.args) or not (
            PYTHON.match(call.program) or call in _launched(job)
        ):
            continue
        for arg, following in call.pairs():
            name, equals, value = arg.text.partition("=")
            value = value if equals else following.text if following else ""
            if not _is_setting(name, value):
                continue
            before = first.get(name)
            if before and before[0].lower() != value.lower():
                line = job.lines.place(arg.offset)[0]
                text = f"{name} is given twice: {before[0]} is replaced by {value} in line {line}"
                yield Violation(before[1].offset, text)
                return
            first[name] = (value, arg)


def _launched(job: JobDescription) -> list[ProgramCall]:
    return [la.call for la in job.launches]


LOST_WHY = "What was appended is gone when the name is set again: the runs that should differ get the same name."
APPENDED = lazy_regex(r"(?m)^([ \t]*)([A-Za-z_]\w*)=([\"']?)\$\{?\2\}?[-_.\w/$,{}]+\3[ \t]*(?:#.*)?$")


def lost_suffix(job: JobDescription) -> Iterator[Violation]:
    """Report a part that is appended to a variable which is set again before anything uses it."""
    for found in APPENDED.finditer(job.text) if job.kind == "script" else ():
        name, place = found[2], found.start(2)
        if job.in_comment(place) or not any(a.offset == place and not a.in_function for a in job.by_name.get(name, ())):
            continue
        again = re.search(rf"(?m)^{name}=(?![^\n]*\$\{{?{name}\b)(?![^\n]*\\$)[^\n]*$", job.text[found.end() :])
        if again is None:
            continue
        end = found.end() + again.start()
        between = [u for u in job.uses if u.name == name and found.end() <= u.offset < end]
        others = [u for u in between if not any(m.start() <= u.offset <= m.end() for m in APPENDED.finditer(job.text))]
        block = job.text[found.end() : end]
        unread = f"{name}" not in APPENDED.sub("", block)
        if not others and unread and not re.search(r"(?m)^(?:done|exit|source|\.|eval)\b|\bsbatch\b", block):
            line = job.lines.place(end)[0]
            text = f"what {name} gets here is replaced in line {line}, before anything uses it"
            yield Violation(place, text, why=LOST_WHY, cure=f"set {name} first, then append to it")
            return


# ------------------------------------------------------------------------------------------- memory

UNIT_WHY = "Slurm takes a number without a unit as megabytes: the job is killed with out of memory when it loads its first library."
UNIT_CURE = "--mem=64G"
LEAST_MB = 1000
"""Whoever writes 1000 or more counts in megabytes."""
SURELY_GB = {"mem": 100, "mem-per-gpu": 100, "mem-per-cpu": 25}
"""Fewer megabytes are too few for any program; more may be meant by a job without GPUs."""
SAYS_MEGABYTES = lazy_regex(r"(?i)#.*(?:\bMB\b|mega)")


def megabytes(job: JobDescription) -> Iterator[Violation]:
    """Report an amount of memory without its unit."""
    for name in ("mem", "mem-per-gpu", "mem-per-cpu"):
        value = job.heads(name) or ""
        least = LEAST_MB if name != "mem-per-cpu" else 125
        if re.fullmatch(r"[1-9]\d{0,3}", value) and int(value) < least:
            found = job.heading[name]
            meant = not job.requests_gpus or SAYS_MEGABYTES.search(found.text)
            severity = "note" if meant and int(value) >= SURELY_GB[name] else None
            text = f"--{name}={value} is {value} MB"
            yield Violation(found.offset, text, cure=f"--{name}={value}G", severity=severity)


# ------------------------------------------------------------------------------------------- arrays

SHARED_LOG_WHY = "All tasks of the array open the same file; each truncates what the others have written."
SHARED_LOG_CURE = "--output=%x-%A_%a.out"


def shared_log(job: JobDescription) -> Iterator[Violation]:
    """Report a log file that all tasks of a job array write."""
    array = job.heads("array")
    span = array_range(array)
    if not array or (span and span[0] == span[1]) or (job.heads("open-mode") or "") == "append":
        return
    # Tasks of which one runs at a time lose the log of the one before.
    for name in ("output", "error"):
        found = job.heading.get(name)
        value = found.value if found else None
        if found and value and value != "/dev/null" and not re.search(r"%\d*[aAjJ]", value):
            yield Violation(found.offset, f"--{name}={value} is one file for all tasks of the array")
            return


SEQUENCE_WHY = "Slurm truncates the file when a task starts: only the log of the last task stays."


PBS_LOG_WHY = "Every task of the array writes its output to this path when it ends: only that of the last one stays."


def _log_of_pbs_array(job: JobDescription) -> Iterator[Violation]:
    """Report ``#PBS -o log.txt`` of a job array, which needs ``^array_index^`` in the name."""
    lines = list(lines_of_system(job, "#PBS")) if job.pbs is not None else []
    arrays = [re.match(r"#PBS\s+-J\s*(\d+)-(\d+)", line) for _, line in lines]
    if not any(found and found[1] != found[2] for found in arrays):
        return
    for offset, line in lines:
        found = re.match(r"#PBS\s+-([oe])\s*(\S*\w\.[A-Za-z]\w{0,9})\s*(?:#.*)?$", line)
        if found and "^array_index^" not in line and not re.search(r"[$%]|/dev/null", found[2]):
            text = f"-{found[1]} {found[2]} is one file for all tasks of the array"
            cure = "^array_index^ in the name; or only the folder, with / at its end"
            yield Violation(offset, text, why=PBS_LOG_WHY, cure=cure)
            return


def one_log(job: JobDescription) -> Iterator[Violation]:
    """Report one log for the tasks that run one after another, ``--array=0-9%1``, and names with %A but without %a."""
    yield from _log_of_pbs_array(job)
    array = job.heads("array")
    span = array_range(array)
    if not array or (span and span[0] == span[1]) or (job.heads("open-mode") or "").startswith("a"):
        return
    in_turn = array.endswith("%1")
    for name in ("output", "error"):
        found = job.heading.get(name)
        value = found.value if found else None
        if not found or not value or value == "/dev/null" or re.search(r"%\d*[ajJ]|\$|[{<]", value):
            continue
        if not in_turn and not re.search(r"%\d*A", value):
            continue  # `allocation.shared_log`
        text = f"--{name}={value} is one file for all tasks of the array"
        yield Violation(found.offset, text, why=SEQUENCE_WHY if in_turn else SHARED_LOG_WHY)
        return


UNUSED_WHY = "Every task runs the same command with the same settings, and writes the same files."
OUTPUT_OPTION = lazy_regex(
    r"--?(?:out(?:put)?|save|log|ckpt|checkpoint|result|exp|run|work)[-_]?(?:dir|path|folder|file|name|root)?(?:=.*)?|"
    r"--(?:(?:set|random|rng|manual|torch|global)[-_])?seed(?:=.*)?"
)
MOST_SEEDS = 20
OF_TASK = lazy_regex(
    r"(?:SLURM|PBS|LSB|SGE|OMPI|PMI)_\w+|SLURMD_NODENAME|RANDOM|TMPDIR|TMP|HOSTNAME|SECONDS|JOB_ID|CUDA_VISIBLE_DEVICES"
)


def array_not_used(job: JobDescription) -> Iterator[Violation]:
    """Report a job array whose script never looks at the number of its task."""
    found = job.heading.get("array")
    span = array_range(found.value) if found else None
    if found is None or span is None or span[0] == span[1] or (found.value or "").endswith("%1") or job.sources_files:
        return
    text = job.code
    if re.search(r"(?i)array|\$\{?[@*#1-9]", text) or job.submits:
        return
    yield from _same_simulation(job, found)
    if len(job.work) != 1:
        return
    call = job.work_calls[0]
    own = [c for c in job.calls if not c.in_substitution and not c.under]
    scripts = any(c.written.endswith(".sh") or c.program in ("bash", "sh", "eval", "sed", "sleep") for c in own)
    drawn = re.search(
        r"\$RANDOM|\bmktemp\b|(?:\$\(|`)\s*date\b|SLURM_JOB_?ID|wandb|sweep|agent|worker|resume|--auto|(?i:grid|search|neps|hpo\b|optuna)|n_models",
        text,
    )
    literal = [a for a in call.args if OUTPUT_OPTION.fullmatch(a.text) and "$" not in a.text]
    if (
        span[1] - span[0] > MOST_SEEDS
    ):  # such a program divides its work by the number itself, and the seed is that of all
        literal = [a for a in literal if "seed" not in a.text]
    if literal and not scripts and not drawn and all(_is_same_for_all(job, a.text) for a in call.args):
        yield Violation(found.offset, f"--array={found.value}, but nothing in the script uses the number of the task")


def _is_same_for_all(job: JobDescription, text: str) -> bool:
    """Return whether a word is literal, or has values of the environment only, which all tasks of an array share."""
    names = re.findall(r"\$\{?([A-Za-z_]\w*)\}?", text)
    plain = text.count("$") == len(names) and "`" not in text
    return plain and not any(OF_TASK.fullmatch(n) or n in job.by_name or n in job.reading.named for n in names)


SIMULATION = lazy_regex(r"(?:lmp\w*|gmx\w*|namd\d?|vasp\w*|pw\.x|cp2k\S*)")
"""Programs that write files of fixed names into their folder."""


def _same_simulation(job: JobDescription, found: Directive) -> Iterator[Violation]:
    """Report one simulation, without a variable in its command, that all tasks of the array run in one folder."""
    own = [c for c in job.calls if not c.in_substitution and not c.under]
    runs = [
        c
        for c in own
        if any(SIMULATION.fullmatch(w.rpartition("/")[2]) for w in [c.written, *(a.text for a in c.args)])
    ]
    moves = any(c.program in ("cd", "pushd", "mkdir", "source", ".") for c in own) or job.has("SLURM_SUBMIT_DIR")
    fixed = len(runs) == 1 and not runs[0].branch and not any("$" in a.text or a.text == "none" for a in runs[0].args)
    if fixed and not moves and "lmp" in f"{runs[0].written} {' '.join(a.text for a in runs[0].args)}":
        yield Violation(found.offset, f"--array={found.value}, but nothing in the script uses the number of the task")


SEPARATE_WHY = (
    "Nothing starts separate jobs, or tasks of a job array, at the same time: the first ones hold their GPUs while they wait for the others, "
    "or reach their timeout, and the node of the fixed address need not be in any of them."
)
SEPARATE_CURE = "one job of all nodes (#SBATCH --nodes=<n>) with srun, which starts a launcher on each"


def separate_jobs(job: JobDescription) -> Iterator[Violation]:
    """Report ranks of one group that are separate jobs, or tasks of a job array."""
    yield from _array_ranks(job)
    yield from _submitted_ranks(job)
    for launch in job.launches:
        option, nodes = launch.option("node_rank", "machine_rank"), launch.value("nnodes", "num_machines")
        given = option and re.fullmatch(r"\"?\$\{?[1-9]\}?\"?", option.value or "")
        fixed = re.fullmatch(r"[\w.-]+", launch.value("master_addr", "main_process_ip") or "")
        if option and given and fixed and nodes not in (None, "1") and job.nodes == 1 and job.is_job:
            text = (
                f"{option.written} is an argument of this job of one node: each node of the group is a job of its own"
            )
            yield Violation(option.arg.offset, text)


def _submitted_ranks(job: JobDescription) -> Iterator[Violation]:
    for call in job.calls:
        if call.program not in ("sbatch", "qsub", "bsub"):
            continue
        words = " ".join(a.text for a in call.args)
        if re.search(r"\bMASTER_ADDR=", words) and (job.is_job or re.search(r"RANK=", words)):
            yield Violation(call.offset, f"{call.program} submits a rank of the group as a job of its own")


RANK_NAME = lazy_regex(r"(?:NODE_|LOCAL_|MACHINE_|GROUP_|WORLD_|PROC_?)?RANK\Z", re.IGNORECASE)
RANK_OPTION = lazy_regex(r"--?(?:node|machine|dist|distributed|world|global)?[-_]?rank\Z")
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"


def _array_ranks(job: JobDescription) -> Iterator[Violation]:
    found = job.heading.get("array")
    if found is None or re.fullmatch(r"\[?\d+\]?", found.value or ""):
        return
    launched = [
        o for la in job.launches if (o := la.option("node_rank", "machine_rank")) and ARRAY_TASK in (o.value or "")
    ]
    ranks = [a for a in job.assignments if RANK_NAME.match(a.name) and not a.removed]
    chosen = {a.value for a in ranks if a.value.isdecimal()}
    by_test = len(chosen) > 1 and any(
        u.name == ARRAY_TASK and u.program in ("[", "[[", "case", "test") for u in job.uses
    )
    passed = any(
        RANK_OPTION.match(arg.text.partition("=")[0]) and ARRAY_TASK in (arg.text.partition("=")[2] or following.text)
        for call in job.calls
        for arg, following in zip(call.args, [*call.args[1:], *call.args[-1:]], strict=True)
    )
    given = by_test or passed or any(ARRAY_TASK in a.value for a in ranks)
    words = {a.text.partition("=")[0].lstrip("-").replace("-", "_") for c in job.work_calls for a in c.args}
    # One sharing of data names ranks and a world size as well; only a group of ranks has an address to meet at.
    meets = job.has("MASTER_ADDR") or words & {
        "master_addr",
        "dist_url",
        "init_method",
        "main_process_ip",
        "rdzv_endpoint",
        "distributed_master",
        "dist_master",
    }
    several = job.has("WORLD_SIZE") or words & {
        "world_size",
        "nnodes",
        "num_machines",
        "num_nodes",
        "nodes",
        "num_replicas",
    }
    if launched or (given and meets and several):
        yield Violation(found.offset, "the tasks of the array are the ranks of one group")
