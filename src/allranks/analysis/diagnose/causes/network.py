"""Detect slow or wrong network transports from NCCL's log."""

from __future__ import annotations

import re

from allranks.analysis.diagnose.patterns import LIKELY
from allranks.analysis.diagnose.records import DiagnosisCase, LogSignal

_NO_SURPRISE = re.compile(r"NCCL_SHM_DISABLE|Avg bus bandwidth")
_PRIVATE_BRIDGES = ("docker", "virbr", "br-", "cni", "veth", "lo")


def detect_wrong_transport(case: DiagnosisCase) -> None:
    """Detect sockets instead of RDMA, a slow path, and bootstrap over an interface that other hosts cannot reach."""
    _fallback(case)
    _unused(case)
    _bootstrap(case)
    _unregistered(case)


def _unregistered(case: DiagnosisCase) -> None:
    """Say what a bad address means when memory is registered: it is rarely the limit of locked memory."""
    candidate = case.candidates.get("memlock_limit")
    if candidate is None or not all("address" in s.groups for s in candidate.signals):
        return
    candidate.title = "memory cannot be registered for RDMA"
    candidate.cause = (
        "The network adapter could not register a buffer (bad address): for memory of a GPU, the module nvidia_peermem "
        "or the DMA-BUF support of the driver is missing or does not match; for memory of the host, it may not be "
        "locked (ulimit -l), or the process forked."
    )
    candidate.fix = (
        "Load nvidia_peermem (or a driver with DMA-BUF) on every node and raise the limit of locked memory; "
        "NCCL_NET_GDR_LEVEL=LOC, or NCCL_IB_DISABLE=1 at the price of speed, shows whether it is that."
    )
    candidate.next_test = (
        "lsmod | grep peermem and ulimit -l inside the job on each node; then the same run with NCCL_NET_GDR_LEVEL=LOC"
    )


def _fallback(case: DiagnosisCase) -> None:
    socket = [s for s in case.facts("network") if s.groups["net"].lower() == "socket"]
    over_socket = [s for s in case.facts("channel") if s.groups["via"].lower().startswith("net/socket")]
    used = [*over_socket, *socket]
    broken = case.candidates.get("silent_socket_fallback")
    if not used:
        if broken is not None and broken.score < 0.75:
            if any(s.groups["net"].lower() != "socket" for s in case.facts("network")):
                del case.candidates["silent_socket_fallback"]  # another network is used, so there was no fall-back
            else:
                broken.against.append("no line shows that sockets were used")
        return
    if _disabled(case):
        return
    tried = [*case.facts("ib_failed"), *case.facts("no_ib")]
    several_nodes = (
        bool(over_socket) or len(case.hosts) > 1 or any(int(s.groups["nodes"]) > 1 for s in case.facts("nodes"))
    )
    if broken is not None:
        case.propose("silent_socket_fallback", 0.96, used[:2])
    elif case.facts("ib_failed"):
        case.propose("silent_socket_fallback", 0.9, [*case.facts("ib_failed")[:2], *used[:2]])
    elif (requested := _asked_for(case)) and tried and several_nodes:
        case.propose("silent_socket_fallback", LIKELY, [*requested[:1], *tried[:1], *used[:2]])


def _asked_for(case: DiagnosisCase) -> list[LogSignal]:
    """Return settings that only make sense with RDMA. Without them, a missing device is normal on Ethernet."""
    return [
        s
        for s in case.facts("nccl_env")
        if s.groups["name"].startswith(("NCCL_IB_", "NCCL_NET_GDR"))
        or s.groups["name"] in ("NCCL_NET", "NCCL_NET_PLUGIN")
    ]


def _unused(case: DiagnosisCase) -> None:
    """Drop findings about shared memory and bandwidth if all data goes over the network."""
    slow = case.candidates.get("slow_transport")
    paths = [via.upper() for scan in case.scans for via in scan.transports]
    if slow is None or len(case.hosts) < 2 or not paths or not all(p.startswith("NET/") for p in paths):
        return
    slow.signals = [s for s in slow.signals if not _NO_SURPRISE.search(s.text)]
    if not slow.signals:
        del case.candidates["slow_transport"]


def _disabled(case: DiagnosisCase) -> bool:
    """Return whether the user disabled RDMA, so that sockets are expected."""
    return any(
        (s.groups["name"] == "NCCL_IB_DISABLE" and s.groups["value"].strip() == "1")
        or (s.groups["name"] == "NCCL_NET" and s.groups["value"].strip().lower().startswith("socket"))
        for s in case.facts("nccl_env")
    )


def _bootstrap(case: DiagnosisCase) -> None:
    """Detect a bootstrap interface that exists on one host only, in a job of several hosts."""
    chosen = [s for s in case.facts("bootstrap") if s.groups["interface"].startswith(_PRIVATE_BRIDGES)]
    if not chosen or len(case.hosts) < 2:
        return
    ready = any(scan.ready for scan in case.scans)
    if not ready:
        name = chosen[0].groups["interface"]
        case.propose(
            "wrong_interface", 0.85, chosen[:2],
            cause=f"NCCL bootstraps over {name} ({chosen[0].groups['address']}), which other hosts cannot reach; no "
            "communicator was initialised.",
        )  # fmt: skip
