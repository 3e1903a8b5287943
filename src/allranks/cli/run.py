"""``allranks run``: run a spec, show its progress and then its summary.

Output is plain text if standard output is not a terminal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import Progress, TaskID

from allranks.cli.console import SafeConsole
from allranks.cli.data import template_text
from allranks.cli.options import any_path, echo, error_line, json_option, print_json, set_option, warn
from allranks.cli.run_output import (
    NO_OUTPUT,
    OUTPUTS,
    TRAINING,
    ProgramOutput,
    ProgramProgress,
    filled,
    n_of,
    print_summary,
    run_progress,
)
from allranks.errors import EXIT_OK
from allranks.planning.rank_environment import secret_variables
from allranks.planning.records import LaunchPlan
from allranks.rundir.events import CACHE_STATES, PROGRESS
from allranks.rundir.files import open_append
from allranks.rundir.paths import RunDir
from allranks.utils.text import NO_VALUE, as_dict, as_list, finite_float, finite_int, format_value, sanitize

if TYPE_CHECKING:
    from allranks.launch.outcome import RunResult
    from allranks.launch.preview import PreparedRun
    from allranks.planning.env_vars import EnvVar

PHASES = {
    "prepare": "preparing data",
    "build": "building the model",
    "prove": "verifying the ranks",
    "train": TRAINING,
    "evaluate": "evaluating",
    "save": "saving",
    "done": "done",
}
PLAIN_INTERVAL_S = 10.0
LINES = {
    "remark": "note     {message}",
    "model": "model    {parameters:,d} parameters, {parameters_trained:,d} trained; {device}, torch {torch}, {threads} "
    "per rank",
    "proof": "proof    {ranks}, weights equal ({digest}), rows disjoint and complete ({rows_checked:d})",
    "checkpoint": "saved    step {step:d} ({mode}, {seconds:.2f} s)",
    "checkpoint_interval": "note     checkpoint every {every_s:.0f} s: a save stops the training for {cost_s:.2g} s, "
    "and one failure in {mtbf_h:g} h is expected",
}
"""Lines of events of rank 0."""


class ProgressView:
    """Show a run's progress, until the block ends: a progress bar on a terminal, otherwise a line every few seconds.

    Args:
        output: ranks whose output is shown live, one of `OUTPUTS`; None: rank 0 of a user's own program.
    """

    def __init__(self, console: SafeConsole, output: str | None = None) -> None:
        self._console, self._output = console, output
        self._stack = ExitStack()
        self._ranks, self._own_program = 1, False
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._last_line = 0.0
        self._errors: dict[str, str] = {}
        self._rate: list[tuple[float, float]] = []  # seconds and tokens of all ranks, of the newest logged steps
        self._program = ProgramProgress()
        self._handlers: dict[object, Callable[[dict[str, Any]], None]] = {
            "phase": self._on_phase,
            "data": self._on_data,
            "eval": self._on_eval,
            "step": self._on_step,
        }

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, run_dir: RunDir, launch_plan: LaunchPlan) -> None:
        """Show what is started, then the bar."""
        plan, self._ranks, self._own_program = launch_plan, launch_plan.world_size, launch_plan.batch is None
        nodes = f"{len(plan.nodes)} node{'s' * (len(plan.nodes) > 1)}"
        self.say(f"run      {run_dir.name}")
        self.say(f"plan     {plan.world_size} rank{'s' * (plan.world_size != 1)} on {nodes}, {plan.work}")
        for item in plan.environment:
            if item.name == "OMP_NUM_THREADS":
                self.say(f"threads  {_threads(item)}")
        for warning in plan.warnings:
            self.warn(warning)
        output = self._output or (OUTPUTS[0] if self._own_program else NO_OUTPUT)
        if output != NO_OUTPUT and not self._console.quiet:
            self._stack.enter_context(ProgramOutput(run_dir, self.say, output))
        if self._console.is_terminal:
            self._bar = self._stack.enter_context(run_progress(self._console))
            self._task = self._bar.add_task("starting the ranks", total=None, step="", loss="", speed="")

    def say_other_errors(self, message: str) -> None:
        """Print a line for each error of a rank that the result's message does not contain; each error once."""
        for error, line in self._errors.items():
            if (error.splitlines() or [""])[0][:80] not in message:
                self.say(line)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.say(text)

    def warn(self, text: str) -> None:
        """Print a warning; with --json on standard error, where nothing else is printed."""
        if self._console.quiet:
            warn([text])
        else:
            self.say(f"note     {text}")

    def event(self, event: dict[str, Any]) -> None:
        """Handle one event of any rank; show those of rank 0. Events come from files, so any field may be missing or
        malformed."""
        kind = event.get("event")
        if kind == "error" and not event.get("echo"):
            # the end comes within seconds and names one of them; several ranks may raise the same error
            self._errors.setdefault(format_value(event.get("message")), error_line(event))
        if kind == "hang":
            ranks = ", ".join(map(str, as_list(event.get("ranks"))))
            host = format_value(event.get("host"))
            self.say(
                f"hang     {f'rank {ranks} on {host} stalled' if ranks else 'all ranks are waiting'}; stopping the run"
            )
        if kind == "warning":
            self.warn(f"rank {format_value(event.get('rank'))}: {format_value(event.get('message'))}")
        if event.get("rank") == 0 and isinstance(kind, str):
            if kind == "start" and self._own_program:
                self._update(description="your program")
            if kind in self._handlers:
                self._handlers[kind](event)
            if kind in LINES:
                shown = {
                    "ranks": n_of(event.get("world_size"), "rank") + " answer" + "s" * (event.get("world_size") == 1),
                    "digest": format_value(event.get("weights_hash"))[:12],
                    "threads": n_of(event.get("threads"), "thread"),
                }
                self.say(filled(LINES[kind], {**event, **shown}))
        if kind == PROGRESS:
            self._show_program(event)

    def _show_program(self, event: dict[str, Any]) -> None:
        """Show the progress of a user's own program."""
        shown = self._program.take(event)
        if shown is None:
            return
        total = self._program.total
        self._update(description=TRAINING, total=total)
        self._advance(self._program.step, total, shown)

    def _update(self, **values: Any) -> bool:
        """Change the bar; return whether there is one."""
        if self._bar is None or self._task is None:
            return False
        self._bar.update(self._task, **values)
        return True

    def _advance(self, step: int | None, total: int | None, shown: dict[str, str]) -> None:
        """Show a step in the bar; without one in a line every few seconds, and at the last step."""
        if self._update(completed=step or 0, **shown):
            return
        if time.monotonic() - self._last_line > PLAIN_INTERVAL_S or (total is not None and step == total):
            self._last_line = time.monotonic()
            self.say("  ".join(filter(None, shown.values())))

    def _on_phase(self, event: dict[str, Any]) -> None:
        name = format_value(event.get("name"))
        if "total_steps" in event:
            self._total = finite_int(event["total_steps"]) or 0
            self._update(total=self._total, completed=finite_int(event.get("first_step")) or 0)
        shown = PHASES.get(name, name)
        if not self._update(description=shown) and (name in ("prepare", "build", "prove") or "total_steps" in event):
            self.say(shown)

    def _on_data(self, event: dict[str, Any]) -> None:
        if event.get("template_reason"):
            self.say(f"template {sanitize(template_text(event))}")
        for one in map(as_dict, as_list(event.get("sources"))):
            line = "source   {source}: weight {weight}, {rows_train:d} rows of an epoch, from {rows:d}"
            self.say(filled(line, one))
        cut = ", {rows_truncated:d} rows truncated ({tokens_cut:d} tokens)"
        parts = {
            "rows_truncated": cut,
            "rows_without_target": ", {rows_without_target:d} rows dropped (prompt longer than max_length)",
            "rows_identical": ", {rows_identical:d} rows identical to another",
        }
        line = "{rows_train:d} rows to train on, {rows_eval:d} held out; {sequences:d} sequences, {fill:.0%} full"
        line += "".join(text for key, text in parts.items() if finite_int(event.get(key)))
        line += "; {tokens_trained:d} of {tokens_real:d} tokens trained [{prepared}, {seconds:.1f} s]"
        prepared = CACHE_STATES.get(str(event.get("how")), event.get("how"))
        self.say("data     " + filled(line, {**event, "prepared": prepared}))
        for warning in as_list(event.get("warnings")):
            self.warn(format_value(warning))

    def _on_eval(self, event: dict[str, Any]) -> None:
        # JSON has no NaN: a loss that is there without a value was not finite
        loss = filled("loss {loss:.4f}", event, needed=True) or "loss nan" * ("loss" in event)
        more = (
            "perplexity {perplexity:.2f}",
            "accuracy {accuracy:.1%}",
            "exact match {exact_match:.1%} of {checked:d}",
        )
        parts = filter(None, [loss, *(filled(text, event, needed=True) for text in more)])
        self.say(f"held out {', '.join(parts) or 'no metrics'} {filled('(after step {step:d})', event)}")

    def _on_step(self, event: dict[str, Any]) -> None:
        step = finite_int(event.get("step"))
        seconds, tokens = finite_float(event.get("step_time_s")), finite_float(event.get("tokens"))
        if seconds is not None and tokens is not None:
            steps = finite_int(event.get("steps")) or 1
            self._rate = [*self._rate[-9:], (seconds * steps, tokens * self._ranks)]
        loss = filled("loss {loss:.4f}", event, needed=True) or ("loss nan" if "loss" in event else f"loss {NO_VALUE}")
        shown = {
            "step": filled("step {step:d}", event) + f"/{self._total}",
            "loss": loss + filled(" + router {router_aux_loss:.4f}", event, needed=True),
            "speed": self._speed(),
        }
        self._advance(step, self._total, shown)

    def _speed(self) -> str:
        seconds = sum(s for s, _ in self._rate)
        return f"{sum(n for _, n in self._rate) / seconds:,.0f} tokens/s" if seconds > 0 else ""


