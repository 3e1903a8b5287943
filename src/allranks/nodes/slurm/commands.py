"""Call sbatch, scontrol, squeue, sinfo, sacct and scancel, each with a time limit; name the key of a spec that a
refusal is about.

The output is parsed in `allranks.nodes.slurm.answers`. "Slurm does not know the job" and "Slurm did not answer"
are always different results: a restarting controller gives no information about a job.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.nodes.slurm import answers
from allranks.nodes.slurm.answers import JobInfo, ListedNode, NoAnswer, NodeInfo, PartitionGres, PartitionLimits
from allranks.nodes.slurm.endpoints import find_endpoint
from allranks.planning.slurm_request import parse_time_limit
from allranks.spec.records import ClusterSpec

CALL_TIMEOUT_S = 60.0
TRY_TIMEOUT_S = 10.0
"""Time limit of calls whose callers can continue without an answer."""
REAP_S = 5.0
EXCLUDE_S = 5.0  # less than KillWait of most clusters, after which Slurm kills a requeued job's script
EXCLUDE_POLL_S = 0.2
NO_ANSWER = "UNKNOWN"
"""The state of a job about which Slurm did not answer. The job counts as alive: nothing shows that it ended."""
# squeue's states of jobs that have not ended.
ALIVE_STATES = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_FED"),
        *("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SIGNALING", "STAGE_OUT", "RESIZING"),
    }
) | {NO_ANSWER}
# Answers about a job or node that Slurm does not know (slurm_errno.c, scontrol).
_NOT_THERE = re.compile(r"invalid job id|invalid node name|\bnot found\b", re.IGNORECASE)
# Variables of the user that change the selection and format of the output.
_FORMATTING = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_")
RESOURCES = ("gres", "gpus_per_node", "mem", "cpus_per_task", "constraint", "exclude", "extra", "nodes")
REFUSALS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"account/partition|invalid account|valid account", ("account", "partition")),
    (r"\bqos\b.*\b(time|limit)|policy|limit.*\bqos\b", ("qos", "account", "time", *RESOURCES)),
    (r"\bqos\b", ("qos",)),
    (r"partition|use this queue", ("partition",)),
    (r"time limit|timelimit|--time\b", ("time",)),
    (r"--signal", ("signal_s",)),
    (r"chdir|working directory", ("chdir",)),
    (r"reservation", ("reservation",)),
    (r"feature|constraint", ("constraint",)),
    (r"gres\b|generic resource|--gpus", ("gres", "gpus_per_node", "extra")),
    (r"node count|too many nodes", ("nodes",)),
    (r"memory|--mem\b", ("mem",)),
    (r"cpu count|cpus? per|more processors", ("cpus_per_task", "nodes")),
    (r"node name", ("exclude",)),
    (r"unrecognized option|invalid option|ambiguous option", ("extra",)),
    (r"node configuration|not available|satisfied", RESOURCES),
)
"""Words in a refusal, and the keys that they may refer to; the first match counts, and keys without a value do not."""
CURES = {
    "partition": "check `sinfo -s`",
    "account": "check `sacctmgr show assoc user=$USER`",
    "qos": "check `sacctmgr show qos`",
    "time": "check `sinfo -o '%P %l'`, which shows the longest time of each partition",
    "signal_s": "choose at most 65535 s",
    "chdir": "choose a folder that the nodes see",
    "gres": "check `sinfo -o '%n %G'`, which shows the GPUs of each node",
    "gpus_per_node": "check `sinfo -o '%n %G'`, which shows the GPUs of each node",
    "mem": "check `sinfo -o '%n %m'`, which shows the MiB of each node",
    "cpus_per_task": "check `sinfo -o '%n %c'`, which shows the CPUs of each node",
    "nodes": "check `sinfo -s`, which shows the nodes of each partition",
    "constraint": "check `sinfo -o '%n %f'`, which shows the features of each node",
    "reservation": "check `scontrol show reservation`",
    "exclude": "check `sinfo -N`",
    "extra": "check `man sbatch`",
}
CONTACT = re.compile(r"unable to contact|connection (refused|timed out)|cannot connect|communication", re.IGNORECASE)


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A job in the queue. ``state`` is ``GONE`` if Slurm no longer knows it."""

    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def alive(self) -> bool:
        return self.state in ALIVE_STATES


