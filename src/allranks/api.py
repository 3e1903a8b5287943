"""What the verbs do, from Python: ``allranks.run(spec)``, ``allranks.plan(spec)``, ``allranks.resume(run)``."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from allranks import __version__, checkpoints, envpolicy, preflight, resumption
from allranks import fit as memory
from allranks.asked import SpecLike, batch_script, fit, hand_commands, plan, read_spec
from allranks.errors import CheckpointError, EnvironmentNotAble, RequestError, SpecError
from allranks.facts import machine_facts
from allranks.launch import allocation
from allranks.launch.follow import Observer, follow, handling_signals
from allranks.launch.jobs import LAUNCHERS
from allranks.launch.outcome import RunResult, conclude
from allranks.launch.slurm import SlurmJob
from allranks.observe.events import Tail
from allranks.planning import LaunchPlan, make_plan
from allranks.redact import redact_argument, redact_env
from allranks.rundir import RunDir, create_run, find_run, read_json, write_json, write_text_atomic
from allranks.slurm.commands import find_slurm
from allranks.slurm.script import render
from allranks.spec import RunSpec, load_spec, spec_to_yaml


class Silent:
    """An observer that shows nothing."""

    def event(self, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


def run(
    spec: SpecLike, sets: Sequence[str] = (), observer: Observer | None = None, *, force: bool = False
) -> RunResult:
    """Plan, check, launch, follow and report one run.

    Args:
        force: start it even if a rank's memory cannot be enough.

    Returns:
        What became of it; ``result.exit_code`` is 0 only if the training succeeded.

    Raises:
        RequestError: spec or data are wrong; nothing was started.
        EnvironmentNotAble: this machine cannot run it.
    """
    checked = read_spec(spec, sets)
    preflight.check_request(checked)
    run_dir, launch_plan = prepare_run(checked, force=force)
    return launch(run_dir, checked, launch_plan, attempt=1, observer=observer or Silent())


def prepare_run(spec: RunSpec, *, force: bool = False) -> tuple[RunDir, LaunchPlan]:
    """Plan, check this machine, and make the run folder with what was asked and planned.

    Raises:
        EnvironmentNotAble: this machine lacks something, or (unless `force`) a rank's memory cannot be enough.
    """
    slurm = find_slurm(Path.cwd()) if spec.cluster.launcher == "slurm" else None
    facts = machine_facts()
    launch_plan = make_plan(spec, facts)
    if not force:
        found = memory.fit(spec, launch_plan, facts)
        memory.require(found)
        launch_plan = msgspec.structs.replace(launch_plan, rank_memory_bytes=memory.known_bytes(found))
    report = preflight.local_report(spec, launch_plan, facts, Path(spec.run_root))
    preflight.require(report)
    run_dir = create_run(spec.run_root, spec.name)
    _write_request(run_dir, spec, launch_plan)
    write_json(run_dir.preflight, [msgspec.to_builtins(report)])
    write_text_atomic(run_dir.preflight_text, report.line() + "\n")
    if slurm is not None and spec.cluster.stage != "never":
        from allranks.stage.job import pack_ahead

        pack_ahead(spec, run_dir)
    if slurm is not None and not allocation.inside():
        slurm.submit(run_dir.sbatch, test_only=True)  # a refusal costs a second, not an hour in the queue
    return run_dir, launch_plan


def _write_request(run_dir: RunDir, spec: RunSpec, launch_plan: LaunchPlan) -> None:
    """spec.yaml, plan.json and run_args.json, with secrets left out."""
    safe = msgspec.structs.replace(
        spec, cluster=msgspec.structs.replace(spec.cluster, env=redact_env(spec.cluster.env))
    )
    write_text_atomic(run_dir.spec, spec_to_yaml(safe))
    hidden = envpolicy.hidden(launch_plan.environment)
    write_json(run_dir.plan, msgspec.to_builtins(msgspec.structs.replace(launch_plan, environment=hidden)))
    if spec.cluster.launcher == "slurm":
        write_text_atomic(run_dir.sbatch, render(spec, launch_plan, run_dir, sys.executable))
    asked = {
        "command": [redact_argument(a) for a in sys.argv],
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "allranks": __version__,
        "started": preflight.stamp(),
        "launched_at": time.time(),
    }
    earlier = read_json(run_dir.run_args) or {}
    write_json(run_dir.run_args, {**earlier, "resumed": [*earlier.get("resumed", []), asked]} if earlier else asked)


def launch(
    run_dir: RunDir,
    spec: RunSpec,
    launch_plan: LaunchPlan,
    *,
    attempt: int,
    observer: Observer,
    resume: dict[str, Any] | None = None,
) -> RunResult:
    """Start one attempt and stay with it until its end."""
    tail = Tail(run_dir)
    tail.skip_existing()
    with handling_signals() as counts:
        job = LAUNCHERS[spec.cluster.launcher](run_dir, spec, launch_plan, attempt, resume or {})
        code = follow(job, tail, observer, counts)
        # The driver plans anew if it left nodes out.
        ran = msgspec.json.decode(run_dir.plan.read_bytes(), type=LaunchPlan)
        return conclude(run_dir, spec, ran, code, interrupted=counts.interrupts > 0, told_by_launcher=job.end_reason())


def resume(
    name: str | Path,
    *,
    inexact: bool = False,
    sets: Sequence[str] = (),
    run_root: str | Path = "runs",
    observer: Observer | None = None,
) -> RunResult:
    """Go on with a run from its newest whole checkpoint, in the same folder.

    Raises:
        RequestError: no such run, it is done, or what is asked for does not fit its newest checkpoint, or only with `inexact`.
        CheckpointError: no checkpoint is whole.
    """
    run_dir, machine, observer = find_run(str(name), run_root), machine_facts(), observer or Silent()
    before, asked = load_spec(run_dir.spec), load_spec(run_dir.spec, sets)
    if running(run_dir):
        raise RequestError(f"run {run_dir.name} is still running; end it first")
    if before.script is not None:
        raise RequestError(
            f"run {run_dir.name} is a program of your own, whose checkpoints allranks does not know; start it anew with: allranks run {run_dir.spec}"
        )
    step, problems = checkpoints.newest(run_dir)
    for problem in problems:
        observer.say(f"passed over: {problem}")
    had = resumption.global_batch_of(run_dir, step)
    spec = resumption.with_its_batch(before, asked, lambda one: make_plan(one, machine), had) if inexact else asked
    launch_plan, facts = make_plan(spec, machine), checkpoints.manifest(run_dir, step)
    resumption.require_resumable(run_dir, before, spec, launch_plan, facts, step, inexact=inexact)
    for note in resumption.notes(asked, spec):
        observer.say(f"note     {note}")
    _write_request(run_dir, spec, launch_plan)
    attempt = max(run_dir.attempts(), default=0) + 1
    observer.say(f"going on after step {step} ({facts['mode']} checkpoint), attempt {attempt}")
    more = {"resume_step": step, "inexact": inexact}
    return launch(run_dir, spec, launch_plan, attempt=attempt, observer=observer, resume=more)


def cancel(run_dir: RunDir, *, now: bool = False) -> str:
    """End a run, whoever follows it: by its job in Slurm, its agent on this machine, or the control file of its agents.

    Returns:
        What was done.

    Raises:
        RequestError: it does not run.
    """
    job = read_json(run_dir.job) or {}
    driver = read_json(run_dir.driver) or {}
    if job and (not driver or driver.get("state") in ("running", "requeued") or driver.get("job") != job["job"]):
        slurm = find_slurm(Path.cwd())
        state = slurm.state(job["job"])
        if state.alive:
            found = SlurmJob(run_dir, slurm, job["job"])
            (found.kill if now or state.state == "PENDING" else found.ask_stop)()
            return f"job {job['job']} ({state.state.lower()}) " + (
                "is cancelled" if now or state.state == "PENDING" else "is asked to stop"
            )
    attempt = max(run_dir.attempts(), default=0)
    joined = list(run_dir.logs_of(attempt).glob("node.*.joined")) if attempt else []
    if not running(run_dir) and len(list(run_dir.logs_of(attempt).glob("*.exit.json"))) >= len(joined):
        raise RequestError(f"run {run_dir.name} does not run; there is nothing to cancel")
    write_text_atomic(run_dir.control(attempt), "kill" if now else "stop")
    return "its ranks are ended" if now else "its ranks are asked to stop at the edge of a step"


def running(run_dir: RunDir, agents: set[str] | None = None) -> bool:
    """True while an agent of this run lives on this machine, or its job has not left Slurm's queue.

    Args:
        agents: what `local_agents` found, where many runs are asked for.
    """
    driver = read_json(run_dir.driver) or {}
    if driver.get("state") in ("running", "requeued"):
        try:
            return find_slurm(Path.cwd()).state(driver["job"]).alive
        except EnvironmentNotAble:
            return False
    return str(run_dir.root) in (local_agents() if agents is None else agents)


def local_agents() -> set[str]:
    """The words of the commands of all agents on this machine: the folders of their runs are among them."""
    import psutil

    commands = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid())
    return {word for command in commands if "allranks.launch.agent" in command for word in command}


__all__ = [
    "CheckpointError", "RunResult", "SpecError", "batch_script", "fit", "hand_commands", "launch", "load_spec", "plan", "read_spec", "resume",
    "run",
]  # fmt: skip
