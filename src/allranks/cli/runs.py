"""``allranks runs``: what ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from allranks.cli.options import json_option, print_json, root_option
from allranks.errors import EXIT_OK


@click.command("runs")
@root_option
@json_option
def runs_command(run_root: Path, as_json: bool) -> int:
    """List the runs under the run root, oldest first."""
    from allranks.rundir import list_runs

    rows = [_row(run) for run in list_runs(run_root)]
    if as_json:
        print_json(rows)
        return EXIT_OK
    if not rows:
        click.echo(f"no runs under {run_root.absolute()}")
        return EXIT_OK
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("run", "status", "model", "data", "strategy", "ranks", "steps", "loss", "held-out", "tokens/s"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            *(
                _cell(row[k])
                for k in (
                    "run",
                    "status",
                    "model",
                    "dataset",
                    "strategy",
                    "world_size",
                    "steps",
                    "train_loss_last",
                    "eval_loss",
                    "tokens_per_s",
                )
            )
        )
    Console().print(table)
    return EXIT_OK


def _row(run: Any) -> dict[str, Any]:
    from allranks import api
    from allranks.rundir import read_json

    metrics = read_json(run.metrics) or {}
    plan = read_json(run.plan) or {}
    status = "running" if api.running(run) else metrics.get("status", "unfinished")
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
