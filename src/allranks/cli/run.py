"""``allranks run``: the whole way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from allranks.cli.options import any_path, json_option, print_json, set_option
from allranks.cli.show import Live, samples_table, summary_table
from allranks.envpolicy import EnvVar, secrets
from allranks.errors import EXIT_OK
from allranks.launch.outcome import RunResult
from allranks.observe.events import read_events
from allranks.observe.samples import before_and_after
from allranks.planning import LaunchPlan
from allranks.rundir import RunDir
from allranks.spec.records import RunSpec


@click.command("run")
@click.argument("spec", type=any_path)
@set_option
@click.option("--dry-run", is_flag=True, help="Show the plan and stop: the same as `allranks plan`.")
@click.option("--exclude-bad", is_flag=True, help="Slurm: go on without nodes that fail, if the spec allows fewer.")
@click.option("--force", is_flag=True, help="Start it even if a rank's memory cannot be enough.")
@click.option("--detach", is_flag=True, help="Start it, print its name, and go.")
@json_option
@click.option("--into", type=any_path, hidden=True)
def run_command(
    spec: Path,
    sets: tuple[str, ...],
    dry_run: bool,
    exclude_bad: bool,
    force: bool,
    detach: bool,
    as_json: bool,
    into: Path | None,
) -> int:
    """Plan, check, launch, follow and report the run that SPEC describes."""
    from allranks import api, preflight
    from allranks.cli.plan import show_request

    if into is not None:
        return _follow_detached(into)
    checked = api.read_spec(spec, (*sets, "cluster.exclude_bad=true") if exclude_bad else sets)
    preflight.check_request(checked)
    if dry_run:
        show_request(checked, as_json)
        return EXIT_OK
    run_dir, plan = api.prepare_run(checked, force=force)
    if detach:
        return _detach(run_dir, checked, plan, as_json)
    console = Console(stderr=as_json, quiet=as_json)
    result = watch(
        console, lambda live: api.launch(run_dir, checked, plan, attempt=1, observer=live), plan, run_dir.root
    )
    return conclude(result, console, as_json)


def watch(console: Console, start: Callable[[Live], RunResult], plan: LaunchPlan, folder: Path) -> RunResult:
    """Show a run while it goes on."""
    threads = next((e for e in plan.environment if e.name == "OMP_NUM_THREADS"), None)
    nodes = f"{len(plan.nodes)} node{'s' * (len(plan.nodes) > 1)}"
    lines = [
        f"run      {folder.name}",
        f"plan     {plan.world_size} rank{'s' * (plan.world_size != 1)} on {nodes}, {plan.work}",
        f"threads  {_threads(threads)}" if threads else "",
        *(f"note     {warning}" for warning in plan.warnings),
    ]
    for line in filter(None, lines):
        console.print(escape(line), highlight=False, soft_wrap=not console.is_terminal)
    with Live(console, plan) as live:
        return start(live)


def _threads(decided: EnvVar) -> str:
    why = decided.reason.split(";")[0]
    return why if decided.value is None else f"OMP_NUM_THREADS={decided.value} ({why})"


def conclude(result: RunResult, console: Console, as_json: bool) -> int:
    """The end of a run, for a person or for a program."""
    if as_json:
        print_json(result.metrics)
    else:
        run = RunDir(Path(result.folder))
        show_end(console, run, result.metrics)
        for item in (result.metrics.get("network") or {}).get("findings", []):
            text = f"network      {item['host']}: {item['text']}"
            console.print(escape(text), highlight=False, soft_wrap=True)
        console.print(f"run folder   {result.folder}", highlight=False, soft_wrap=True)
        if run.report.exists():
            console.print(f"report       {run.report}", highlight=False, soft_wrap=True)
        if traced := run.traced_ranks():
            text = f"traces       {run.traces} ({len(traced)} rank{'s' * (len(traced) > 1)}); next: allranks trace {result.folder}"
            console.print(escape(text), highlight=False, soft_wrap=True)
    if result.status != "succeeded":
        click.echo(f"allranks: {result.message}", err=True)
    return result.exit_code


def show_end(console: Console, run: RunDir, metrics: dict[str, Any]) -> None:
    """Sample answers and the summary."""
    samples = before_and_after(list(read_events(run.events_of(0))))
    if samples:
        console.print()
        console.print(samples_table(samples))
    if metrics["steps"] or metrics["status"] == "succeeded":
        console.print()
        console.print(summary_table(metrics))
        console.print()


def _detach(run_dir: RunDir, spec: RunSpec, plan: LaunchPlan, as_json: bool) -> int:
    """Slurm follows its own jobs; a local run gets a follower in the background."""
    if spec.cluster.launcher == "slurm":
        from allranks.launch.jobs import LAUNCHERS

        LAUNCHERS["slurm"](run_dir, spec, plan, 1, {})
    else:
        with (run_dir.logs / "launcher.log").open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "allranks.cli.main", "run", str(run_dir.spec), "--into", str(run_dir.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **secrets(plan.environment)},  # the run folder, which it reads, keeps none
            )
    if as_json:
        print_json({"run": run_dir.name, "folder": str(run_dir.root)})
    else:
        click.echo(
            f"started {run_dir.name}; follow it with: allranks logs {run_dir.name} --follow; end it with: allranks cancel {run_dir.name}"
        )
    return EXIT_OK


def _follow_detached(folder: Path) -> int:
    """The second half of ``--detach``: in the background, on a run folder that is already made."""
    import msgspec

    from allranks import api
    from allranks.spec import load_spec

    run_dir = RunDir(folder)
    plan = msgspec.json.decode(run_dir.plan.read_bytes(), type=LaunchPlan)
    result = api.launch(run_dir, load_spec(run_dir.spec), plan, attempt=1, observer=api.Silent())
    click.echo(result.message)
    return result.exit_code
