"""Make a run folder, start a run, follow it to its end; resume and cancel runs, and find out which ones are running.

A run is followed by passing its events to an observer and turning signals into an orderly stop. No display ends a run.

How ranks start: `launch` calls the launcher (``LocalLauncher`` in ``launch/launchers.py``, ``launch/hosts.py``,
``launch/slurm/launcher.py``), which starts one agent per node (``launch/agent.py``), under Slurm by the batch script's
driver (``launch/driver.py``). An agent starts ``python -m allranks.launch.rank`` per rank, in torchrun's environment;
``launch/local_job.py`` and ``launch/rank_processes.py`` wait for them and end them.
"""

from __future__ import annotations

import logging
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from allranks.analysis.stragglers import StragglerDetector
from allranks.errors import CheckpointError, DataError, RequestError
from allranks.launch import restarts, resumption
from allranks.launch.launchers import Launcher, get_launcher, launcher_of
from allranks.launch.notification import notify
from allranks.launch.outcome import RunResult, finalize_run
from allranks.launch.preview import PreparedRun, check_start, plan_with_model, planning_facts, sequence_problem
from allranks.launch.stop_limit import StopLimit
from allranks.launch.supervisor import LaunchedJob
from allranks.nodes import preflight
from allranks.planning import memory, rank_environment
from allranks.planning.records import LaunchPlan, load_plan
from allranks.rundir import checkpoints
from allranks.rundir.events import EventTail
from allranks.rundir.files import read_record, write_json, write_text_atomic
from allranks.rundir.paths import RunDir, create_run, find_run
from allranks.spec import RunSpec, load_spec, spec_to_yaml
from allranks.utils.redaction import redact_arguments
from allranks.version import __version__

POLL_S = 0.1
PROGRAM_MARGIN_S = 10.0
STOP_GRACE_S = 600.0  # TERM, HUP and USR1, after which nobody waits at a terminal: at least


class Observer(Protocol):
    """Receiver of a run's events and messages, such as a display.

    If it has a method ``start(run_dir, launch_plan)``, that is called before the ranks are started.
    """

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


class NullObserver:
    """Observer that ignores all events."""

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


class GuardedObserver:
    """Forward to another observer. One that fails (a closed terminal, a full disk) is disabled and logged once, with
    `failure` as the reason: whatever shows a run must not end it."""

    def __init__(self, observer: Observer, log: Callable[[str], object] | None = None) -> None:
        self._observer, self._log = observer, log
        self.failure: str | None = None

    def start(self, run_dir: RunDir, launch_plan: LaunchPlan) -> None:
        """Show what is started. Never raises."""
        if (show := getattr(self._observer, "start", None)) is not None:
            self._guarded(show, run_dir, launch_plan)

    def event(self, event: dict[str, Any]) -> None:
        self._guarded(self._observer.event, event)

    def say(self, text: str) -> None:
        self._guarded(self._observer.say, text)

    def _guarded(self, show: Callable[..., None], *what: object) -> None:
        if self.failure is not None:
            return
        try:
            show(*what)
        except Exception as error:  # noqa: BLE001
            self.failure = f"the display failed and was turned off, the run continues: {type(error).__name__}: {error}"
            if self._log is not None:
                with suppress(Exception):
                    self._log(self.failure)


