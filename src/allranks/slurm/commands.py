"""sbatch, squeue, scancel and scontrol, with parsable output, every call bounded in time."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError

CALL_S = 60.0
# What squeue says of jobs that are still to do something.
ALIVE = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
}


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A job as squeue sees it. ``state`` is ``GONE`` when it has left the queue."""

    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


class Slurm:
    """The commands of one Slurm. ``prefix`` goes before each: empty for the machine's own, else the way into a box."""

    def __init__(self, prefix: list[str], label: str) -> None:
        self.prefix, self.label = prefix, label

    def call(self, *argv: str, timeout_s: float = CALL_S) -> subprocess.CompletedProcess[str]:
        """Run one command to its end.

        Raises:
            EnvironmentNotAble: it does not answer in time, or is not installed.
        """
        try:
            return subprocess.run(
                [*self.prefix, *argv],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentNotAble(
                f"Slurm ({self.label}): {argv[0]} did not answer within {timeout_s:.0f} s; is slurmctld up?"
            ) from None
        except FileNotFoundError:
            raise EnvironmentNotAble(f"Slurm ({self.label}): the command {argv[0]} is not here") from None

    def submit(self, script: Path, *, test_only: bool = False) -> str:
        """The job's number, or with `test_only` what sbatch says about when it could start.

        Raises:
            RequestError: Slurm refuses the request; its own words are in the message.
        """
        done = self.call("sbatch", *(["--test-only"] if test_only else ["--parsable"]), str(script))
        if done.returncode:
            words = " ".join(
                line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.strip().splitlines()
            )
            raise RequestError(f"Slurm ({self.label}) refuses the job: {words}{_cure(words)}")
        return done.stderr.strip() if test_only else done.stdout.strip().split(";")[0]

    def state(self, job: str) -> JobState:
        """What squeue says of a job now."""
        done = self.call("squeue", "--noheader", "--jobs", job, "--states=all", "--format=%T|%r|%S|%N")
        line = done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
        if not line:
            return JobState(state="GONE")
        state, reason, start, nodes = [*line.split("|"), "", "", ""][:4]
        return JobState(state=state, reason=reason, start=start, nodes=nodes)

    def end_reason(self, job: str) -> str:
        """How a job that is over ended: from scontrol while it still knows it, else from sacct, else unknown."""
        done = self.call("scontrol", "show", "job", "--oneliner", job)
        found = re.search(r"\bJobState=(\S+) Reason=(\S+)", done.stdout)
        if done.returncode == 0 and found:
            return found.group(1) if found.group(2) in ("None", "") else f"{found.group(1)} ({found.group(2)})"
        if shutil.which("sacct") or self.prefix:
            done = self.call("sacct", "--jobs", job, "--parsable2", "--noheader", "--allocations", "--format=State")
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.strip().splitlines()[0]
        return "unknown"

    def cancel(self, job: str, *extra: str) -> None:
        """scancel, with options such as ``--signal=USR1``."""
        self.call("scancel", *extra, job)

    def requeue(self, job: str, without: Sequence[str]) -> bool:
        """Send a job back to the queue, from now on without these nodes; False where Slurm does not take it."""
        if self.call("scontrol", "requeue", job).returncode:
            return False
        if without:
            self.call("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(without)}")
        return True

    def restarts(self, job: str) -> int | None:
        """How often a job has gone back to the queue; None where Slurm does not know it."""
        found = re.search(r"\bRestarts=(\d+)", self.call("scontrol", "show", "job", "--oneliner", job).stdout)
        return int(found.group(1)) if found else None

    def node_state(self, host: str) -> str:
        """sinfo's word for a node: ``allocated``, ``down`` and the like, with ``*`` where it does not answer Slurm."""
        lines = self.call("sinfo", "--noheader", "--Node", f"--nodes={host}", "--format=%T").stdout.split()
        return lines[0] if lines else "unknown"


def _cure(words: str) -> str:
    for pattern, cure in (
        (r"invalid partition", ". Look at `sinfo -s` and set cluster.slurm.partition"),
        (
            r"invalid account|account/partition",
            ". Look at `sacctmgr show assoc user=$USER` and set cluster.slurm.account",
        ),
        (r"invalid qos", ". Look at `sacctmgr show qos` and set cluster.slurm.qos"),
        (r"more processors|node configuration|cpu count", ". Ask for fewer nodes, CPUs or GPUs a node"),
        (r"gres", ". Look at `sinfo -o '%n %G'` for the GPUs there are, and set cluster.slurm.gpus_per_node or gres"),
        (r"time limit|timelimit", ". Look at `sinfo -o '%P %l'` and set cluster.slurm.time"),
    ):
        if re.search(pattern, words, re.IGNORECASE):
            return cure
    return ""


def find_slurm(cwd: Path) -> Slurm:
    """The machine's own Slurm if it answers, else the cluster in a box that is up.

    Raises:
        EnvironmentNotAble: there is neither.
    """
    from allranks.testcluster import find_box

    if shutil.which("scontrol"):
        own = Slurm([], "this machine's")
        try:
            ping = own.call("scontrol", "ping", timeout_s=10)
            if ping.returncode == 0 and "UP" in ping.stdout:
                return own
        except EnvironmentNotAble:
            pass
    box = find_box()
    if box is not None:
        return Slurm(box.command_prefix(str(cwd)), f"the cluster in a box {box.name!r}")
    raise EnvironmentNotAble(
        "cluster.launcher is slurm, but no Slurm answers here and no cluster in a box is up; go to a login node, or try it here: allranks cluster up"
    )
