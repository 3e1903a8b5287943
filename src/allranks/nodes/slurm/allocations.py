"""Find nodes to check: those of the current job, or of a short allocation made for the check."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from allranks.errors import EnvironmentNotAble, SpecError
from allranks.nodes.slurm.commands import CONTACT, Slurm, clean_words, over_limits, refusal_text, suspects, without
from allranks.nodes.slurm.srun import wait_or_end
from allranks.planning.slurm_request import partition_requested
from allranks.spec.records import ClusterSpec
from allranks.utils.redaction import redact
from allranks.utils.text import format_list

UNAVAILABLE = re.compile(r"node configuration|not available|satisfied", re.IGNORECASE)
MAX_SHOWN = 5
END_TIMEOUT_S = 10.0
HOLD_SCRIPT = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat >/dev/null'
"""Holds the allocation until our end of the pipe closes, which also happens if we are killed."""
SBATCH_ONLY = ("--output", "--error", "--open-mode", "--requeue", "--no-requeue", "--array", "--parsable", "-o", "-e")


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A running job: its ID, number of restarts and nodes. ``prefix`` precedes every Slurm command."""

    job_id: str
    nodes: tuple[str, ...]
    restart: int = 0
    cluster: str = "cluster"
    prefix: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """Return the name of the job's folder on the nodes; it is unique for each job and restart."""
        return f"{self.cluster}.{self.job_id}.{self.restart}"

    @classmethod
    def current(cls) -> Allocation:
        """Return the job of this process.

        Raises:
            EnvironmentNotAble: it does not run in a job, or Slurm does not answer.
        """
        job = os.environ.get("SLURM_JOB_ID")
        listed = os.environ.get("SLURM_JOB_NODELIST")
        if not job or not listed:
            raise EnvironmentNotAble("not inside a Slurm job: SLURM_JOB_ID and SLURM_JOB_NODELIST are not set")
        return cls(
            job_id=job,
            nodes=tuple(expand_hostlist(Slurm([], "this job's"), listed)),
            restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            cluster=os.environ.get("SLURM_CLUSTER_NAME") or "cluster",
        )


def request_args(cluster: ClusterSpec) -> list[str]:
    """Return the options of sbatch, salloc and srun for the nodes of a spec."""
    slurm = cluster.slurm
    pairs = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "gpus-per-node": slurm.gpus_per_node,
        "gres": slurm.gres,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.mem,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "exclude": ",".join(slurm.exclude) or None,
    }
    return [
        f"--nodes={cluster.allocated_nodes}",
        "--ntasks-per-node=1",
        *(f"--{key}={value}" for key, value in pairs.items() if value is not None),
        *(["--exclusive"] if slurm.exclusive else []),
    ]


def test_only(slurm: Slurm, cluster: ClusterSpec) -> str:
    """Ask sbatch whether such a job could ever run, without submitting one; return its output.

    Raises:
        SpecError: account, partition, time or resources are refused; the message names the key.
        EnvironmentNotAble: Slurm does not answer.
    """
    done = _ask(slurm, cluster)
    if done.returncode:
        raise refusal(slurm, cluster, clean_words(done.stderr))
    if keys := over_limits(cluster, slurm.partition_limits(), os.environ.get("SBATCH_PARTITION")):
        words = "the partition does not allow it; sbatch would accept the job, which would then wait forever"
        raise SpecError(refusal_text(words, cluster, keys))
    return clean_words(done.stderr)


test_only.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test


def refusal(slurm: Slurm, cluster: ClusterSpec, said: str) -> SpecError | EnvironmentNotAble:
    """Return the error for a refusal of sbatch, with the key of the spec that it is about.

    If several keys may be the cause, the request is repeated without each of them: the key without which Slurm accepts
    the job is named.
    """
    if CONTACT.search(said):
        return EnvironmentNotAble(f"Slurm ({slurm.label}) does not answer sbatch: {said}")
    keys = suspects(said, cluster)
    if len(keys) > 1:
        smaller = ((key, without(cluster, key)) for key in keys)
        alone = next((key for key, rest in smaller if rest is not None and _ask(slurm, rest).returncode == 0), None)
        keys = keys if alone is None else [alone]
    known = _known(slurm, keys[0] if len(keys) == 1 else None) or _not_usable(slurm, cluster, said)
    return SpecError(refusal_text(said, cluster, keys, known))


def _not_usable(slurm: Slurm, cluster: ClusterSpec, said: str) -> str:
    """Return the partition's nodes that start no job, with reasons, if a refusal may be about them; else empty."""
    if not UNAVAILABLE.search(said):
        return ""
    bad = [node for node in slurm.node_list(_partition(cluster)) or () if not node.usable]
    shown = format_list(
        [f"{node.host} is {node.state}{f' ({redact(node.reason)})' if node.reason else ''}" for node in bad], MAX_SHOWN
    )
    return f"; {shown}, so it starts no job" if len(bad) == 1 else f"; {shown}, so they start no job" if bad else ""


