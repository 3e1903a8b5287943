"""``allranks trace``: what profiler traces tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from allranks.cli.options import any_path, json_option, print_json, run_or_path
from allranks.errors import EXIT_OK

if TYPE_CHECKING:
    from allranks.trace.diff import Comparison
    from allranks.trace.records import TraceReport


@click.command("trace")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=any_path)
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
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write summary.html, summary.csv, collectives.csv and merged.json.gz there.",
)
@click.option(
    "--compare",
    "other",
    type=any_path,
    metavar="PATH",
    help="Show how many times the figures of this other run ours are.",
)
@json_option
def trace_command(
    paths: tuple[Path, ...],
    select: Literal["latest", "all"],
    workers: int | None,
    out: Path | None,
    other: Path | None,
    as_json: bool,
) -> int:
    """Analyse profiler traces: files, folders of them, or runs (`latest`, a name, or a folder).

    Per rank: compute, communication that compute hides or does not, copies, idle. Collectives: transfer and waiting told apart,
    bandwidth, who came last. Nothing is written without --out. merged.json.gz is all ranks on one clock, for ui.perfetto.dev.
    """
    from allranks.trace import analyse

    reports = analyse([run_or_path(path) for path in paths], select=select, workers=workers)
    comparison = _compare(reports, run_or_path(other), workers) if other else None
    written = _write(reports, comparison, out) if out else []
    if as_json:
        print_json(as_document(reports, comparison, written))
    else:
        _show(reports, comparison, written)
    return EXIT_OK


def as_document(
    reports: list[TraceReport], comparison: Comparison | None = None, written: list[Path] | None = None
) -> dict[str, object]:
    """The document of ``--json``: ``{"reports": [...]}``, each as the records of `allranks.trace.records`.

    With ``--compare`` also ``comparison`` (`allranks.trace.diff.Comparison`), with ``--out`` also ``written``, the files' paths.
    """
    import msgspec

    document: dict[str, object] = {"reports": [msgspec.to_builtins(report, str_keys=True) for report in reports]}
    if comparison is not None:
        document["comparison"] = msgspec.to_builtins(comparison)
    if written:
        document["written"] = [str(path) for path in written]
    return document


def _compare(reports: list[TraceReport], other: Path, workers: int | None) -> Comparison:
    """Our newest report against the other's newest."""
    from allranks.trace import analyse
    from allranks.trace.diff import compare_last

    return compare_last(reports, analyse([other], workers=workers))


def _write(reports: list[TraceReport], comparison: Comparison | None, out: Path) -> list[Path]:
    from allranks.trace.write import write_all, write_comparison

    written = write_all(reports, out)
    return [*written, write_comparison(comparison, out)] if comparison else written


def _show(reports: list[TraceReport], comparison: Comparison | None, written: list[Path]) -> None:
    from rich.console import Console

    from allranks.trace.tables import show_report

    console = Console()
    for number, report in enumerate(reports):
        if number:
            console.rule()
        show_report(console, report)
    if comparison is not None:
        from allranks.trace.diff_table import show_comparison

        show_comparison(console, comparison)
    if written:
        console.print()
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True, markup=False, highlight=False)
