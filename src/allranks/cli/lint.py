"""``allranks lint``: report problems in a user's own script or environment."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli.options import any_path, json_option, print_json
from allranks.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEST

LEVELS = ("note", "warning", "error")


@click.command("lint")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=any_path)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="note",
    show_default=True,
    help="Lowest severity that is reported and counts for the exit code.",
)
@json_option
def lint_command(files: tuple[Path, ...], level: str, as_json: bool) -> int:
    """Report problems in batch scripts, shell scripts, environment files (output of env, .env) and specs. Runs nothing.

    FILE - reads standard input: `env | allranks lint -`.

    Exit code 0: nothing found; 1: findings; 2: a file could not be read completely. Silence an intended
    finding with a comment on its line or the line above: # allranks: allow RULE the reason
    """
    import msgspec

    from allranks.analysis.lint import lint

    report = lint(files)
    wanted = LEVELS[LEVELS.index(level) :]
    report = msgspec.structs.replace(report, findings=[f for f in report.findings if f.severity in wanted])
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        from allranks.analysis.lint.terminal import show_report
        from allranks.cli.console import SafeConsole

        show_report(SafeConsole(highlight=False), report)
    if report.unread:
        return EXIT_REQUEST
    return EXIT_FAILED if report.findings else EXIT_OK
