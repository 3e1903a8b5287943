"""Determine a run's status, one-sentence explanation, summary and report; for a user's own program, each rank's end."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from allranks.analysis.effective_time import AttemptRecord, effective_training_time
from allranks.analysis.metrics import (
    describe_non_finite_loss,
    early_stop,
    progress_metrics,
    summarize,
    without_repeated_steps,
)
from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK
from allranks.launch import restarts
from allranks.launch.failure_attribution import (
    FirstFailure,
    RankEnd,
    describe_crash,
    exception_in_log,
    find_first_failure,
    signal_name,
)
from allranks.launch.launchers import get_launcher
from allranks.launch.monitor.hang_rules import list_ranks
from allranks.launch.restarts import Restart
from allranks.launch.supervisor import JobEnd
from allranks.planning.cost import run_cost
from allranks.planning.records import LaunchPlan, load_plan
from allranks.rundir import events as event_files
from allranks.rundir.files import read_record, write_json
from allranks.rundir.paths import RunDir, restrict_permissions, status_of
from allranks.spec.records import RunSpec
from allranks.utils import filesystem
from allranks.utils.inputs import read_appended
from allranks.utils.redaction import redact
from allranks.utils.text import as_dicts, finite_float, sanitize

TAIL_BYTES = 64 << 10
UNFINISHED_MESSAGE = (
    "the run has ended, but its outcome was not recorded, because the command that followed it was killed. Continue "
    "with: allranks resume {}"
)
_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result. ``status``: succeeded, stopped (checkpoint written, or user program exited 0 after SIGTERM) or failed."""

    run: str
    folder: str
    status: str
    exit_code: int
    message: str
    metrics: dict[str, Any]
    restart: Restart | None = None
    """What was decided on starting again by itself; None: the run did not fail, or nothing was to be decided."""
    interrupted: bool = False
    """Ctrl-C has stopped it."""
    signalled: bool = False
    """Ctrl-C or another signal to the process that followed it has stopped it."""


def finalize_run(
    run: RunDir,
    spec: RunSpec,
    plan: LaunchPlan,
    code: int,
    *,
    interrupted: bool = False,
    scheduler_end_reason: str = "unknown",
    end: JobEnd | None = None,
    restarts_before: list[Restart] | None = None,
    spares: Sequence[str] = (),
    lost: Mapping[str, str] = {},
    restart_problem: str = "",
) -> RunResult:
    """Determine how the last attempt ended, and write metrics.json and, if no other attempt follows, report.html.

    The message names files that cannot be written (a full disk); the verdict does not depend on them.

    Args:
        code: exit code of the launcher's job.
        scheduler_end_reason: how the job ended according to the scheduler.
        end: the end as the agents reported it over the control channel; None if no driver recorded it.
        restarts_before: decide, and record, whether the run starts again by itself; what was decided since a user
            started it. None: it does not.
        spares: nodes that may take the place of others if it does.
        lost: nodes that are known to be lost, with the evidence.
        restart_problem: why the launcher cannot start the run again.
    """
    from allranks.analysis.diagnose.run_outcome import failure_of
    from allranks.nodes.network.traffic import outcome_metrics, verify_network

    attempt = max(run.attempts(), default=1)
    ranks = event_files.read_run_events(run)
    now = {rank: events_of_attempt(events, attempt) for rank, events in ranks.items()}
    ended = _EndedAttempt(run, plan, attempt, now, code, interrupted, scheduler_end_reason, end or JobEnd())
    status, message, exit_code = ended.verdict()
    if status != "succeeded" and (gave_up := ended.driver.get("gave_up")):
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
    restart = None
    if status != "succeeded":
        metrics |= {"message": message, "failure": msgspec.to_builtins(failure_of(run, message))}
        by_user = end is not None and (end.requested or (bool(end.stopped) and not end.lost))
        # ranks whose agent is lost save a checkpoint and stop, which no user has asked for
        ended_badly = status == "failed" or (status == "stopped" and ended.lost_agent)
        if ended_badly and restarts_before is not None and not by_user:
            restart = restarts.decide_and_record(
                run, spec, attempt, metrics, restarts_before, spares, lost, restart_problem
            )
    if history := restarts.read_restarts(run):
        metrics["restarts"] = msgspec.to_builtins(history)
    metrics |= _time_and_cost(run, spec, plan, ranks, metrics)
    try:
        metrics["network"] = outcome_metrics(verify_network(run, attempt))
        write_json(run.metrics, metrics)
        if restart is None or restart.action == "stop":  # it would delay the next attempt
            from allranks.analysis.report.page import write_report

            with suppress(OSError):  # metrics.json has all of it
                write_report(run)
        restrict_permissions(run)
    except OSError as error:
        message = f"{message}. metrics.json or the report cannot be written: {filesystem.describe_os_error(error)}"
        metrics["message"] = message
    return RunResult(
        run=run.name,
        folder=str(run.root),
        status=status,
        exit_code=exit_code,
        message=message,
        metrics=metrics,
        restart=restart,
    )


