"""``allranks trace``: what profiler traces tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from allranks.cli.options import json_option, print_json
from allranks.errors import EXIT_OK

if TYPE_CHECKING:
    from allranks.trace.records import TraceReport


@click.command("trace")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option(
    "--select",
    type=click.Choice(["latest", "all"]),
    default="latest",
    show_default=True,
    help="Which windows of a rank: the newest, or each.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Processes that read ranks in parallel (default: one a core)."
)
@json_option
def trace_command(paths: tuple[Path, ...], select: Literal["latest", "all"], workers: int | None, as_json: bool) -> int:
    """Analyse profiler traces: files, folders of them, or run folders.

    Per rank: compute, communication that compute hides or does not, copies, idle. Collectives: transfer and waiting told apart,
    bandwidth, who came last. Nothing is written.
    """
    from allranks.trace import analyse

    reports = analyse(paths, select=select, workers=workers)
    if as_json:
        print_json(as_document(reports))
    else:
        _show(reports)
    return EXIT_OK


def as_document(reports: list[TraceReport]) -> dict[str, object]:
    """The document of ``--json``: ``{"reports": [...]}``, each as the records of `allranks.trace.records`."""
    import msgspec

    return {"reports": [msgspec.to_builtins(report, str_keys=True) for report in reports]}


def _show(reports: list[TraceReport]) -> None:
    from rich.console import Console

    from allranks.trace.tables import show_report

    console = Console()
    for number, report in enumerate(reports):
        if number:
            console.rule()
        show_report(console, report)
