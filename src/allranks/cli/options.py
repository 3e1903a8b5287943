"""Options and output that several verbs share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from allranks.report.text import plain
from allranks.rundir import finite

any_path = click.Path(path_type=Path, readable=False)
"""A path whose verb says itself what cannot be read, in its own words, and reads the rest; click would refuse all."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on standard output, nothing else there."
)
set_option = click.option(
    "--set", "sets", multiple=True, metavar="A.B=V", help="Override a value of the spec; may be repeated."
)
root_option = click.option("--run-root", default="runs", show_default=True, type=any_path, help="Folder of the runs.")


class FullHelpGroup(click.Group):
    """A group whose help shows the first sentence of each command whole; click's own cuts it in the middle."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, _first_sentence(command.help or "")) for name, command in commands if command]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    end = flat.find(". ")
    return flat if end < 0 else flat[: end + 1]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of runs for shell completion."""
    from allranks.rundir import list_runs

    names = [run.name for run in list_runs(ctx.params.get("run_root") or "runs")]
    return [name for name in [*names, "latest"] if name.startswith(incomplete)]


def run_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """The argument RUN, a path, a name, the beginning of a name, or ``latest``."""
    return click.argument("run", default="latest", shell_complete=complete_runs)(function)


def error_line(event: dict[str, Any]) -> str:
    """An error event of a rank in one line; what the program wrote may hold anything, also what a terminal obeys."""
    first = (plain(event["message"]).splitlines() or [""])[0]
    return f"rank {event['rank']}: {event['type']}: {first[:200]}"


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(finite(value), indent=2, ensure_ascii=False))


def run_or_path(path: Path) -> Path:
    """A path as it is; `latest` or the name of a run as that run's folder."""
    if os.path.lexists(path) or len(path.parts) != 1:
        return path
    from allranks.errors import RunNotFound
    from allranks.rundir import find_run

    try:
        return find_run(str(path)).root
    except RunNotFound:
        return path
