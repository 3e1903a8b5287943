"""What one rank may use of the device it is on."""

from __future__ import annotations

import re

from allranks.facts import MachineFacts
from allranks.fit.records import Capacity
from allranks.planning import LaunchPlan
from allranks.spec.records import RunSpec

GIB = 1 << 30
_MEM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # sbatch: without a letter, megabytes


def capacity(spec: RunSpec, plan: LaunchPlan, facts: MachineFacts) -> Capacity:
    """From ``cluster.device_memory_gib``, else from this machine where the ranks run here, else from Slurm's ``mem``."""
    given = spec.cluster.device_memory_gib
    on_gpu = plan.device == "cuda"
    if given is not None:
        return Capacity(
            device="GPU" if on_gpu else "host memory", bytes=int(given * GIB), source="cluster.device_memory_gib"
        )
    if spec.cluster.launcher != "local":
        return _elsewhere(spec, plan, on_gpu)
    if on_gpu:
        known = [g for g in facts.gpus if g.memory_bytes]
        if not known:
            return Capacity(device="GPU", bytes=None, source="the driver does not tell the GPU's memory")
        least = min(known, key=lambda g: g.memory_bytes)
        sharing = -(-plan.procs_per_node // len(facts.gpus))
        shared = f", shared by {sharing} ranks" if sharing > 1 else ""
        return Capacity(device=least.name, bytes=least.memory_bytes // sharing, source=f"this machine's driver{shared}")
    each = facts.memory_bytes // plan.procs_per_node
    return Capacity(
        device="host memory",
        bytes=each,
        source=f"{facts.memory_bytes / GIB:.1f} GiB of this machine / {plan.procs_per_node} ranks",
    )


def _elsewhere(spec: RunSpec, plan: LaunchPlan, on_gpu: bool) -> Capacity:
    if on_gpu:
        return Capacity(device="GPU", bytes=None, source="set cluster.device_memory_gib to the memory of one GPU there")
    mem = parse_mem(spec.cluster.slurm.mem) if spec.cluster.slurm.mem else None
    if mem:
        return Capacity(
            device="host memory",
            bytes=mem // plan.procs_per_node,
            source=f"cluster.slurm.mem {spec.cluster.slurm.mem} / {plan.procs_per_node} ranks",
        )
    return Capacity(
        device="host memory",
        bytes=None,
        source="set cluster.device_memory_gib to what one rank may use there, or cluster.slurm.mem",
    )


def parse_mem(text: str) -> int | None:
    """Bytes of sbatch's ``--mem``; None for 0 (all of the node) and for what it would refuse."""
    found = _MEM.fullmatch(text.strip())
    return int(float(found[1]) * _UNITS[found[2].upper()]) or None if found else None
