"""RDMA or sockets, and which ports. Every rank of a job must come to the same answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.fabric import gids
from allranks.fabric.decision import EnvVar, nccl
from allranks.fabric.facts import NodeFacts, Port
from allranks.fabric.job import Job

_FALSE = {"", "0"}


class Rdma(msgspec.Struct, frozen=True, kw_only=True):
    """The decision: the family that all nodes use (or Socket), the ports of each node, the variables, why."""

    family: str
    ports: dict[str, list[Port]]
    environment: dict[str, list[EnvVar]]
    why: str
    notes: list[str] = []


def decide(job: Job, nodes: Sequence[NodeFacts]) -> Rdma:
    """What the nodes have in common, and what must be said so that all of them use it."""
    forced = _forced(job, nodes)
    if forced:
        return Rdma(family="Socket", ports={}, environment={n.host: [_net_alone(forced)] for n in nodes}, why=forced)
    for family in ("InfiniBand", "RoCE", "EFA"):
        ports = {node.host: _usable(node, family) for node in nodes}
        if nodes and all(ports.values()):
            return _chosen(nodes, family, ports)
    return _none(nodes)


def _forced(job: Job, nodes: Sequence[NodeFacts]) -> str:
    """Sockets because somebody said so: the spec, or /etc/nccl.conf of a node."""
    if job.user.get("NCCL_IB_DISABLE", "0") not in _FALSE or job.user.get("NCCL_NET", "").lower() == "socket":
        return "cluster.env says so"
    files = [
        n.host
        for n in nodes
        if n.conf.get("NCCL_IB_DISABLE", "0") not in _FALSE or n.conf.get("NCCL_NET", "").lower() == "socket"
    ]
    return f"/etc/nccl.conf of {', '.join(files)} says so" if files else ""


def _usable(node: NodeFacts, family: str) -> list[Port]:
    """Active ports of a family; a RoCE port without a routable address cannot leave its own wire."""
    ports = [port for port in node.active if port.family == family]
    if family != "RoCE":
        return ports
    return [port for port in ports if any(gid.routable for gid in port.gids)]


def _chosen(nodes: Sequence[NodeFacts], family: str, ports: dict[str, list[Port]]) -> Rdma:
    environment = {node.host: [_hca(node, family, ports[node.host])] for node in nodes}
    notes = _uneven(ports)
    if family == "RoCE":
        for host, found in gids.decide(nodes, ports).items():
            environment[host] += found
        if gids.common_kind(ports) is None:
            notes.append(
                "the RoCE ports have no kind of GID in common: `show_gids` on each node; NCCL may fail or fall back to sockets"
            )
    why = f"every node has active {family} ports"
    for node in nodes:
        environment[node.host].append(_net_alone(why + (", NCCL takes them by itself" if family != "EFA" else "")))
    if family == "EFA":
        notes.append(
            "EFA is reached through the plugin aws-ofi-nccl alone; without it NCCL falls back to sockets in silence"
        )
    return Rdma(family=family, ports=ports, environment=environment, why=why, notes=notes)


def _hca(node: NodeFacts, family: str, ports: list[Port]) -> EnvVar:
    others = [port for port in node.active if port not in ports]
    names = ",".join(port.name for port in ports)
    if not others:
        why = f"all active ports of {node.host} are {family} and usable ({names}); NCCL takes the nearest to each GPU"
        return nccl(
            "NCCL_IB_HCA", None, why, "a list written down by hand is wrong on the first node that names them otherwise"
        )
    left = ", ".join(f"{port.name} ({_why_not(port, family)})" for port in others)
    why = f"NCCL would also use {left} of {node.host}, which does not lead to the other nodes' {family} ports"
    return nccl("NCCL_IB_HCA", f"={names}", why, "ports that come up later are not used; '=' means exactly these names")


def _why_not(port: Port, family: str) -> str:
    if port.family != family:
        return port.family
    return "no routable address"


def _uneven(ports: dict[str, list[Port]]) -> list[str]:
    counts = {host: len(items) for host, items in ports.items()}
    if len(set(counts.values())) < 2:
        return []
    shown = ", ".join(f"{host} {count}" for host, count in counts.items())
    return [
        f"the nodes do not have equally many usable RDMA ports ({shown}): the one with the fewest sets the pace; look for ports that are down"
    ]


def _net_alone(why: str) -> EnvVar:
    return nccl(
        "NCCL_NET",
        None,
        f"{why}; NCCL chooses",
        "NCCL says nothing when it falls back to sockets; allranks compares its log with what was expected",
    )


def _none(nodes: Sequence[NodeFacts]) -> Rdma:
    having = [node.host for node in nodes if node.active]
    lacking = [node.host for node in nodes if not node.active]
    if not having:
        why = "no node has an active RDMA port"
        decided = nccl(
            "NCCL_NET",
            None,
            f"{why}: NCCL finds none and takes sockets by itself",
            "none: setting NCCL_IB_DISABLE would change nothing",
        )
        return Rdma(family="Socket", ports={}, environment={n.host: [decided] for n in nodes}, why=why)
    what = (
        f"{', '.join(lacking)} ha{'s' if len(lacking) == 1 else 've'} no active RDMA port"
        if lacking
        else "the nodes have no kind of RDMA in common"
    )
    why = f"{what}, and all ranks must use the same network"
    decided = nccl("NCCL_NET", "Socket", why, "RDMA of the other nodes lies idle, which is much slower")
    cure = (
        f"leave {', '.join(lacking)} out (cluster.slurm.exclude, --exclude-bad)"
        if lacking
        else "choose nodes alike (cluster.slurm.constraint)"
    )
    notes = [f"{what}: the ranks talk over sockets everywhere; to use RDMA, {cure}"]
    return Rdma(family="Socket", ports={}, environment={n.host: [decided] for n in nodes}, why=why, notes=notes)