def _time_and_cost(
    run: RunDir, spec: RunSpec, plan: LaunchPlan, ranks: dict[int, list[dict[str, Any]]], metrics: dict[str, Any]
) -> dict[str, Any]:
    effective = _effective_training_time(run, plan, ranks)
    cost = run_cost(spec, plan, finite_float((effective or metrics).get("wall_time_s")))
    return {"effective_training_time": effective, **({"cost": cost} if cost else {})}


def _effective_training_time(run: RunDir, plan: LaunchPlan, ranks: dict[int, list[dict[str, Any]]]) -> Any:
    """Account for the run's wall time by its events and the records of its attempts, any of which may be missing."""
    verdicts = {one.attempt: one.time for one in restarts.read_restarts(run)}
    records = {}
    for attempt in run.attempts():
        by_node = [read_record(path) for path in run.logs_of(attempt).glob("*.exit.json")]
        failed, ended = (
            [at for one in by_node for end in as_dicts(one.get(key)) if (at := finite_float(end.get("time")))]
            for key in ("failed", "succeeded")
        )
        records[attempt] = AttemptRecord(
            began=finite_float(read_record(run.attempt_args(attempt)).get("began")),
            verdict=verdicts.get(attempt),
            faults=failed,
            hung=run.hang_report(attempt).exists(),
            ends=[*failed, *ended],
        )
    run_args = read_record(run.run_args)
    started = [finite_float(one.get("launched_at")) for one in (run_args, *as_dicts(run_args.get("resumed")))]
    launched_at = [at for at in started if at is not None]
    return effective_training_time(ranks, records, launched_at, program=plan.batch is None)


