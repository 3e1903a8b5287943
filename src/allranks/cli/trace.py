"""``allranks trace``: analyse profiler traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from allranks.cli.options import any_path, json_option, print_json, resolve_run_path, root_option
from allranks.errors import EXIT_OK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allranks.analysis.trace.diff import Comparison
    from allranks.analysis.trace.records import TraceReport
    from allranks.analysis.trace.tables import Block


@click.command("trace")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=any_path)
@click.option(
    "--select",
    type=click.Choice(["latest", "all"]),
    default="latest",
    show_default=True,
    help="Which profiler windows of a rank to read: the newest or all.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of processes that read ranks in parallel (default: one per core).",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write summary.html, summary.csv, collectives.csv and merged.json.gz to this folder.",
)
@click.option(
    "--compare", "other", type=any_path, metavar="PATH", help="Show each metric as a ratio to the run at PATH."
)
@root_option
@json_option
def trace_command(
    paths: tuple[Path, ...],
    select: Literal["latest", "all"],
    workers: int | None,
    out: Path | None,
    other: Path | None,
    run_root: Path,
    as_json: bool,
) -> int:
    """Analyse profiler traces from files, folders or runs (`latest`, a name, or a folder).

    Shows per rank: compute, overlapped and exposed communication, copies, idle time. Shows per collective: transfer
    time, wait time, bandwidth, the last rank. Writes files only with --out. merged.json.gz has all ranks on one clock,
    for ui.perfetto.dev.
    """
    from allranks.analysis.trace import analyse

    reports = analyse([resolve_run_path(path, run_root) for path in paths], select=select, workers=workers)
    comparison, written = None, []
    if other:
        from allranks.analysis.trace.diff import compare_last

        comparison = compare_last(reports, analyse([resolve_run_path(other, run_root)], workers=workers))
    if out:
        from allranks.analysis.trace.output import write_all

        written = write_all(reports, out, comparison)
    if as_json:
        print_json(as_document(reports, comparison, written))
    else:
        _show(reports, comparison, written)
    return EXIT_OK


def as_document(
    reports: list[TraceReport], comparison: Comparison | None = None, written: list[Path] | None = None
) -> dict[str, object]:
    """Return the document of ``--json``: ``{"reports": [...]}``, each as the records of
    `allranks.analysis.trace.records`.

    With ``--compare`` also ``comparison`` (`allranks.analysis.trace.diff.Comparison`), with ``--out`` also ``written``,
    the files' paths.
    """
    import msgspec

    document: dict[str, object] = {"reports": [msgspec.to_builtins(report, str_keys=True) for report in reports]}
    if comparison is not None:
        document["comparison"] = msgspec.to_builtins(comparison)
    if written:
        document["written"] = [str(path) for path in written]
    return document


def _show(reports: list[TraceReport], comparison: Comparison | None, written: list[Path]) -> None:
    import shutil

    from allranks.analysis.trace.tables import text_lines
    from allranks.cli.options import echo

    width = shutil.get_terminal_size().columns
    for line in text_lines(_blocks(reports, comparison, written, width), width):
        echo(line, styled=True)


def _blocks(
    reports: list[TraceReport], comparison: Comparison | None, written: list[Path], width: int
) -> Iterator[Block]:
    from allranks.analysis.trace.tables import BLANK, Line, comparison_blocks, report_blocks

    for number, report in enumerate(reports):
        if number:
            yield Line((("\u2500" * width, ""),))
        yield from report_blocks(report, width)
    if comparison is not None:
        yield from comparison_blocks(comparison, width)
    if written:
        yield BLANK
    for path in written:
        yield Line(((f"wrote {path}", ""),))
