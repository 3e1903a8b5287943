"""Keep ``driver.json``, the driver's heartbeat; detect from it a lost first node or a silent driver, and cancel or
requeue the job.

The driver runs in the job's script, on its first node. Slurm notices the loss of that node only after minutes, and then
starts the job again. Whoever follows the job therefore reads the heartbeat, asks Slurm and the node whether the node is
lost, and cancels or requeues the job itself.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from allranks.errors import CheckpointError, EnvironmentNotAble
from allranks.launch.restarts import record_requeue
from allranks.nodes.slurm.answers import NoAnswer, is_lost
from allranks.nodes.slurm.commands import JobState, Slurm
from allranks.planning.records import load_plan
from allranks.rundir.checkpoints import read_manifest
from allranks.rundir.files import read_json, write_json
from allranks.rundir.paths import RunDir
from allranks.spec import load_spec
from allranks.spec.records import ClusterSpec
from allranks.utils.machine import host_name

HEARTBEAT_S = 10.0  # between two beats of the driver
ENDED, SILENT, CLEANING = "ended", "silent", "cleaning"
LIMITS_S = {
    ENDED: 30.0,  # from the driver's last record to the end of the job in Slurm
    SILENT: 80.0,  # without a beat of the driver, which comes every `HEARTBEAT_S` and may be seen a minute late on NFS
    CLEANING: 120.0,  # a node that does not answer keeps a job in it until Slurm gives the node up
}
EXAMINE_S = 2.0  # between two checks by an agent whose driver does not answer
FINAL_STATES = ("done", "stopped", "failed", "cancelled")


def slurm_node_name() -> str:
    """Return this node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or host_name()


def print_log_line(text: str) -> None:
    """Print a line in Slurm's own log of the job."""
    try:
        print(f"allranks {time.strftime('%H:%M:%S')} {text}", flush=True)  # noqa: T201 - the job's log
    except OSError:
        pass  # a full disk; what matters is in the record or the exit code


