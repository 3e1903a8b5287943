"""Decide whether a run starts again by itself after a failed attempt: the cause of the failure decides.

`CAUSES` gives the kind of cause of each failure class (`allranks failures`), and `decide` the action. What is decided
is recorded in ``restarts.json`` of the run folder, so that a restart never hides the first cause.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.analysis.diagnose.patterns import NCCL_ERROR
from allranks.errors import CheckpointError
from allranks.rundir import checkpoints
from allranks.rundir.files import read_json, read_record, write_json
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
OF_ONE_NODE = ("broken_node_network", "fabric_manager", "gpu_hardware_fault", "node_unhealthy", "replicas_diverged")
"""Failure classes whose host is at fault: it is left out where a spare node takes its place. A hang is another, if all
ranks that stalled are on one node."""
_KINDS: dict[str, Cause] = {name: kind for kind, names in CAUSES.items() for name in names}


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """How attempt ``attempt`` has failed.

    ``failure``, ``rank`` and ``host`` are those of its verdict, ``message`` is the verdict's sentence. ``after_step``:
    the newest complete checkpoint by then, None if there was none. ``own_program``: it reads its own checkpoints, and
    ``reached_step`` is the largest step that it has reported.
    """

    attempt: int
    failure: str
    message: str
    rank: int | None = None
    host: str | None = None
    after_step: int | None = None
    own_program: bool = False
    reached_step: int | None = None

    @property
    def progress(self) -> int:
        """The step that must grow between two attempts that fail in the same way."""
        return (self.after_step or 0) + (self.reached_step or 0)


class Restart(FailedAttempt, frozen=True, kw_only=True):
    """What was decided after an attempt had failed, and why.

    ``left_out``: nodes in whose place spare ones run from now on. ``time`` is in seconds since 1970.
    """

    time: float
    action: Literal["restart", "stop"]
    cause: Cause
    reason: str
    left_out: list[str] = []

    def resume_args(self, spec: RunSpec) -> dict[str, Any]:
        """Return how the next attempt continues, from the checkpoint that was verified for the decision."""
        return {} if spec.script is not None else _resume_after(self.after_step)

    @property
    def lines(self) -> tuple[str, str]:
        """What failed, and what follows, for the log and the terminal."""
        where = "from the start" if self.after_step is None else f"after step {self.after_step}"
        where = "from the program's own checkpoints" if self.own_program else where
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
    limit, spares = restart_limit(spec), spec.cluster.spares
    text = (
        f"restarts: at most {limit}, after a lost node or link, a faulty GPU or a transient failure, and once after a "
        "failure of unknown cause (cluster.restarts)"
    )
    if not limit:
        text = "restarts: none (cluster.restarts)"
    elif spec.cluster.launched_by.uses_hosts:
        text += "; not after a lost node, whose command is started by hand"
    if not spares:
        return text
    when = "that fails preflight, is lost or is at fault" if limit else "that fails preflight"
    nodes = f"{spares} of the job's {spec.cluster.allocated_nodes} nodes"
    return f"{text}\nspares: {nodes}, each for one {when} (cluster.spares)"


def decide(
    failed: FailedAttempt,
    before: Sequence[Restart],
    limit: int,
    *,
    suspects: Mapping[str, str] = {},
    spares: Sequence[str] = (),
    problem: str = "",
) -> Restart:
    """Return what to do after an attempt has failed.

    Args:
        before: what was decided since the run was last started by a user, oldest first.
        limit: the largest number of restarts.
        suspects: nodes that are left out if there are enough `spares`, each with evidence beyond the message.
        problem: why the launcher cannot start the run again.
    """
    name = failed.failure
    cause, title = cause_of(name), CATALOGUE[name].title if name in CATALOGUE else name
    if name == "application_error" and NCCL_ERROR.search(failed.message):
        cause, title = "unknown", "NCCL failed and does not say why"
    elif name == "application_error" and "ended with exit code" in failed.message:
        title = "an exit of the program itself"
    last = before[-1] if before else None
    # a failure that comes again without progress would come a third time
    same = last is not None and last.failure == name and failed.progress <= last.progress
    left_out: list[str] = []
    action: Literal["restart", "stop"] = "stop"
    if cause in ("deterministic", "ended"):
        would = "it was ended from outside" if cause == "ended" else "the next attempt would end the same way"
        reason = f"{title} ({cause}); {would}"
    elif problem:
        reason = f"{title} ({cause}); {problem}"
    elif len(before) >= limit:
        reason = f"cluster.restarts.max ({limit}) is reached"
    elif same:
        missing = (
            "it has reported no later step since" if failed.own_program else "no checkpoint was written in between"
        )
        reason = f"{title}, as after the attempt before, and {missing}"
    elif cause == "unknown" and any(one.cause == "unknown" for one in before):
        reason = f"{title}; the run has already been started again once for an unknown cause"
    else:
        action, reason = "restart", f"{title} ({'cause unknown' if cause == 'unknown' else cause})"
        # all or none: with one of them left, the next attempt would fail as this one did
        if 0 < len(suspects) <= len(spares):
            left_out = sorted(suspects)
            why = "; ".join(f"{host} ({text})" if text else host for host, text in sorted(suspects.items()))
            reason += f"; without {why}, replaced by spare {', '.join(spares[: len(left_out)])}"
    decided = {"time": time.time(), "action": action, "cause": cause, "reason": reason, "left_out": left_out}
    return Restart(**msgspec.structs.asdict(failed), **decided)


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
    run: RunDir,
    spec: RunSpec,
    attempt: int,
    metrics: dict[str, Any],
    before: list[Restart],
    spares: Sequence[str] = (),
    lost: Mapping[str, str] = {},
    problem: str = "",
) -> Restart | None:
    """Decide whether a failed run starts again by itself; None where the user has turned that off.

    Args:
        metrics: of the failed attempt, with its verdict: ``failure`` and ``message``.
        before: what was decided since the run was last started by a user.
        spares: nodes that may take the place of others.
        lost: nodes that are known to be lost, with the evidence.
        problem: why the launcher cannot start the run again.
    """
    limit = restart_limit(spec)
    if not limit or run.compare.exists():
        return None
    own, failure = spec.script is not None, metrics["failure"]
    sentence = re.split(r"\. Log: |\. Continue after step |; a full checkpoint is in ", str(metrics["message"]))[0]
    failed = FailedAttempt(
        attempt=attempt,
        failure=str(failure.get("id") or "application_error"),
        message=sentence.rstrip("."),
        rank=failure.get("rank"),
        host=failure.get("host"),
        after_step=None if own else _newest_step(run)[0],
        own_program=own,
        reached_step=metrics.get("steps") if own else None,
    )
    suspects = lost or _suspects(run, attempt, failure)
    decided = decide(failed, before, limit, suspects=suspects, spares=spares, problem=problem)
    _record(run, decided)
    return decided


def _suspects(run: RunDir, attempt: int, failure: dict[str, Any]) -> dict[str, str]:
    """Return the node at fault; empty unless the evidence names exactly one."""
    stalled = read_record(run.hang_report(attempt)).get("stalled") or []
    hosts = {str(one.get("host") or "") for one in stalled}
    evidence = str(failure.get("evidence") or "")
    if failure.get("id") in OF_ONE_NODE and (evidence or not stalled):
        hosts = {str(failure.get("host") or "")}
    return dict.fromkeys(hosts, evidence) if len(hosts) == 1 and "" not in hosts else {}


def record_requeue(run: RunDir, attempt: int, nodes: Mapping[str, str], *, own_program: bool) -> None:
    """Record that Slurm starts the job again without nodes that were lost, each with the evidence."""
    lost = Restart(
        attempt=attempt,
        time=time.time(),
        action="restart",
        cause="infrastructure",
        reason=f"requeued without {', '.join(nodes)}",
        failure="node_unhealthy",
        message="; ".join(f"node {host}: {text}" for host, text in nodes.items()),
        host=next(iter(nodes)),
        after_step=None if own_program else _newest_step(run)[0],
        own_program=own_program,
        left_out=list(nodes),
    )
    _record(run, lost)


def _record(run: RunDir, decided: Restart) -> None:
    with suppress(OSError):  # a full disk; what was decided is done and shown all the same
        write_json(run.restarts, msgspec.to_builtins([*read_restarts(run), decided]))
