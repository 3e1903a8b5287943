"""Request a full checkpoint of a running training from another process, and wait until it is complete.

The request goes to the run's driver, over the control channel to the agent of rank 0, and over its heartbeat page to
rank 0. All ranks agree on the step with the reduction of a step's metrics. Rank 0 records the step in an event, which
this process waits for: it only reads, so that whatever ends it leaves the run alone.
"""

from __future__ import annotations

import time

from allranks.errors import RequestError, RunFailed
from allranks.launch.launchers import launcher_of
from allranks.launch.stop_limit import StopLimit
from allranks.planning.records import load_plan
from allranks.rundir.checkpoints import MANIFEST
from allranks.rundir.events import decode_line
from allranks.rundir.files import read_record
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_appended

POLL_S = 0.2
LEAST_S = 120.0
"""How long a run may take that has not done a step yet, and the least for others."""
ENDED_LOOKS_S = 2.0


def checkpoint(run: RunDir, *, wait: bool = True) -> int | None:
    """Have a running training save a full checkpoint without stopping.

    Args:
        wait: return when the checkpoint is complete, within the limits of `StopLimit`.

    Returns:
        The step of the checkpoint; None without `wait`.

    Raises:
        RequestError: the run is not a training that is running.
        RunFailed: the run ended first, or saved nothing within the limit.
    """
    if run.compare.exists():
        raise RequestError(f"run {run.name} compares strategies, and keeps no checkpoints")
    if load_plan(run).batch is None:
        raise RequestError(
            f"run {run.name} runs your own program, whose checkpoints allranks does not know; let the program save them"
        )
    attempt, events = max(run.attempts(), default=0), run.events_of(0)
    offset = events.stat().st_size if events.exists() else 0
    try:
        launcher_of(run).request_checkpoint(run)
    except RequestError as error:
        saved = run.checkpoint_steps()
        newest = f"its newest checkpoint is {run.checkpoint(saved[-1])}" if saved else "it has no checkpoint"
        raise RequestError(f"{error}; {newest}") from None
    return _wait(run, attempt, offset) if wait else None


def _wait(run: RunDir, attempt: int, offset: int) -> int:
    """Return the step once a checkpoint is complete that rank 0 announced behind `offset` in its events."""
    limit, looked_at, ended = StopLimit(run, load_plan(run), LEAST_S), time.monotonic(), False
    while True:
        step = _announced(run, offset)
        if step is not None and read_record(run.checkpoint(step) / MANIFEST).get("mode") == "full":
            return step
        if ended:
            see = f"see: allranks report {run.argument}"
            raise RunFailed(f"run {run.name} ended before the checkpoint was complete; {see}")
        now = time.monotonic()
        if limit.expired(now):
            raise RunFailed(
                f"run {run.name} has saved no checkpoint within {limit.limit_s:.0f} s; the request stands, and the run "
                "goes on"
            )
        if now - looked_at > ENDED_LOOKS_S:
            looked_at, restarted = now, max(run.attempts(), default=0) != attempt
            ended = restarted or not (run.channel(attempt).exists() or launcher_of(run).is_running(run))
        time.sleep(POLL_S)


def _announced(run: RunDir, offset: int) -> int | None:
    try:
        data = read_appended(run.events_of(0), offset).data
    except OSError:
        return None
    events = (decode_line(line) for line in data[: data.rfind(b"\n") + 1].splitlines())
    return next((event["step"] for event in events if event and event["event"] == "checkpoint_request"), None)
