"""Decide whether a run starts again by itself after a failed attempt: the cause of the failure decides.

`CAUSES` gives the kind of cause of each failure class (`allranks failures`), and `decide` the action. What is decided is
recorded in ``restarts.json`` of the run folder, so that a restart never hides the first cause.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.errors import CheckpointError
from allranks.rundir import checkpoints
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from allranks.spec.records import RunSpec

DEFAULT_RESTARTS = 3  # of a training; a user's own program starts again only if its spec says so
Cause = Literal["infrastructure", "transient", "unknown", "deterministic", "ended"]

CAUSES: dict[Cause, tuple[str, ...]] = {
    "infrastructure": (
        "first_collective_failed", "broken_node_network", "rdma_unreachable", "fabric_manager", "gpu_hardware_fault",
        "node_unhealthy", "replicas_diverged",
    ),
    "transient": (
        "port_in_use", "rendezvous_unreachable", "stale_file_handle", "storage_stalled", "hub_unreachable",
        "package_lock", "extension_build_lock", "slurm_controller_error", "slurm_credential",
    ),
    "unknown": (
        "rank_died", "peer_died_first", "collective_hang", "checkpoint_collective", "dataloader_hang", "host_oom",
        "cuda_oom", "cuda_oom_optimizer_step", "sigbus_memory", "shm_removed", "straggler", "slow_transport",
    ),
    "ended": ("slurm_cancelled", "slurm_time_limit", "slurm_preempted", "slurm_allocation_gone"),
}  # fmt: skip
"""Failure classes by kind of cause. All others are deterministic: the next attempt would end the same way."""
ACTIONS: dict[Cause, str] = {
    "infrastructure": "starts again",
    "transient": "starts again",
    "unknown": "starts again once",
    "deterministic": "stops at once",
    "ended": "stops: it was ended from outside",
}
_KINDS: dict[str, Cause] = {name: kind for kind, names in CAUSES.items() for name in names}


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided after attempt ``attempt`` had failed, and why.

    ``failure``, ``rank`` and ``host`` are those of its verdict, ``message`` is the verdict's sentence. ``after_step``:
    the newest complete checkpoint by then, None if there was none. ``time`` is in seconds since 1970.
    """

    attempt: int
    time: float
    action: Literal["restart", "stop"]
    cause: Cause
    reason: str
    failure: str
    message: str
    rank: int | None = None
    host: str | None = None
    after_step: int | None = None

    def resume_args(self, spec: RunSpec) -> dict[str, Any]:
        """Return how the next attempt continues, from the checkpoint that was verified for the decision."""
        return {} if spec.script is not None else _resume_after(self.after_step)

    @property
    def lines(self) -> tuple[str, str]:
        """What failed, and what follows, for the log and the terminal."""
        where = "from the start" if self.after_step is None else f"after step {self.after_step}"
        what = where if self.action == "restart" else "none"
        return f"failed   attempt {self.attempt}: {self.message}", f"restart  {what}: {self.reason}"


def cause_of(failure: str) -> Cause:
    """Return the kind of cause of a failure class."""
    return _KINDS.get(failure, "deterministic")


def restart_limit(spec: RunSpec) -> int:
    """Return how often a run may start again by itself."""
    wanted = spec.cluster.restarts.max
    return wanted if wanted is not None else 0 if spec.script is not None else DEFAULT_RESTARTS


def restart_line(spec: RunSpec) -> str:
    """Return a line of the plan: how often, and after which failures, the run starts again by itself."""
    limit, by_hand = restart_limit(spec), spec.cluster.launched_by.uses_hosts
    if by_hand or not limit:
        why = "launcher hosts: its commands are started by hand" if by_hand else "cluster.restarts"
        return f"restarts: none ({why})"
    return (
        f"restarts: at most {limit}, after a lost node or link, a faulty GPU or a transient failure, and once after a "
        "failure of unknown cause (cluster.restarts)"
    )


