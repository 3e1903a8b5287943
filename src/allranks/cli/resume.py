"""``allranks resume``: go on in the same folder."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from allranks.cli.options import json_option, root_option, run_argument, set_option


@click.command("resume")
@run_argument
@set_option
@click.option(
    "--inexact",
    is_flag=True,
    help="Also from a lite checkpoint, or with other ranks, strategy, data or batch: not bitwise.",
)
@root_option
@json_option
def resume_command(run: str, sets: tuple[str, ...], inexact: bool, run_root: Path, as_json: bool) -> int:
    """Go on with RUN from its newest whole checkpoint, as if it had not stopped."""
    from allranks import api
    from allranks.cli.run import conclude, watch
    from allranks.rundir import find_run
    from allranks.spec import load_spec

    console = Console(stderr=as_json, quiet=as_json)
    folder = find_run(run, run_root)
    plan = api.plan(load_spec(folder.spec, sets))
    result = watch(
        console, lambda live: api.resume(folder.root, inexact=inexact, sets=sets, observer=live), plan, folder.root
    )
    return conclude(result, console, as_json)
