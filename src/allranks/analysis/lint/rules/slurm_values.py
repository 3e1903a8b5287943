"""Rules for values and spellings that Slurm refuses, in #SBATCH lines and in calls of srun, sbatch and salloc. All were tried with Slurm 22.05."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.command_options import ALIASES, LONG, SHORT, slurm_option, srun_end
from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.placeholders import PLACEHOLDER
from allranks.analysis.lint.records import Argument, ProgramCall, Violation
from allranks.analysis.lint.rules.directives import COUNTS, FOREIGN, REFUSED_WHY, invalid
from allranks.analysis.lint.shell_tokens import UNRESOLVED_OPEN
from allranks.utils.text import lazy_regex, nearest_name

COMMAND_WHY = "The command stops with an error about the option, and starts nothing."
ZERO = {"nodes", "ntasks", "cpus-per-task", "ntasks-per-node"}
RANGE = lazy_regex(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
ARRAY_CURE = "--array=<first>-<last>, perhaps with :<step> or %<tasks at a time>"
MODEL = r"(?:a|v|h|p|t|l|k)(?:4|10|20|30|40|80|100|200)[a-z]?|rtx\w*|gtx\w*|titan\w*|mi\d{3}\w?"
NO_GPU = lazy_regex(rf"\d+:gpu|gpu,\d+|(?:{MODEL}):\d+", re.IGNORECASE)
CHOICES = {
    "hint": ("compute_bound", "memory_bound", "multithread", "nomultithread", "help"),
    "kill-on-invalid-dep": ("yes", "no"),
    "gres-flags": (
        "disable-binding", "enforce-binding", "allow-task-sharing", "one-task-per-sharing", "multiple-tasks-per-sharing",
    ),
}  # fmt: skip
SPREAD = lazy_regex(
    r"(?:\*|block|cyclic|arbitrary|plane(?:=\d+)?|fcyclic|pack|nopack)(?:[:,](?:\*|block|cyclic|fcyclic|pack|nopack))*",
    re.IGNORECASE,
)
TAKES_NONE = {
    "requeue", "no-requeue", "hold", "parsable", "test-only", "contiguous", "label", "unbuffered", "pty", "multi-prog", "exact", "overcommit",
}  # fmt: skip
CONDITION = r"(?:after|afterany|afterok|afternotok|aftercorr|afterburstbuffer|expand)"
HELD_WHY = "sbatch takes a word other than TOP for the number 0, which holds the job: it stays pending until somebody releases it."
DEPENDS = lazy_regex(rf"(?:{CONDITION}:\d[\d_*+]*(?::\d[\d_*+]*)*|singleton)(?:[,?].*)?", re.IGNORECASE)


def wrong_value(name: str, value: str) -> tuple[str, str] | None:
    """Return what is wrong with a literal value of an option, and what to write."""
    shown = f"--{name}={value}"
    bounds = re.fullmatch(r"(\d{1,8})-(\d{1,8})", value)
    if name in ZERO and re.fullmatch(r"0+", value):
        return f"{shown} is no count", f"--{name}=<n>"
    if name == "nodes" and bounds and int(bounds[2]) < int(bounds[1]):
        return f"{shown}: the most nodes are fewer than the least", "--nodes=<least>-<most>"
    if name == "array":
        return _array(value)
    if name == "gres" and NO_GPU.fullmatch(value):
        return f"{shown}: the form is gpu:<type>:<count>", "--gres=gpu:<n>"
    if name in ("mem", "mem-per-cpu", "mem-per-gpu") and re.fullmatch(r"[KMGTkmgt][Bb]?\d+", value):
        return f"{shown} is no size", "a whole number with K, M, G or T behind it"
    if name in CHOICES and not any(value.lower() == known for word in [value] for known in CHOICES[name]):
        return f"{shown}: this option takes {', '.join(CHOICES[name][:4])}", f"--{name}={CHOICES[name][0]}"
    if name == "distribution" and re.fullmatch(r"[a-z:,]+", value) and not SPREAD.fullmatch(value):
        return f"{shown} is no distribution of tasks", "--distribution=block or cyclic, also block:cyclic"
    if name == "dependency":
        return _dependency(value)
    return None


def _array(value: str) -> tuple[str, str] | None:
    shown, text = f"--array={value}", re.sub(r"%\d+\Z", "", value.strip("[]"))
    if not re.fullmatch(r"[\d,:.;{}-]+%?", text):
        return None  # names are left to be filled in
    for part in text.rstrip(",").split(","):
        bounds = RANGE.fullmatch(part)
        if bounds is None or bounds[3] == "0":
            return f"{shown} is no list of tasks", ARRAY_CURE
        if bounds[2] and int(bounds[2][:9]) < int(bounds[1][:9]):
            return f"{shown}: the last task comes before the first", ARRAY_CURE
    return None


def _dependency(value: str) -> tuple[str, str] | None:
    name, colon, rest = value.partition(":")
    known = re.fullmatch(rf"{CONDITION}|singleton", name, re.IGNORECASE)
    if not known and re.fullmatch(r"[a-z_-]+", name) and (colon or name.startswith("s")):
        return f"--dependency={value}: there is no condition {name}", "--dependency=afterok:<job's number>"
    name_of_job = re.fullmatch(r"[A-Za-z][\w.-]*", rest) and not re.search(r"(?i)job|id|num", rest)
    if known and not colon and name.lower() != "singleton":
        return f"--dependency={value} names no job", "--dependency=afterok:<job's number>"
    if known and colon and name_of_job:
        cure = "--dependency=afterok:<job's number>; or --dependency=singleton for jobs of one name"
        return f"--dependency={value} names a job by its name, where its number is needed", cure
    return None


# ------------------------------------------------------------------- #SBATCH lines

MORE_FOREIGN = {
    "num-gpus": "--gpus-per-node", "email": "--mail-user", "log": "--output", "logfile": "--output", "outfile": "--output", "errfile": "--error",
    "mem-per-node": "--mem", "workdir": "--chdir", "working-dir": "--chdir", "time-limit": "--time", "num-nodes": "--nodes", "num-tasks": "--ntasks",
}  # fmt: skip


def refused_directives(job: JobDescription) -> Iterator[Violation]:
    """Report #SBATCH lines whose value or spelling sbatch refuses."""
    if not job.source.text.startswith("#!"):
        return
    for item in job.directives:
        value, text = item.value or "", item.text.split()[0] if item.text.split() else ""
        if (
            item.late
            or not item.name
            or re.search(r"[$`<>{}]|@[A-Z]", text)
            or "$" in job.line_of(item.offset)
            or PLACEHOLDER.search(item.text)
        ):
            if not re.fullmatch(r"(?:--array=|-a)\{\d+\.\.\d+\}", text):
                continue
        colon, letter = re.match(r"--([a-z][a-z-]+):(\S+)", text), re.match(r"--([A-Za-z])(?:=|\Z)", text)
        instead = MORE_FOREIGN.get(item.name) if text.startswith(f"--{item.name}") else None
        if colon and colon[1] in LONG:
            wrong = (f"{text}: the value follows after =", f"--{colon[1]}={colon[2]}")
        elif letter and letter[1] in SHORT:
            wrong = (f"{text}: an option of one letter has one dash", f"-{letter[1]} <value>")
        elif instead:
            wrong = (f"--{item.name}: sbatch has no such option", instead)
        elif item.name in TAKES_NONE and text.startswith("--") and "=" in text:
            wrong = (f"{text}: this option takes no value", f"--{item.name}")
        elif item.name == "priority" and re.fullmatch(r"(?!top\Z)[A-Za-z][\w-]*", value, re.IGNORECASE):
            cure = "--account for a project, --qos for a class of priority; or remove it"
            yield Violation(item.offset, f"#SBATCH --priority={value} is 0: the job is held", cure=cure, why=HELD_WHY)
            continue
        else:
            wrong = wrong_value(item.name, value) if value else None
        if wrong:
            old = "warning" if item.name == "workdir" else None  # until Slurm 17.11
            yield Violation(item.offset, f"#SBATCH {wrong[0]}", cure=wrong[1], why=REFUSED_WHY, severity=old)