class SubmissionRefused(RequestError):
    """Slurm refused a job; the message contains its error."""


class Slurm:
    """The commands of one Slurm. ``prefix`` precedes each: empty for the machine's own Slurm, else that of a box."""

    def __init__(self, prefix: list[str], label: str) -> None:
        self.prefix, self.label = prefix, label

    def call(self, *argv: str, timeout_s: float = CALL_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        """Run one command to its end.

        Raises:
            EnvironmentNotAble: it cannot be started, or does not end within `timeout_s` seconds.
        """
        return self._run(argv, timeout_s, None)

    def _ask(self, *argv: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command whose output is parsed: in Slurm's standard format, independent of the user's variables."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_FORMATTING)}
        return self._run(argv, timeout_s, {**env, "SLURM_TIME_FORMAT": "standard"})

    def _run(
        self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None
    ) -> subprocess.CompletedProcess[str]:
        command = [*self.prefix, *argv]
        try:
            # A separate session, so that a wrapper script's child that holds the pipe is ended too.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=env,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise EnvironmentNotAble(f"Slurm ({self.label}): the command {argv[0]} was not found") from None
        except (OSError, ValueError) as error:
            raise EnvironmentNotAble(f"Slurm ({self.label}): {argv[0]} cannot be started: {error}") from None
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise EnvironmentNotAble(
                f"Slurm ({self.label}): {argv[0]} did not answer within {timeout_s:g} s; check that slurmctld is "
                "running"
            ) from None
        except BaseException:
            _end(process)
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def submit(self, script: Path, *, test_only: bool = False) -> str:
        """Return the job ID, or with `test_only` what sbatch prints about when it could start.

        Raises:
            SubmissionRefused: Slurm refuses the request; `allocations.refusal` names the key of the spec.
        """
        done = self.call("sbatch", *(["--test-only"] if test_only else ["--parsable"]), str(script))
        if done.returncode:
            raise SubmissionRefused(clean_words(done.stderr))
        return done.stderr.strip() if test_only else done.stdout.strip().split(";")[0]

    def try_job(self, job: str) -> JobInfo | NoAnswer | None:
        """Return Slurm's record of a job, `NoAnswer` if it does not answer, None if it does not know the job."""
        text = self.show("job", job)
        return answers.parse_job(text, job) or _strange(text) if isinstance(text, str) else text

    def try_node(self, host: str) -> NodeInfo | NoAnswer | None:
        """Return Slurm's record of a node, `NoAnswer` if it does not answer, None if it does not know the node."""
        text = self.show("node", host)
        return next(iter(answers.parse_nodes(text)), _strange(text)) if isinstance(text, str) else text

    def show(self, what: str, name: str) -> str | NoAnswer | None:
        """Return what scontrol shows of a job or node on one line; None if Slurm does not know it."""
        try:
            done = self._ask("scontrol", "show", what, "--oneliner", name, timeout_s=TRY_TIMEOUT_S)
        except EnvironmentNotAble as error:
            return NoAnswer(str(error))
        said = f"{done.stderr} {done.stdout}"
        if done.returncode == 0 and not _NOT_THERE.search(done.stdout[:100]):
            return done.stdout
        if _NOT_THERE.search(said):
            return None
        return NoAnswer(f"Slurm ({self.label}): scontrol show {what} {name}: {' '.join(said.split())[:300]}")

    def partitions(self, *, timeout_s: float = TRY_TIMEOUT_S) -> list[PartitionGres]:
        """Return the partitions, each once for every kind of its nodes; none if Slurm does not answer."""
        listed = self.output("sinfo", "--all", "--noheader", "--format=%P|%G", timeout_s=timeout_s)
        return answers.parse_partitions(listed or "")

    def partition_gpus(self, partition: str | None, *, timeout_s: float = TRY_TIMEOUT_S) -> int | None:
        """Return the GPUs of each node of a partition (None: the default one); None if unknown."""
        return answers.partition_gpus(self.partitions(timeout_s=timeout_s), partition)

    def partition_limits(self) -> list[PartitionLimits]:
        """Return the largest job of each partition; none if Slurm does not answer."""
        listed = self.output("sinfo", "--all", "--noheader", "--format=%P|%l|%s")
        return answers.parse_partition_limits(listed or "")

    def output(self, *argv: str, timeout_s: float = TRY_TIMEOUT_S) -> str | None:
        """Return what a command prints; None if it is not installed, fails, or does not answer."""
        try:
            done = self._ask(*argv, timeout_s=timeout_s)
        except EnvironmentNotAble:
            return None
        return None if done.returncode else done.stdout

    def state(self, job: str) -> JobState:
        """Return a job's state: ``GONE`` if Slurm does not know it, `NO_ANSWER` if Slurm does not answer."""
        info = self.try_job(job)
        if info is None:
            return JobState(state="GONE")
        if isinstance(info, NoAnswer):
            return JobState(state=NO_ANSWER, reason=info.reason)
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(info.start_time)) if info.start_time else "N/A"
        return JobState(
            state=info.state,
            reason=info.reason or "None",
            start=start,
            nodes=info.nodes or "",
            restarts=info.restarts or 0,
        )

    def end_reason(self, job: str) -> str:
        """Return how a job ended: from scontrol while it knows the job, else from sacct, else ``unknown``."""
        info = self.try_job(job)
        if isinstance(info, JobInfo):
            return answers.end_text(info)
        fields = ("--parsable2", "--noheader", "--allocations", "--format=State,ExitCode")
        recorded = answers.parse_sacct(self.output("sacct", "--jobs", job, *fields) or "", job)
        return answers.end_text(recorded) if recorded else "unknown"

    def cancel(self, job: str, *extra: str, timeout_s: float = TRY_TIMEOUT_S) -> None:
        """Run scancel, with options such as ``--signal=USR1``.

        Raises:
            EnvironmentNotAble: Slurm does not answer, or refuses for a reason other than that the job has ended.
        """
        done = self.call("scancel", *extra, job, timeout_s=timeout_s)
        if done.returncode and not re.search(
            r"invalid job id|already completing|not running|job/step already", done.stderr, re.I
        ):
            raise EnvironmentNotAble(f"Slurm ({self.label}): scancel {job}: {' '.join(done.stderr.split())[:300]}")

    def try_requeue(self, job: str) -> str:
        """Requeue a job.

        Returns:
            Why it failed; empty on success.
        """
        return self._refusal("scontrol", "requeue", job)

    def try_exclude(self, job: str, nodes: Sequence[str], *changes: str) -> str:
        """Exclude nodes from the next start of a job that was requeued. Slurm refuses this while the job is running.

        Args:
            changes: of the job's request, as scontrol update takes them.

        Returns:
            Why it failed; empty on success.
        """
        deadline = time.monotonic() + EXCLUDE_S
        while True:
            refused = self._refusal("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}", *changes)
            if not refused or time.monotonic() > deadline:
                return refused
            time.sleep(EXCLUDE_POLL_S)

    def _refusal(self, *command: str) -> str:
        try:
            done = self.call(*command, timeout_s=TRY_TIMEOUT_S)
        except EnvironmentNotAble as error:
            return str(error)
        return " ".join(done.stderr.split())[:300] or "no reason was given" if done.returncode else ""

    def usable_nodes(self, partition: str | None) -> list[str] | None:
        """Return the nodes of a partition (None: the default one) that are up or will be; None if unknown."""
        nodes = self.node_list(partition)
        return None if nodes is None else [node.host for node in nodes if node.usable]

    def node_list(self, partition: str | None) -> list[ListedNode] | None:
        """Return the nodes of a partition (None: the default one) with their states; None if unknown."""
        listed = self.output("sinfo", "--noheader", "--Node", "--format=%P|%N|%T|%a|%E")
        return None if listed is None else answers.parse_node_list(listed, partition)

    def restarts(self, job: str) -> int | None:
        """Return how often a job was requeued; None if Slurm does not know it or does not answer."""
        info = self.try_job(job)
        return info.restarts if isinstance(info, JobInfo) else None

    def node_state(self, host: str) -> str:
        """Return sinfo's state of a node: ``allocated``, ``down`` and others, with ``*`` if it does not respond."""
        listed = self.output("sinfo", "--noheader", "--Node", f"--nodes={host}", "--format=%T")
        return next(iter((listed or "").split()), "unknown")


def _strange(text: str) -> NoAnswer:
    return NoAnswer(f"the answer of scontrol cannot be read: {text[:200]!r}")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a command with all its children, and wait for it at most `REAP_S`."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired, ValueError, OSError):
        process.communicate(timeout=REAP_S)


def find_slurm(cwd: Path, *, timeout_s: float = TRY_TIMEOUT_S, wanted: str = "cluster.launcher is slurm, but") -> Slurm:
    """Return the machine's own Slurm if it answers, else the running cluster in a box.

    Args:
        wanted: how the message begins if there is neither.

    Raises:
        EnvironmentNotAble: there is neither.
    """
    if shutil.which("scontrol"):
        own = Slurm([], "this machine's")
        with suppress(EnvironmentNotAble):
            ping = own.call("scontrol", "ping", timeout_s=timeout_s)
            if ping.returncode == 0 and "UP" in ping.stdout:
                return own
    box = find_endpoint()
    if box is not None:
        return Slurm(box.command_prefix(cwd), f"the cluster in a box {box.name!r}")
    raise EnvironmentNotAble(
        f"{wanted} no Slurm answers on this machine and no cluster in a box is running; use a login node, or run: "
        "allranks cluster up"
    )


def clean_words(said: str) -> str:
    """Return what sbatch printed to standard error as one line, without its prefixes."""
    lines = (re.sub(r"^\s*(sbatch: )?(error: )?", "", line).strip() for line in said.splitlines())
    return " ".join(line for line in lines if line)


def suspects(said: str, cluster: ClusterSpec) -> list[str]:
    """Return the keys with a value that a refusal may be about; the likeliest first, none if the message is unknown."""
    for pattern, keys in REFUSALS:
        if re.search(pattern, said, re.IGNORECASE):
            return [key for key in keys if _value(cluster, key)] or [keys[0]]
    return []


def without(cluster: ClusterSpec, key: str) -> ClusterSpec | None:
    """Return the request without one key, to ask Slurm again; None if the key cannot be left out."""
    if key == "nodes":
        return None if cluster.allocated_nodes == 1 else msgspec.structs.replace(cluster, nodes=1, spares=0)
    empty = [] if key in ("exclude", "extra") else None
    return msgspec.structs.replace(cluster, slurm=msgspec.structs.replace(cluster.slurm, **{key: empty}))


def over_limits(cluster: ClusterSpec, limits: Sequence[PartitionLimits], default: str | None) -> list[str]:
    """Return the keys that exceed the limits of every partition that may run the job.

    Slurm accepts such a job unless its administrator set EnforcePartLimits. A QOS may lift the limits, so nothing is
    reported if the spec has one.

    Args:
        default: the partition if the spec names none; None: Slurm's default.
    """
    slurm = cluster.slurm
    names = (slurm.partition or default or "").split(",")
    mine = [limit for limit in limits if limit.partition in names or (names == [""] and limit.default)]
    if slurm.qos or not mine:
        return []
    asked_s = parse_time_limit(slurm.time) if slurm.time else None
    checks = {
        "time": lambda limit: asked_s is not None and limit.time_s is not None and asked_s > limit.time_s,
        "nodes": lambda limit: limit.nodes is not None and cluster.allocated_nodes > limit.nodes,
    }
    return [key for key, exceeds in checks.items() if all(map(exceeds, mine))]


def refusal_text(said: str, cluster: ClusterSpec, keys: Sequence[str], known: str = "") -> str:
    """Return the message of a refusal: keys with their values, Slurm's error, and where to look."""
    named = " and ".join(
        f"{'cluster' if key == 'nodes' else 'cluster.slurm'}.{key} {shown_value(cluster, key)}" for key in keys
    )
    cures = "; ".join(dict.fromkeys(CURES[key] for key in keys))
    where = named or f"cluster of {cluster.allocated_nodes} nodes"
    return f"{where}: Slurm refuses such a job: {said}{known}{f'; {cures}' if cures else ''}"


def shown_value(cluster: ClusterSpec, key: str) -> str:
    """Return a key's value as the spec has it; null for a value that Slurm chooses."""
    value = _value(cluster, key)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "null" if value is None else str(value)


def _value(cluster: ClusterSpec, key: str) -> object:
    if key == "nodes":
        return f"{cluster.nodes} with cluster.spares {cluster.spares}" if cluster.spares else cluster.nodes
    return getattr(cluster.slurm, key)
