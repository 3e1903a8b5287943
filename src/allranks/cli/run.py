"""``allranks run``: run a spec, show its progress and then its summary.

Output is plain text if standard output is not a terminal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from allranks.analysis.machine_load import machine_notes
from allranks.analysis.metrics import before_and_after
from allranks.analysis.slow_links import link_notes
from allranks.cli.console import SafeConsole
from allranks.cli.data import template_text
from allranks.cli.options import any_path, echo, error_line, json_option, print_json, set_option
from allranks.cli.run_output import NO_OUTPUT, OUTPUTS, TRAINING, ProgramOutput, ProgramProgress, run_progress
from allranks.errors import EXIT_OK
from allranks.launch.outcome import RunResult
from allranks.planning.env_vars import EnvVar
from allranks.planning.rank_environment import secret_variables
from allranks.planning.records import LaunchPlan
from allranks.rundir.events import read_events
from allranks.rundir.files import open_append
from allranks.rundir.paths import RunDir
from allranks.rundir.progress import PROGRESS
from allranks.spec.records import RunSpec
from allranks.utils.formatting import (
    NO_VALUE,
    as_dict,
    as_list,
    finite_float,
    finite_int,
    format_bytes,
    format_count,
    format_duration,
)
from allranks.utils.text import format_value, sanitize

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
LOG_NOTE = " (parsed from the output of rank 0)"


class ProgressView:
    """Show a run's progress: a progress bar on a terminal, otherwise a line every few seconds."""

    def __init__(self, console: SafeConsole, plan: LaunchPlan) -> None:
        self._console, self._plan = console, plan
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._last_line = 0.0
        self._errors: dict[str, str] = {}
        self._rate: list[tuple[float, float]] = []  # seconds and tokens of all ranks, of the newest logged steps
        self._program = ProgramProgress()

    def __enter__(self) -> ProgressView:
        if self._console.is_terminal:
            self._bar = run_progress(self._console)
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=None, step="", loss="", speed="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def other_errors(self, told: str) -> list[str]:
        """Return a line for each error of a rank that `told`, the result's message, does not contain; each message once."""
        return [line for message, line in self._errors.items() if (message.splitlines() or [""])[0][:80] not in told]

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(escape(text), highlight=False, soft_wrap=not self._console.is_terminal)

    def event(self, event: dict[str, Any]) -> None:
        """Handle one event of any rank; show those of rank 0. Events come from files, so any field may be missing or malformed."""
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
            self.say(f"note     rank {format_value(event.get('rank'))}: {format_value(event.get('message'))}")
        handler = getattr(self, f"_on_{kind}", None) if isinstance(kind, str) else None
        if handler is not None and event.get("rank") == 0:
            handler(event)

        if kind == PROGRESS:
            self._show_program(event)

    def _show_program(self, event: dict[str, Any]) -> None:
        """Show the progress of a user's own program."""
        shown = self._program.take(event)
        if shown is None:
            return
        values: dict[str, Any] = {**shown}
        step, total = self._program.step, self._program.total
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=TRAINING, total=total, completed=step or 0, **values)
        elif time.monotonic() - self._last_line > PLAIN_INTERVAL_S or (total is not None and step == total):
            self._last_line = time.monotonic()
            self.say("  ".join(filter(None, shown.values())))

    def _on_start(self, event: dict[str, Any]) -> None:
        if self._bar and self._task is not None and self._plan.batch is None:
            self._bar.update(self._task, description="your program")

    def _on_phase(self, event: dict[str, Any]) -> None:
        name = format_value(event.get("name"))
        if "total_steps" in event:
            self._total = finite_int(event["total_steps"]) or 0
            if self._bar and self._task is not None:
                self._bar.update(self._task, total=self._total, completed=finite_int(event.get("first_step")) or 0)
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=PHASES.get(name, name))
        elif name in ("prepare", "build", "prove") or "total_steps" in event:
            self.say(PHASES.get(name, name))

    def _on_data(self, event: dict[str, Any]) -> None:
        cut, lost = finite_int(event.get("rows_truncated")), finite_int(event.get("rows_without_target"))
        left_out = f", {lost} rows dropped (prompt longer than max_length)" if lost else ""
        if event.get("template_reason"):
            self.say(f"template {sanitize(template_text(event))}")
        shortened = f", {cut} rows truncated ({_count(event, 'tokens_cut')} tokens)" if cut else ""
        for one in map(as_dict, as_list(event.get("sources"))):
            self.say(
                f"source   {format_value(one.get('source'))}: weight {format_value(one.get('weight'))}, "
                f"{_count(one, 'rows_train')} rows of an epoch, from {_count(one, 'rows')}"
            )
        identical = finite_int(event.get("rows_identical"))
        repeated = f", {identical} rows identical to another" if identical else ""
        self.say(
            f"data     {_count(event, 'rows_train')} rows to train on, {_count(event, 'rows_eval')} held out; "
            f"{_count(event, 'sequences')} sequences, {_formatted(event.get('fill'), '.0%')} full{shortened}{left_out}{repeated}; "
            f"{_count(event, 'tokens_trained')} of {_count(event, 'tokens_real')} tokens trained "
            f"[{format_value(event.get('how'))}, {_formatted(event.get('seconds'), '.1f')} s]"
        )
        warnings = event.get("warnings")
        for warning in warnings if isinstance(warnings, list) else []:
            self.say(f"warning  {format_value(warning)}")

    def _on_remark(self, event: dict[str, Any]) -> None:
        self.say(f"note     {format_value(event.get('message'))}")

    def _on_model(self, event: dict[str, Any]) -> None:
        threads = finite_int(event.get("threads"))
        self.say(
            f"model    {format_count(event.get('parameters'))} parameters, {format_count(event.get('parameters_trained'))} trained; "
            f"{format_value(event.get('device'))}, torch {format_value(event.get('torch'))}, "
            f"{format_count(threads)} thread{'s' * (threads != 1)} per rank"
        )

    def _on_proof(self, event: dict[str, Any]) -> None:
        count = finite_int(event.get("world_size"))
        answer = "1 rank answers" if count == 1 else f"{_count(event, 'world_size')} ranks answer"
        digest = format_value(event.get("weights_hash"))[:12]
        rows = _count(event, "rows_checked")
        self.say(f"proof    {answer}, weights equal ({digest}), rows disjoint and complete ({rows})")

    def _on_eval(self, event: dict[str, Any]) -> None:
        # JSON has no NaN: a loss that is there without a value was not finite
        parts = [f"loss {_formatted(event['loss'], '.4f', 'nan')}"] if "loss" in event else []
        if finite_float(event.get("perplexity")) is not None:
            parts.append(f"perplexity {_formatted(event['perplexity'], '.2f')}")
        if finite_float(event.get("accuracy")) is not None:
            parts.append(f"accuracy {_formatted(event['accuracy'], '.1%')}")
        if finite_float(event.get("exact_match")) is not None:
            parts.append(f"exact match {_formatted(event['exact_match'], '.1%')} of {_count(event, 'checked')}")
        self.say(f"held out {', '.join(parts) or 'no metrics'} (after step {_count(event, 'step')})")

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        mode, seconds = format_value(event.get("mode")), _formatted(event.get("seconds"), ".2f")
        self.say(f"saved    step {_count(event, 'step')} ({mode}, {seconds} s)")

    def _on_step(self, event: dict[str, Any]) -> None:
        step = finite_int(event.get("step"))
        seconds, tokens = finite_float(event.get("step_time_s")), finite_float(event.get("tokens"))
        if seconds is not None and tokens is not None:
            steps = finite_int(event.get("steps")) or 1
            self._rate = [*self._rate[-9:], (seconds * steps, tokens * self._plan.world_size)]
        loss = _formatted(event.get("loss"), ".4f", "nan" if "loss" in event else NO_VALUE)
        shown: dict[str, Any] = {
            "step": f"step {_count(event, 'step')}/{self._total}",
            "loss": f"loss {loss}",
            "speed": self._speed(),
        }
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step or 0, **shown)
        elif time.monotonic() - self._last_line > PLAIN_INTERVAL_S or step == self._total:
            self._last_line = time.monotonic()
            self.say("  ".join(shown.values()))

    def _speed(self) -> str:
        seconds = sum(s for s, _ in self._rate)
        return f"{sum(n for _, n in self._rate) / seconds:,.0f} tokens/s" if seconds > 0 else ""


