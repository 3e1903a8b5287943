"""Decide between RDMA and sockets, the RDMA ports (NCCL_IB_HCA) and the RoCE GID (NCCL_IB_GID_INDEX). Pure.

All ranks of a job must use the same network. NCCL chooses the GID itself since 2.21; variables are set only where it cannot.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from allranks.planning.env_vars import EnvVar, NetworkJob, nccl_var
from allranks.planning.node_facts import NodeFacts, RdmaPort

NCCL_SELECTS_GID_SINCE = (2, 21)


class RoceGidKind(msgspec.Struct, frozen=True):
    """RoCE version and address family that all nodes have in common."""

    version: int
    four: bool


def common_gid_kind(chosen: dict[str, list[RdmaPort]]) -> RoceGidKind | None:
    """Return the best kind of GID that all chosen ports have: v2 over IPv4, v2 over IPv6, v1 over IPv4; else None."""
    ports = [port for items in chosen.values() for port in items]
    for kind in (RoceGidKind(2, True), RoceGidKind(2, False), RoceGidKind(1, True)):
        if ports and all(port.routable(kind.version, kind.four) for port in ports):
            return kind
    return None


def decide_gid_index(nodes: Sequence[NodeFacts], chosen: dict[str, list[RdmaPort]]) -> dict[str, list[EnvVar]]:
    """Decide the GID variables of every node that uses RoCE."""
    kind = common_gid_kind(chosen)
    shared: list[EnvVar] = []
    if kind == RoceGidKind(2, False):
        shared.append(
            nccl_var(
                "NCCL_IB_ADDR_FAMILY",
                "AF_INET6",
                "the RoCE ports of every node have routable IPv6 GIDs, but not all have IPv4 ones, which NCCL selects by default",
                "NCCL before 2.21 does not support it",
            )
        )
    if kind == RoceGidKind(1, True):
        shared.append(
            nccl_var(
                "NCCL_IB_ROCE_VERSION_NUM",
                "1",
                "some port has only RoCE v1 GIDs, and both ends must use the same version",
                "v1 is not routed: all nodes must be in one Ethernet segment",
            )
        )
    span = _address_range(nodes, chosen, kind)
    if span:
        shared.append(span)
    return {node.host: [*shared, _gid_index_var(node, chosen[node.host], kind)] for node in nodes}


def _address_range(
    nodes: Sequence[NodeFacts], chosen: dict[str, list[RdmaPort]], kind: RoceGidKind | None
) -> EnvVar | None:
    """Decide the address range if ports are on several networks (VLANs): the network that all ports share."""
    if kind is None or not kind.four:
        return None
    per_port = [
        {net for gid in port.routable(kind.version) if gid.ipv4 and (net := _gid_network(node, gid.ipv4))}
        for node in nodes
        for port in chosen[node.host]
    ]
    if not per_port or max(len(nets) for nets in per_port) < 2:
        return None
    common = set.intersection(*per_port)
    if len(common) != 1:
        return None
    return nccl_var(
        "NCCL_IB_ADDR_RANGE",
        str(next(iter(common))),
        "RoCE ports have addresses on several networks (VLANs); this is the one that all of them are on",
        "a port that is later added on another network is not used",
    )


def _gid_network(node: NodeFacts, address: ipaddress.IPv4Address) -> ipaddress.IPv4Network | None:
    for item in node.interfaces:
        if item.address == str(address) and item.prefix:
            return ipaddress.IPv4Network(f"{item.address}/{item.prefix}", strict=False)
    return None


def _gid_index_var(node: NodeFacts, ports: list[RdmaPort], kind: RoceGidKind | None) -> EnvVar:
    """Decide NCCL_IB_GID_INDEX: only for NCCL versions that do not choose it themselves."""
    name = "NCCL_IB_GID_INDEX"
    risk = "the order of the GID table differs between nodes and changes with the addresses, so a fixed index becomes wrong"
    if kind is None:
        why = "no kind of GID (v2 or v1, IPv4 or IPv6) is on all RoCE ports of all nodes: assign addresses to their interfaces first"
        return nccl_var(name, None, why, risk)
    found = [{gid.index for gid in port.routable(kind.version, kind.four)} for port in ports]
    same = set.intersection(*found) if found else set()
    if not node.nccl or node.nccl >= NCCL_SELECTS_GID_SINCE:
        shown = ", ".join(f"{port.name} {min(indices)}" for port, indices in zip(ports, found, strict=True) if indices)
        why = f"NCCL chooses it since 2.21 (on {node.host} it should choose {shown})"
        return nccl_var(name, None, why, risk)
    text = ".".join(map(str, node.nccl))
    if same:
        why = f"NCCL {text} uses index 0 by default; here RoCE v{kind.version} with {'IPv4' if kind.four else 'IPv6'} is at this one"
        return nccl_var(name, str(min(same)), why, risk)
    why = f"NCCL {text} needs it, but the ports of {node.host} have the right GID at different indices: use NCCL 2.21 or newer"
    return nccl_var(name, None, why, risk)


_FALSE_VALUES = {"", "0"}


class RdmaDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The family that all nodes use (or Socket), the ports of each node, the variables and the reasons."""

    family: str
    ports: dict[str, list[RdmaPort]]
    environment: dict[str, list[EnvVar]]
    why: str
    notes: list[str] = []