@click.command("run")
@click.argument("spec", type=any_path)
@set_option
@click.option("--dry-run", is_flag=True, help="Show the plan and stop, like `allranks plan`.")
@click.option(
    "--exclude-bad", is_flag=True, help="Slurm: continue without nodes that fail the checks, if the spec allows fewer."
)
@click.option("--force", is_flag=True, help="Start even if the estimated memory per rank exceeds the limit.")
@click.option("--detach", is_flag=True, help="Start the run, print its name and return.")
@click.option(
    "--output",
    type=click.Choice(OUTPUTS),
    help="Ranks whose output is shown live (default: rank0 for `script`, else none).",
)
@json_option
@click.option("--into", type=any_path, hidden=True)
def run_command(
    spec: Path,
    sets: tuple[str, ...],
    dry_run: bool,
    exclude_bad: bool,
    force: bool,
    detach: bool,
    output: str | None,
    as_json: bool,
    into: Path | None,
) -> int:
    """Plan, check, launch, follow and report the run described by SPEC."""
    from allranks import api
    from allranks.cli.plan import show_dry_run

    if into is not None:
        return _follow_detached(into)
    prepared = api.prepare(spec, (*sets, "cluster.exclude_bad=true") if exclude_bad else sets)
    if dry_run:
        show_dry_run(prepared, as_json)
        return EXIT_OK
    if detach:
        return _detach(*api.create(prepared, force=force), prepared, as_json)
    return follow_run(lambda view: api.run(prepared, observer=view, force=force), as_json, output)