TASKS_WHY = "sbatch has no --tasks: it takes it as the beginning of --tasks-per-node."


def tasks_as_total(job: JobDescription) -> Iterator[Violation]:
    """Report ``--tasks``, which is short for ``--tasks-per-node``, in a job of several nodes."""
    nodes = job.number(job.heads("nodes"))
    found = job.heading.get("ntasks-per-node")
    count = job.number(found.value) if found and re.match(r"--tasks[=\s]", found.text) else None
    if found and nodes and count and nodes > 1 and count > 1:
        text = f"--tasks={count} is --tasks-per-node={count}: {count} tasks on each of {nodes} nodes, {count * nodes} in all"
        yield Violation(found.offset, text, why=TASKS_WHY, cure=f"--ntasks={count}, or --ntasks-per-node={count}")


# ------------------------------------------------------------------- commands

COMMANDS = ("srun", "sbatch", "salloc")
OF_SRUN = {
    "mpi", "cpu-bind", "accel-bind", "bcast", "bcast-exclude", "task-prolog", "task-epilog", "prolog", "epilog", "slurmd-debug", "het-group", "pack-group",
    "threads", "jobid", "exact", "overlap", "whole", "cpu-freq", "bell", "kill-command", "env", "image", "module", "ntasks-per-tres", "stepmgr", "x11",
}  # fmt: skip
GLUED = {"np": "-n", "pty": "--pty", "mpi": "--mpi", "pmix": "--mpi=pmix", "pmi2": "--mpi=pmi2"}
"""Words that srun reads as several letters: ``-np`` is ``-n p``, ``-pty`` is ``-p ty``."""
NUMBERS = COUNTS | {"nodes"}
PROGRAM = lazy_regex(r"-.*|python[\d.]*|bash|torchrun|accelerate|deepspeed|\./\S*|\S*\.(?:py|sh)")