def decide(
    attempt: int, failure: dict[str, Any], message: str, before: Sequence[Restart], limit: int, after_step: int | None
) -> Restart:
    """Return what to do after an attempt has failed.

    Args:
        failure: class (``id``), ``rank`` and ``host`` of its verdict.
        before: what was decided since the run was last started by a user, oldest first.
        limit: the largest number of restarts.
        after_step: the newest complete checkpoint; None: there is none.
    """
    name = str(failure.get("id") or "application_error")
    cause, title = cause_of(name), CATALOGUE[name].title if name in CATALOGUE else name
    same = bool(before) and before[-1].failure == name and (after_step or 0) <= (before[-1].after_step or 0)
    action: Literal["restart", "stop"] = "stop"
    if cause in ("deterministic", "ended"):
        would = "it was ended from outside" if cause == "ended" else "the next attempt would end the same way"
        reason = f"{title} ({cause}); {would}"
    elif len(before) >= limit:
        reason = f"cluster.restarts.max ({limit}) is reached"
    elif same:
        reason = f"{title}, as after the attempt before, and no checkpoint was written in between"
    elif cause == "unknown" and any(one.cause == "unknown" for one in before):
        reason = f"{title}; the run has already been started again once for an unknown cause"
    else:
        action, reason = "restart", f"{title} ({'cause unknown' if cause == 'unknown' else cause})"
    return Restart(
        attempt=attempt,
        time=time.time(),
        action=action,
        cause=cause,
        reason=reason,
        failure=name,
        message=message.partition(". Log: ")[0].rstrip("."),
        rank=failure.get("rank"),
        host=failure.get("host"),
        after_step=after_step,
    )


def resume_args(run: RunDir, spec: RunSpec) -> tuple[dict[str, Any], list[str]]:
    """Return how the next attempt of a run continues by itself, and what to say of it.

    Without a full checkpoint a training begins anew. A user's own program reads its own checkpoints.
    """
    if spec.script is not None:
        return {}, []
    step, problems = _newest_step(run)
    notes = [f"skipped: {problem}" for problem in problems]
    if step is not None:
        return _resume_after(step), [*notes, f"resuming after step {step}"]
    return _resume_after(None), [*notes, "no full checkpoint yet: training starts from the beginning"]


def _resume_after(step: int | None) -> dict[str, Any]:
    return {"resume_step": None, "anew": True} if step is None else {"resume_step": step, "inexact": False}


def _newest_step(run: RunDir) -> tuple[int | None, list[str]]:
    """Return the newest complete checkpoint with optimizer state, and what is wrong with newer ones."""
    try:
        return checkpoints.newest_checkpoint(run, full=True)
    except CheckpointError:
        return None, []


def read_restarts(run: RunDir) -> list[Restart]:
    """Return everything that was decided in a run, oldest first; nothing if the record is missing or damaged."""
    try:
        return msgspec.convert(read_json(run.restarts) or [], list[Restart])
    except msgspec.ValidationError:
        return []


def decide_and_record(
    run: RunDir, spec: RunSpec, attempt: int, metrics: dict[str, Any], before: list[Restart]
) -> Restart | None:
    """Decide whether a failed run starts again by itself; None where the user has turned that off.

    Args:
        metrics: of the failed attempt, with its verdict: ``failure`` and ``message``.
        before: what was decided since the run was last started by a user.
    """
    limit = restart_limit(spec)
    if not limit or run.compare.exists():
        return None
    step = None if spec.script is not None else _newest_step(run)[0]
    decided = decide(attempt, metrics["failure"], str(metrics["message"]), before, limit, step)
    _record(run, decided)
    return decided


def record_requeue(run: RunDir, attempt: int, hosts: Sequence[str], evidence: str) -> None:
    """Record that Slurm starts the job again without nodes that were lost, on this evidence."""
    lost = Restart(
        attempt=attempt,
        time=time.time(),
        action="restart",
        cause="infrastructure",
        reason=f"requeued without {', '.join(hosts)}",
        failure="node_unhealthy",
        message=evidence,
        host=hosts[0],
        after_step=_newest_step(run)[0],
    )
    _record(run, lost)


def _record(run: RunDir, decided: Restart) -> None:
    with suppress(OSError):  # a full disk; what was decided is done and shown all the same
        write_json(run.restarts, msgspec.to_builtins([*read_restarts(run), decided]))
