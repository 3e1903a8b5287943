"""Rules for what a job requests and does not use, and for requests that a later line replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
from allranks.analysis.lint.records import Directive, ProgramCall, Violation
from allranks.analysis.lint.rules.dataflow import RENDEZVOUS_OPTIONS

HELD_WHY = "The job holds GPUs that no program uses, and others wait for them; the sleeping time counts against the project's budget."
HELD_CURE = (
    "start the training in the script; for interactive work use salloc or srun --pty, which end with the terminal"
)
TWICE_WHY = "The last value counts. The earlier one, which is often a mistyped name of another option, has no effect."
TWICE_CURE = "remove one of the two; perhaps another option was meant"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONG_S = 3600
# What prepares a job or prints something: a job of these alone does nothing with its GPUs.
PREPARING = {
    "echo", "printf", "cat", "date", "hostname", "module", "ml", "source", ".", "cd", "nvidia-smi", "conda", "mamba", "mkdir", "ls", "pwd", "env",
    "set", "unset", "which", "ulimit", "sleep", "head", "scontrol", "free", "uname", "whoami", "printenv", "eval", "true", "tail", "lscpu", "df",
}  # fmt: skip
COUNTED = {
    "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gres", "gpus", "gpus-per-node", "gpus-per-task", "mem", "mem-per-cpu", "time", "array",
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


def twice(job: JobDescription) -> Iterator[Violation]:
    """Report an option that is given twice with different values."""
    first: dict[str, Directive] = {}
    for item in job.directives:
        before = first.get(item.name)
        if before and item.name in COUNTED and not item.late and before.value != item.value:
            line = job.lines.place(item.offset)[0]
            text = f"--{item.name}={before.value} is replaced by --{item.name}={item.value} in line {line}"
            yield Violation(before.offset, text)
        first[item.name] = item
    for launch in job.launches:
        for name, option in launch.repeated:
            last = launch.options[name]
            if option.value != last.value:
                line = job.lines.place(last.arg.offset)[0]
                text = f"--{name} is given twice: {option.value} is replaced by {last.value} in line {line}"
                yield Violation(option.arg.offset, text, severity="warning" if name in RENDEZVOUS_OPTIONS else "note")


UNIT_WHY = "Slurm takes a number without a unit as megabytes: the job is killed with out of memory when it loads its first library."
UNIT_CURE = "--mem=64G"
LEAST_MB = 1000
"""Whoever writes 1000 or more counts in megabytes."""


def megabytes(job: JobDescription) -> Iterator[Violation]:
    """Report an amount of memory without its unit."""
    for name in ("mem", "mem-per-gpu", "mem-per-cpu"):
        value = job.heads(name) or ""
        least = LEAST_MB if name != "mem-per-cpu" else 125
        if re.fullmatch(r"[1-9]\d{0,3}", value) and int(value) < least:
            yield Violation(job.heading[name].offset, f"--{name}={value} is {value} MB", cure=f"--{name}={value}G")


SHARED_LOG_WHY = "All tasks of the array open the same file; each truncates what the others have written."
SHARED_LOG_CURE = "--output=%x-%A_%a.out"


def shared_log(job: JobDescription) -> Iterator[Violation]:
    """Report a log file that all tasks of a job array write."""
    array = job.heads("array")
    if not array or re.fullmatch(r"\d+", array) or (job.heads("open-mode") or "") == "append":
        return
    # Tasks of which one runs at a time lose the log of the one before.
    for name in ("output", "error"):
        found = job.heading.get(name)
        value = found.value if found else None
        if found and value and value != "/dev/null" and not re.search(r"%\d*[aAjJ]", value):
            yield Violation(found.offset, f"--{name}={value} is one file for all tasks of the array")
            return


SEPARATE_WHY = (
    "Nothing starts separate jobs, or tasks of a job array, at the same time: the first ones hold their GPUs while they wait for the others, "
    "or reach their timeout, and the node of the fixed address need not be in any of them."
)
SEPARATE_CURE = "one job of all nodes (#SBATCH --nodes=<n>) with srun, which starts a launcher on each"
RANK_NAME = re.compile(r"(?:NODE_|LOCAL_|MACHINE_|GROUP_|WORLD_|PROC_?)?RANK\Z", re.IGNORECASE)
RANK_OPTION = re.compile(r"--?(?:node|machine|dist|world|global)?[-_]?rank\Z")
ARRAY_TASK = "SLURM_ARRAY_TASK_ID"


def separate_jobs(job: JobDescription) -> Iterator[Violation]:
    """Report ranks of one group that are separate jobs, or tasks of a job array."""
    yield from _array_ranks(job)
    yield from _submitted_ranks(job)
    for launch in job.launches:
        option, nodes = launch.option("node_rank", "machine_rank"), launch.value("nnodes", "num_machines")
        given = option and re.fullmatch(r"\"?\$\{?[1-9]\}?\"?", option.value or "")
        fixed = re.fullmatch(r"[\w.-]+", launch.value("master_addr", "main_process_ip") or "")
        if option and given and fixed and nodes not in (None, "1") and job.nodes == 1 and job.is_job:
            text = f"{option.arg.text.partition('=')[0]} is an argument of this job of one node: each node of the group is a job of its own"
            yield Violation(option.arg.offset, text)


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
    }
    several = job.has("WORLD_SIZE") or words & {"world_size", "nnodes", "num_machines", "num_nodes", "nodes"}
    if launched or (given and meets and several):
        yield Violation(found.offset, "the tasks of the array are the ranks of one group")


def _submitted_ranks(job: JobDescription) -> Iterator[Violation]:
    for call in job.calls:
        if call.program not in ("sbatch", "qsub", "bsub"):
            continue
        words = " ".join(a.text for a in call.args)
        if re.search(r"\bMASTER_ADDR=", words) and (job.is_job or re.search(r"RANK=", words)):
            yield Violation(call.offset, f"{call.program} submits a rank of the group as a job of its own")
