"""``allranks runs``: what ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from allranks.cli.options import json_option, print_json, root_option
from allranks.errors import EXIT_OK

WIDE = 120
NARROW = {
    "run": "run",
    "status": "status",
    "steps": "steps",
    "train_loss_last": "loss",
    "eval_loss": "held-out",
    "tokens_per_s": "tokens/s",
}
MORE = {"strategy": "strategy", "world_size": "ranks", "model": "model", "dataset": "data"}


@click.command("runs")
@root_option
@json_option
def runs_command(run_root: Path, as_json: bool) -> int:
    """List the runs under the run root, oldest first."""
    from allranks import api
    from allranks.rundir import list_runs

    agents = api.local_agents()
    rows = [_row(run, agents) for run in list_runs(run_root)]
    if as_json:
        print_json(rows)
        return EXIT_OK
    if not rows:
        click.echo(f"no runs under {run_root.absolute()}")
        return EXIT_OK
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = dict(NARROW if console.width < WIDE else NARROW | MORE)
    table = Table()
    for title in columns.values():
        table.add_column(title, no_wrap=title in ("run", "status"), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in columns))
    console.print(table)
    return EXIT_OK


def _row(run: Any, agents: set[str]) -> dict[str, Any]:
    from allranks import api
    from allranks.rundir import read_json, status_of

    metrics = read_json(run.metrics) or {}
    plan = read_json(run.plan) or {}
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
