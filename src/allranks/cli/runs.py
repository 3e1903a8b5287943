"""List, resume, cancel, checkpoint and report runs (``allranks runs``, ``resume``, ``cancel``, ``checkpoint``,
``report``)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks.cli.console import FittedColumn, print_fitted, table_console
from allranks.cli.options import (
    complete_runs,
    echo,
    json_option,
    print_json,
    root_option,
    run_argument,
    set_only_option,
)
from allranks.errors import EXIT_FAILED, EXIT_OK, RequestError
from allranks.rundir.files import read_record
from allranks.utils.text import NO_VALUE, as_dicts, finite_float, format_bytes, format_value

if TYPE_CHECKING:
    from allranks.rundir.paths import RunDir

# key of a row, and its column; those with the highest `drop` are left out first in a narrow terminal
COLUMNS = {
    "run": FittedColumn("run", fold_to=20),
    "status": FittedColumn("status"),
    "strategy": FittedColumn("strategy", fold_to=9, drop=2),
    "model": FittedColumn("model", fold_to=12, drop=1),
    "dataset": FittedColumn("data", fold_to=12, drop=3),
    "steps": FittedColumn("steps", right=True),
    "train_loss_last": FittedColumn("loss", right=True, drop=4),
    "eval_loss": FittedColumn("held-out", right=True, drop=5),
    "tokens_per_s": FittedColumn("tokens/s", right=True, drop=6),
    "world_size": FittedColumn("ranks", right=True, drop=7),
}


STATUSES = ("running", "succeeded", "stopped", "failed", "unfinished")
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Age(click.ParamType):
    """A length of time such as 90m, 12h, 7d or 2w, or a date; converted to seconds since 1970."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        with suppress(ValueError):
            if text[-1:] in UNITS_S and (amount := float(text[:-1])) >= 0:
                return time.time() - amount * UNITS_S[text[-1]]
            return datetime.fromisoformat(text).timestamp()
        self.fail(f"{text!r} is neither a length of time (90m, 12h, 7d, 2w) nor a date (2026-11-29)", param, ctx)


@click.group("runs", invoke_without_command=True)
@click.option("--status", type=click.Choice(STATUSES), multiple=True, help="Only runs with this status; repeatable.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N of them.")
@click.option("--since", type=Age(), metavar="TIME", help="Only runs started since: 90m, 12h, 7d, 2w ago, or a date.")
@click.option("--size", is_flag=True, help="Show the size of each run on disk.")
@root_option
@json_option
@click.pass_context
def runs_command(
    ctx: click.Context,
    status: tuple[str, ...],
    last: int | None,
    since: float | None,
    size: bool,
    run_root: Path,
    as_json: bool,
) -> int:
    """List the runs under the run root, oldest first. `allranks runs rm RUN...` removes runs."""
    from allranks.launch.launchers import local_agents
    from allranks.rundir.paths import list_runs

    if ctx.invoked_subcommand is not None:
        return EXIT_OK
    agents, runs = local_agents(), list_runs(run_root)
    if since is not None:
        runs = [run for run in runs if (finite_float(read_record(run.run_args).get("launched_at")) or 0.0) >= since]
    rows = [(run, _run_row(run, agents)) for run in runs]
    rows = [(run, row) for run, row in rows if not status or row["status"] in status][-(last or 0) :]
    if size:
        for run, row in rows:
            row["bytes"] = folder_bytes(run.root)
    shown = [row for _, row in rows]
    if as_json:
        print_json(shown)
        return EXIT_OK
    if not shown:
        echo(f"no {'such ' * bool(status or since)}runs under {run_root.absolute()}")
        return EXIT_OK
    columns = COLUMNS | ({"bytes": FittedColumn("size", right=True)} if size else {})
    cells = [[_cell(key, row[key]) for key in columns] for row in shown]
    for row, texts in zip(shown, cells, strict=True):
        if row["compared"]:
            texts[list(COLUMNS).index("strategy")] = f"{len(row['compared'])} compared"
    print_fitted(table_console(), list(columns.values()), cells, "; --json has all")
    if size:
        echo(f"{format_bytes(sum(row['bytes'] for row in shown))} in {len(shown)} run{'s' * (len(shown) != 1)}")
    return EXIT_OK