def refused_commands(job: JobDescription) -> Iterator[Violation]:
    """Report options of srun, sbatch and salloc whose value or spelling they refuse."""
    said: set[int] = set()
    for call in job.calls:
        for outer in (call, *call.under):
            if outer.program in COMMANDS and outer.offset not in said:
                said.add(outer.offset)
                yield from _of_command(outer)


def _of_command(call: ProgramCall) -> Iterator[Violation]:
    args = call.args[: srun_end(call.args)]
    follows = False
    for i, arg in enumerate(args):
        if follows:
            follows = False
            continue
        if not re.match(r"-{1,2}[A-Za-z]", arg.text) or UNRESOLVED_OPEN in arg.source.text[:3]:
            continue
        name, value, follows = slurm_option(arg.text)
        following = args[i + 1] if follows and i + 1 < len(args) else _behind(call, args, i) if follows else None
        source = following.source.text if following else arg.source.text
        value = following.text if following else value
        wrong = _spelling(call.program, arg.text)
        before = re.match(r"(?:-d\s*|--dependency=)?([a-z_-]+):", source) if name == "dependency" else None
        if wrong is None and before and not re.search(r"[$`]", before[1]):
            wrong = _dependency(f"{before[1]}:")
        if wrong is None and value is not None and UNRESOLVED_OPEN not in source and not re.search(r"[$`<>@]", source):
            wrong = _value(name, value, arg.text)
        if wrong:
            yield Violation(arg.offset, f"{call.program} {wrong[0]}", why=COMMAND_WHY, cure=wrong[1])
            return


def _behind(call: ProgramCall, args: tuple[Argument, ...], index: int) -> Argument | None:
    """Return the word that the last option takes as its value."""
    return call.args[index + 1] if index + 1 == len(args) < len(call.args) else None


def _spelling(program: str, text: str) -> tuple[str, str] | None:
    """Return what is wrong with the spelling of an option, and what to write."""
    word, equals, value = text.lstrip("-").partition("=")
    if text.startswith("--"):
        instead = (FOREIGN | MORE_FOREIGN).get(word, "") if word not in OF_SRUN else ""
        of_srun = {"np": "-n", "n": "-n", "N": "-N", "c": "-c", "p": "-p", "w": "-w", "J": "-J", "t": "-t", "G": "-G"}
        instead = of_srun.get(word, "" if instead.startswith("srun ") or instead == f"--{word}" else instead)
        whole = any(known.startswith(word) for known in LONG | OF_SRUN) and word not in of_srun
        if instead and not (whole and word not in ("gpu", "cpus")):
            return f"--{word}: there is no such option", instead
        return _unclear(word)
    if word in GLUED and program == "srun":
        return f"-{word} is read as -{word[0]} with the value '{word[1:]}'", GLUED[word]
    if len(word) > len("abc") and word in LONG and (equals or word not in ("label", "hold", "quiet")):
        return f"-{word}: a long option needs two dashes", f"--{word}"
    if re.fullmatch(r"[NncGt]", word) and equals:
        return f"{text}: the value is '={value}', because a short option has no =", f"-{word} {value}"
    return None


def _unclear(word: str) -> tuple[str, str] | None:
    """Return what is wrong with a long option that is the beginning of several ones, or like one."""
    known = LONG | OF_SRUN
    if word in known or word in ALIASES or not re.fullmatch(r"[a-z-]+", word) or word.startswith(("container", "no-")):
        return None
    longer = [option for option in sorted(known) if option.startswith(word)]
    near = nearest_name(word, known, 0.9)
    if len(longer) > 1 and near:
        return f"--{word} is the beginning of several options", f"--{near}"
    return (f"--{word}: there is no such option", f"--{near}") if near and not longer else None


def _value(name: str, value: str, written: str) -> tuple[str, str] | None:
    """Return what is wrong with a literal value, and what to write."""
    if name in NUMBERS and PROGRAM.fullmatch(value):
        return f"{written} takes '{value}' as its number", f"{written} <n>"
    if name in TAKES_NONE and written.startswith("--") and "=" in written:
        return f"{written}: this option takes no value", f"--{name}"
    if name in ("kill-on-bad-exit", "wait") and written.startswith("--") and re.fullmatch(r"[a-z]+", value):
        return (f"{written}: the value is a number", f"--{name}=1") if "=" in written else None
    if name in ("exclusive", "mail-type", "output", "error"):
        return None  # these depend on the command
    if name == "gres" and re.fullmatch(r"\d+|gpus?\d+|gpus:.*|gpu:\d+:[A-Za-z]\w*", value):
        return f"--gres={value}: the form is gpu:<type>:<count>", "--gres=gpu:<n>"
    return invalid(name, value) or wrong_value(name, value)
