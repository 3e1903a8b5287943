"""What is done about a job whose first node is cut off or lost: it is cancelled, or goes back to the queue without that node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from allranks.checkpoints import manifest
from allranks.errors import CheckpointError
from allranks.launch.overdue import CLEANING, LOST
from allranks.planning import LaunchPlan
from allranks.rundir import RunDir, read_json, write_json
from allranks.slurm.commands import JobState, Slurm
from allranks.spec import load_spec


def act(sign: str, run: RunDir, slurm: Slurm, job: str, state: JobState, driver: Mapping[str, Any]) -> bool:
    """Draw the conclusion that the job's own script could not draw, or not tell.

    Args:
        sign: one of `overdue`.
        driver: what the job's driver has written last.

    Returns:
        Whether the job is not to be waited for any longer.
    """
    if sign == CLEANING:
        return True
    starts = driver.get("restart", 0) + (state.state == "PENDING")
    if slurm.restarts(job) != starts:  # what is written is of an earlier start: this one has said nothing yet
        return False
    host = str(driver.get("host", ""))
    spec = load_spec(run.spec).cluster.slurm
    without = [*spec.exclude, host]
    again = sign == LOST and driver.get("restart", 0) < spec.max_requeues and not run.cancelled.exists()
    if again and slurm.requeue(job, without):
        write_json(run.driver, {**driver, "state": "requeued"})
        return False
    found = _sentence(sign, run, slurm, job, driver)
    slurm.cancel(job)
    ended = {} if sign != LOST else {"state": "failed", "exit_code": 1}
    write_json(run.driver, {**driver, **ended, "gave_up": f"{found}. {_cure(run, without)}"})
    return True


def _sentence(sign: str, run: RunDir, slurm: Slurm, job: str, driver: Mapping[str, Any]) -> str:
    host, attempt = driver.get("host", "?"), driver.get("attempt", 1)
    ranks = msgspec.json.decode(run.plan.read_bytes(), type=LaunchPlan).nodes[0].ranks
    few = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    met = read_json(run.rendezvous(attempt))
    at = f", and where all ranks met ({met['address']}:{met['port']})" if met else ""
    what = "has not said how its ranks ended" if sign == LOST else "has ended its work, but Slurm has not heard of it"
    state = slurm.node_state(str(host))
    mute = ", that is, it does not answer" if state.endswith("*") else ""
    return (
        f"{host}, the job's first node, where its script and {few} ran{at}, {what}: to Slurm the node is "
        f"{state}{mute}. Job {job} was cancelled"
    )


def _cure(run: RunDir, without: list[str]) -> str:
    steps, way = run.checkpoint_steps(), "start it again with"
    try:
        if steps and manifest(run, steps[-1])["mode"] == "full":
            way = f"allranks resume {run.name}"
    except (CheckpointError, KeyError):
        pass
    return (
        f"Look at that node's network; to go on without it: {way} --set 'cluster.slurm.exclude=[{','.join(without)}]'"
    )
