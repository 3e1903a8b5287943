"""Find the logs of a job of Slurm, whatever program it ran, from what Slurm knows about the job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from allranks.analysis.diagnose import Diagnosis, diagnose
from allranks.analysis.lint.command_options import sbatch_options
from allranks.errors import EnvironmentNotAble, RequestError
from allranks.nodes.slurm import answers
from allranks.nodes.slurm.answers import JobFiles, NoAnswer
from allranks.nodes.slurm.commands import ALIVE_STATES, Slurm
from allranks.utils.inputs import read_regular

MAX_NAMED = 5
MAX_SCRIPT_BYTES = 4 << 20  # Slurm's own limit


def diagnose_job(
    slurm: Slurm, job: str, more: Sequence[Path] = (), *, workers: int | None = None
) -> tuple[Diagnosis, list[str]]:
    """Return the diagnosis of a job from its logs, its state and `more`, and notes for the reader.

    Of an array with failed tasks, only their logs are read.

    Raises:
        RequestError: this is no job ID; Slurm does not know the job; or it did not fail, and no log of it is here.
        EnvironmentNotAble: Slurm does not answer.
    """
    if not re.fullmatch(r"\d+(?:_\d+|\+\d+)?", job):
        raise RequestError(f"--job {job}: expected a job ID such as 4711, or 4711_3 for a task of an array")
    jobs = _recorded(slurm, job)
    failed = [one for one in jobs if one.info.state != "COMPLETED" and one.info.state not in ALIVE_STATES]
    notes = [f"job {one.label}: {answers.end_text(one.info)}" for one in (failed or jobs)[:MAX_NAMED]]
    if failed and len(jobs) > 1:
        notes.append(f"{len(failed)} of {len(jobs)} tasks failed; only their logs are read")
    files: list[Path] = []
    for one in [_with_paths(slurm, job) for job in failed or jobs]:
        there = [path for path in one.paths if path.exists()]
        files += there
        if not there:
            notes.append(f"job {one.label}: {_why_no_log(one)}")
    if not files and not failed:
        raise RequestError("; ".join(notes))
    rows = [f"{one.label}|{one.info.state}|{one.info.exit_code or 0}:{one.info.exit_signal or 0}" for one in jobs]
    with TemporaryDirectory(prefix="allranks-") as folder:
        accounting = Path(folder, "slurm-accounting", f"job-{job}")
        accounting.parent.mkdir()
        accounting.write_text("\n".join(["JobID|State|ExitCode", *rows, ""]))  # as sacct prints it
        return diagnose([*files, accounting.parent, *more], workers=workers), notes


def _recorded(slurm: Slurm, job: str) -> list[JobFiles]:
    """Return what scontrol, or for older jobs sacct, has of a job."""
    shown = slurm.show("job", job)
    if isinstance(shown, str) and (jobs := answers.parse_job_files(shown)):
        return jobs
    delimiter = f"--delimiter={answers.SACCT_DELIMITER}"
    query = ("sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", delimiter)
    for fields in (answers.SACCT_FILES + answers.SACCT_PATHS, answers.SACCT_FILES):
        listed = slurm.output(*query, f"--format={fields}")
        if listed and (jobs := answers.parse_sacct_files(listed)):
            return jobs
    if isinstance(shown, NoAnswer):
        raise EnvironmentNotAble(shown.reason)
    accounting = "sacct gives no answer here" if listed is None else "sacct has no record of it"
    raise RequestError(
        f"job {job}: Slurm does not know it (scontrol forgets a job some minutes after its end, and {accounting}); "
        "give its log files: allranks diagnose FILE..."
    )


def _with_paths(slurm: Slurm, job: JobFiles) -> JobFiles:
    """Take the paths from the options of sbatch where sacct has none, before 24.05; the script may have changed."""
    if job.std_out is not None:
        return job
    words = job.submit_line.split()[1:]  # sacct has no quotes
    given, place = sbatch_options(words)
    script = slurm.output("sacct", "--jobs", job.label, "--batch-script") or ""
    for name in (path for word in words[place : place + 1] for path in (word, Path(word).name)):
        with suppress(OSError):
            if "#SBATCH" not in script:
                script = read_regular(Path(job.work_dir, name), MAX_SCRIPT_BYTES).decode(errors="replace")
    options: dict[str, str | None] = {}
    for line in re.findall(r"(?m)^#SBATCH[ \t]+(.*)", script):
        with suppress(ValueError):  # an open quote
            options |= sbatch_options(shlex.split(line, comments=True))[0]
    options |= given
    usual = "slurm-%A_%a.out" if "_" in job.label else "slurm-%j.out"
    return msgspec.structs.replace(job, std_out=options.get("output") or usual, std_err=options.get("error"))


def _why_no_log(job: JobFiles) -> str:
    if not job.paths:
        return "it has no batch script, so Slurm wrote no log: its output went to the terminal of salloc or srun"
    path, nodes = job.paths[0], job.info.nodes
    if nodes is None:
        return f"it has not started; it will write to {path}"
    if job.submit_line:
        return (
            f"sacct does not know its log, and {path} is not here, which sbatch's options imply; give the file instead"
        )
    if not path.parent.exists():
        missing = f"no log: {path.parent} is not here"
        return f"{missing}; if {nodes} lacks it too, the job failed at once: mkdir -p {path.parent}"
    return f"its log {path} is not on this machine; if it is on {nodes}, copy it and diagnose the copy"
