"""Parsers for the text that Slurm's commands print. Pure: no processes, no clock.

The formats are those of Slurm 21.08 to 25.05. ``scontrol --oneliner`` prints ``Key=value`` pairs on one line without
quoting, and a few values are free text with spaces and possibly further ``Key=`` pairs (a job's name and comment, a
node's reason). Keys are therefore read from the part of the line without free text, and the first occurrence counts.
Unknown keys are ignored. A value that Slurm prints as unknown (``Unknown``, ``N/A``, ``None``, ``(null)``,
``UNLIMITED``, ``INVALID``) becomes None.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from allranks.planning.slurm_request import SIGNAL_EARLY_S, gpu_count, parse_time_limit

SignalCause = Literal["time_limit", "preempted", "cancelled", "node_fail", "unknown"]

JOB_FLAGS = frozenset(
    {
        *("COMPLETING", "CONFIGURING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED", "REQUEUE_FED"),
        *("REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED"),
    }
)
"""Job state flags, which Slurm prints instead of or after the base state (man squeue, JOB STATE CODES)."""

# Reasons that show how a job ended while its state is COMPLETING (job_reason_string).
TIME_REASONS = frozenset({"TimeLimit"})
NODE_REASONS = frozenset({"NodeDown", "NodeFail"})
# Tolerance for clock offsets between machines and for the duration of the query.
MARGIN_S = 15.0
LOST_STATES = frozenset({"DOWN", "ERROR", "FUTURE"})
UNUSABLE = ("down", "drain", "fail", "unknown", "maint", "power", "future", "inval")
"""How sinfo's states of nodes begin that start no job."""
LOST_FLAGS = frozenset({"POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})

_NOTHING = frozenset({"", "(null)", "N/A", "n/a", "None", "NONE", "Unknown", "UNKNOWN", "UNLIMITED", "INVALID"})
_RECORD = re.compile(r"^(?=JobId=)", re.MULTILINE)
# Group names of directory services may contain spaces: "domain users(10513)".
_OWNER = re.compile(r"(?:^|\s)UserId=[^=()]*\(\d+\) GroupId=.*?\(\d+\) ")
_PAIR = re.compile(r"(?:^|\s)(?P<key>[A-Z][A-Za-z0-9_/:]*)=(?P<value>.*?)(?=\s+[A-Z][A-Za-z0-9_/:]*=|\s*$)")


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One job as ``scontrol show job`` prints it. None: not printed."""

    job: str
    state: str
    """State word, such as RUNNING or TIMEOUT. While Slurm ends a job it prints a flag instead, usually COMPLETING."""
    flags: tuple[str, ...] = ()
    """State flags in the order printed, a flag that replaces the base state included."""
    reason: str | None = None
    """Why the job waits or ended, such as Priority or TimeLimit; with underscores instead of blanks."""
    exit_code: int | None = None
    """Exit status of the batch script."""
    exit_signal: int | None = None
    """The signal that ended the batch script; 0 if none did."""
    restarts: int | None = None
    start_time: float | None = None
    """Seconds since the epoch; for a pending job, its expected start."""
    end_time: float | None = None
    """When the job ended, or must end."""
    preempt_time: float | None = None
    time_limit_s: int | None = None
    """None also for a job without a limit."""
    nodes: str | None = None
    """Slurm's host list expression, such as ``n[1-3]``."""
    failed_node: str | None = None
    """The node whose failure ended the job (23.02 and newer)."""
    cancelled_by: int | None = None
    """Numeric user id from ``CANCELLED by UID`` (sacct)."""

    @property
    def must_end_at(self) -> float | None:
        """Return when the time limit ends the job, in seconds since the epoch.

        `end_time` is only used if nothing else is known: preemption and cancellation change it.
        """
        if self.start_time is not None and self.time_limit_s is not None:
            return self.start_time + self.time_limit_s
        return self.end_time if self.state == "RUNNING" else None


class JobFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A job, or a task of an array, and where its batch script writes: paths with patterns that Slurm left in them."""

    info: JobInfo
    label: str
    """The job as users name it: 12, or 12_3 for a task."""
    name: str = ""
    user: str = ""
    work_dir: str = ""
    std_out: str | None = None
    """None: unknown; empty for a job without a batch script."""
    std_err: str | None = None
    submit_line: str = ""
    """The command line of sbatch, as sacct has it."""

    @property
    def paths(self) -> list[Path]:
        """Return the files of output and errors, with all patterns expanded; none if they are unknown."""
        array_job, _, task = self.label.partition("_")
        node = re.sub(r"\[(\d+)[^]]*\].*|[,.].*", r"\1", self.info.nodes or "")  # the first of gpu[07-09],login
        values = {"A": array_job, "a": task or "4294967294", "j": self.info.job, "J": self.info.job, "x": self.name}
        values |= {"u": self.user, "N": node, "n": "0", "t": "0", "s": "batch", "%": "%"}

        def expanded(match: re.Match[str]) -> str:
            value = values.get(match[2], match[0])
            return value.zfill(int(match[1])) if match[1] and value.isdigit() else value

        texts = dict.fromkeys(text for text in (self.std_out, self.std_err) if text)
        return [Path(self.work_dir, re.sub(r"%(\d{0,2})([A-Za-z%])", expanded, text)) for text in texts]


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node as ``scontrol show node`` or ``sinfo`` prints it. None: not printed."""

    host: str
    state: str
    """The base state: DOWN, IDLE, ALLOCATED, MIXED, ERROR, FUTURE or UNKNOWN."""
    flags: tuple[str, ...] = ()
    """Such as DRAIN, NOT_RESPONDING, COMPLETING, REBOOT_ISSUED."""
    responding: bool | None = None
    """Whether the node answers slurmctld; None if the state is unknown."""


class PartitionGres(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``sinfo --format=%P|%G``: nodes of a partition with the same generic resources."""

    partition: str
    default: bool
    gpus: int


class PartitionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A partition's largest job. None: no limit."""

    partition: str
    default: bool
    time_s: int | None
    time: str
    nodes: int | None


class NoAnswer(msgspec.Struct, frozen=True):
    """Slurm did not answer, or its answer cannot be parsed. This says nothing about the job."""

    reason: str


def parse_jobs(text: str) -> list[JobInfo]:
    """Parse output of ``scontrol show job --oneliner``: one record per job, array task or heterogeneous component."""
    return [job for part in _RECORD.split(text) if part.startswith("JobId=") and (job := _job(part)) is not None]


def parse_job(text: str, job: str) -> JobInfo | None:
    """Return the record of one job, else the first one; None if there is none."""
    jobs = parse_jobs(text)
    return next((one for one in jobs if one.job == job), jobs[0] if jobs else None)


def _job(record: str) -> JobInfo | None:
    line = " ".join(record.splitlines())
    number = re.match(r"JobId=(\d\S*)", line)
    if number is None:
        return None
    owner = _OWNER.search(line)
    # Free text precedes the owner (the name) and follows Command= (paths, comments).
    body = line[owner.end() :] if owner else line[number.end() :]
    values = _pairs(body.partition(" Command=")[0])
    state, flags, cancelled_by = job_state(values.get("JobState", ""))
    code, _, signal = values.get("ExitCode", "").partition(":")
    return JobInfo(
        job=number[1],
        state=state,
        flags=flags,
        reason=_known(values.get("Reason")),
        exit_code=_integer(code),
        exit_signal=_integer(signal),
        restarts=_integer(values.get("Restarts")),
        start_time=_time(values.get("StartTime")),
        end_time=_time(values.get("EndTime")),
        preempt_time=_time(values.get("PreemptTime")),
        time_limit_s=parse_time_limit(limit) if (limit := _known(values.get("TimeLimit"))) else None,
        nodes=_known(values.get("NodeList")),
        failed_node=_known(values.get("FailedNode")),
        cancelled_by=cancelled_by,
    )


# Arguments of the script and a comment precede the files and may contain anything, so the last of each key counts.
_FILES = re.compile(
    r".*?JobName=(?P<name>.*?)(?: HetJobIdSet=\S+)? UserId=(?P<user>[^(]*)\(.* WorkDir=(?P<work_dir>.*?)(?: (?:[A-Z][a-z]+)*Comment=.*)? "
    r"StdErr=(?P<std_err>.*?) StdIn=.*? StdOut=(?P<std_out>.*?)(?: [A-Z][A-Za-z]*=|\s*$)"
)


def parse_job_files(text: str) -> list[JobFiles]:
    """Parse output of ``scontrol show job --oneliner`` for the files of its jobs and tasks."""
    jobs = []
    for line in (" ".join(part.splitlines()) for part in _RECORD.split(text) if part.startswith("JobId=")):
        # Of a heterogeneous job, the first component runs the script.
        if (info := _job(line)) and not re.match(r"JobId=\d+ HetJobId=\d+ HetJobOffset=[1-9]", line):
            task = re.match(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\S+)", line)
            files = _FILES.match(line)
            known = files.groupdict() if files else {"std_out": ""}
            jobs.append(JobFiles(info=info, label=f"{task[1]}_{task[2]}" if task else info.job, **known))
    return jobs


SACCT_FILES = "JobID,JobIDRaw,JobName,User,NodeList,WorkDir,SubmitLine,State,ExitCode"
SACCT_PATHS = ",StdOut,StdErr"  # since 24.05
SACCT_DELIMITER = "\x1f"
_SACCT_NAMES = (
    "label", "raw", "name", "user", "nodes", "work_dir", "submit_line", "state", "code", "std_out", "std_err",
)  # fmt: skip


def parse_sacct_files(text: str) -> list[JobFiles]:
    """Parse output of sacct with the fields `SACCT_FILES` and, if it has them, `SACCT_PATHS`."""
    jobs = []
    for record in re.split(r"\n(?=[^\x1f\n]+\x1f\d+\x1f)", text.rstrip("\n")):  # --wrap may have several lines
        row = dict(zip(_SACCT_NAMES, record.split(SACCT_DELIMITER), strict=False))
        info = parse_sacct(f"{row.pop('state')}|{row.pop('code')}", row.pop("raw")) if "code" in row else None
        if info is not None:  # else a message, such as: accounting storage is disabled
            nodes = _known(row.pop("nodes").replace("None assigned", ""))
            jobs.append(JobFiles(info=msgspec.structs.replace(info, nodes=nodes), **row))
    return jobs


def job_state(text: str) -> tuple[str, tuple[str, ...], int | None]:
    """Split a job state into its first word, its flags, and the user id of ``CANCELLED by UID``.

    Reads scontrol's and squeue's single word, words joined by ``,`` or ``+``, and sacct's ``CANCELLED by 1000``.
    """
    by = re.search(r"\bby (\d+)", text)
    words = [word for word in re.split(r"[,+\s]+", text.strip()) if word and (word.isupper() or "_" in word)]
    if not words:
        return "UNKNOWN", (), None
    bases = [word for word in words if word not in JOB_FLAGS]
    return (bases or words)[0], tuple(word for word in words if word in JOB_FLAGS), int(by[1]) if by else None


def parse_nodes(text: str) -> list[NodeInfo]:
    """Parse the output of ``scontrol show node --oneliner``."""
    return [node for line in text.splitlines() if (node := _node(line)) is not None]


def _node(line: str) -> NodeInfo | None:
    name = re.match(r"NodeName=(\S+)", line)
    if name is None:
        return None
    values = _pairs(line.partition(" Reason=")[0])  # free text
    state, flags = node_state(values.get("State", ""))
    return NodeInfo(
        host=name[1],
        state=state,
        flags=flags,
        responding=None if state == "UNKNOWN" and not flags else "NOT_RESPONDING" not in flags,
    )


def node_state(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a node state into its base and its flags.

    Reads scontrol's ``DOWN+DRAIN+NOT_RESPONDING`` and the older ``DOWN*+DRAIN``, where ``*`` means not responding
    (man sinfo, NODE STATE CODES).
    """
    words = [word for word in text.strip().upper().split("+") if word]
    star = any("*" in word for word in words)
    words = [word.rstrip("*$@^~#%!-") for word in words]
    if not words or not words[0]:
        return "UNKNOWN", ()
    flags = [*words[1:], *(["NOT_RESPONDING"] if star and "NOT_RESPONDING" not in words else [])]
    return words[0], tuple(flags)


def parse_partitions(text: str) -> list[PartitionGres]:
    """Parse the output of ``sinfo --noheader --format=%P|%G``; ``*`` marks the default partition."""
    rows = [line.strip().split("|") for line in text.splitlines() if "|" in line]
    return [
        PartitionGres(partition=row[0].rstrip("*"), default=row[0].endswith("*"), gpus=gpu_count(row[1]))
        for row in rows
    ]


def parse_partition_limits(text: str) -> list[PartitionLimits]:
    """Parse the output of ``sinfo --noheader --format=%P|%l|%s``: name, longest time, smallest and largest number of
    nodes."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 2]
    return [
        PartitionLimits(
            partition=name.rstrip("*"),
            default=name.endswith("*"),
            time_s=parse_time_limit(time),
            time=time,
            nodes=_integer(size.rpartition("-")[2]),
        )
        for name, time, size in rows
    ]


def partition_gpus(partitions: Iterable[PartitionGres], partition: str | None) -> int | None:
    """Return the GPUs of a node of a partition: the smallest count among its nodes with GPUs, 0 if none has any.

    None if the partition is unknown.

    Args:
        partitions: the result of `parse_partitions`.
        partition: None for the default partition. Of a list such as ``gpu,gpu-long`` every partition counts.
    """
    names = partition.split(",") if partition else None
    rows = [row for row in partitions if (row.default if names is None else row.partition in names)]
    with_gpus = [row.gpus for row in rows if row.gpus]
    return min(with_gpus) if with_gpus else (0 if rows else None)


def parse_sacct(text: str, job: str) -> JobInfo | None:
    """Parse the first line of ``sacct --parsable2 --noheader --allocations --format=State,ExitCode``; None if empty."""
    line = next((line for line in text.splitlines() if re.match(r"[A-Z]", line)), "")
    text_state, _, code = line.partition("|")
    state, flags, by = job_state(text_state)
    exit_code, _, exit_signal = code.partition(":")
    if state == "UNKNOWN":
        return None
    return JobInfo(
        job=job,
        state=state,
        flags=flags,
        exit_code=_integer(exit_code),
        exit_signal=_integer(exit_signal),
        cancelled_by=by,
    )


NO_OUTPUT = 53  # what slurmstepd reports if it cannot open the output, not a signal


def end_text(info: JobInfo) -> str:
    """Return how a job ended, as one phrase: ``FAILED (NonZeroExitCode, exit code 3)``."""
    details = []
    if info.reason and info.state != "CANCELLED":  # a cancelled job keeps the reason why it was pending
        details.append(info.reason)
    if info.cancelled_by is not None:
        details.append(f"by user id {info.cancelled_by}")
    if info.exit_signal == NO_OUTPUT:
        details.append("exit code 0:53: its node cannot open the job's output; that folder must exist on all nodes")
    elif info.exit_signal and info.exit_signal <= signal.SIGRTMAX:  # OUT_OF_MEMORY is printed as 0:125
        names = {one.value: one.name for one in signal.Signals}
        name = names.get(info.exit_signal, "not a signal of this system")
        details.append(f"the batch script was killed by signal {info.exit_signal} ({name})")
    elif info.exit_code:
        details.append(f"exit code {info.exit_code}")
    return f"{info.state} ({', '.join(details)})" if details else info.state


def why_signalled(info: JobInfo | None, now: float, signal_s: int) -> SignalCause:
    """Decide why Slurm sent SIGTERM, or the signal of ``--signal``, to a job.

    The sources are the manual pages of 22.05 to 25.05:

    - sbatch ``--signal``: the signal comes `signal_s` before the end of the job, or up to 60 s earlier.
    - slurm.conf ``PreemptParameters=send_user_signal``: preemption sends that signal too, at any time.
    - slurm.conf ``GraceTime``: a preempted job gets SIGCONT and SIGTERM at once and keeps running until the grace time
      ends. Its EndTime is then set to the end of the grace time, so PreemptTime is checked before any time limit.
    - scancel: SIGCONT and SIGTERM, and SIGKILL after ``KillWait``. Meanwhile scontrol prints COMPLETING instead of
      CANCELLED, PREEMPTED, TIMEOUT or NODE_FAIL. EndTime is then the time of the cancellation, and the reason
      (TimeLimit, NodeDown) and PreemptTime remain. slurmctld clears PreemptTime when it requeues the job.

    Args:
        info: the job when the signal arrived; None if Slurm did not answer.
        now: seconds since the epoch.
        signal_s: seconds before the time limit at which the job requested its signal.
    """
    if info is None:
        return "unknown"
    words, limit = {info.state, *info.flags}, info.must_end_at
    lost_node = info.failed_node is not None and info.state != "RUNNING"  # with --no-kill the job keeps running
    causes: list[tuple[SignalCause, bool]] = [
        ("preempted", "PREEMPTED" in words or info.preempt_time is not None),
        ("cancelled", "CANCELLED" in words),
        ("node_fail", "NODE_FAIL" in words or info.reason in NODE_REASONS or lost_node),
        ("time_limit", "TIMEOUT" in words or info.reason in TIME_REASONS),
        ("time_limit", limit is not None and limit - now <= signal_s + SIGNAL_EARLY_S + MARGIN_S),
        ("cancelled", _ended_early(info, now)),
    ]
    for cause, holds in causes:
        if holds:
            return cause
    return "unknown"


def _ended_early(info: JobInfo, now: float) -> bool:
    """Return whether Slurm is ending a job without a reason of its own, that is, after scancel.

    A requeued job is COMPLETING too, but has no EndTime.
    """
    completing = info.state == "COMPLETING" and info.reason is None
    return completing and info.end_time is not None and info.end_time <= now + MARGIN_S


def is_lost(node: NodeInfo | NoAnswer | None) -> bool | None:
    """Return whether Slurm has given up a node, so that no job on it continues; None if unknown.

    A node that does not respond but is not DOWN is not known to be lost: slurmctld marks it after one unanswered ping
    and sets it DOWN after SlurmdTimeout. `NodeInfo.responding` distinguishes the two. Draining nodes finish their jobs.
    """
    if not isinstance(node, NodeInfo):
        return None
    if node.state in LOST_STATES or LOST_FLAGS.intersection(node.flags):
        return True
    return None if node.state == "UNKNOWN" or not node.responding else False


class ListedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``sinfo --Node --format=%P|%N|%T|%a|%E``: a node as part of one partition."""

    host: str
    state: str
    partition: str
    default: bool
    partition_state: str
    """up, down, drain or inactive (man sinfo, AVAIL)."""
    reason: str

    @property
    def usable(self) -> bool:
        """Return whether the node runs jobs or can run them."""
        return not self.state.endswith("*") and not self.state.startswith(UNUSABLE)


def parse_node_list(text: str, partition: str | None = None) -> list[ListedNode]:
    """Return the nodes of the partitions that a job may use.

    Args:
        partition: its name, or several joined by commas; None for the default one, which sinfo marks with ``*``.
    """
    rows = [[word.strip() for word in line.split("|", 4)] for line in text.splitlines() if line.count("|") >= 4]
    nodes = [
        ListedNode(
            host=host,
            state=state,
            partition=name.rstrip("*"),
            default=name.endswith("*"),
            partition_state=up,
            reason=_known(why) or "",
        )
        for name, host, state, up, why in rows
    ]
    return [row for row in nodes if (row.partition in partition.split(",") if partition else row.default)]


def _pairs(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for match in _PAIR.finditer(text):
        values.setdefault(match["key"], match["value"].strip())
    return values


def _known(text: str | None) -> str | None:
    return None if text is None or text in _NOTHING else text


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _time(text: str | None) -> float | None:
    """Return seconds since the epoch; Slurm's commands print local time."""
    if _known(text) is None:
        return None
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
