"""``allranks report``: the summary of a run, and its page."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli.options import json_option, print_json, root_option, run_argument
from allranks.errors import EXIT_FAILED, EXIT_OK, RequestError


@click.command("report")
@run_argument
@root_option
@json_option
def report_command(run: str, run_root: Path, as_json: bool) -> int:
    """Show the summary of RUN and write its report.html anew from its events."""
    from allranks import api
    from allranks.launch.outcome import refresh
    from allranks.report.page import write_report
    from allranks.report.text import plain
    from allranks.rundir import find_run

    found = find_run(run, run_root)
    metrics = refresh(found, alive=api.running(found))
    if metrics is None:
        raise RequestError(f"run {found.name} has no events yet; there is nothing to report")
    write_report(found)
    if as_json:
        print_json(metrics)
    else:
        from rich.console import Console

        from allranks.cli.run import show_end

        console = Console()
        show_end(console, found, metrics)
        if metrics.get("message"):
            console.print(plain(metrics["message"]), highlight=False, markup=False, soft_wrap=not console.is_terminal)
        console.print(f"report  {found.report}", highlight=False, soft_wrap=True)
    return EXIT_OK if metrics["status"] in ("succeeded", "running") else EXIT_FAILED