def _count(event: dict[str, Any], name: str) -> str:
    """Format an integer without separators."""
    found = finite_int(event.get(name))
    return NO_VALUE if found is None else str(found)


def _formatted(value: Any, form: str, absent: str = NO_VALUE) -> str:
    found = finite_float(value)
    return absent if found is None else format(found, form)


def summary_table(metrics: dict[str, Any]) -> Table:
    """Return the summary of a run as a two-column table."""
    table = Table(
        title=escape(f"{format_value(metrics.get('run_name'))}: {format_value(metrics.get('status'))}"),
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_rows(metrics):
        table.add_row(name, escape(value))
    return table


def summary_rows(m: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the summary whose values are known."""
    nodes = finite_int(m.get("nodes"))
    ranks = f"{format_count(m.get('world_size'))} on {format_count(nodes)} node{'s' * (nodes != 1)}"
    network = as_dict(m.get("network")).get("line")
    if m.get("model") is None:  # a user's own program, whose steps, tokens or proofs are unknown
        ranks += f", your own program, {format_value(m.get('device'))}"
        known = [
            ("ranks", ranks),
            ("steps", _program_steps(m)),
            ("train loss", _change(m, "train_loss_first", "train_loss_last", trained="loss_not_finite" in m)),
            ("held-out loss", _change(m, "eval_loss_first", "eval_loss", trained=False)),
            ("speed", _program_speed(m)),
            ("time", format_duration(finite_float(m.get("wall_time_s")) or 0)),
            ("network", network),
        ]
        return [(name, sanitize(value)) for name, value in known if value]
    rows = [
        ("ranks", ", ".join([ranks, *(format_value(m.get(name)) for name in ("strategy", "device", "dtype"))])),
        ("proof", _proof(m)),
        ("steps", _steps(m)),
        ("train loss", _change(m, "train_loss_first", "train_loss_last", trained=bool(m.get("steps")))),
        ("held-out loss", _change(m, "eval_loss_first", "eval_loss", trained=bool(m.get("eval_s")))),
        ("best", _best(m)),
        ("ended early", _ended_early(m)),
        ("perplexity", _format_or_none(m.get("perplexity"), ".3f")),
        ("accuracy", _format_or_none(m.get("accuracy"), ".1%")),
        ("exact match", _change_of_share(m.get("exact_match_first"), m.get("exact_match"))),
        ("tokens", ", ".join(f"{format_count(m.get(f'tokens_{key}'))} {word}" for key, word in TOKEN_KINDS)),
        ("speed", _rate(m)),
        ("step time", _step_time(as_dict(m.get("step_time_s")))),
        ("epoch", _format_number(m.get("epoch_s"), lambda s: f"{format_duration(s)} of training")),
        ("network", network),
        ("MFU", _format_or_none(m.get("mfu"), ".1%")),
        ("peak memory", format_bytes(m.get("peak_memory_bytes")) + " per rank"),
        ("machine", "; ".join(machine_notes(m))),
        ("links", "; ".join(link_notes(m)[:3])),
    ]
    return [(name, sanitize(value)) for name, value in rows if value]


TOKEN_KINDS = (("real", "real"), ("trained", "trained"), ("padded", "padding"))


def _program_steps(m: dict[str, Any]) -> str | None:
    """Format the steps of a user's own program, if it has made them known."""
    steps = finite_int(m.get("steps")) if "progress_source" in m else None
    return None if steps is None else f"{steps}{LOG_NOTE if m['progress_source'] == 'log' else ''}"


def _program_speed(m: dict[str, Any]) -> str | None:
    known = [(m.get("tokens_per_s"), ",.0f", "tokens/s"), (m.get("steps_per_s"), ".3g", "steps/s")]
    return (
        ", ".join(f"{_formatted(value, form)} {unit}" for value, form, unit in known if finite_float(value) is not None)
        or None
    )


def _proof(m: dict[str, Any]) -> str:
    return "world size, equal weights, disjoint data: shown at step 0" if m.get("sync_proof") else "not reached"


def _steps(m: dict[str, Any]) -> str:
    attempts = finite_int(m.get("attempts")) or 1
    more = f" over {attempts} attempts" if attempts > 1 else ""
    wall = finite_float(m.get("wall_time_s"))
    return f"{_count(m, 'steps')}{more}" + (f"; the whole run took {format_duration(wall)}" if wall else "")


def _change(m: dict[str, Any], first: str, last: str, *, trained: bool) -> str | None:
    """Format a loss before and after training. A measured loss without a value was not finite."""
    before, after = finite_float(m.get(first)), finite_float(m.get(last))
    if after is None:
        end = "nan (not finite)" if trained and last in m else None
        return end if before is None or end is None else f"{before:.4f} -> {end}"
    return f"{after:.4f}" if before is None or before == after else f"{before:.4f} -> {after:.4f}"


def _best(m: dict[str, Any]) -> str | None:
    """Format the lowest held-out loss, if it is not the last one."""
    loss, last = finite_float(m.get("best_eval_loss")), finite_float(m.get("eval_loss"))
    return None if loss is None or loss == last else f"{loss:.4f} after step {_count(m, 'best_step')}"


def _ended_early(m: dict[str, Any]) -> str | None:
    early = as_dict(m.get("stopped_early"))
    return f"after step {_count(early, 'step')}: {format_value(early.get('reason'))}" if early else None


def _rate(m: dict[str, Any]) -> str | None:
    rate, each = finite_float(m.get("tokens_per_s")), finite_float(m.get("tokens_per_s_per_rank"))
    if rate is None:
        return None
    return f"{rate:,.0f} real tokens/s ({_formatted(each, ',.0f')} per rank), after 5 warm-up steps"


def _step_time(step: dict[str, Any]) -> str | None:
    if finite_float(step.get("median")) is None:
        return None
    return f"median {_formatted(step.get('median'), '.3f')} s, p90 {_formatted(step.get('p90'), '.3f')} s"


def _format_or_none(value: Any, form: str) -> str | None:
    return _format_number(value, lambda found: format(found, form))


def _format_number(value: Any, text: Callable[[float], str]) -> str | None:
    found = finite_float(value)
    return None if found is None else text(found)


def _change_of_share(first: Any, last: Any) -> str | None:
    before, after = finite_float(first), finite_float(last)
    if after is None:
        return None
    return f"{after:.1%}" if before is None or before == after else f"{before:.1%} -> {after:.1%}"


def samples_table(samples: list[dict[str, Any]]) -> Table:
    """Return a table of sample answers before and after training."""
    table = Table(title="Held-out questions", title_justify="left", show_lines=False)
    for name in ("question", "correct answer", "before", "after"):
        table.add_column(name, overflow="fold", max_width=48)
    for s in samples:
        table.add_row(*(escape(_one_line(s.get(k))) for k in ("prompt", "expected", "before", "after")))
    return table


def _one_line(text: Any) -> str:
    if text is None:
        return "-"
    for header in ("### Instruction:", "### Input:", "### Response:"):
        text = str(text).replace(header, "")
    flat = " ".join(sanitize(text).split())  # an untrained model says anything, also what a terminal obeys
    return flat if len(flat) <= 160 else flat[:157] + "..."


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
    from allranks.nodes import preflight

    if into is not None:
        return _follow_detached(into)
    checked = api.read_spec(spec, (*sets, "cluster.exclude_bad=true") if exclude_bad else sets)
    preflight.check_request(checked)
    if dry_run:
        show_dry_run(checked, as_json)
        return EXIT_OK
    run_dir, plan = api.prepare_run(checked, force=force)
    if detach:
        return _detach(run_dir, checked, plan, as_json)
    console = SafeConsole(stderr=as_json, quiet=as_json)
    result = run_with_progress(
        console,
        lambda live: api.launch(run_dir, checked, plan, attempt=1, observer=live),
        plan,
        run_dir.root,
        output or (OUTPUTS[0] if checked.script is not None else NO_OUTPUT),
    )
    return print_result(result, console, as_json)


def run_with_progress(
    console: SafeConsole,
    start: Callable[[ProgressView], RunResult],
    plan: LaunchPlan,
    folder: Path,
    output: str = NO_OUTPUT,
) -> RunResult:
    """Run with a progress display, and with the live output of some ranks."""
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
    view = ProgressView(console, plan)
    shown = (
        ProgramOutput(RunDir(folder), view.say, output) if output != NO_OUTPUT and not console.quiet else nullcontext()
    )
    with view as live, shown:
        result = start(live)
    for line in view.other_errors(result.message):
        view.say(line)
    return result


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
            console.print(escape(text), highlight=False, soft_wrap=True)
        console.print(f"run folder   {result.folder}", highlight=False, markup=False, soft_wrap=True)
        if run.report.exists():
            console.print(f"report       {run.report}", highlight=False, markup=False, soft_wrap=True)
        if traced := run.traced_ranks():
            text = f"traces       {run.traces} ({len(traced)} rank{'s' * (len(traced) > 1)}); next: allranks trace {result.folder}"
            console.print(escape(text), highlight=False, soft_wrap=True)
    if result.status != "succeeded":
        echo(f"allranks: {result.message}", err=True)
    elif "loss_not_finite" in result.metrics:
        echo(f"allranks: warning: {result.message}", err=True)
    return result.exit_code


def print_summary(console: SafeConsole, run: RunDir, metrics: dict[str, Any]) -> None:
    """Print sample answers and the summary."""
    samples = before_and_after(list(read_events(run.events_of(0))))
    if samples:
        console.print()
        console.print(samples_table(samples))
    if metrics["steps"] or metrics["status"] == "succeeded":
        console.print()
        console.print(summary_table(metrics))
        console.print()


def _detach(run_dir: RunDir, spec: RunSpec, plan: LaunchPlan, as_json: bool) -> int:
    """Start a run without following it; if its launcher needs a process, start one in the background."""
    from allranks.launch.launchers import get_launcher

    launcher = get_launcher(spec.cluster.launcher)
    if not launcher.needs_follower:
        launcher.start(run_dir, spec, plan, 1, {})
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
        echo(
            f"started {run_dir.name}; follow it with: allranks logs {run_dir.name} --follow; end it with: allranks cancel {run_dir.name}"
        )
    return EXIT_OK


def _follow_detached(folder: Path) -> int:
    """Run the background part of ``--detach`` on an existing run folder."""
    import msgspec

    from allranks import api
    from allranks.spec import load_spec
    from allranks.utils.inputs import read_regular

    run_dir = RunDir(folder)
    plan = msgspec.json.decode(read_regular(run_dir.plan), type=LaunchPlan)
    result = api.launch(run_dir, load_spec(run_dir.spec), plan, attempt=1, observer=api.NullObserver())
    echo(result.message)
    return result.exit_code
