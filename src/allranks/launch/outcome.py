"""What became of a run: status, the one sentence that explains it, the summary and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from allranks.errors import EXIT_ENVIRONMENT, EXIT_FAILED, EXIT_OK, RequestError
from allranks.launch.blame import Culprit, RankEnd, find_culprit
from allranks.observe import events as event_files
from allranks.observe.summary import of_last_story, summarize
from allranks.planning import LaunchPlan
from allranks.report.text import plain
from allranks.rundir import RunDir, read_json, status_of, write_json
from allranks.spec.records import RunSpec

UNFINISHED = "it does not run, and how it ended was not written down: whoever followed it was killed. Go on with: allranks resume {}"


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run. ``status``: succeeded, stopped (a checkpoint was written) or failed."""

    run: str
    folder: str
    status: str
    exit_code: int
    message: str
    metrics: dict[str, Any]


def conclude(
    run: RunDir,
    spec: RunSpec,
    plan: LaunchPlan,
    code: int,
    *,
    interrupted: bool = False,
    told_by_launcher: str = "unknown",
) -> RunResult:
    """Find out how the last attempt ended, and write metrics.json and report.html.

    Args:
        code: what the launcher's job ended with.
        told_by_launcher: how the scheduler says that the job ended.
    """
    from allranks.fabric.aftermath import as_metrics, outcome_of
    from allranks.report.page import write_report

    attempt = max(run.attempts(), default=1)
    ranks = event_files.read_run(run)
    now = {rank: of_attempt(events, attempt) for rank, events in ranks.items()}
    status, message, exit_code = _verdict(run, plan, now, attempt, _End(code, interrupted, told_by_launcher))
    message = plain(message)  # it quotes what the program wrote, which may hold anything
    if status == "failed" and (gave_up := (read_json(run.driver) or {}).get("gave_up")):
        message = f"{message}. {gave_up}"
    metrics = summarize(run.name, spec, plan, ranks, status)
    if status != "succeeded":
        metrics["message"] = message
    metrics["network"] = as_metrics(outcome_of(run, attempt))
    write_json(run.metrics, metrics)
    write_report(run)
    return RunResult(
        run=run.name, folder=str(run.root), status=status, exit_code=exit_code, message=message, metrics=metrics
    )