def folder_bytes(folder: Path) -> int:
    """Return the space that the files of a folder take on disk; files with several names count once."""
    sizes = dict[tuple[int, int], int]()
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed in the meantime
                entry = os.lstat(f"{parent}/{name}")
                sizes[entry.st_dev, entry.st_ino] = entry.st_blocks * 512
    return sum(sizes.values())


@runs_command.command("rm")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@root_option
def rm_command(runs: tuple[str, ...], yes: bool, run_root: Path) -> int:
    """Remove RUNs with their checkpoints, after asking. A running one is never removed."""
    import shutil

    from allranks import api
    from allranks.rundir.paths import find_run

    folders = list({run.root: run for run in (find_run(name, run_root) for name in runs)}.values())
    for run in folders:
        # any folder with a spec.yaml is accepted as a run by other verbs; here it could be a user's project
        if not (run.plan.is_file() and run.run_args.is_file() and run.events.is_dir()) or run.root.is_symlink():
            raise RequestError(f"{run.root}: is not a run folder that allranks has made; nothing was removed")
        if api.running(run):
            raise RequestError(f"run {run.name} is running; end it first with: allranks cancel {run.argument}")
    for run in folders:
        steps = run.checkpoint_steps()
        kept = f", checkpoints of step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}" if steps else ""
        echo(f"{run.name}  {format_bytes(folder_bytes(run.root))}{kept}")
    if not yes and not click.confirm(f"Remove {'it' if len(folders) == 1 else f'these {len(folders)} runs'}?"):
        echo("nothing was removed", message=True)
        return EXIT_FAILED
    for run in folders:
        shutil.rmtree(run.root)
        echo(f"removed {run.root}")
    return EXIT_OK


def _run_row(run: RunDir, agents: set[str]) -> dict[str, Any]:
    from allranks.launch.launchers import launcher_of
    from allranks.rundir.paths import status_of

    metrics = read_record(run.metrics)
    plan = read_record(run.plan)
    status = status_of(run, alive=launcher_of(run).is_running(run, agents))
    names = ("model", "dataset", "steps", "train_loss_last", "eval_loss", "tokens_per_s")
    figures = {n: metrics.get(n) for n in names}
    if figures["model"] is None and figures["dataset"] is None:  # the run has not ended
        figures |= _requested(run)
    compared = [format_value(one.get("name")) for one in as_dicts(read_record(run.compare).get("strategies"))]
    return {
        "run": run.name,
        "folder": str(run.root),
        "status": status,
        "compared": compared or None,
        # a user's own program has no batch
        "strategy": None if "batch" in plan and plan["batch"] is None else plan.get("strategy"),
        "world_size": plan.get("world_size"),
        **figures,
    }


def _requested(run: Any) -> dict[str, Any]:
    """Return model and data of the spec; None if it cannot be read, or for a user's own program."""
    from allranks.errors import SpecError
    from allranks.spec import load_spec
    from allranks.spec.data_sources import source_of

    try:
        spec = load_spec(run.spec)
    except SpecError:
        return {}
    return {"model": spec.model and spec.model.name, "dataset": spec.data and source_of(spec.data)}


def _cell(key: str, value: Any) -> str:
    if value is None:
        return NO_VALUE
    if key == "bytes":
        return format_bytes(value)
    if key in ("model", "dataset"):
        return Path(str(value)).name if str(value).startswith(("/", "~", ".")) else str(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) > 100 else f"{value:.4f}"
    return str(value)


