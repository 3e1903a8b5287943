"""``allranks lint``: report problems in a user's own script or environment, and repair what is safe to repair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import any_path, echo, json_option, print_json
from allranks.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEST, RequestError

if TYPE_CHECKING:
    from allranks.analysis.lint import LintReport

LEVELS = ("note", "warning", "error")
FORMATS = ("text", "json", "github")


@click.command("lint")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=any_path)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="warning",
    show_default=True,
    help="Lowest severity that is reported and counts for the exit code.",
)
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="Form of the report."
)
@click.option(
    "--slurm-version", metavar="X.Y", help="Slurm's version on the cluster, such as 23.11; some rules depend on it."
)
@click.option(
    "--fix", is_flag=True, help="Show a diff of the repairs that are safe, and write them after confirmation."
)
@click.option("--yes", is_flag=True, help="With --fix: write without asking.")
@json_option
def lint_command(
    files: tuple[Path, ...], level: str, form: str, slurm_version: str | None, fix: bool, yes: bool, as_json: bool
) -> int:
    """Report problems in batch scripts, shell scripts, environment files (output of env, .env) and specs. Runs nothing.

    FILE - reads standard input: `env | allranks lint -`.

    Exit code 0: nothing found; 1: findings; 2: a file could not be read completely. Silence an intended
    finding with a comment on its line or the line above: # allranks: ignore[RULE]
    """
    import msgspec

    from allranks.analysis.lint import lint

    if slurm_version is not None and not _is_version(slurm_version):
        raise RequestError(f"--slurm-version {slurm_version}: expected a version such as 23.11")
    report = lint(files, slurm_version)
    wanted = LEVELS[LEVELS.index(level) :]
    if fix:
        return _fix(report, yes)
    hidden = sum(f.severity not in wanted for f in report.findings)
    report = msgspec.structs.replace(report, findings=[f for f in report.findings if f.severity in wanted])
    _print(report, "json" if as_json else form, hidden)
    if report.unread:
        return EXIT_REQUEST
    return EXIT_FAILED if report.findings else EXIT_OK


def _is_version(text: str) -> bool:
    numbers = text.split(".")
    return len(numbers) >= 2 and all(n.isdecimal() and len(n) < 4 for n in numbers[:2]) and len(numbers[0]) == 2


def _print(report: LintReport, form: str, hidden: int) -> None:
    import msgspec

    if form == "json":
        print_json(msgspec.to_builtins(report))
    elif form == "github":
        from allranks.analysis.lint.output import github_commands

        for line in github_commands(report):
            echo(line)
    else:
        from allranks.analysis.lint.output import show_report
        from allranks.cli.console import SafeConsole

        show_report(SafeConsole(highlight=False), report, hidden)


def _fix(report: LintReport, yes: bool) -> int:
    """Show the repairs, and write them if `yes`, or if a person at a terminal confirms."""
    import sys

    from allranks.analysis.lint.output import plan_repairs, write_repair

    repairs = plan_repairs(report)
    for repair in repairs:
        echo(repair.diff)
    places = sum(repair.count for repair in repairs)
    if not repairs:
        echo("nothing to repair: no finding has a safe repair")
        return EXIT_REQUEST if report.unread else EXIT_OK
    what = f"{places} place{'s' * (places != 1)} in {len(repairs)} file{'s' * (len(repairs) != 1)}"
    writable = [repair for repair in repairs if repair.path is not None]
    if not yes and sys.stdin.isatty() and sys.stdout.isatty() and writable:
        yes = click.confirm(f"Repair {what}?", default=False)
    if not yes or not writable:
        echo(f"{what} can be repaired; nothing was written (--fix --yes writes)")
        return EXIT_FAILED
    for repair in writable:
        write_repair(repair)
    echo(f"repaired {what}")
    return EXIT_OK