def of_attempt(events: list[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """What one rank recorded in an attempt; nothing if it did not start in it."""
    for i in range(len(events) - 1, -1, -1):
        if events[i]["event"] == "start":
            return events[i:] if events[i].get("attempt") == attempt else []
    return []


class _End(msgspec.Struct, frozen=True):
    """How the job ended: its exit code, whether a person interrupted it, and what the scheduler says."""

    code: int
    interrupted: bool
    told: str


def _verdict(
    run: RunDir, plan: LaunchPlan, now: dict[int, list[dict[str, Any]]], attempt: int, end: _End
) -> tuple[str, str, int]:
    done = [e for events in now.values() for e in events if e["event"] == "phase" and e["name"] == "done"]
    stops = [e for events in now.values() for e in events if e["event"] == "stop"]
    if end.code == 0 and stops:
        step, why = stops[0]["step"], "interrupted" if end.interrupted else stops[0]["reason"]
        where = f"a full checkpoint is in {run.checkpoint(step)}. Go on with: allranks resume {run.name}"
        return "stopped", f"stopped after step {step} ({why}); {where}", EXIT_FAILED
    if end.code == 0 and len(done) >= plan.world_size:
        return "succeeded", f"all {plan.world_size} ranks ended well", EXIT_OK
    if end.interrupted:
        return "failed", _interrupted(run, plan), EXIT_FAILED
    hang = read_json(run.hang_report(attempt)) or {}
    if isinstance(hang.get("sentence"), str) and not _failed_before(now, hang):
        return "failed", f"{hang['sentence']}. Evidence: {run.hang(attempt)}", EXIT_FAILED
    culprit = blame(run, now, attempt)
    if culprit is None:
        return "failed", *_without_culprit(run, plan, attempt, end)
    said = describe(run, culprit, attempt, in_steps=plan.batch is not None)
    return "failed", said, culprit.exit_code if culprit.known else EXIT_FAILED


def _interrupted(run: RunDir, plan: LaunchPlan) -> str:
    if plan.batch is None:  # a user's own program, of which no steps and no checkpoints are known
        return "interrupted; the ranks were ended"
    saved = run.checkpoint_steps()
    rest = f"the newest checkpoint is step {saved[-1]}" if saved else "no checkpoint had been written"
    return f"interrupted; the ranks did not reach the edge of a step in time and were ended; {rest}"


def _failed_before(now: dict[int, list[dict[str, Any]]], hang: dict[str, Any]) -> bool:
    """Whether a rank had failed by itself before the others were found to stand still."""
    noticed = (hang.get("alarm") or {}).get("time") or 0.0
    errors = [e for events in now.values() for e in events if e["event"] == "error" and not e.get("echo")]
    return any(e["time"] < noticed for e in errors)


def _without_culprit(run: RunDir, plan: LaunchPlan, attempt: int, end: _End) -> tuple[str, int]:
    """No rank has said or shown anything: what the driver or the scheduler says, and the last line of the log."""
    ends = [read_json(path) or {} for path in sorted(run.logs_of(attempt).glob("*.exit.json"))]
    refused = next((e for e in sorted(ends, key=lambda e: e.get("node", 0)) if e.get("refused")), None)
    if refused:
        return f"{refused['host']}: {refused['refused']}", EXIT_ENVIRONMENT
    driver = read_json(run.driver) or {}
    if driver.get("message"):
        return f"{driver['message']}. Log: {run.logs / 'slurm.log'}", int(driver.get("exit_code", EXIT_FAILED))
    if plan.launcher == "slurm":
        log, what = run.logs / "slurm.log", f"the job ended as {end.told} before its ranks had done their work"
    else:
        log, what = (
            _agent_log(run, attempt),
            f"the ranks did not start or ended without a word (agent exit code {end.code})",
        )
    return f"{what}. {_tail(log)} Log: {log}", EXIT_FAILED


def blame(run: RunDir, now: dict[int, list[dict[str, Any]]], attempt: int) -> Culprit | None:
    """The rank that failed first in an attempt."""
    ends: list[RankEnd] = []
    for path in sorted(run.logs_of(attempt).glob("*.exit.json")):
        record = read_json(path) or {}
        ends += msgspec.convert(record.get("failed", []), list[RankEnd])
    errors = [e for events in now.values() for e in events if e["event"] == "error"]
    steps = {
        rank: next((e["step"] for e in reversed(of_last_story(events)) if e["event"] == "step"), None)
        for rank, events in now.items()
    }
    return find_culprit(ends, errors, steps)


def describe(run: RunDir, culprit: Culprit, attempt: int, *, in_steps: bool) -> str:
    """Rank, cause, last step (where there are steps) and log in one paragraph."""
    logs = run.rank_logs(attempt)
    where = f"rank {culprit.rank}" + (f" on {culprit.host}" if culprit.host else "")
    at = f" after step {culprit.step}" if culprit.step else " before the first step" if in_steps else ""
    log = f". Log: {logs[culprit.rank]}" if culprit.rank in logs else ""
    if culprit.known:
        return f"{culprit.message.rstrip('.')}{log if culprit.exit_code == EXIT_FAILED else ''}"
    name = "" if culprit.cause in culprit.message else f"{culprit.cause}: "
    return f"{where} failed{at}: {name}{culprit.message.splitlines()[0] if culprit.message else culprit.cause}{log}"


def _agent_log(run: RunDir, attempt: int) -> Path:
    return next(iter(run.logs_of(attempt).glob("*.agent.log")), run.logs_of(attempt))


def _tail(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f"Its last words: {lines[-1]}." if lines else ""


def refresh(run: RunDir, *, alive: bool) -> dict[str, Any] | None:
    """metrics.json made anew from the events, its verdict kept; None where there are no events.

    Args:
        alive: whether the run goes on.

    Raises:
        RequestError: plan.json is missing or damaged.
    """
    from allranks.spec import load_spec

    ranks = event_files.read_run(run)
    if not ranks:
        return None
    before, status = read_json(run.metrics) or {}, status_of(run, alive=alive)
    metrics = summarize(run.name, load_spec(run.spec), _planned(run), ranks, status)
    if status == "unfinished":
        metrics["message"] = UNFINISHED.format(run.name)
    metrics |= {key: before[key] for key in ("message", "network") if key in before and not alive}
    write_json(run.metrics, metrics)
    return metrics


def _planned(run: RunDir) -> LaunchPlan:
    try:
        return msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan)
    except (OSError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(
            f"{run.plan}: what was planned cannot be read: {why}; without it there is no summary"
        ) from None