class SignalCounts:
    """Counters of received signals."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.stops = 0
        self.first = ""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number).name
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.stops += 1


@contextmanager
def count_signals() -> Iterator[SignalCounts]:
    """Count INT, TERM, HUP and USR1 in the main thread; one that the caller ignores (HUP under nohup) stays ignored."""
    counts = SignalCounts()
    if threading.current_thread() is not threading.main_thread():
        yield counts
        return
    before = {
        number: signal.signal(number, counts)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield counts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(
    job: LaunchedJob,
    tail: EventTail,
    observer: Observer,
    counts: SignalCounts,
    limit: Callable[[float], StopLimit],
    program_grace_s: float | None = None,
) -> int:
    """Follow a job until it has ended.

    Args:
        observer: an observer that does not raise (`allranks.launch.runs.GuardedObserver`).
        limit: makes the limit of a stop, of at least so many seconds.
        program_grace_s: how long the agents give a user's own program after SIGTERM; None if the ranks train.

    Returns:
        Its exit code.
    """  # fmt: skip
    slow = StragglerDetector()
    stop: StopLimit | None = None
    killed_at: float | None = None
    interrupted, shown = False, set[tuple[str, bool]]()
    while (code := job.poll()) is None:
        _show_events(tail.new(), observer, slow)
        if news := job.news():
            observer.say(news)
        now = time.monotonic()
        if (counts.interrupts or counts.stops) and (stop is None or (counts.interrupts and not interrupted)):
            first, interrupted = stop is None, bool(counts.interrupts)
            least_s = job.interrupt_grace_s if interrupted else STOP_GRACE_S
            if program_grace_s is not None:  # the agents count it; this is for agents that do not
                least_s = program_grace_s + max(job.interrupt_grace_s, PROGRAM_MARGIN_S)
            stop = limit(least_s)
            if first:
                job.request_stop("interrupted" if interrupted else f"allranks received {counts.first}")
        if stop is not None and killed_at is None:
            expired = stop.expired(now)
            text = stop.text
            if program_grace_s is not None:
                text = f"SIGTERM to every rank; what still runs after {program_grace_s:g} s (script.grace_s) is killed"
            # the limit is measured anew, and after the checkpoint the phase is again that of steps
            if (stop.work, interrupted) not in shown:
                shown.add((stop.work, interrupted))
                observer.say(f"stopping: {text}{'; Ctrl-C again kills them now' if interrupted else ''}")
            if expired or counts.interrupts > 1:
                killed_at = now
                job.kill()
        if killed_at is not None and now > killed_at + 1.0:
            job.kill_all_processes()
        time.sleep(POLL_S)
    _show_events(tail.rest(), observer, slow)
    return code


def _show_events(events: list[dict[str, Any]], observer: Observer, slow: StragglerDetector) -> None:
    for event in events:
        observer.event(event)
        for text in slow.take(event):
            observer.say(text)


def create(prepared: PreparedRun, *, force: bool = False) -> tuple[RunDir, LaunchPlan]:
    """Check this machine, and create the run folder with the request and the plan.

    Raises:
        DataError: a small file has fewer sequences than there are ranks.
        EnvironmentNotAble: this machine lacks something, or (unless `force`) a rank would not fit in memory.
    """
    spec, launcher = prepared.spec, prepared.launcher
    launcher.require_available()
    if not force:
        memory.require(prepared.fit)
    launch_plan = prepared.plan if force else prepared.plan_with_memory
    report = check_start(prepared, launch_plan)
    if not report.ok:  # what is left does not prevent a run
        from allranks.nodes.preflight.runner import failure_lines  # with all checks

        launch_plan = msgspec.structs.replace(launch_plan, warnings=[*launch_plan.warnings, *failure_lines([report])])
    if problem := sequence_problem(prepared):
        raise DataError(problem)
    run_dir = create_run(spec.run_root, spec.name, group_readable=spec.cluster.group_readable)
    with ExitStack() as refused:
        refused.callback(shutil.rmtree, run_dir.root, ignore_errors=True)
        write_request(run_dir, spec, launch_plan)
        write_json(run_dir.preflight, [msgspec.to_builtins(report)])
        write_text_atomic(run_dir.preflight_text, report.line() + "\n")
        notes = launcher.prepare(run_dir, spec)
        refused.pop_all()
    return run_dir, msgspec.structs.replace(launch_plan, warnings=[*launch_plan.warnings, *notes])


def write_request(run_dir: RunDir, spec: RunSpec, launch_plan: LaunchPlan) -> None:
    """Write the launcher's files, spec.yaml, plan.json and run_args.json without secrets."""
    get_launcher(spec.cluster.launcher).write_files(run_dir, spec, launch_plan)
    earlier, command = read_record(run_dir.run_args), redact_arguments(sys.argv)
    variables = rank_environment.with_hidden_secrets(launch_plan.environment)
    write_text_atomic(run_dir.spec, spec_to_yaml(rank_environment.without_secrets(spec)))
    write_json(run_dir.plan, msgspec.to_builtins(msgspec.structs.replace(launch_plan, environment=variables)))
    request = {
        "command": command,
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "allranks": __version__,
        "started": preflight.stamp(),
        "launched_at": time.time(),
    }
    again = {**earlier, "resumed": [*earlier.get("resumed", []), request]}
    write_json(run_dir.run_args, again if earlier else request)


