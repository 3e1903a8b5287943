"""Rules for the values of #SBATCH lines: what sbatch refuses, so that the job is not submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import PLACEHOLDER, JobDescription
from allranks.analysis.lint.records import Directive, Violation

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
TIME = re.compile(r"(?:\d+-\d*|\d+)(?::\d+){0,2}|(?i:infinite|unlimited)|-1")
SIZE = re.compile(r"\d+(?i:[kmgt]b?)?")
NODES = re.compile(r"\d+[kKmM]?(?:-\d*[kKmM]?)?|[\d,:-]+")
SIGNAL = re.compile(r"(?:[BR]+:)?(?:(?:SIG)?[A-Z]+\d?|\d+)(?:@\d*)?", re.IGNORECASE)
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
}  # fmt: skip
TEMPLATE = re.compile(r"[@{}!<>*#%]|__")
GLUED_COMMENT = re.compile(r"\d[\d:.,-]*[KMGTkmgt]?#+[A-Za-z]*")
"""A number with a # behind it, and no blank between: the # begins no comment."""
SHORT_EQUALS = re.compile(r"-[A-Za-z]=\S")
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
        what = _short_equals(item) or _unknown(item) or (_invalid(item.name, value) if value is not None else None)
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


def _invalid(name: str, value: str) -> tuple[str, str] | None:
    """Return what is wrong with a value, and what to write."""
    if (
        value
        and GLUED_COMMENT.fullmatch(value)
        and name in (*COUNTS, *MEMORY, "nodes", "time", "gpus", "gpus-per-node")
    ):
        return f"--{name}={value}: a # without a blank before it begins no comment", "a blank before the #"
    if not value or (name != "signal" and TEMPLATE.search(value)):
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
