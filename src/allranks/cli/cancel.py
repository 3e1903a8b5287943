"""``allranks cancel``: end a run."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli.options import root_option, run_argument
from allranks.errors import EXIT_OK


@click.command("cancel")
@run_argument
@click.option("--now", is_flag=True, help="Do not wait for the edge of a step and a checkpoint.")
@root_option
def cancel_command(run: str, now: bool, run_root: Path) -> int:
    """End RUN: its ranks finish their step and write a full checkpoint, from which `resume` goes on."""
    from allranks import api
    from allranks.rundir import find_run

    found = find_run(run, run_root)
    click.echo(f"{found.name}: {api.cancel(found, now=now)}")
    return EXIT_OK