def waiting_note(slurm: Slurm, cluster: ClusterSpec) -> str:
    """Return that the spec's job would wait as its partition is down; empty if it is up or Slurm does not say."""
    nodes = slurm.node_list(_partition(cluster)) or ()
    if {node.partition_state for node in nodes} != {"down"}:
        return ""
    name = ", ".join(dict.fromkeys(node.partition for node in nodes))
    return (
        f"cluster.slurm.partition {name}: it is down, so a job waits until an administrator opens it again; see `sinfo "
        "-s`"
    )


def _partition(cluster: ClusterSpec) -> str | None:
    return partition_requested(cluster) or os.environ.get("SBATCH_PARTITION") or None


def _ask(slurm: Slurm, cluster: ClusterSpec) -> subprocess.CompletedProcess[str]:
    wanted = {"time": cluster.slurm.time, "chdir": cluster.slurm.chdir, "signal": f"B:USR1@{cluster.slurm.signal_s}"}
    more = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
    return slurm.call("sbatch", "--test-only", *request_args(cluster), *more, *_extra(cluster), "--wrap=true")


def _extra(cluster: ClusterSpec) -> list[str]:
    """Return the further options as arguments; in a spec they may be lines of a script."""
    return [line.strip().removeprefix("#SBATCH").strip() for line in cluster.slurm.extra]


def _known(slurm: Slurm, key: str | None) -> str:
    if key == "partition":
        names = sorted(set(slurm.call("sinfo", "--noheader", "--format=%R").stdout.split()))
        return f"; there are {', '.join(names)}" if names else ""
    if key in ("account", "qos"):
        user = os.environ.get("USER") or str(os.getuid())
        shown = slurm.call("sacctmgr", "-nP", "show", "associations", f"user={user}", "format=account").stdout.split()
        return f"; you have {', '.join(sorted(set(shown)))}" if shown else ""
    return ""


@contextmanager
def allocate_nodes(slurm: Slurm, cluster: ClusterSpec, *, wait_s: float = 600.0) -> Iterator[Allocation]:
    """Yield the nodes of the current job, else newly allocated ones for the spec, which are released at the end.

    Raises:
        EnvironmentNotAble: they are not free within `wait_s`, or Slurm refuses.
    """
    if inside_job(slurm):
        yield _current_job(cluster)
        return
    if why := waiting_note(slurm, cluster):
        raise EnvironmentNotAble(why)
    extra = [word for word in _extra(cluster) if not word.startswith(SBATCH_ONLY)]
    command = [*slurm.prefix, "salloc", "--job-name=allranks-doctor", "--time=10"]
    command += [*request_args(cluster), *extra, "sh", "-c", HOLD_SCRIPT]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    granted = False
    try:
        job_id, nodelist = _wait_for_nodes(process, cluster, wait_s)
        granted = True
        yield Allocation(job_id=job_id, nodes=tuple(expand_hostlist(slurm, nodelist)), prefix=tuple(slurm.prefix))
    finally:
        _release(process, granted)


def inside_job(slurm: Slurm) -> bool:
    """Return whether this process runs in a job of that Slurm."""
    return "SLURM_JOB_ID" in os.environ and not slurm.prefix


def _current_job(cluster: ClusterSpec) -> Allocation:
    job = Allocation.current()
    if len(job.nodes) < cluster.allocated_nodes:
        current = f"the current job {job.job_id} has {len(job.nodes)}: {', '.join(job.nodes)}"
        raise EnvironmentNotAble(
            f"cluster.nodes and spares are {cluster.allocated_nodes}, but {current}; request more nodes, or run the "
            "doctor outside of a job"
        )
    return msgspec.structs.replace(job, nodes=job.nodes[: cluster.allocated_nodes])


def _wait_for_nodes(process: subprocess.Popen[str], cluster: ClusterSpec, wait_s: float) -> tuple[str, str]:
    first: list[str] = []
    said: list[str] = []
    readers = [
        threading.Thread(target=lambda: first.append(process.stdout.readline() if process.stdout else ""), daemon=True),
        threading.Thread(target=lambda: said.extend(process.stderr or []), daemon=True),
    ]
    for reader in readers:
        reader.start()
    readers[0].join(wait_s)
    words = first[0].split() if first else []
    if len(words) == 2:
        return words[0], words[1]
    if readers[0].is_alive():
        raise EnvironmentNotAble(
            f"{cluster.allocated_nodes} nodes were not free within {wait_s:g} s (squeue shows who uses them): wait "
            "longer with --wait-s"
        )
    readers[1].join(1)
    why = " ".join(line.strip() for line in said[-3:])
    raise EnvironmentNotAble(f"Slurm did not allocate {cluster.allocated_nodes} nodes: {why}")


def _release(process: subprocess.Popen[str], granted: bool) -> None:
    if process.stdin:
        process.stdin.close()
    wait_or_end(process, END_TIMEOUT_S if granted else 0.1, END_TIMEOUT_S)


def expand_hostlist(slurm: Slurm, nodelist: str) -> list[str]:
    """Return the names in a Slurm host list, in Slurm's order.

    Raises:
        EnvironmentNotAble: Slurm does not answer.
    """
    shown = slurm.call("scontrol", "show", "hostnames", nodelist)
    if shown.returncode:
        raise EnvironmentNotAble(f"Slurm ({slurm.label}): scontrol show hostnames failed: {shown.stderr.strip()}")
    return shown.stdout.split()
