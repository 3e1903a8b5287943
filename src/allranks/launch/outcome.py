"""Determine how a run ended: status, a one-sentence explanation, the summary and the report; for a user's own program,
how each rank ended."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from allranks.analysis.metrics import (
    describe_non_finite_loss,
    early_stop,
    progress_metrics,
    summarize,
    without_repeated_steps,
)
from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK
from allranks.launch.failure_attribution import FirstFailure, RankEnd, describe_crash, find_first_failure, signal_name
from allranks.launch.launchers import get_launcher
from allranks.launch.monitor.hang_rules import list_ranks
from allranks.launch.supervisor import JobEnd
from allranks.planning.records import LaunchPlan, load_plan
from allranks.rundir import events as event_files
from allranks.rundir.files import read_record, write_json
from allranks.rundir.paths import RunDir, restrict_permissions, status_of
from allranks.spec.records import RunSpec
from allranks.utils import filesystem
from allranks.utils.inputs import read_appended
from allranks.utils.redaction import redact
from allranks.utils.text import sanitize

TAIL_BYTES = 64 << 10
UNFINISHED_MESSAGE = (
    "the run has ended, but its outcome was not recorded, because the command that followed it was killed. Continue "
    "with: allranks resume {}"
)
_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run. ``status``: succeeded, stopped (a checkpoint was written, or a user's own program ended with
    exit code 0 after SIGTERM) or failed."""

    run: str
    folder: str
    status: str
    exit_code: int
    message: str
    metrics: dict[str, Any]


def finalize_run(
    run: RunDir,
    spec: RunSpec,
    plan: LaunchPlan,
    code: int,
    *,
    interrupted: bool = False,
    scheduler_end_reason: str = "unknown",
    end: JobEnd | None = None,
) -> RunResult:
    """Determine how the last attempt ended, and write metrics.json and report.html.

    The message names files that cannot be written (a full disk); the verdict does not depend on them.

    Args:
        code: exit code of the launcher's job.
        told_by_launcher: how the job ended according to the scheduler.
        end: the end as the agents reported it over the control channel; None if no driver recorded it.
    """
    from allranks.analysis.diagnose.run_outcome import failure_of
    from allranks.analysis.report.page import write_report
    from allranks.nodes.network.traffic import outcome_metrics, verify_network

    attempt = max(run.attempts(), default=1)
    ranks = event_files.read_run_events(run)
    now = {rank: events_of_attempt(events, attempt) for rank, events in ranks.items()}
    seen = _JobOutcome(code, interrupted, scheduler_end_reason, end or JobEnd())
    status, message, exit_code = _verdict(run, plan, now, attempt, seen)
    gave_up = read_record(run.driver).get("gave_up") or seen.reported.gave_up
    if gave_up and status != "succeeded":
        message = f"{message}. {gave_up}"
    message = sanitize(message)  # it quotes what the program wrote, which may hold anything
    metrics = summarize(run.name, spec, plan, ranks, status) | progress_metrics(ranks)
    if status == "succeeded" and len(now) < plan.world_size:
        missing = [rank for rank in range(plan.world_size) if not now.get(rank)]
        message = f"{message}; the events of rank {list_ranks(missing)} are missing, so their metrics are unknown"
        metrics["message"] = message
    if lost_loss := describe_non_finite_loss(metrics):
        message = f"{message}, but {lost_loss}" if status == "succeeded" else f"{message}. Also, {lost_loss}"
        metrics["message"] = message
    if status != "succeeded":
        metrics["message"] = message
        metrics["failure"] = msgspec.to_builtins(failure_of(run, message))
    try:
        metrics["network"] = outcome_metrics(verify_network(run, attempt))
        write_json(run.metrics, metrics)
        with suppress(OSError):  # metrics.json has all of it
            write_report(run)
        restrict_permissions(run)
    except OSError as error:
        message = f"{message}. metrics.json or the report cannot be written: {filesystem.describe_os_error(error)}"
        metrics["message"] = message
    return RunResult(
        run=run.name, folder=str(run.root), status=status, exit_code=exit_code, message=message, metrics=metrics
    )


