"""``allranks compare-runs``: results and differences of runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import complete_runs, echo, json_option, print_json, root_option
from allranks.errors import EXIT_OK, RequestError

if TYPE_CHECKING:
    from allranks.analysis.report.run_comparison import RunComparison


@click.command("compare-runs")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", shell_complete=complete_runs)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the page with all charts to this file (HTML).",
)
@root_option
@json_option
def compare_runs_command(runs: tuple[str, ...], out: Path | None, run_root: Path, as_json: bool) -> int:
    """Compare finished or running RUNs: results, losses at equal steps and equal tokens, and what differs between them.

    For each key of the spec and of the environment that differs, it says what such a difference changes.
    """
    from allranks.analysis.report.run_comparison import compare_runs
    from allranks.analysis.report.run_data import read_run_data
    from allranks.launch.outcome import current_metrics
    from allranks.launch.runs import running
    from allranks.rundir.files import read_record
    from allranks.rundir.paths import find_run
    from allranks.utils.filesystem import environment_error

    if len(runs) < 2:
        raise RequestError("compare-runs needs at least two runs; `allranks runs` lists them")
    folders = [find_run(run, run_root) for run in runs]
    if twice := {run.name for run in folders if sum(run.root == other.root for other in folders) > 1}:
        raise RequestError(f"run {min(twice)} is given twice")
    data = []
    for run in folders:
        alive = running(run)
        metrics = read_record(run.metrics) if not alive and run.metrics.exists() else current_metrics(run, alive=alive)
        if metrics is None:
            raise RequestError(f"run {run.name} has no events yet; there is nothing to compare")
        data.append(read_run_data(run, metrics))
    comparison = compare_runs(data, [str(run.root) for run in folders])
    if out is not None:
        from allranks.analysis.report.comparison_page import write_page

        try:
            write_page(comparison, out)
        except OSError as error:
            raise environment_error(error) from None
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(comparison))
    else:
        _show(comparison)
        if out is not None:
            echo(f"page  {out.absolute()}")
    return EXIT_OK


def _show(comparison: RunComparison) -> None:
    from allranks.analysis.report.comparison_page import FORMATS, best_run, data_line, point_name
    from allranks.analysis.report.run_comparison import FIGURES
    from allranks.cli.console import FittedColumn, print_fitted, table_console
    from allranks.utils.text import format_loss, format_value, sanitize

    console, runs = table_console(), comparison.runs
    letters = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(runs))]
    for letter, run in zip(letters, runs, strict=True):
        echo(f"{letter}  {run.run}")
    echo("")
    rows = []
    for key, title in FIGURES.items():
        values = [run.figures[key] for run in runs]
        if any(value is not None for value in values):
            rows.append([title, *_marked([FORMATS[key](v) for v in values], best_run(key, values))])
    for point in comparison.equal:
        best = best_run("eval_loss", point.values)
        rows.append([point_name(point), *_marked([format_loss(v) for v in point.values], best)])
    columns = [
        FittedColumn("", fold_to=20),
        *(FittedColumn(letter, right=True, drop=i) for i, letter in enumerate(letters)),
    ]
    print_fitted(console, columns, rows, "; --json has all")
    echo(f"\n*  best value; {data_line(comparison)}")
    if not comparison.differences:
        echo("The specs, and what is known of the environments, are equal.")
        return
    echo("")
    rows = [
        [row.key, *(sanitize(format_value(value), 60) for value in row.values), row.changes]
        for row in comparison.differences
    ]
    columns = [
        FittedColumn("differs", fold_to=18),
        *(FittedColumn(letter, fold_to=12, drop=i) for i, letter in enumerate(letters)),
        FittedColumn("changes", fold_to=16),
    ]
    print_fitted(console, columns, rows, "; --json has all")


def _marked(texts: list[str], best: int | None) -> list[str]:
    return [f"{text} *" if i == best else f"{text}  " for i, text in enumerate(texts)]
