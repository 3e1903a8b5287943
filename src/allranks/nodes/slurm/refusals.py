"""Name the key of a spec that a refusal of Slurm is about. Pure: the words are those of slurm_errno.c and of sbatch's options.

Some refusals name one option, others only say that no node fits. `suspects` returns every key that may be meant; the caller finds
out which one it is by asking Slurm again without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from allranks.nodes.slurm.answers import PartitionLimits
from allranks.planning.slurm_request import parse_time_limit
from allranks.spec.records import ClusterSpec

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


def clean_words(said: str) -> str:
    """Return what sbatch printed to standard error as one line, without its prefixes."""
    lines = (re.sub(r"^\s*(sbatch: )?(error: )?", "", line).strip() for line in said.splitlines())
    return " ".join(line for line in lines if line)


def suspects(said: str, cluster: ClusterSpec) -> list[str]:
    """Return the keys with a value that a refusal may be about; the likeliest first, none if the words are unknown."""
    for pattern, keys in REFUSALS:
        if re.search(pattern, said, re.IGNORECASE):
            return [key for key in keys if _value(cluster, key)] or [keys[0]]
    return []


def without(cluster: ClusterSpec, key: str) -> ClusterSpec | None:
    """Return the request without one key, to ask Slurm again; None if the key cannot be left out."""
    if key == "nodes":
        return None if cluster.nodes == 1 else msgspec.structs.replace(cluster, nodes=1)
    empty = [] if key in ("exclude", "extra") else None
    return msgspec.structs.replace(cluster, slurm=msgspec.structs.replace(cluster.slurm, **{key: empty}))


def over_limits(cluster: ClusterSpec, limits: Sequence[PartitionLimits], default: str | None) -> list[str]:
    """Return the keys that exceed the limits of every partition that may run the job.

    Slurm accepts such a job unless its administrator set EnforcePartLimits. A QOS may lift the limits, so nothing is said where one is named.

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
        "nodes": lambda limit: limit.nodes is not None and cluster.nodes > limit.nodes,
    }
    return [key for key, exceeds in checks.items() if all(map(exceeds, mine))]


def refusal_text(said: str, cluster: ClusterSpec, keys: Sequence[str], known: str = "") -> str:
    """Return the message of a refusal: keys with their values, Slurm's words, and where to look."""
    named = " and ".join(
        f"{'cluster' if key == 'nodes' else 'cluster.slurm'}.{key} {shown_value(cluster, key)}" for key in keys
    )
    cures = "; ".join(dict.fromkeys(CURES[key] for key in keys))
    where = named or f"cluster of {cluster.nodes} nodes"
    return f"{where}: Slurm refuses such a job: {said}{known}{f'; {cures}' if cures else ''}"


def shown_value(cluster: ClusterSpec, key: str) -> str:
    """Return a key's value as the spec has it; null stands for what Slurm chooses."""
    value = _value(cluster, key)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "null" if value is None else str(value)


def _value(cluster: ClusterSpec, key: str) -> object:
    return cluster.nodes if key == "nodes" else getattr(cluster.slurm, key)
