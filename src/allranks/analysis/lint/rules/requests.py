"""Rules for the lines of PBS and LSF: times and amounts in another unit, and patterns that only Slurm replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.analysis.lint.job import JobDescription
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
