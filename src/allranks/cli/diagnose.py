"""Diagnose a failed run from its logs, and list the known failures (``allranks diagnose``, ``failures``).

``failures`` shows the classes that diagnose can name, and how allranks handles each of the forty known failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from allranks.cli.options import any_path, echo, json_option, print_json, resolve_run_path, root_option
from allranks.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEST, RequestError


@click.command("diagnose")
@click.argument("paths", nargs=-1, metavar="[PATH...]", type=any_path)
@click.option(
    "--job",
    metavar="JOBID",
    help="Read the logs of this job of Slurm, which Slurm names; JOBID_TASK for one of an array.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of processes that read files in parallel (default: one per core).",
)
@root_option
@json_option
def diagnose_command(
    paths: tuple[Path, ...], job: str | None, workers: int | None, run_root: Path, as_json: bool
) -> int:
    """Find what went wrong in run folders, log folders or single log files, compressed or not.

    Reads Slurm output, torchrun, NCCL, kernel and system logs, sacct tables, py-spy and faulthandler dumps. Exit code 0
    if the verdict is healthy; 1 if it is found, unexplained or incomplete; 2 if nothing could be read.
    """
    if not paths and job is None:
        raise click.UsageError("give PATH... (logs, folders, a run), or --job JOBID", click.get_current_context())
    given, notes = [resolve_run_path(path, run_root) for path in paths], []
    if job is None:
        from allranks.analysis.diagnose import diagnose

        diagnosis = diagnose(given, workers=workers)
    else:
        from allranks.analysis.diagnose.job_logs import diagnose_job
        from allranks.nodes.slurm.commands import find_slurm

        slurm = find_slurm(Path.cwd(), wanted=f"--job {job}:")
        diagnosis, notes = diagnose_job(slurm, job, given, workers=workers)
    for note in notes:
        echo(note, err=True)
    if as_json:
        print_json(msgspec.to_builtins(diagnosis))
    else:
        from allranks.analysis.diagnose.terminal import show_diagnosis

        show_diagnosis(diagnosis)
    if not diagnosis.readable:
        return EXIT_REQUEST
    return EXIT_OK if diagnosis.verdict == "healthy" else EXIT_FAILED


CLASS_FIELDS = ("cause", "fix", "next_test", "example", "reference")


@click.command("failures")
@click.argument("name", required=False)
@json_option
def failures_command(name: str | None, as_json: bool) -> int:
    """List the failures that `diagnose` names and those that allranks prevents or refuses; NAME (a class or number)
    shows one."""
    from allranks.analysis.diagnose.catalogue import CATALOGUE
    from allranks.analysis.diagnose.known_failures import KNOWN_FAILURES

    entries = [{key: getattr(entry, key) for key in ("id", "title", *CLASS_FIELDS)} for entry in CATALOGUE.values()]
    rows = [{**msgspec.to_builtins(f), "page": f.page, "tests": []} for f in KNOWN_FAILURES]  # the page names its tests
    if name is not None:
        entries = [e for e in entries if e["id"] == name]
        rows = [r for r in rows if str(r["number"]) == name or name in r["classes"]]
        if not entries and not rows:
            raise RequestError(f"{name}: no failure has this number or class name; list them with `allranks failures`")
    if as_json:
        print_json({"classes": entries, "failures": rows})
    elif name is not None and name.isdigit():
        from rich.markdown import Markdown

        from allranks.cli.console import SafeConsole

        text = next(failure.text for failure in KNOWN_FAILURES if str(failure.number) == name)
        SafeConsole().print(Markdown(text, hyperlinks=False))
    elif name is not None:
        _print_details(entries, rows)
    else:
        _print_tables(entries, rows)
    return EXIT_OK


def _print_details(entries: list[dict[str, str]], rows: list[dict[str, Any]]) -> None:
    from allranks.analysis.diagnose.known_failures import HANDLING_WORDS

    for e in entries:
        echo(f"{e['id']}: {e['title']}")
        for key in CLASS_FIELDS:
            echo(f"  {key.replace('_', ' '):<11} {e[key]}")
    for r in rows:
        echo(f"failure {r['number']}: {r['title']}")
        echo(f"  {HANDLING_WORDS[r['how']]:<11} {r['where']}")
        for name in r["classes"]:
            echo(f"  {'in logs':<11} {name}")
        echo(f"  {'more':<11} allranks failures {r['number']}")


def _print_tables(entries: list[dict[str, str]], rows: list[dict[str, Any]]) -> None:
    from allranks.cli.console import FittedColumn, SafeConsole, print_fitted

    console = SafeConsole()
    classes = [FittedColumn("class"), FittedColumn("description", fold_to=30)]
    print_fitted(console, classes, [[e["id"], e["title"]] for e in entries], title="Failure classes of diagnose")
    console.print()
    columns = [FittedColumn("#", right=True), FittedColumn("failure", fold_to=30), FittedColumn("how")]
    lines = [[str(r["number"]), r["title"], r["how"], r["where"]] for r in rows]
    print_fitted(console, [*columns, FittedColumn("where", fold_to=24)], lines, title="The forty failures")
    console.print()
    console.print("P: prevented by design, R: refused before the ranks start, D: named by diagnose.", highlight=False)
    console.print("allranks failures NAME shows a class, allranks failures NUMBER a failure.", highlight=False)