class DriverRecord(threading.Thread):
    """Maintain ``driver.json`` in the run folder: the state of this start of the job, and a heartbeat."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(name="note", daemon=True)
        self._run = run
        self._known: dict[str, object] = {
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            "host": slurm_node_name(),
            "attempt": 0,
            "beat": 0,
        }
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def write(self, state: str, **more: object) -> None:
        """Write a new state for followers of the job. A full file system is only reported."""
        with self._lock:
            self._known |= {"state": state, **more}
            self._save()

    def run(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            with self._lock:
                self._known["beat"] = int(str(self._known["beat"])) + 1
                self._save()

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closed.set()

    def _save(self) -> None:
        try:
            write_json(self._run.driver, self._known)
        except OSError as error:
            print_log_line(f"{self._run.driver} cannot be written: {error.strerror}")


class DriverLiveness:
    """Check the driver's last record and how long it has not changed."""

    def __init__(self, run: RunDir, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._job, self._clock = run, job, clock
        self._seen: tuple[object, ...] = ()
        self._since = clock()

    def look(self, state: str) -> str:
        """Return a condition that has lasted too long while the job had this state in squeue; empty if there is none.

        `ENDED`: the driver recorded the end, `SILENT`: nothing, yet the job runs, `CLEANING`: Slurm awaits only nodes.
        """
        driver = self.driver()
        record = (driver.get("restart"), driver.get("beat"), driver.get("state"))
        seen = (liveness_problem(self._run, driver, state), state, *record)
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()
        sign = str(seen[0])
        return sign if sign and self._clock() - self._since > LIMITS_S[sign] else ""

    def driver(self) -> dict[str, Any]:
        """Return the last record of this job's driver; empty if the record is another job's."""
        driver = read_json(self._run.driver) or {}
        return driver if driver.get("job") == self._job else {}


def liveness_problem(run: RunDir, driver: Mapping[str, Any], state: str) -> str:
    """Return the current condition."""
    said, attempt = driver.get("state"), driver.get("attempt", 0)
    ended = said in FINAL_STATES
    if state == "COMPLETING":  # or on its way back to the queue
        return CLEANING if ended or run.cancelled.exists() else ""
    if state == "PENDING":  # Slurm gave the node up, and would start again what was found to hang
        return ENDED if said == "failed" and run.hang_report(attempt).exists() else ""
    if ended:
        return ENDED
    return SILENT if said == "running" and state == "RUNNING" else ""


SCONTROL_TIMEOUT_S = 10.0
SLURMD_TIMEOUT_S = 3.0
CONNECT_LIMIT_S = 10.0
SLURMD_PORT = 6818


class NodeLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a node check. ``lost`` is None if unknown; ``text`` names the evidence; ``answered``: slurmctld did."""

    host: str
    lost: bool | None
    text: str
    answered: bool = True


def examine_node(slurm: Slurm, host: str) -> NodeLoss:
    """Return whether a node is lost. Takes at most about 25 s.

    Slurm's state decides if it says that the node is down or not responding. slurmctld notices a lost node only after
    minutes (SlurmdTimeout), so otherwise the node's slurmd is contacted directly.
    """
    info = slurm.try_node(host)
    if isinstance(info, NoAnswer):
        return NodeLoss(host=host, lost=None, text=f"unknown: {info.reason}", answered=False)
    if info is not None and is_lost(info):
        return NodeLoss(host=host, lost=True, text=f"Slurm's state of the node is {info.state}")
    # Not from this process: the launcher may be outside of a cluster in a box, where the names of nodes mean nothing.
    words = (host, str(_slurmd_port(slurm)), str(SLURMD_TIMEOUT_S))
    try:
        done = slurm.call(sys.executable, "-I", "-S", "-c", _CONNECT, *words, timeout_s=CONNECT_LIMIT_S)
    except EnvironmentNotAble as error:
        return NodeLoss(host=host, lost=None, text=f"unknown: {error}")
    number, _, text = done.stdout.strip().partition("|")
    if not number:  # ended by a signal, for example since the job of this process is being cancelled
        said = " ".join(done.stderr.split())[-200:] or f"exit code {done.returncode}"
        return NodeLoss(host=host, lost=None, text=f"unknown: connecting to its slurmd gave no result ({said})")
    if number in _UNREACHABLE:  # which of the two comes first depends on the network
        why = f"within {SLURMD_TIMEOUT_S:.0f} s" if number == str(errno.ETIMEDOUT) else f"({text})"
        return NodeLoss(host=host, lost=True, text=f"it does not answer on the network {why}")
    lost, answer = {
        "0": (False, "its slurmd answers, so the node is not lost"),
        str(errno.ECONNREFUSED): (True, "its slurmd is not running"),
    }.get(number, (None, f"unknown: connecting to its slurmd: {text}"))
    return NodeLoss(host=host, lost=lost, text=answer)


_UNREACHABLE = {str(code) for code in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)}
_CONNECT = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
    print("0|")
except socket.timeout:
    print(f"{errno.ETIMEDOUT}|")
except OSError as error:
    print(f"{error.errno}|{error.strerror or error}")
"""


def _slurmd_port(slurm: Slurm) -> int:
    try:
        done = slurm.call("scontrol", "show", "config", timeout_s=SCONTROL_TIMEOUT_S)
    except EnvironmentNotAble:
        return SLURMD_PORT
    match = re.search(r"^SlurmdPort\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    return int(match.group(1)) if match else SLURMD_PORT


def handle_dead_driver(
    sign: str, run: RunDir, slurm: Slurm, job: str, state: JobState, driver: Mapping[str, Any]
) -> bool:
    """Cancel or requeue the job in place of its script, which cannot do or report it.

    Args:
        sign: a condition returned by `DriverLiveness.look`.
        driver: the last record of the job's driver.

    Returns:
        Whether to stop waiting for the job.

    Raises:
        EnvironmentNotAble: Slurm does not answer.
    """
    if sign == CLEANING:
        return True
    starts = driver.get("restart", 0) + (state.state == "PENDING")
    if slurm.restarts(job) != starts:  # what is recorded is of an earlier start: this one has recorded nothing yet
        return False
    host = str(driver.get("host", ""))
    spec = load_spec(run.spec)
    without = [*spec.cluster.slurm.exclude, host]
    node = examine_node(slurm, host)
    may_requeue = driver.get("restart", 0) < spec.cluster.slurm.max_requeues and not run.cancelled.exists()
    if sign == SILENT and node.lost and may_requeue and not slurm.try_requeue(job):
        if kept := slurm.try_exclude(
            job, without, *smaller_request(spec.cluster, usable_without(slurm, spec.cluster, without))
        ):
            logging.warning(
                "Slurm does not exclude %s from the next start of job %s: %s", ", ".join(without), job, kept
            )
        _write_driver_record(run, {**driver, "state": "requeued"})
        record_requeue(run, int(driver.get("attempt", 1)), {host: node.text}, own_program=spec.script is not None)
        return False
    loss = _describe_loss(sign, run, slurm, job, driver, node)
    slurm.cancel(job)
    ended = {} if sign != SILENT else {"state": "failed", "exit_code": 1}
    cure = _how_to_continue(run, without if node.lost or sign != SILENT else [])
    _write_driver_record(run, {**driver, **ended, "gave_up": f"{loss}. {cure}"})
    return True


def continue_without_driver(
    run: RunDir, job: str, slurm: Slurm | None = None, *, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Requeue the job, from another of its nodes, if its driver stays silent and the node of its script is lost.

    Slurm does that itself, except for a job with `--no-kill`, which then waits for its time limit if nobody follows it.
    """
    slurm, overdue = slurm or Slurm([], "this job's"), DriverLiveness(run, job)
    deadline = time.monotonic() + LIMITS_S[SILENT] + HEARTBEAT_S
    while time.monotonic() < deadline and not stopped():  # as Slurm cancels a job
        state = slurm.state(job)
        if sign := overdue.look(state.state):
            driver = overdue.driver()
            with suppress(EnvironmentNotAble):
                if sign == SILENT and examine_node(slurm, str(driver.get("host", ""))).lost:
                    handle_dead_driver(sign, run, slurm, job, state, driver)
            return
        time.sleep(EXAMINE_S)


def usable_without(slurm: Slurm, cluster: ClusterSpec, excluded: Sequence[str]) -> int:
    """Return how many of the nodes that a job asked for are usable without some; all if Slurm does not answer."""
    usable = slurm.usable_nodes(cluster.slurm.partition)
    left = None if usable is None else len([host for host in usable if host not in excluded])
    return cluster.allocated_nodes if left is None else min(left, cluster.allocated_nodes)


def smaller_request(cluster: ClusterSpec, usable: int) -> list[str]:
    """Return the changes with which a job starts again with fewer spare nodes; empty if it needs none or has too few.

    With as many CPUs as before, Slurm would give some of the nodes more than others.
    """
    if not cluster.nodes <= usable < cluster.allocated_nodes:
        return []
    cpus = usable * (cluster.slurm.cpus_per_task or 1)
    return [f"NumNodes={usable}", f"NumTasks={usable}", f"NumCPUs={cpus}"]


def _write_driver_record(run: RunDir, driver: Mapping[str, Any]) -> None:
    """Write ``driver.json`` for the driver. A full disk is logged; it does not end the command that follows the job."""
    try:
        write_json(run.driver, driver)
    except OSError as error:
        logging.warning(
            "%s cannot be written: %s (%s)", run.driver, error.strerror, driver.get("gave_up", driver["state"])
        )


def _describe_loss(sign: str, run: RunDir, slurm: Slurm, job: str, driver: Mapping[str, Any], node: NodeLoss) -> str:
    host = driver.get("host", "?")
    if sign == SILENT and node.lost is False:
        return (
            f"the driver of job {job} on {host} recorded nothing for too long: its process is stopped or gets no CPU "
            f"time ({node.text}). Job {job} was cancelled"
        )
    ranks = load_plan(run).nodes[0].ranks
    few = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
    what = "has recorded nothing for too long" if sign == SILENT else "has finished, but Slurm has not noticed"
    return (
        f"{host}, the job's first node, where its script and {few} ran, {what}: Slurm reports the node as "
        f"{slurm.node_state(str(host))} ({node.text}). Job {job} was cancelled"
    )


def _how_to_continue(run: RunDir, without: list[str]) -> str:
    exclude = f" --set 'cluster.slurm.exclude=[{','.join(without)}]'" if without else ""
    resumable, steps = False, run.checkpoint_steps()
    try:
        resumable = bool(steps) and read_manifest(run, steps[-1])["mode"] == "full"
    except (CheckpointError, KeyError):
        pass
    command = f"allranks resume {run.argument}{exclude}" if resumable else f"allranks run {run.spec}{exclude}"
    start = "Check that node's network; to continue without it" if without else "Continue with"
    return f"{start}: {command}"
