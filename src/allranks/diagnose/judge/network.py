"""Which way the data goes, and whether that is the way it should go."""

from __future__ import annotations

from allranks.diagnose.catalogue.entry import SHOWS
from allranks.diagnose.judge.case import Case

_PRIVATE_BRIDGES = ("docker", "virbr", "br-", "cni", "veth", "lo")


def decide(case: Case) -> None:
    """Sockets where RDMA was there or expected; bootstrap over an interface that no other host reaches."""
    _fallback(case)
    _bootstrap(case)


def _fallback(case: Case) -> None:
    socket = [s for s in case.facts("network") if s.groups["net"].lower() == "socket"]
    over_socket = [s for s in case.facts("channel") if s.groups["via"].lower().startswith("net/socket")]
    used = [*over_socket, *socket]
    broken = case.candidates.get("silent_socket_fallback")
    if not used:
        if broken is not None and broken.score < 0.75:
            broken.against.append("no line shows that sockets were really used")
        return
    if _disabled(case):
        return
    tried = [*case.facts("ib_failed"), *case.facts("no_ib")]
    several_nodes = (
        bool(over_socket)
        or len(case.hosts) > 1
        or any(int(s.groups.get("nodes") or s.groups.get("nnodes") or 0) > 1 for s in case.facts("nodes"))
    )
    if broken is not None:
        case.propose("silent_socket_fallback", 0.96, used[:2])
    elif case.facts("ib_failed"):
        case.propose("silent_socket_fallback", 0.9, [*case.facts("ib_failed")[:2], *used[:2]])
    elif tried and several_nodes:
        found = case.propose("silent_socket_fallback", SHOWS, [*tried[:1], *used[:2]])
        found.against.append("if these nodes have no RDMA network, sockets are the right path and nothing is wrong")


def _disabled(case: Case) -> bool:
    """The user switched RDMA off: then sockets are no surprise."""
    return any(
        (s.groups["name"] == "NCCL_IB_DISABLE" and s.groups["value"].strip() == "1")
        or (s.groups["name"] == "NCCL_NET" and s.groups["value"].strip().lower().startswith("socket"))
        for s in case.facts("nccl_env")
    )


def _bootstrap(case: Case) -> None:
    """An interface of one host alone, with more than one host in the job."""
    chosen = [s for s in case.facts("bootstrap") if s.groups["interface"].startswith(_PRIVATE_BRIDGES)]
    if not chosen or len(case.hosts) < 2:
        return
    ready = any(scan.ready for scan in case.scans)
    if not ready:
        name = chosen[0].groups["interface"]
        case.propose(
            "wrong_interface", 0.85, chosen[:2],
            cause=f"NCCL starts over {name} ({chosen[0].groups['address']}), which other hosts cannot reach; no communicator became ready.",
        )  # fmt: skip