def events_of_attempt(events: list[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """Return one rank's events of an attempt; empty if it did not start in it."""
    for i in range(len(events) - 1, -1, -1):
        if events[i]["event"] == "start":
            return events[i:] if events[i].get("attempt") == attempt else []
    return []


class _JobOutcome(msgspec.Struct, frozen=True):
    """How the job ended: exit code, interruption by the user, the scheduler's account and the agents' reports."""

    code: int
    interrupted: bool
    told: str
    reported: JobEnd


def _verdict(
    run: RunDir, plan: LaunchPlan, now: dict[int, list[dict[str, Any]]], attempt: int, end: _JobOutcome
) -> tuple[str, str, int]:
    done = sum(any(e["event"] == "phase" and e["name"] == "done" for e in events) for events in now.values())
    stops = [e for events in now.values() for e in events if e["event"] == "stop"]
    all_done = done >= plan.world_size or end.reported.all_ended_well(plan.world_size)
    lost = _lost(run, plan, end)
    own_program = plan.batch is None
    if own_program and (told := reason_of_stop(end.reported, interrupted=end.interrupted)):
        return describe_program_stop(end.reported, _cancelled(run, plan, end) or told, plan.grace_s or 0.0)
    if all_done and not own_program and (stops or (end.reported.stopped and done < plan.world_size)):
        told = end.reported.stopped or ("interrupted" if end.interrupted else next(iter(end.reported.reasons), ""))
        return _stopped(run, plan, stops, lost or told)
    culprit = attribute_failure(run, now, attempt, end.reported, own_program=own_program)
    if all_done and (end.code == 0 or culprit is None):
        ended = early_stop(now.get(0, []))
        early = f"; the training ended early, after step {ended['step']}: {ended['reason']}" if ended else ""
        return "succeeded", f"all {plan.world_size} ranks succeeded{early}", EXIT_OK
    return "failed", *_why_failed(run, plan, now, attempt, end, culprit)


def _why_failed(
    run: RunDir,
    plan: LaunchPlan,
    now: dict[int, list[dict[str, Any]]],
    attempt: int,
    end: _JobOutcome,
    culprit: FirstFailure | None,
) -> tuple[str, int]:
    """Return message and exit code of the first that applies: a user's request, a hang, a lost agent, a failed rank,
    the launcher."""
    cancelled, lost = _cancelled(run, plan, end), _lost(run, plan, end)
    hang = read_record(run.hang_report(attempt))
    if end.interrupted or cancelled:
        found = cancelled or _interrupted(run, plan), EXIT_FAILED
    elif (verdict := str(hang.get("sentence") or end.reported.hang)) and not _failed_before(now, hang):
        found = f"{verdict}. Evidence: {run.hang(attempt)}", EXIT_FAILED
    elif lost and (culprit is None or culprit.echo):
        found = f"{lost}{_newest_checkpoint_text(run, plan)}", EXIT_FAILED
    elif culprit is None:
        found = _without_failed_rank(run, plan, attempt, end)
    else:
        said = describe_failure(run, culprit, attempt, in_steps=plan.batch is not None)
        if end.reported.stopped and not lost:
            said = f"{said}. A stop had been requested: {end.reported.stopped}"
        found = said, culprit.exit_code if culprit.known else EXIT_FAILED
    return found


def _stopped(run: RunDir, plan: LaunchPlan, stops: list[dict[str, Any]], why: str) -> tuple[str, str, int]:
    """Return the result of ranks that stopped on request."""
    saved = run.checkpoint_steps()
    step = stops[0]["step"] if stops else saved[-1] if saved else None
    why = why or (str(stops[0]["reason"]) if stops else "")
    if step not in saved:
        return (
            "failed",
            f"stopped before a checkpoint was written ({why}){_newest_checkpoint_text(run, plan)}",
            EXIT_FAILED,
        )
    where = f"a full checkpoint is in {run.checkpoint(step)}. Continue with: allranks resume {run.name}"
    return "stopped", f"stopped after step {step} ({why}); {where}", EXIT_FAILED


def _lost(run: RunDir, plan: LaunchPlan, end: _JobOutcome) -> str:
    """Describe lost agents, or a lost driver; empty if there are none."""
    agents = "; ".join(f"the agent on {agent.host} is gone: {agent.why}" for agent in end.reported.lost[:4])
    return agents or get_launcher(plan.launcher).describe_lost_driver(run, end.told)


def _newest_checkpoint_text(run: RunDir, plan: LaunchPlan) -> str:
    """Return how to continue from the newest checkpoint."""
    saved = run.checkpoint_steps()
    if plan.batch is None:
        return ""
    return (
        f". Continue after step {saved[-1]} with: allranks resume {run.name}"
        if saved
        else ". No checkpoint had been written"
    )


def _cancelled(run: RunDir, plan: LaunchPlan, end: _JobOutcome) -> str:
    """Describe a Slurm job that a user cancelled; empty if it was not, or if `handle_dead_driver` cancelled it."""
    driver = read_record(run.driver)
    told = end.told.startswith("CANCELLED") and (run.cancelled.exists() or "gave_up" not in driver)
    if not told and driver.get("state") != "cancelled":
        return ""
    job = read_record(run.job).get("job", driver.get("job", "?"))
    if not run.attempts():
        return f"job {job} was cancelled before it started"
    return f"job {job} was cancelled{_newest_checkpoint_text(run, plan)}"


def _interrupted(run: RunDir, plan: LaunchPlan) -> str:
    saved = run.checkpoint_steps()
    rest = f"the newest checkpoint is step {saved[-1]}" if saved else "no checkpoint had been written"
    return f"interrupted; the ranks were killed before they had finished their step and saved; {rest}"


def _failed_before(now: dict[int, list[dict[str, Any]]], hang: dict[str, Any]) -> bool:
    """Return whether a rank had failed by itself before the others were found to be stalled."""
    noticed = (hang.get("alarm") or {}).get("time") or 0.0
    errors = [e for events in now.values() for e in events if e["event"] == "error" and not e.get("echo")]
    return any(e["time"] < noticed for e in errors)


def _without_failed_rank(run: RunDir, plan: LaunchPlan, attempt: int, end: _JobOutcome) -> tuple[str, int]:
    """Explain a failure without a failed rank from the reports of agents, driver or scheduler, and the log's last
    line."""
    if end.reported.refused:
        return end.reported.refused, EXIT_ENVIRONMENT
    ends = [read_record(path) for path in sorted(run.logs_of(attempt).glob("*.exit.json"))]
    refused = next((e for e in sorted(ends, key=lambda e: e.get("node", 0)) if e.get("refused")), None)
    if refused:
        return f"{refused['host']}: {refused['refused']}", EXIT_ENVIRONMENT
    driver = read_record(run.driver)
    if driver.get("message"):
        return f"{driver['message']}. Log: {run.logs / 'slurm.log'}", int(driver.get("exit_code", EXIT_FAILED))
    reasons = end.reported.reasons or [f"{e['host']}: {e['reason']}" for e in ends if e.get("reason")]
    if reasons:
        return f"{reasons[0]}{_newest_checkpoint_text(run, plan)}", EXIT_FAILED
    if end.reported.ended:
        return f"the ranks were stopped: {end.reported.ended}{_newest_checkpoint_text(run, plan)}", EXIT_FAILED
    steps = end.reported.last_steps or _steps_seen(run)
    did = f"after step {max(steps.values())}" if steps else "before its ranks had recorded any step"
    what, log = get_launcher(plan.launcher).describe_end(run, attempt, end.code, end.told)
    return f"{what} {did}{_newest_checkpoint_text(run, plan)}. {_tail(log)} Log: {log}", EXIT_FAILED


def _steps_seen(run: RunDir) -> dict[int, int]:
    found = {rank: _last_step(events) for rank, events in event_files.read_run_events(run).items()}
    return {rank: step for rank, step in found.items() if step}


def _last_step(events: list[dict[str, Any]]) -> int | None:
    return next((e["step"] for e in reversed(without_repeated_steps(events)) if e["event"] == "step"), None)


def attribute_failure(
    run: RunDir,
    now: dict[int, list[dict[str, Any]]],
    attempt: int,
    end: JobEnd | None = None,
    *,
    own_program: bool = False,
) -> FirstFailure | None:
    """Return the rank that failed first in an attempt, by the agents' reports or records."""
    ends = list(end.ends) if end else []
    if not any(one.failed for one in ends):
        ends = []
        for path in sorted(run.logs_of(attempt).glob("*.exit.json")):
            record = read_record(path)
            ends += msgspec.convert([*record.get("failed", []), *record.get("succeeded", [])], list[RankEnd])
    errors = [e for events in now.values() for e in events if e["event"] == "error"]
    exits = {
        rank: e["message"] for rank, events in now.items() for e in events if e["event"] == "exit" and e.get("message")
    }
    steps = {rank: _last_step(events) for rank, events in now.items()}
    finished = {
        rank: e["time"] for rank, events in now.items() for e in events if e["event"] == "phase" and e["name"] == "done"
    }
    return find_first_failure(ends, errors, steps, exits, finished if own_program else None)


def describe_failure(run: RunDir, culprit: FirstFailure, attempt: int, *, in_steps: bool) -> str:
    """Describe rank, cause, last step (if there are steps) and log in one paragraph."""
    logs = run.rank_logs(attempt)
    where = f"rank {culprit.rank}" + (f" on {culprit.host}" if culprit.host else "")
    at = f" after step {culprit.step}" if culprit.step else " before the first step" if in_steps else ""
    log = f". Log: {logs[culprit.rank]}" if culprit.rank in logs else ""
    if culprit.message == f"ended with {culprit.cause}":  # and nothing says why
        low = filesystem.low_space_text(run.root)
        log += f". {low}, which may be why the rank recorded no reason" if low else ""
    if culprit.known:
        return f"{culprit.message.rstrip('.')}{log if culprit.exit_code == EXIT_FAILED else ''}"
    name = "" if culprit.cause in culprit.message else f"{culprit.cause}: "
    said = culprit.message.splitlines()[0] if culprit.message else culprit.cause
    if culprit.cause.startswith("SIG") and culprit.cause != "SIGKILL":
        crash = redact(describe_crash(culprit.rank, {rank: _end_of(path) for rank, path in logs.items()}))
        said = f"{said}: {crash}" if crash else said
    return f"{where} failed{at}: {name}{said}{log}"


def _tail(log: Path) -> str:
    lines = [line.strip() for line in _end_of(log).splitlines() if line.strip()]
    return f"Its last line: {lines[-1]}." if lines else ""


def _end_of(log: Path) -> str:
    try:
        return read_appended(log, 0, TAIL_BYTES).data.decode("utf-8", "replace")
    except OSError:
        return ""


def recompute_metrics(run: RunDir, *, alive: bool) -> dict[str, Any] | None:
    """Recompute metrics.json from the events and keep its verdict; None if there are no events and no verdict.

    Args:
        alive: whether the run is still running.

    Raises:
        RequestError: plan.json is missing or damaged.
    """
    from allranks.spec import load_spec

    ranks = event_files.read_run_events(run)
    before, status = read_record(run.metrics), status_of(run, alive=alive)
    if not ranks and (alive or not before.get("message")):
        return None
    metrics = summarize(run.name, load_spec(run.spec), load_plan(run), ranks, status) | progress_metrics(ranks)
    if status == "unfinished":
        metrics["message"] = UNFINISHED_MESSAGE.format(run.name)
    metrics |= {key: before[key] for key in ("message", "failure", "network") if key in before and not alive}
    write_json(run.metrics, metrics)
    return metrics


def reason_of_stop(reported: JobEnd, *, interrupted: bool) -> str:
    """Return why a stop was requested; empty if it was not, or if agents are lost or ranks had failed before."""
    signalled = next((reason for reason in reported.reasons if "the agent received" in reason), "")
    told = reported.stopped or signalled or ("interrupted" if interrupted else "")
    # Slurm signals ranks itself: a program that ends by SIGTERM has not failed
    failed = any(end.failed and end.exitcode not in (0, *_BY_SIGTERM) for end in reported.ends)
    return "" if reported.lost or reported.hang or failed else told


def describe_program_stop(reported: JobEnd, why: str, grace_s: float) -> tuple[str, str, int]:
    """Return status, message and exit code of a run after a stop request.

    The status is ``stopped`` if every rank then ended by itself with exit code 0. Whether it has saved anything is not
    known.
    """
    groups: dict[str, list[int]] = {}
    for end in reported.ends:
        groups.setdefault(_how(end, grace_s), []).append(end.rank)
    ends = "; ".join(f"rank {list_ranks(sorted(ranks))} {how}" for how, ranks in groups.items())
    status = "stopped" if reported.ends and all(end.exitcode == 0 for end in reported.ends) else "failed"
    told = "the ranks received SIGTERM" if reported.ends else "no rank had been started"
    return status, f"stopped ({why}): {told}" + (f"; {ends}" if ends else ""), EXIT_FAILED


def _how(end: RankEnd, grace_s: float) -> str:
    if end.exitcode == -signal.SIGTERM:
        return "ended by it"
    if end.exitcode == -signal.SIGKILL and end.ended_by_agent:
        return f"did not end within {grace_s:g} s (script.grace_s) and was killed"
    if end.exitcode < 0:
        return f"ended by {signal_name(end.exitcode)}"
    return f"ended with exit code {end.exitcode}"