def events_of_attempt(events: list[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """Return one rank's events of an attempt; empty if it did not start in it."""
    for i in range(len(events) - 1, -1, -1):
        if events[i]["event"] == "start":
            return events[i:] if events[i].get("attempt") == attempt else []
    return []


class _EndedAttempt:
    """What is known of the end of an attempt: the ranks' events, the reports of the agents and their records in the run
    folder, the driver's record, the scheduler's account, and whether the user interrupted it."""

    def __init__(
        self,
        run: RunDir,
        plan: LaunchPlan,
        attempt: int,
        events: dict[int, list[dict[str, Any]]],
        code: int,
        interrupted: bool,
        scheduler: str,
        end: JobEnd,
    ) -> None:
        self._run, self._plan, self._attempt, self._events = run, plan, attempt, events
        self._code, self._interrupted, self._scheduler = code, interrupted, scheduler
        self._own_program = plan.batch is None
        self._saved = run.checkpoint_steps()
        self.driver = read_record(run.driver)
        self._end = _with_records(run, attempt, end)
        agents = "; ".join(f"the agent on {agent.host} is gone: {agent.why}" for agent in end.lost[:4])
        self.lost_agent = agents or get_launcher(plan.launcher).describe_lost_driver(run, scheduler)
        self._cancelled = self._describe_cancellation()

    def verdict(self) -> tuple[str, str, int]:
        """Return status, message and exit code."""
        end, world = self._end, self._plan.world_size
        done = len({e["rank"] for e in self._all("phase") if e["name"] == "done"})
        all_done = done >= world or end.all_ended_well(world)
        if self._own_program and (why := reason_of_stop(end, interrupted=self._interrupted)):
            return describe_program_stop(end, self._cancelled or why, self._plan.grace_s or 0.0)
        stops = self._all("stop")
        if all_done and not self._own_program and (stops or (end.stopped and done < world)):
            why = end.stopped or ("interrupted" if self._interrupted else next(iter(end.reasons), ""))
            return self._stopped(stops, self.lost_agent or why)
        culprit = self._first_failure()
        if all_done and (self._code == 0 or culprit is None):
            early = early_stop(self._events.get(0, []))
            note = f"; the training ended early, after step {early['step']}: {early['reason']}" if early else ""
            return "succeeded", f"all {world} ranks succeeded{note}", EXIT_OK
        return "failed", *self._why_failed(culprit)

    def _all(self, kind: str) -> list[dict[str, Any]]:
        return [e for events in self._events.values() for e in events if e["event"] == kind]

    def _why_failed(self, culprit: FirstFailure | None) -> tuple[str, int]:
        """Return message and exit code of the first of: user request, hang, lost agent, failed rank, launcher."""
        hang = read_record(self._run.hang_report(self._attempt))
        verdict = str(hang.get("sentence") or self._end.hang)
        noticed = (hang.get("alarm") or {}).get("time") or 0.0
        if self._cancelled:
            return self._cancelled, EXIT_FAILED
        if self._interrupted:
            rest = (
                f"the newest checkpoint is step {self._saved[-1]}" if self._saved else "no checkpoint had been written"
            )
            text = "interrupted; the ranks were killed before they had finished their step and saved"
            return f"{text}; {rest}", EXIT_FAILED
        if verdict and not any(e["time"] < noticed for e in self._all("error") if not e.get("echo")):
            return f"{verdict}. Evidence: {self._run.hang(self._attempt)}", EXIT_FAILED
        if self.lost_agent and (culprit is None or culprit.echo):
            return f"{self.lost_agent}{self._how_to_continue()}", EXIT_FAILED
        if culprit is None:
            return self._without_failed_rank()
        text = self._describe_failure(culprit)
        if self._end.stopped and not self.lost_agent:
            text = f"{text}. A stop had been requested: {self._end.stopped}"
        return text, culprit.exit_code if culprit.known else EXIT_FAILED

    def _stopped(self, stops: list[dict[str, Any]], why: str) -> tuple[str, str, int]:
        """Return the result of ranks that stopped on request."""
        step = stops[0]["step"] if stops else self._saved[-1] if self._saved else None
        why = why or (str(stops[0]["reason"]) if stops else "")
        if step not in self._saved:
            text = f"stopped before a checkpoint was written ({why}){self._how_to_continue()}"
            return "failed", text, EXIT_FAILED
        again = f"Continue with: allranks resume {self._run.argument}"
        where = f"a full checkpoint is in {self._run.checkpoint(step)}. {again}"
        return "stopped", f"stopped after step {step} ({why}); {where}", EXIT_FAILED

    def _how_to_continue(self) -> str:
        if self._own_program:
            return ""
        if not self._saved:
            return ". No checkpoint had been written"
        return f". Continue after step {self._saved[-1]} with: allranks resume {self._run.argument}"

    def _describe_cancellation(self) -> str:
        """Describe a Slurm job that a user cancelled; empty if it was not, or if `handle_dead_driver` cancelled it."""
        by_slurm = self._scheduler.startswith("CANCELLED")
        requested = by_slurm and (self._run.cancelled.exists() or "gave_up" not in self.driver)
        if not requested and self.driver.get("state") != "cancelled":
            return ""
        job = read_record(self._run.job).get("job", self.driver.get("job", "?"))
        if not self._run.attempts():
            return f"job {job} was cancelled before it started"
        return f"job {job} was cancelled{self._how_to_continue()}"

    def _without_failed_rank(self) -> tuple[str, int]:
        """Explain a failure without failed rank from reports of agents, driver or scheduler, and the last log line."""
        end, run, driver = self._end, self._run, self.driver
        if end.refused:
            return end.refused, EXIT_ENVIRONMENT
        if driver.get("message"):
            return f"{driver['message']}. Log: {run.logs / 'slurm.log'}", int(driver.get("exit_code", EXIT_FAILED))
        if end.reasons or end.ended:
            why = end.reasons[0] if end.reasons else f"the ranks were stopped: {end.ended}"
            return f"{why}{self._how_to_continue()}", EXIT_FAILED
        steps = [step for events in event_files.read_run_events(run).values() if (step := _last_step(events))]
        when = f"after step {max(steps)}" if steps else "before its ranks had recorded any step"
        what, log = get_launcher(self._plan.launcher).describe_end(run, self._attempt, self._code, self._scheduler)
        lines = [line.strip() for line in _end_of(log).splitlines() if line.strip()]
        last = f"Its last line: {lines[-1]}. " if lines else ""
        return f"{what} {when}{self._how_to_continue()}. {last}Log: {log}", EXIT_FAILED

    def _first_failure(self) -> FirstFailure | None:
        """Return the rank that failed first, by the agents' reports and the ranks' events."""
        exits = {e["rank"]: e["message"] for e in self._all("exit") if e.get("message")}
        steps = {rank: _last_step(events) for rank, events in self._events.items()}
        finished = {e["rank"]: e["time"] for e in self._all("phase") if e["name"] == "done"}
        errors = self._all("error")
        return find_first_failure(self._end.ends, errors, steps, exits, finished if self._own_program else None)

    def _describe_failure(self, culprit: FirstFailure) -> str:
        """Describe rank, cause, last step (if there are steps) and log in one paragraph."""
        logs = self._run.rank_logs(self._attempt)
        where = f"rank {culprit.rank}" + (f" on {culprit.host}" if culprit.host else "")
        at = f" after step {culprit.step}" if culprit.step else "" if self._own_program else " before the first step"
        log = f". Log: {logs[culprit.rank]}" if culprit.rank in logs else ""
        if culprit.message == f"ended with {culprit.cause}":  # and nothing says why
            low = filesystem.low_space_text(self._run.root)
            log = (f". {low}, which may be why the rank recorded no reason" if low else "") + log
        if culprit.known:
            return f"{culprit.message.rstrip('.')}{log if culprit.exit_code == EXIT_FAILED else ''}"
        name = "" if culprit.cause in culprit.message else f"{culprit.cause}: "
        said = _first_line(culprit.message).rstrip(".") or culprit.cause
        if culprit.cause.startswith("SIG") and culprit.cause != "SIGKILL":
            crash = redact(describe_crash(culprit.rank, {rank: _end_of(path) for rank, path in logs.items()}))
            said = f"{said}: {crash}" if crash else said
        elif self._own_program and culprit.rank in logs:
            error, place = exception_in_log(_end_of(logs[culprit.rank]))
            if said == f"ended with {culprit.cause}" and error:  # a program that allranks did not start itself
                said = f"{said}: {error}, in {place}"
            elif place and error.startswith(culprit.cause):
                said = f"{said}, in {place}"
            said = redact(said)
        return f"{where} failed{at}: {name}{said}{log}"


def _with_records(run: RunDir, attempt: int, end: JobEnd) -> JobEnd:
    """Return what the agents reported, completed by the records that they wrote, which do not need the driver."""
    records = sorted(map(read_record, run.logs_of(attempt).glob("*.exit.json")), key=lambda one: one.get("node", 0))
    refused = [f"{one['host']}: {one['refused']}" for one in records if one.get("refused")]
    reasons = [f"{one['host']}: {one['reason']}" for one in records if one.get("reason")]
    written = [e for one in records for e in (*one.get("failed", []), *one.get("succeeded", []))]
    known = {e.rank for e in end.ends}
    return msgspec.structs.replace(
        end,
        ends=[*end.ends, *(e for e in msgspec.convert(written, list[RankEnd]) if e.rank not in known)],
        refused=end.refused or next(iter(refused), ""),
        reasons=end.reasons or reasons,
    )


def _last_step(events: list[dict[str, Any]]) -> int | None:
    return next((e["step"] for e in reversed(without_repeated_steps(events)) if e["event"] == "step"), None)


def _first_line(message: str) -> str:
    """Return the first line of an exception's text; of NCCL's, which only says which call failed, also its last
    error."""
    first, _, more = message.partition("\n")
    detail = more.partition("Last error:")[2].strip().splitlines() if "NCCL" in first else []
    return f"{first}; last error: {detail[0].strip()}" if detail else first


def _end_of(log: Path) -> str:
    try:
        return read_appended(log, 0, TAIL_BYTES).data.decode("utf-8", "replace")
    except OSError:
        return ""


def current_metrics(run: RunDir, *, alive: bool) -> dict[str, Any] | None:
    """Return metrics.json, computed anew from the events, with its verdict; None if there are no events and no verdict.

    Nothing is written: the run may be ending, and its own record must stay.

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
    spec, plan = load_spec(run.spec), load_plan(run)
    metrics = summarize(run.name, spec, plan, ranks, status) | progress_metrics(ranks)
    if status == "unfinished":
        metrics["message"] = UNFINISHED_MESSAGE.format(run.argument)
    metrics |= _time_and_cost(run, spec, plan, ranks, metrics)
    metrics |= {
        key: before[key] for key in ("message", "failure", "network", "restarts") if key in before and not alive
    }
    return metrics


def reason_of_stop(reported: JobEnd, *, interrupted: bool) -> str:
    """Return why a stop was requested; empty if it was not, or if agents are lost or ranks had failed before."""
    signalled = next((reason for reason in reported.reasons if "the agent received" in reason), "")
    stop = reported.stopped or signalled or ("interrupted" if interrupted else "")
    # Slurm signals ranks itself: a program that ends by SIGTERM has not failed
    failed = any(end.failed and end.exitcode not in (0, *_BY_SIGTERM) for end in reported.ends)
    return "" if reported.lost or reported.hang or failed else stop


def describe_program_stop(reported: JobEnd, why: str, grace_s: float) -> tuple[str, str, int]:
    """Return status, message and exit code of a run after a stop request.

    The status is ``stopped`` if every rank then ended by itself with exit code 0. Whether it saved anything is unknown.
    """
    groups: dict[str, list[int]] = {}
    for end in reported.ends:
        groups.setdefault(_how(end, grace_s), []).append(end.rank)
    ends = "; ".join(f"rank {list_ranks(sorted(ranks))} {ending}" for ending, ranks in groups.items())
    status = "stopped" if reported.ends and all(end.exitcode == 0 for end in reported.ends) else "failed"
    reached = "the ranks received SIGTERM" if reported.ends else "no rank had been started"
    return status, f"stopped ({why}): {reached}" + (f"; {ends}" if ends else ""), EXIT_FAILED


def _how(end: RankEnd, grace_s: float) -> str:
    if end.exitcode == -signal.SIGTERM:
        return "ended by it"
    if end.exitcode == -signal.SIGKILL and end.ended_by_agent:
        return f"did not end within {grace_s:g} s (script.grace_s) and was killed"
    if end.exitcode < 0:
        return f"ended by {signal_name(end.exitcode)}"
    return f"ended with exit code {end.exitcode}"
