"""Interfaces and transports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from allranks.lint.job import Job
from allranks.lint.records import Assignment, Hit

INTERFACE_WHY = (
    "Interface names differ from node to node. NCCL does not say when the interface is missing, it takes another way or hangs; "
    "Gloo stops."
)
INTERFACE_CURE = (
    "leave NCCL_SOCKET_IFNAME unset, or exclude what cannot be right (NCCL_SOCKET_IFNAME=^lo,docker), or find the name on each "
    "node: the interface that has the route to the head node (ip -o route get <address>)"
)
LOOPBACK_WHY = "lo reaches only the node itself; ranks on other nodes wait for it until the timeout."
DISABLED_WHY = (
    "A transport that works is switched off for every node, and collectives become many times slower: without InfiniBand 10 to "
    "20 times, without P2P over NVLink about 8 times. What a topology matrix says (SYS) is no evidence that P2P fails."
)
DISABLED_CURE = (
    "remove it; if a copy test between the pairs (allranks doctor --collectives) or NCCL's own log shows that the transport "
    "fails, keep it and write that down: # allranks: allow transport-disabled <what was seen>"
)
GID_WHY = "The index of the RoCE v2 address differs between nodes and changes when addresses do. NCCL 2.21 and later choose it."
NAME = re.compile(r"[a-z]+[a-z0-9]*\d[a-z0-9.:_-]*\Z", re.IGNORECASE)


def _names(value: str) -> list[str]:
    return [v.lstrip("=") for v in value.split(",") if v]


def interface(job: Job) -> Iterator[Hit]:
    for item in job.assignments:
        if item.name not in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") or item.removed:
            continue
        value = item.value
        names = _names(value)
        if value.startswith("^") or "$" in value or len(names) != 1 or not NAME.match(names[0]):
            continue
        where = "on every node" if job.multi_node else "here"
        yield Hit(item.offset, f"{item.name}={value}: the interface {names[0]} may not exist {where}")
    for call in job.calls:
        words = [a.text for a in call.args]
        if call.program in ("ip", "ifconfig", "ethtool"):
            named = words[words.index("dev") + 1 : words.index("dev") + 2] if "dev" in words else words[:1]
            if call.program == "ip" and "dev" not in words:
                named = [w for before, w in pairwise(words) if before == "show"]
            if named and NAME.match(named[0]) and "$" not in named[0]:
                text = f"the address is taken from {named[0]}, which may not exist on every node"
                yield Hit(
                    call.offset,
                    text,
                    cure='take the host name: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                )


def loopback(job: Job) -> Iterator[Hit]:
    if not job.multi_node:
        return
    for item in job.assignments:
        if item.name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") and _names(item.value) == ["lo"]:
            yield Hit(item.offset, f"{item.name}={item.value} in a job of several nodes")


def disabled(job: Job) -> Iterator[Hit]:
    for item in job.assignments:
        what = _switched_off(item)
        if what:
            yield Hit(
                item.offset, f"{item.name}={item.value} turns {what} off on every node, and nothing here says why"
            )


OFF = {
    ("NCCL_P2P_DISABLE", "1"): "direct copies between GPUs",
    ("NCCL_P2P_LEVEL", "LOC"): "direct copies between GPUs",
    ("NCCL_P2P_LEVEL", "0"): "direct copies between GPUs",
    ("NCCL_IB_DISABLE", "1"): "InfiniBand and RoCE",
    ("NCCL_NET", "SOCKET"): "InfiniBand and RoCE",
    ("NCCL_SHM_DISABLE", "1"): "shared memory",
}


def _switched_off(item: Assignment) -> str | None:
    return None if item.removed else OFF.get((item.name, item.value.strip().upper()))


def gid(job: Job) -> Iterator[Hit]:
    for item in job.set_values("NCCL_IB_GID_INDEX"):
        if item.value.isdecimal():
            yield Hit(item.offset, f"NCCL_IB_GID_INDEX={item.value}: the same index on every node")