def launch(
    run_dir: RunDir,
    spec: RunSpec,
    launch_plan: LaunchPlan,
    *,
    attempt: int,
    observer: Observer,
    resume: dict[str, Any] | None = None,
    launcher: Launcher | None = None,
) -> RunResult:
    """Start an attempt and wait until it ends; start again by itself where the cause of a failure allows it.

    Args:
        launcher: starts the attempts, instead of a new launcher of the spec's kind.
    """
    tail = EventTail(run_dir, launch_plan.world_size)
    tail.skip_existing()
    shown = GuardedObserver(observer, logging.getLogger(__name__).warning)
    shown.start(run_dir, launch_plan)
    launcher, decided = launcher or get_launcher(spec.cluster.launcher), list[restarts.Restart]()
    with count_signals() as counts:
        while True:
            job = launcher.start(run_dir, spec, launch_plan, attempt, resume or {})
            limit = partial(StopLimit, run_dir, launch_plan)
            code = follow(job, tail, shown, counts, limit, launch_plan.grace_s)
            with suppress(RequestError):
                launch_plan = load_plan(run_dir)  # the driver makes a new one if it excludes nodes
            end, interrupted = job.end(), counts.interrupts + counts.stops > 0
            may_restart = launcher.restarts_here and not interrupted
            result = finalize_run(
                run_dir,
                spec,
                launch_plan,
                code,
                interrupted=interrupted,
                scheduler_end_reason=job.end_reason(),
                end=end,
                restarts_before=decided if may_restart else None,
                restart_problem=launcher.restart_problem(end) if end is not None else "",
            )
            result = msgspec.structs.replace(result, interrupted=counts.interrupts > 0, signalled=interrupted)
            one = result.restart
            if not spec.cluster.launched_by.uses_slurm:  # there the driver does, also if nobody follows
                notify(spec, result, shown.say)
            for line in one.lines[one.action == "stop" :] if one is not None else ():
                shown.say(line)  # the result ends with the last failure
            if one is None or one.action == "stop" or counts.interrupts + counts.stops > 0:
                if result.status == "failed" and (
                    text := launcher.commands_to_continue(run_dir, spec, launch_plan, attempt + 1)
                ):
                    shown.say(text)
                return result
            decided.append(one)
            attempt, resume = attempt + 1, one.resume_args(spec)


def resume(
    name: str | Path,
    *,
    allow_inexact: bool = False,
    sets: Sequence[str] = (),
    run_root: str | Path = "runs",
    observer: Observer | None = None,
) -> RunResult:
    """Resume a run from its newest complete checkpoint, in the same folder; one without optimizer state is used only
    with `allow_inexact`, or if there is no other, and then refused.

    Raises:
        RequestError: no such run, it is complete, or the request does not fit its newest checkpoint, or only with
            `allow_inexact`; or another version of allranks wrote the plan or the checkpoint.
        CheckpointError: no checkpoint is whole.
    """
    run_dir, observer = find_run(str(name), run_root), observer or NullObserver()
    resumption.require_same_schema(run_dir)
    before, requested = load_spec(run_dir.spec), load_spec(run_dir.spec, sets)
    machine = planning_facts(requested)
    if running(run_dir):
        raise RequestError(f"run {run_dir.name} is still running; end it first")
    if before.script is not None:
        raise RequestError(
            f"run {run_dir.name} runs your own program, whose checkpoints allranks does not know; start it again with: "
            f"allranks run {run_dir.spec}"
        )
    try:
        step, problems = checkpoints.newest_checkpoint(run_dir, full=not allow_inexact)
    except CheckpointError:
        step, problems = checkpoints.newest_checkpoint(run_dir)
    for problem in problems:
        observer.say(f"skipped: {problem}")
    preflight.check_rows(requested, preflight.check_request(requested))
    had = resumption.global_batch_of(run_dir, step)
    spec = (
        resumption.keep_global_batch(before, requested, lambda one: plan_with_model(one, machine), had)
        if allow_inexact
        else requested
    )
    launch_plan = resumption.keep_compilation(run_dir, spec, plan_with_model(spec, machine))
    facts = checkpoints.read_manifest(run_dir, step)
    resumption.require_resumable(run_dir, before, spec, launch_plan, facts, step, allow_inexact=allow_inexact)
    for note in resumption.resume_notes(before, requested, spec, launch_plan):
        observer.say(f"note     {note}")
    write_request(run_dir, spec, launch_plan)
    attempt = max(run_dir.attempts(), default=0) + 1
    observer.say(f"resuming after step {step} ({facts['mode']} checkpoint), attempt {attempt}")
    more = {"resume_step": step, "inexact": allow_inexact}
    return launch(run_dir, spec, launch_plan, attempt=attempt, observer=observer, resume=more)


def cancel(run_dir: RunDir, *, now: bool = False) -> str:
    """End a run, also one that another process follows.

    Returns:
        A description of what was done.

    Raises:
        RequestError: it does not run.
    """
    return launcher_of(run_dir).cancel(run_dir, now=now)


def running(run_dir: RunDir) -> bool:
    """Return whether an agent of this run lives on this machine, or its job has not left Slurm's queue."""
    return launcher_of(run_dir).is_running(run_dir)