@click.command("resume")
@run_argument
@set_only_option
@click.option(
    "--allow-inexact",
    is_flag=True,
    help=(
        "Allow a resume that is not bitwise: from a weights-only checkpoint, or with other ranks, strategy, data or "
        "batch."
    ),
)
@root_option
@json_option
def resume_command(run: str, sets: tuple[str, ...], allow_inexact: bool, run_root: Path, as_json: bool) -> int:
    """Resume RUN in its folder from its newest complete checkpoint."""
    from allranks import api
    from allranks.cli.run import follow_run

    return follow_run(
        lambda view: api.resume(run, allow_inexact=allow_inexact, sets=sets, run_root=run_root, observer=view), as_json
    )


@click.command("cancel")
@run_argument
@click.option("--now", is_flag=True, help="Stop at once, without finishing the step and writing a checkpoint.")
@root_option
def cancel_command(run: str, now: bool, run_root: Path) -> int:
    """Stop RUN after its current step and a full checkpoint, from which `resume` continues."""
    from allranks import api
    from allranks.rundir.paths import find_run

    run_dir = find_run(run, run_root)
    echo(f"{run_dir.name}: {api.cancel(run_dir, now=now)}", message=True)
    return EXIT_OK


@click.command("checkpoint")
@run_argument
@click.option(
    "--wait/--no-wait",
    default=True,
    show_default=True,
    help="Wait until the checkpoint is complete, and print its step.",
)
@root_option
def checkpoint_command(run: str, wait: bool, run_root: Path) -> int:
    """Have RUN, a running training, save a full checkpoint now, without stopping."""
    from allranks import api
    from allranks.rundir.paths import find_run

    run_dir = find_run(run, run_root)
    try:
        step = api.checkpoint(run_dir, wait=wait)
    except KeyboardInterrupt:
        echo(f"allranks: interrupted; {run_dir.name} goes on, and may still save the checkpoint", err=True)
        return EXIT_FAILED
    if step is None:
        echo(f"{run_dir.name}: asked its ranks for a full checkpoint", message=True)
    else:
        echo(f"{run_dir.name}: full checkpoint of step {step} in {run_dir.checkpoint(step)}")
    return EXIT_OK


@click.command("report")
@run_argument
@root_option
@json_option
def report_command(run: str, run_root: Path, as_json: bool) -> int:
    """Show the summary of RUN and rewrite its report.html from its events; of a comparison, its tables and
    comparison.html."""
    from allranks import api
    from allranks.analysis.diagnose.run_outcome import failure_headline
    from allranks.analysis.report.page import write_report
    from allranks.launch.outcome import current_metrics
    from allranks.rundir.files import write_json
    from allranks.rundir.paths import find_run
    from allranks.utils.filesystem import environment_error
    from allranks.utils.text import sanitize

    run_dir = find_run(run, run_root)
    if run_dir.compare.is_file():
        from allranks.cli.compare import show_comparison
        from allranks.experiments.compare import finished_comparison

        if (done := finished_comparison(run_dir)) is not None:
            return show_comparison(done, as_json)
    metrics = current_metrics(run_dir, alive=(alive := api.running(run_dir)))
    if metrics is None:
        raise RequestError(f"run {run_dir.name} has no events yet; there is nothing to report")
    not_written: OSError | None = None
    try:
        if not alive:
            write_json(run_dir.metrics, metrics)
        write_report(run_dir, metrics)
    except OSError as error:
        not_written = error
    if as_json:
        print_json(metrics)
    else:
        from allranks.cli.console import SafeConsole
        from allranks.cli.run_output import print_summary

        console = SafeConsole()
        print_summary(console, run_dir, metrics)
        if metrics.get("message"):
            console.say(sanitize(metrics["message"]))
        if diagnosis := failure_headline(metrics, run_dir.name):
            console.say(sanitize(diagnosis))
        if not_written is None:
            console.print(f"report  {run_dir.report}", highlight=False, markup=False, soft_wrap=True)
    if not_written is not None:
        raise environment_error(not_written)
    return EXIT_OK if metrics["status"] in ("succeeded", "running") else EXIT_FAILED
