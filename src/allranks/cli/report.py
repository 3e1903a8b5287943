"""``allranks report``: show a run's summary and rewrite its page."""

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
    """Show the summary of RUN and rewrite its report.html from its events; of a comparison, its tables and comparison.html."""
    from allranks import api
    from allranks.analysis.diagnose.run_outcome import failure_headline
    from allranks.analysis.report.page import write_report
    from allranks.launch.outcome import recompute_metrics
    from allranks.rundir.paths import find_run
    from allranks.utils.filesystem import environment_error
    from allranks.utils.text import sanitize

    found = find_run(run, run_root)
    if found.compare.is_file():
        from allranks.cli.compare import show_comparison
        from allranks.experiments.compare import finished_comparison

        if (done := finished_comparison(found)) is not None:
            return show_comparison(done, as_json)
    metrics = recompute_metrics(found, alive=api.running(found))
    if metrics is None:
        raise RequestError(f"run {found.name} has no events yet; there is nothing to report")
    not_written: OSError | None = None
    try:
        write_report(found)
    except OSError as error:
        not_written = error
    if as_json:
        print_json(metrics)
    else:
        from allranks.cli.console import SafeConsole
        from allranks.cli.run_output import print_summary

        console = SafeConsole()
        print_summary(console, found, metrics)
        if metrics.get("message"):
            console.say(sanitize(metrics["message"]))
        if diagnosis := failure_headline(metrics, found.name):
            console.say(sanitize(diagnosis))
        if not_written is None:
            console.print(f"report  {found.report}", highlight=False, markup=False, soft_wrap=True)
    if not_written is not None:
        raise environment_error(not_written)
    return EXIT_OK if metrics["status"] in ("succeeded", "running") else EXIT_FAILED