def follow_run(start: Callable[[ProgressView], RunResult], as_json: bool, output: str | None = None) -> int:
    """Run with a progress display, and print the result as text or JSON."""
    console = SafeConsole(stderr=as_json, quiet=as_json)
    with ProgressView(console, output) as view:
        result = start(view)
    view.say_other_errors(result.message)
    return print_result(result, console, as_json)


def _threads(decided: EnvVar) -> str:
    why = decided.reason.split(";")[0].strip()
    why += ")" * (why.count("(") - why.count(")"))
    return (
        f"OMP_NUM_THREADS on each node: {why}" if decided.value is None else f"OMP_NUM_THREADS={decided.value}: {why}"
    )


def print_result(result: RunResult, console: SafeConsole, as_json: bool) -> int:
    """Print the result of a run as text or JSON."""
    if as_json:
        print_json(result.metrics)
    else:
        run = RunDir(Path(result.folder))
        print_summary(console, run, result.metrics)
        for item in (result.metrics.get("network") or {}).get("findings", []):
            text = f"network      {item['host']}: {item['text']}"
            console.say(text)
        console.print(f"run folder   {result.folder}", highlight=False, markup=False, soft_wrap=True)
        if run.report.exists():
            console.print(f"report       {run.report}", highlight=False, markup=False, soft_wrap=True)
        if traced := run.traced_ranks():
            text = (
                f"traces       {run.traces} ({len(traced)} rank{'s' * (len(traced) > 1)}); next: allranks trace "
                f"{result.folder}"
            )
            console.say(text)
    if result.status != "succeeded":
        echo(f"allranks: {result.message}", err=True)
    elif "loss_not_finite" in result.metrics:
        echo(f"allranks: warning: {result.message}", err=True)
    return result.exit_code


def _detach(run_dir: RunDir, plan: LaunchPlan, prepared: PreparedRun, as_json: bool) -> int:
    """Start a run without following it; if its launcher needs a process, start one in the background."""
    if not prepared.launcher.needs_follower:
        prepared.launcher.start(run_dir, prepared.spec, plan, 1, {})
    else:
        with os.fdopen(open_append(run_dir.logs / "launcher.log"), "ab") as log:
            subprocess.Popen(
                [sys.executable, "-m", "allranks.cli.main", "run", str(run_dir.spec), "--into", str(run_dir.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **secret_variables(plan.environment)},  # the run folder, which it reads, keeps none
            )
    if as_json:
        print_json({"run": run_dir.name, "folder": str(run_dir.root)})
    else:
        follow, cancel = f"allranks logs {run_dir.argument} --follow", f"allranks cancel {run_dir.argument}"
        echo(f"started {run_dir.name}; follow it with: {follow}; end it with: {cancel}", message=True)
    return EXIT_OK


def _follow_detached(folder: Path) -> int:
    """Run the background part of ``--detach`` on an existing run folder."""
    from allranks import api
    from allranks.planning.records import load_plan
    from allranks.spec import load_spec

    run_dir = RunDir(folder)
    result = api.launch(run_dir, load_spec(run_dir.spec), load_plan(run_dir), attempt=1, observer=api.NullObserver())
    echo(result.message)
    return result.exit_code
