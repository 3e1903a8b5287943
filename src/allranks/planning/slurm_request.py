"""Parse the Slurm options that planning depends on: GPUs, partition, whole nodes, time limit. Pure.

In the batch script, ``cluster.slurm.extra`` follows the options of the named keys, so it takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from allranks.errors import SpecError
from allranks.spec.records import ClusterSpec
from allranks.utils.text import format_bytes_word

SIGNAL_EARLY_S = 60
"""How many seconds early Slurm may send ``--signal`` (man sbatch)."""
_TIME_LIMIT = r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})"


def parse_time_limit(text: str) -> int | None:
    """Convert ``90`` (minutes), ``90:00``, ``1:30:00``, ``2-0``, ``2-1:30`` or ``2-1:30:00`` to seconds; else None."""
    match = re.fullmatch(_TIME_LIMIT, text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:  # minutes[:seconds], or hours:minutes:seconds
        hours, minutes, seconds = parts if len(parts) == 3 else [0, *parts, 0][:3]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


_SHORT = {"-G": "gpus", "-p": "partition", "-N": "nodes", "-n": "ntasks", "-a": "array"}
_OWN_OPTIONS = {
    "nodes": "set cluster.nodes instead",
    "ntasks": "set cluster.nodes and cluster.procs_per_node instead; Slurm starts one task per node",
    "ntasks-per-node": "set cluster.procs_per_node instead; Slurm starts one task per node, which starts its ranks",
    "array": "submit several runs instead",
}
"""Options of sbatch that contradict the plan."""
MIN_MEM_BYTES = 256 << 20
_MEMORY = r"(?i)(\d+(?:\.\d+)?)\s*([KMGT]?)B?"
_MEMORY_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
"""sbatch takes a number without a letter for megabytes."""
_GPU_OPTIONS = ("gpus-per-node", "gres", "gpus-per-task", "gpus", "gpus-per-socket")
_SHARED = r"(?:^|,)(?:gres[/:])?(?:shard|mps)\b"


class GpuRequest(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that an allocation will have on each node."""

    per_node: int | None
    """None if the option does not determine it (``--gpus`` that the nodes do not divide, ``--gpus-per-socket``)."""
    option: str
    """The key or option that requests them, with its value, as the user wrote it."""


def gpus_requested(cluster: ClusterSpec) -> GpuRequest | None:
    """Return the GPUs that the spec requests from Slurm; None if it requests none."""
    slurm, extra = cluster.slurm, _options(cluster.slurm.extra)
    requests: dict[str, tuple[str, str]] = {}
    if slurm.gpus_per_node:
        requests["gpus-per-node"] = (str(slurm.gpus_per_node), f"cluster.slurm.gpus_per_node: {slurm.gpus_per_node}")
    if slurm.gres:
        requests["gres"] = (slurm.gres, f"cluster.slurm.gres: {slurm.gres}")
    for name in _GPU_OPTIONS:
        if name in extra:
            requests[name] = (extra[name], f"cluster.slurm.extra: --{name}={extra[name]}")
    for name in _GPU_OPTIONS:
        value, option = requests.get(name, ("", ""))
        if value and (name != "gres" or re.search(rf"(?:^|,)(?:gres[/:])?gpu\b|{_SHARED}", value)):
            return GpuRequest(per_node=_per_node(name, value, cluster.allocated_nodes), option=option)
    return None


def parse_mem(text: str) -> int | None:
    """Return the bytes of sbatch's ``--mem``; None for 0 (the full node) and for invalid values."""
    match = re.fullmatch(_MEMORY, text.strip())
    return int(float(match[1]) * _MEMORY_UNITS[match[2].upper()]) or None if match else None


def require_consistent(cluster: ClusterSpec) -> None:
    """Refuse options that contradict the plan, and too little memory to start a rank; `SpecError` names the key."""
    for option in cluster.slurm.extra:
        own = next((name for name in _options([option]) if name in _OWN_OPTIONS), None)
        if own is not None:
            raise SpecError(f"cluster.slurm.extra {option}: contradicts the plan; {_OWN_OPTIONS[own]}")
    mem = cluster.slurm.mem
    size = parse_mem(mem or "")
    if size is not None and size < MIN_MEM_BYTES:
        raise SpecError(
            f"cluster.slurm.mem {mem}: {format_bytes_word(size)} for all ranks of a node, in which not even torch can "
            "be imported; Slurm reads a number without a unit as MiB, so write 64G for 64 GiB"
        )


def partition_requested(cluster: ClusterSpec) -> str | None:
    """Return the partition that the spec names; None for the default partition."""
    return _options(cluster.slurm.extra).get("partition") or cluster.slurm.partition


def takes_whole_nodes(cluster: ClusterSpec) -> bool:
    """Return whether the job gets all generic resources of its nodes: ``--exclusive`` without ``=user`` or ``=mcs``."""
    extra = _options(cluster.slurm.extra).get("exclusive")
    return extra == "" if extra is not None else cluster.slurm.exclusive


def _per_node(name: str, value: str, nodes: int) -> int | None:
    if name == "gres":
        return gpu_count(value) or (1 if re.search(_SHARED, value) else 0)
    # [type:]number, several of them joined by commas
    count = sum(gpu_count(f"gpu:{item}") for item in value.split(","))
    if name == "gpus-per-socket" or (name == "gpus" and count % nodes):
        return None
    return count // nodes if name == "gpus" else count  # --gpus-per-task too: the job has one task per node


def _options(lines: Iterable[str]) -> dict[str, str]:
    """Return options of sbatch by long name; the last one wins, as in sbatch."""
    options: dict[str, str] = {}
    for line in lines:
        word = line.removeprefix("#SBATCH").strip()
        if word[:2] in _SHORT and not word.startswith("--"):
            options[_SHORT[word[:2]]] = word[2:].strip().removeprefix("=")
            continue
        name, _, value = word.removeprefix("--").partition("=")
        options[name.strip()] = value.strip()
    return options


def gpu_count(gres: str | None) -> int:
    """Return the GPUs in a list of generic resources: ``gpu:8``, ``gpu:a100:4(S:0-1)``, ``gres/gpu:2``, ``gpu=4``.

    Other resources (``shard``, ``mps``, ``nvme``) do not count. A bare ``gpu`` or ``gpu:a100`` is one GPU.
    """
    total = 0
    for item in filter(str.strip, re.split(r",(?![^(]*\))", gres or "")):  # at commas outside parentheses
        word = re.sub(r"\(.*\)", "", item.strip().removeprefix("gres/").removeprefix("gres:"))
        name, *rest = word.replace("=", ":").split(":")
        if name.lower() == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return total
