"""Which interface the ranks use. Pure."""

from __future__ import annotations

from allranks.fabric.decision import TORCH, EnvVar, nccl
from allranks.fabric.facts import NodeFacts
from allranks.fabric.job import Job

CHOOSING = f"{TORCH}#choosing-the-network-interface-to-use"
FAST_MBIT = 100_000
_GLOO_RISK = "Gloo takes exact names only and fails at once if the node has no interface of that name"
_NCCL_RISK = (
    "an interface that a node lacks is an error there or, in some versions, a silent other choice; NCCL uses it for the "
    "bootstrap even when RDMA carries the data"
)


def gloo(job: Job, node: NodeFacts | None = None) -> EnvVar:
    """GLOO_SOCKET_IFNAME: an exact name, per node."""

    def decided(value: str | None, reason: str, source: str = "policy") -> EnvVar:
        return EnvVar(
            name="GLOO_SOCKET_IFNAME",
            value=value,
            reason=reason,
            source=source,
            documentation=CHOOSING,
            risk=_GLOO_RISK if value else "without it Gloo takes the address that the host's own name resolves to",
        )

    if job.interface:
        return decided(job.interface, "cluster.rendezvous.interface", "spec")
    if job.nodes == 1:
        why = "one node: Gloo would look the host name up, which fails or waits for DNS on many laptops"
        return decided("lo", why)
    if node is not None and node.seat is not None:
        return decided(node.seat.interface, f"{node.host} is on the common network by it ({node.seat.address})")
    return decided(None, "several nodes: decided on each node from its own interfaces")


def nccl_interface(job: Job, node: NodeFacts | None = None) -> EnvVar:
    """NCCL_SOCKET_IFNAME: with ``=`` it means exactly this name; without, a prefix."""
    name = "NCCL_SOCKET_IFNAME"
    if job.interface:
        said = "cluster.rendezvous.interface ('=' means exactly this name)"
        return EnvVar(
            name=name, value=f"={job.interface}", reason=said, source="spec", documentation=CHOOSING, risk=_NCCL_RISK
        )
    if job.nodes == 1:
        return nccl(name, None, "one node: NCCL finds its own way between local GPUs", "none is known")
    if node is not None and node.seat is not None:
        said = f"{node.host} is on the common network by it ({node.seat.address}); '=' means exactly this name"
        return nccl(name, f"={node.seat.interface}", said, _NCCL_RISK)
    return nccl(
        name,
        None,
        "several nodes: decided on each node from its own interfaces; names may differ",
        "a name written down by hand is wrong on the first node that calls it otherwise",
    )


def threads(node: NodeFacts | None, over_sockets: bool) -> EnvVar:
    """NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD: worth measuring on a fast network, never set unmeasured."""
    speed = _speed(node)
    if over_sockets and speed >= FAST_MBIT:
        why = (
            f"sockets over {speed // 1000} Gbit/s: one connection may not fill it; measure with NCCL_SOCKET_NTHREADS=4 and "
            "NCCL_NSOCKS_PERTHREAD=4 (their product may be 64 at most) before keeping them"
        )
    else:
        why = "matters only when NCCL sends over sockets on a network of 100 Gbit/s or more"
    return nccl("NCCL_SOCKET_NTHREADS", None, why, "each helper thread takes a core from the ranks")


def _speed(node: NodeFacts | None) -> int:
    if node is None or node.seat is None:
        return 0
    return next((i.speed_mbit or 0 for i in node.interfaces if i.name == node.seat.interface), 0)
