"""Rules for requests that a batch system refuses, and for lines of PBS and LSF in the unit or with the patterns of another one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription, count_gpus
from allranks.analysis.lint.records import Violation

LIKELY_HOURS = {24, 48, 72, 96, 144, 168}
SHORT_S = 600
PBS_TIME_WHY = "A single number is seconds for PBS, and two numbers are minutes and seconds: the job is ended long before it has finished."
LSF_TIME_WHY = "LSF takes [hours:]minutes: a single number is minutes."
PATTERN_WHY = (
    "Only Slurm replaces these patterns: the file gets the name as written, and every job writes the same one."
)
BYTES_WHY = "PBS takes a number without a unit as bytes: the job is refused, or ended when it starts."
FORM_WHY = "The batch system does not accept this form, and no job is submitted."
PBS_LOG = re.compile(r"-[oe]\s*(\S*%[jJxAaN]\S*)")
LSF_LOG = re.compile(r"-(?:oo|eo|o|e)\s+(\S*%[jxAaN](?![a-z])\S*)")


def _lines(job: JobDescription, system: str) -> Iterator[tuple[int, str]]:
    """Yield the lines for a batch system that is the only one of the file."""
    if job.is_batch or not job.is_job:
        return
    for comment in job.reading.comments:
        if re.match(rf"{system}\s", comment.text) and job.lines.place(comment.offset)[1] == 1:
            yield comment.offset, comment.text.rstrip()


def hours_as_minutes(job: JobDescription) -> Iterator[Violation]:
    """Report a time limit of PBS in seconds or minutes, or of LSF in minutes, where hours were meant."""
    for offset, line in _lines(job, "#PBS"):
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
    for offset, line in _lines(job, "#BSUB"):
        found = re.search(r"\s-W\s+(\d{1,3})(?=\s|\Z)", line)
        if found and int(found[1]) in LIKELY_HOURS and job.requests_gpus:
            yield Violation(offset, f"-W {found[1]} is {found[1]} minutes", why=LSF_TIME_WHY, cure=f"-W {found[1]}:00")


def refused_times(job: JobDescription) -> Iterator[Violation]:
    """Report a time limit in the form of another batch system."""
    for offset, line in _lines(job, "#PBS"):
        found = re.search(r"\bwalltime=(\d+-[\d:]+)(?=[,\s]|\Z)", line)
        if found:
            yield Violation(
                offset, f"walltime={found[1]}: PBS takes no days", why=FORM_WHY, cure="walltime=<hours>:00:00"
            )
    for offset, line in _lines(job, "#BSUB"):
        found = re.search(r"\s-W\s+(\d+:\d\d:\d\d|\d+-[\d:]+)(?=\s|\Z)", line)
        if found:
            yield Violation(
                offset, f"-W {found[1]}: LSF takes hours:minutes", why=FORM_WHY, cure="-W <hours>:<minutes>"
            )


def bytes_of_memory(job: JobDescription) -> Iterator[Violation]:
    """Report an amount of memory of PBS without a unit."""
    for offset, line in _lines(job, "#PBS"):
        found = re.search(r"\b(p?v?mem)=(\d{1,6})(?=[,:\s]|\Z)", line)
        if found and re.search(r"\s-l\s*\S*\b" + re.escape(found[0]), line):
            yield Violation(offset, f"{found[0]} is {found[2]} bytes", why=BYTES_WHY, cure=f"{found[1]}={found[2]}gb")


def foreign_patterns(job: JobDescription) -> Iterator[Violation]:
    """Report a file name with a pattern of Slurm in a line for PBS or LSF."""
    for system, pattern, cure in (
        ("#PBS", PBS_LOG, "-o <folder>/, where PBS puts <name>.o<id>"),
        ("#BSUB", LSF_LOG, "%J for the job's number, %I for that of the array"),
    ):
        for offset, line in _lines(job, system):
            found = pattern.search(line)
            if found:
                yield Violation(
                    offset,
                    f"{system} {found[0]}: {'PBS' if system == '#PBS' else 'LSF'} does not replace {re.findall('%[a-zA-Z]', found[1])[0]}",
                    why=PATTERN_WHY,
                    cure=cure,
                )
                return


# ------------------------------------------------------------- options that exclude each other

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
    for offset, line in _lines(job, "#PBS"):
        found = re.search(r"-l\s*select=\S*:(walltime|place|pmem|cput)=", line)
        if found:
            text = f"{found[1]} stands in select, which only takes resources of a chunk"
            yield Violation(offset, text, why=FORM_WHY, cure=f"-l select=... -l {found[1]}=...")


def cut_list(job: JobDescription) -> Iterator[Violation]:
    """Report a blank in a list of PBS resources: the list ends there."""
    for offset, line in _lines(job, "#PBS"):
        found = re.search(r"-l\s*\w+=\S*,\s+(\w+=\S+)", line)
        if found:
            text = f"the list ends at the blank: {found[1]} is not part of it"
            yield Violation(
                offset,
                text,
                why="The resource is not requested, or no job is submitted.",
                cure="no blank after the comma",
            )
