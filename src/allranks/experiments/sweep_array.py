"""Run the points of a sweep as the tasks of one Slurm array, and follow them.

Each task calls ``allranks sweep FOLDER --task`` on the first node of its allocation, which runs its point as a local
sweep would: it creates or resumes the run, starts the ranks in the allocation, and ends a run that diverges.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.experiments.sweep import SPEC, STOPPED, Sweep, is_left, only_one, results_of, run_point
from allranks.launch import preview
from allranks.launch.runs import Observer, count_signals
from allranks.launch.slurm.launcher import SlurmLauncher, inside_allocation
from allranks.launch.slurm.script import render_array_script, sbatch_options
from allranks.nodes.slurm.answers import JobInfo, parse_job_files
from allranks.nodes.slurm.commands import ALIVE_STATES, NoAnswer, Slurm, find_slurm
from allranks.rundir.files import read_record, write_json, write_text_atomic
from allranks.rundir.paths import RunDir

JOB = "array.json"
POLL_S = 2.0
KILLED_S = 90.0
SILENT_S = 20.0
"""Slurm that restarts answers again within this time."""


def uses_array(sweep: Sweep) -> bool:
    """Return whether the points are jobs of Slurm that this process does not run itself."""
    spec = preview.read_spec(Path(sweep.folder) / SPEC, sweep.sets)
    return spec.cluster.launched_by.uses_slurm and not inside_allocation()


def run_task(sweep: Sweep, view: Observer) -> bool:
    """Run the point of this task; return False if it was stopped."""
    number = int(os.environ.get("SLURM_ARRAY_TASK_ID", "0"))
    if not 0 < number <= len(sweep.points):
        raise RequestError("--task is for the tasks of a Slurm array; give the folder of the sweep alone")
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the script ignores it, and so would the run
    before = results_of(sweep)[number - 1]  # it has succeeded if Slurm starts the task once more
    return before.status == "succeeded" or run_point(sweep, number, before, view)


def run_array(sweep: Sweep, view: Observer, *, again: bool = False, at_once: int | None = None) -> bool:
    """Submit the points that are left, unless an array of this sweep is in the queue, and follow them; return False if
    the user ended it.

    Raises:
        RequestError: another process follows this sweep, or its points need different allocations.
    """
    with only_one(sweep):
        folder, slurm = RunDir(Path(sweep.folder)), find_slurm(Path.cwd())
        job = str(read_record(folder.root / JOB).get("job") or "")
        if job and _tasks(slurm, job) != {}:  # None: it may still run, and a second array would run points twice
            view.say(f"job      {job} is followed")
        elif left := [n for n, one in enumerate(results_of(sweep), 1) if is_left(one, again=again)]:
            base = preview.prepare(folder.root / SPEC, sweep.sets)
            _require_equal_allocations(sweep, base, folder)
            script = render_array_script(base.spec, base.plan, folder, sys.executable, tasks=left, at_once=at_once)
            write_text_atomic(folder.sbatch, script)
            job = SlurmLauncher().submit_array(folder.sbatch, base.spec)
            write_json(folder.root / JOB, {"job": job, "slurm": slurm.label})
            view.say(f"job      {job}: an array of {len(left)} tasks; their logs: {folder.root}/slurm-N.log")
        return _follow(sweep, slurm, job, view) if job else True


def _require_equal_allocations(sweep: Sweep, base: preview.PreparedRun, folder: RunDir) -> None:
    options = sbatch_options(base.spec, base.plan, folder)
    for point in (one for one in sweep.extremes() if any(text.startswith("cluster.") for text in one.sets)):
        other = preview.prepare(folder.root / SPEC, [*sweep.sets, *point.sets])
        if sbatch_options(other.spec, other.plan, folder) != options:
            raise RequestError(
                f"point {point.name} ({' '.join(point.sets)}) needs another allocation than the spec, and the tasks "
                "of a Slurm array have the same one; run one sweep for each"
            )


def _tasks(slurm: Slurm, job: str) -> dict[int, JobInfo] | None:
    """Return the tasks of an array that run, by number, and one of those that wait as 0; empty: it has ended, None:
    Slurm does not answer."""
    text = slurm.show("job", job)
    if isinstance(text, NoAnswer):
        return None
    alive = [one for one in parse_job_files(text or "") if one.info.state in ALIVE_STATES]
    numbers = (one.label.partition("_")[2] if one.info.nodes else "" for one in alive)  # those that wait: [2-7]
    return {int(n) if n.isdigit() else 0: one.info for n, one in zip(numbers, alive, strict=True)}


def _follow(sweep: Sweep, slurm: Slurm, job: str, view: Observer) -> bool:
    running, reason, killed_at, stopping = set[int](), "", float("inf"), False
    answered_at, silent = time.monotonic(), False
    with count_signals() as counts:
        while (tasks := _tasks(slurm, job)) != {} and time.monotonic() < killed_at + KILLED_S:
            if tasks is None and time.monotonic() > answered_at + SILENT_S:  # slurmctld is down, or very busy
                if not silent:
                    view.say(f"note     Slurm does not answer; trying again. Ctrl-C ends this command, not job {job}")
                silent = True
                if counts.interrupts + counts.stops:
                    view.say(
                        f"ended    Slurm does not answer, and job {job} may still run; to cancel it: scancel {job}"
                    )
                    return False
            elif tasks is not None:
                answered_at, silent = time.monotonic(), False
                waits = tasks.pop(0, None)
                if waits and not tasks and waits.reason not in (None, reason):
                    reason = waits.reason
                    view.say(f"pending  {reason}")
                for number in sorted(tasks.keys() - running):
                    view.say(f"running  {sweep.points[number - 1].name} on {tasks[number].nodes}")
                _say_ended(sweep, running - tasks.keys(), view)
                running = set(tasks)
            seen = counts.interrupts + counts.stops
            if seen and not stopping:
                stopping = True
                view.say("stopping: no more points start, and ranks write a checkpoint; Ctrl-C again kills them now")
                _cancel(slurm, job, view, "--state=PENDING")
                _cancel(slurm, job, view, "--signal=USR1", "--batch", "--state=RUNNING")
            elif counts.interrupts > 1 and killed_at == float("inf"):
                killed_at = time.monotonic()
                mark_stopped(sweep, running)
                _cancel(slurm, job, view)
            until = time.monotonic() + POLL_S
            while time.monotonic() < until and counts.interrupts + counts.stops == seen:
                time.sleep(0.1)
    _say_ended(sweep, running, view)
    return not stopping


def mark_stopped(sweep: Sweep, numbers: Iterable[int]) -> None:
    """Record that the user ends these points, whose tasks Slurm may kill before they have recorded it themselves."""
    results = results_of(sweep)
    for run in filter(None, (results[number - 1].run for number in numbers)):
        (Path(sweep.folder) / run / STOPPED).touch()


def _cancel(slurm: Slurm, job: str, view: Observer, *options: str) -> None:
    try:
        slurm.cancel(job, *options)
    except EnvironmentNotAble as error:
        view.say(f"note     {error}. Cancel it by hand: scancel {job}")


def _say_ended(sweep: Sweep, numbers: set[int], view: Observer) -> None:
    for number, one in ((n, one) for n, one in enumerate(results_of(sweep), 1) if n in numbers):
        begun = f"{one.status:8} {one.name}{': ' * bool(one.message)}{one.message}"
        begun = begun if one.status != "open" else f"ended    {one.name} before its run began"
        whole = one.status == "succeeded" or "Log: " in begun
        view.say(begun if whole else f"{begun}. Log: {sweep.folder}/slurm-{number}.log")
