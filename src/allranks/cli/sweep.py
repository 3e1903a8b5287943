"""``allranks sweep``: one spec with many settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allranks.cli.options import any_path, echo, json_option, print_json, set_option
from allranks.errors import EXIT_FAILED, EXIT_OK, RequestError

if TYPE_CHECKING:
    from allranks.experiments.sweep import PointResult, Sweep


@click.command("sweep")
@click.argument("spec", type=any_path, metavar="SPEC|SWEEP")
@click.option("--grid", multiple=True, metavar="KEY=V,V,...", help="Values of one key; several make all combinations.")
@click.option("--list", "listed", type=any_path, metavar="FILE", help="File with the settings of one point a line.")
@click.option(
    "--trials",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Run N points that Optuna chooses; --grid may have LOW..HIGH.",
)
@click.option("--at-once", type=click.IntRange(1), metavar="K", help="Slurm: run at most K points at the same time.")
@click.option("--new", is_flag=True, help="Start a new sweep, also if one of the same points is unfinished.")
@click.option("--task", is_flag=True, hidden=True)
@click.option("--again", is_flag=True, help="Run failed, diverged and refused points of a sweep once more.")
@click.option("--show", is_flag=True, help="Show the table of a sweep, and write its page again; run nothing.")
@set_option
@json_option
def sweep_command(
    spec: Path,
    grid: tuple[str, ...],
    listed: Path | None,
    trials: int | None,
    at_once: int | None,
    new: bool,
    task: bool,
    again: bool,
    show: bool,
    sets: tuple[str, ...],
    as_json: bool,
) -> int:
    """Run SPEC with each combination of settings, and rank the results by held-out loss.

    Points run one after another; with Slurm as the tasks of one array. The same command, or the folder of a sweep
    instead of SPEC, continues an unfinished sweep: finished points stay, a stopped one is resumed. A failed point does
    not end the sweep. A run whose loss diverges is ended early.
    """
    from allranks.cli.compare import ProgressPrinter
    from allranks.cli.console import table_console
    from allranks.experiments.sweep import open_sweep, run_sweep
    from allranks.experiments.sweep_array import run_array, run_task, uses_array

    continued = spec.is_dir()
    if continued and (grid or listed or sets or trials or new):
        raise RequestError(
            f"{spec} is a folder: a sweep continues with its own settings; give only --again, --show or --at-once"
        )
    if not continued and (show or again):
        raise RequestError("--show and --again need the folder of a sweep")
    sweep = open_sweep(spec) if continued else _create(spec, grid, listed, trials, sets, new)
    console = table_console(stderr=as_json, quiet=as_json)
    view = ProgressPrinter(console)
    if task:
        return EXIT_OK if run_task(sweep, view) else EXIT_FAILED
    console.say(f"sweep    {sweep.folder}, {len(sweep.points)} points")
    if show:
        return _report(sweep, as_json)
    array = uses_array(sweep)
    finished = run_array(sweep, view, again=again, at_once=at_once) if array else run_sweep(sweep, view, again=again)
    code = _report(sweep, as_json)
    if not finished:
        echo(f"the command ended before the sweep; continue it with: allranks sweep {sweep.folder}", err=True)
    return code if finished else EXIT_FAILED


def _create(
    spec: Path, grid: tuple[str, ...], listed: Path | None, trials: int | None, sets: tuple[str, ...], new: bool
) -> Sweep:
    from allranks.experiments.sweep import create_sweep, grid_points, trial_points
    from allranks.utils.inputs import read_lines

    if trials and listed:
        raise RequestError("--trials chooses the points; leave out --list")
    if trials:
        return create_sweep(spec, sets, *trial_points(grid, trials), new=new)
    lines = [line.decode("utf-8", "replace") for line in read_lines(listed)] if listed else []
    if listed and not lines:
        raise RequestError(f"--list {listed}: the file is empty; each line has the settings of one point")
    return create_sweep(spec, sets, grid_points(grid, lines), new=new)


def _report(sweep: Sweep, as_json: bool) -> int:
    """Show the ranked table, and write the page of the points that have trained."""
    import msgspec

    from allranks.experiments.sweep import ranked, results_of

    key, results = ranked(results_of(sweep))
    page = _write_page(sweep, results)
    code = EXIT_OK if all(result.status == "succeeded" for result in results) else EXIT_FAILED
    if as_json:
        print_json({"folder": sweep.folder, "ranked_by": key, "points": msgspec.to_builtins(results)})
        return code
    from allranks.cli.console import FittedColumn, print_fitted, table_console
    from allranks.planning.cost import cost_text
    from allranks.utils.text import format_bytes, format_loss, format_rate, sanitize

    columns = [
        FittedColumn("point"),
        FittedColumn("settings", fold_to=24),
        FittedColumn("status"),
        FittedColumn("held-out", right=True),
        FittedColumn("train", right=True, drop=1),
        FittedColumn("tokens/s", right=True, drop=2),
        FittedColumn("memory", right=True, drop=3),
    ]
    rows = [
        [
            r.name,
            sanitize(" ".join(r.sets), 200),
            r.status,
            format_loss(r.eval_loss),
            format_loss(r.train_loss),
            format_rate(r.tokens_per_s),
            format_bytes(r.peak_memory_bytes),
        ]
        for r in results
    ]
    if costs := [r.cost for r in results if r.cost]:
        columns.append(FittedColumn("cost", right=True))
        rows = [[*row, cost_text(r.cost) if r.cost else "-"] for row, r in zip(rows, results, strict=True)]
    echo("")
    print_fitted(table_console(), columns, rows, "; --json has all")
    for r in results:
        if r.status not in ("succeeded", "open", "stopped") and r.message:
            echo(f"{r.name}  {sanitize(r.message, 300)}", message=True)
    if costs:
        echo(f"cost   {cost_text({**costs[0], 'amount': sum(cost['amount'] for cost in costs)})} in all")
    if page:
        echo(f"page   {page}")
    return code


def _write_page(sweep: Sweep, results: list[PointResult]) -> Path | None:
    """Write the comparison of all points with a run; None if there are fewer than two, or it cannot be written."""
    from allranks.analysis.report.comparison_page import write_page
    from allranks.analysis.report.run_comparison import compare_runs
    from allranks.analysis.report.run_data import read_run_data
    from allranks.rundir.files import read_record
    from allranks.rundir.paths import RunDir

    runs = {RunDir(Path(sweep.folder) / one.run): one.status for one in results if one.run}
    data = [read_run_data(run, {**read_record(run.metrics), "status": status}) for run, status in runs.items()]
    if len(data) < 2:
        return None
    page = Path(sweep.folder) / "sweep.html"
    try:
        write_page(compare_runs(data, [str(run.root) for run in runs]), page, sweep=Path(sweep.folder).name)
    except OSError as error:
        echo(f"the page cannot be written: {error.strerror}", err=True)
        return None
    return page
