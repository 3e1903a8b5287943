"""``allranks sbatch``: lint a user's own batch script, submit it with a check of its nodes, follow and diagnose it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
import msgspec

from allranks.cli.options import echo
from allranks.errors import EXIT_FAILED, AllranksError
from allranks.utils.inputs import read_appended

if TYPE_CHECKING:
    from allranks.analysis.lint import LintReport
    from allranks.nodes.slurm.commands import Slurm

OWN = ("--force", "--follow", "--no-follow", "--no-preflight")
"""Options that are not sbatch's; none is the beginning of one of its options."""
POLL_S = 1.0
NEVER_STARTS = ("JobHeld", "DependencyNeverSatisfied")
SUBMITTED = re.compile(r"(?:Submitted batch job )?(\d+)( on cluster \S+|;\S+)?\s*")


class SbatchCommand(click.Command):
    """Command that leaves all words to sbatch, also ``--`` and what click would take for its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] in (["--help"], ["-h"]) and not ctx.resilient_parsing:
            echo(ctx.get_help())
            ctx.exit()
        ctx.params["words"] = args
        return []


@click.command("sbatch", cls=SbatchCommand, options_metavar="[SBATCH OPTIONS]", add_help_option=False)
@click.argument("words", nargs=-1, metavar="[JOB.sh [ARGS]]", type=click.Path())
@click.option("--force", is_flag=True, help="Submit in spite of errors in the script.")
@click.option("--follow/--no-follow", help="Follow the job to its end. [if standard output is a terminal]")
@click.option("--no-preflight", is_flag=True, help="Do not check the nodes before the script's first command.")
def sbatch_command(words: list[str]) -> int:
    """Submit your own batch script with sbatch: lint it before, check the job's nodes at its start, follow it, and
    diagnose its logs at its end.

    All options of sbatch (`sbatch --help`) and its ways to pass a script work; output on standard output and exit code
    are sbatch's. Ctrl-C stops following; the job goes on. Errors that lint finds prevent the submission.
    """
    from allranks.launch.slurm.submission import read_submission
    from allranks.nodes.slurm.commands import find_slurm

    slurm = find_slurm(Path.cwd(), wanted="sbatch:")
    script = read_submission(words, OWN)
    given = script.options.keys()
    follow = "follow" in given if given & {"follow", "no-follow"} else sys.stdout.isatty() and "parsable" not in given
    spoken = follow or sys.stderr.isatty()  # else a program reads both, as in $(sbatch --parsable job.sh 2>&1)
    job, preflight = None, "no-preflight" not in given
    with TemporaryDirectory(prefix="allranks-") as name:
        folder = Path(name)
        (folder / "lint").mkdir()
        if script.text is not None and _has_errors(script.lint(folder / "lint"), spoken) and "force" not in given:
            echo("allranks: not submitted; --force submits it all the same", err=True)
            return EXIT_FAILED
        if spoken and preflight and (why := script.why_no_preflight()):
            echo(f"allranks: no preflight: {why}", err=True)
        command, file = script.command(folder, preflight=preflight)
        command = [*slurm.prefix, "sbatch", *command]
        stdin = None if file is None else file.open("rb")
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, errors="replace")
        try:
            for line in process.stdout or ():
                echo(line.removesuffix("\n"))
                if (submitted := SUBMITTED.fullmatch(line)) and "test-only" not in given:
                    job = submitted[1]
                    if follow:
                        _follow(slurm, job, elsewhere=bool(submitted[2]))
        except KeyboardInterrupt:  # sbatch gets it too
            if job is None:
                raise
            echo(f"allranks: job {job} goes on. Cancel it: scancel {job}; {_later(job)}", err=True)
        code = process.wait()
    return 128 - code if code < 0 else code


def _later(job: str) -> str:
    return f"at its end: allranks diagnose --job {job}"


def _has_errors(report: LintReport, spoken: bool) -> bool:
    """Show the errors of a script, or how many warnings it has."""
    from allranks.analysis.lint.output import show_report
    from allranks.cli.console import SafeConsole

    errors = [item for item in report.findings if item.severity == "error"]
    warnings = sum(item.severity == "warning" for item in report.findings)
    if errors:
        show_report(SafeConsole(highlight=False, stderr=True), msgspec.structs.replace(report, findings=errors))
    elif warnings and spoken:
        echo(f"allranks: lint: {warnings} warning{'s' * (warnings > 1)} (allranks lint {report.files[0]})", err=True)
    return bool(errors)


def _follow(slurm: Slurm, job: str, *, elsewhere: bool) -> None:
    """Show the state and the output of a job until it ends, then its diagnosis."""
    from allranks.analysis.diagnose.job_logs import diagnose_job
    from allranks.analysis.diagnose.terminal import show_diagnosis

    if why := "it is on another cluster" if elsewhere else _show_to_end(slurm, job):
        echo(f"allranks: job {job} is not followed: {why}; {_later(job)}", err=True)
        return
    try:
        diagnosis, notes = diagnose_job(slurm, job)
    except AllranksError as error:
        echo(f"allranks: {error}", err=True)
        return
    for note in notes:
        echo(f"allranks: {note}", err=True)
    if diagnosis.verdict in ("found", "unexplained"):
        show_diagnosis(diagnosis)


def _show_to_end(slurm: Slurm, job: str) -> str:
    """Return why a job cannot be followed; empty at its end."""
    from allranks.launch.slurm.job import describe_state
    from allranks.nodes.slurm.answers import parse_job_files
    from allranks.nodes.slurm.commands import NO_ANSWER

    shown, ends = None, dict[Path, int]()
    while True:
        state = slurm.state(job)
        if not ends and isinstance(record := slurm.show("job", job), str):
            parts = parse_job_files(record)
            if any("_" in part.label for part in parts):
                return "it is an array"
            ends = {path: 0 for part in parts if part.info.nodes for path in part.paths}
        text = describe_state(job, state)
        if state.alive and state.state != NO_ANSWER and text != shown:
            shown = text
            echo(f"allranks: {text}", err=True)
        if state.state == "PENDING" and state.reason.startswith(NEVER_STARTS):
            return f"it cannot start as it is ({state.reason})"
        for path in ends:
            ends[path] = _show_new(path, ends[path], last=not state.alive)
        if not state.alive:
            return ""
        time.sleep(POLL_S)


def _show_new(path: Path, end: int, *, last: bool) -> int:
    """Print what was appended to a log since `end`, in whole lines, and return its new end."""
    try:
        end = end if path.stat().st_size >= end else 0  # a requeued job begins its log anew
        data = read_appended(path, end).data
    except OSError:  # not yet there, or on the node only
        return end
    data = data if last else data[: data.rfind(b"\n") + 1]
    if data:
        echo(data.decode(errors="replace").removesuffix("\n"))
    return end + len(data)