def decide_rdma(job: NetworkJob, nodes: Sequence[NodeFacts]) -> RdmaDecision:
    """Decide the network that all nodes have in common and the variables that make all of them use it."""
    forced = _socket_reason(job, nodes)
    if forced:
        return RdmaDecision(
            family="Socket", ports={}, environment={n.host: [_net_unset(forced)] for n in nodes}, why=forced
        )
    for family in ("InfiniBand", "RoCE", "EFA"):
        ports = {node.host: _usable_ports(node, family) for node in nodes}
        if nodes and all(ports.values()):
            return _decide_ports(nodes, family, ports)
    return _decide_sockets(nodes)


def _socket_reason(job: NetworkJob, nodes: Sequence[NodeFacts]) -> str:
    """Return why sockets are configured: by the spec, or by /etc/nccl.conf of a node."""
    if job.user.get("NCCL_IB_DISABLE", "0") not in _FALSE_VALUES or job.user.get("NCCL_NET", "").lower() == "socket":
        return "cluster.env sets it"
    files = [
        n.host
        for n in nodes
        if n.conf.get("NCCL_IB_DISABLE", "0") not in _FALSE_VALUES or n.conf.get("NCCL_NET", "").lower() == "socket"
    ]
    return f"/etc/nccl.conf of {', '.join(files)} sets it" if files else ""


def _usable_ports(node: NodeFacts, family: str) -> list[RdmaPort]:
    """Return the active ports of a family; a RoCE port without a routable address cannot reach other segments."""
    ports = [port for port in node.active if port.family == family]
    if family != "RoCE":
        return ports
    return [port for port in ports if any(gid.routable for gid in port.gids)]


def _decide_ports(nodes: Sequence[NodeFacts], family: str, ports: dict[str, list[RdmaPort]]) -> RdmaDecision:
    environment = {node.host: [_ib_hca_var(node, family, ports[node.host])] for node in nodes}
    notes = _port_count_notes(ports)
    if family == "RoCE":
        for host, found in decide_gid_index(nodes, ports).items():
            environment[host] += found
        if common_gid_kind(ports) is None:
            notes.append(
                "the RoCE ports have no kind of GID in common: `show_gids` on each node; NCCL may fail or fall back to sockets"
            )
    why = f"every node has active {family} ports"
    for node in nodes:
        environment[node.host].append(_net_unset(why + (", NCCL uses them by default" if family != "EFA" else "")))
    if family == "EFA":
        notes.append("EFA needs the plugin aws-ofi-nccl; without it NCCL falls back to sockets silently")
    return RdmaDecision(family=family, ports=ports, environment=environment, why=why, notes=notes)


def _ib_hca_var(node: NodeFacts, family: str, ports: list[RdmaPort]) -> EnvVar:
    others = [port for port in node.active if port not in ports]
    names = ",".join(port.name for port in ports)
    if not others:
        why = (
            f"all active ports of {node.host} are {family} and usable ({names}); NCCL uses the nearest one to each GPU"
        )
        return nccl_var("NCCL_IB_HCA", None, why, "a fixed list is wrong on nodes with other port names")
    left = ", ".join(f"{port.name} ({_exclusion_reason(port, family)})" for port in others)
    why = f"NCCL would also use {left} of {node.host}, which does not reach the other nodes' {family} ports"
    return nccl_var(
        "NCCL_IB_HCA", f"={names}", why, "ports that come up later are not used; '=' means exactly these names"
    )


def _exclusion_reason(port: RdmaPort, family: str) -> str:
    if port.family != family:
        return port.family
    return "no routable address"


def _port_count_notes(ports: dict[str, list[RdmaPort]]) -> list[str]:
    counts = {host: len(items) for host, items in ports.items()}
    if len(set(counts.values())) < 2:
        return []
    shown = ", ".join(f"{host} {count}" for host, count in counts.items())
    return [
        f"the nodes have different numbers of usable RDMA ports ({shown}): the node with the fewest limits the bandwidth; check for ports that are down"
    ]


def _net_unset(why: str) -> EnvVar:
    return nccl_var(
        "NCCL_NET",
        None,
        f"{why}; NCCL chooses",
        "NCCL falls back to sockets silently; allranks compares its log with what was expected",
    )


def _decide_sockets(nodes: Sequence[NodeFacts]) -> RdmaDecision:
    having = [node.host for node in nodes if node.active]
    lacking = [node.host for node in nodes if not node.active]
    if not having:
        why = "no node has an active RDMA port"
        decided = nccl_var(
            "NCCL_NET",
            None,
            f"{why}: NCCL finds none and uses sockets",
            "none: setting NCCL_IB_DISABLE would change nothing",
        )
        return RdmaDecision(family="Socket", ports={}, environment={n.host: [decided] for n in nodes}, why=why)
    what = (
        f"{', '.join(lacking)} ha{'s' if len(lacking) == 1 else 've'} no active RDMA port"
        if lacking
        else "the nodes have no kind of RDMA in common"
    )
    why = f"{what}, and all ranks must use the same network"
    decided = nccl_var(
        "NCCL_NET", "Socket", why, "the RDMA ports of the other nodes stay unused; sockets are much slower"
    )
    cure = (
        f"exclude {', '.join(lacking)} (cluster.slurm.exclude, --exclude-bad)"
        if lacking
        else "choose nodes with equal hardware (cluster.slurm.constraint)"
    )
    notes = [f"{what}: all ranks use sockets; to use RDMA, {cure}"]
    return RdmaDecision(family="Socket", ports={}, environment={n.host: [decided] for n in nodes}, why=why, notes=notes)
