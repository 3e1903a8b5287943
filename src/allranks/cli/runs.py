"""List, resume and cancel runs (``allranks runs``, ``resume``, ``cancel``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from allranks.cli.console import SafeConsole
from allranks.cli.options import echo, json_option, print_json, root_option, run_argument, set_option
from allranks.errors import EXIT_OK

WIDE_TERMINAL = 120
NARROW_COLUMNS = {
    "run": "run",
    "status": "status",
    "steps": "steps",
    "train_loss_last": "loss",
    "eval_loss": "held-out",
    "tokens_per_s": "tokens/s",
}
WIDE_COLUMNS = {"strategy": "strategy", "world_size": "ranks", "model": "model", "dataset": "data"}


@click.command("runs")
@root_option
@json_option
def runs_command(run_root: Path, as_json: bool) -> int:
    """List the runs under the run root, oldest first."""
    from allranks import api
    from allranks.rundir.paths import list_runs

    agents = api.local_agents()
    rows = [_run_row(run, agents) for run in list_runs(run_root)]
    if as_json:
        print_json(rows)
        return EXIT_OK
    if not rows:
        echo(f"no runs under {run_root.absolute()}")
        return EXIT_OK
    from rich.table import Table
    from rich.text import Text

    from allranks.cli.console import SafeConsole

    console = SafeConsole()
    columns = dict(NARROW_COLUMNS if console.width < WIDE_TERMINAL else NARROW_COLUMNS | WIDE_COLUMNS)
    table = Table()
    for title in columns.values():
        table.add_column(title, no_wrap=title in ("run", "status"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[key])) for key in columns))  # names of folders are not markup
    console.print(table)
    return EXIT_OK


def _run_row(run: Any, agents: set[str]) -> dict[str, Any]:
    from allranks import api
    from allranks.rundir.files import read_record
    from allranks.rundir.paths import status_of

    metrics = read_record(run.metrics)
    plan = read_record(run.plan)
    status = status_of(run, alive=api.running(run, agents))
    names = ("model", "dataset", "steps", "train_loss_last", "eval_loss", "tokens_per_s")
    return {
        "run": run.name,
        "folder": str(run.root),
        "status": status,
        "strategy": plan.get("strategy"),
        "world_size": plan.get("world_size"),
        **{n: metrics.get(n) for n in names},
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.0f}"
        if isinstance(value, float) and value > 100
        else f"{value:.4f}"
        if isinstance(value, float)
        else str(value)
    )


@click.command("resume")
@run_argument
@set_option
@click.option(
    "--allow-inexact",
    is_flag=True,
    help="Allow a resume that is not bitwise: from a weights-only checkpoint, or with other ranks, strategy, data or batch.",
)
@root_option
@json_option
def resume_command(run: str, sets: tuple[str, ...], allow_inexact: bool, run_root: Path, as_json: bool) -> int:
    """Resume RUN in its folder from its newest complete checkpoint."""
    from allranks import api
    from allranks.cli.run import print_result, run_with_progress
    from allranks.launch.resumption import require_same_schema
    from allranks.rundir.paths import find_run
    from allranks.spec import load_spec

    console = SafeConsole(stderr=as_json, quiet=as_json)
    folder = find_run(run, run_root)
    require_same_schema(folder)
    plan = api.plan(load_spec(folder.spec, sets))
    result = run_with_progress(
        console,
        lambda live: api.resume(folder.root, allow_inexact=allow_inexact, sets=sets, observer=live),
        plan,
        folder.root,
    )
    return print_result(result, console, as_json)


@click.command("cancel")
@run_argument
@click.option("--now", is_flag=True, help="Stop at once, without finishing the step and writing a checkpoint.")
@root_option
def cancel_command(run: str, now: bool, run_root: Path) -> int:
    """Stop RUN after its current step and a full checkpoint, from which `resume` continues."""
    from allranks import api
    from allranks.rundir.paths import find_run

    found = find_run(run, run_root)
    echo(f"{found.name}: {api.cancel(found, now=now)}")
    return EXIT_OK
