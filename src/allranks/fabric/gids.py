"""RoCE: which GID NCCL should take. It chooses by itself since 2.21; what it needs is told here, if anything. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from allranks.fabric.decision import EnvVar, nccl
from allranks.fabric.facts import NodeFacts, Port

CHOOSES_SINCE = (2, 21)


class Roce(msgspec.Struct, frozen=True):
    """What all nodes have in common: version of RoCE, and whether by IPv4; None: nothing that reaches every node."""

    version: int
    four: bool


def common_kind(chosen: dict[str, list[Port]]) -> Roce | None:
    """The best kind of GID that every chosen port of every node has: v2 by IPv4, v2 by IPv6, v1 by IPv4."""
    ports = [port for items in chosen.values() for port in items]
    for kind in (Roce(2, True), Roce(2, False), Roce(1, True)):
        if ports and all(port.routable(kind.version, kind.four) for port in ports):
            return kind
    return None


def decide(nodes: Sequence[NodeFacts], chosen: dict[str, list[Port]]) -> dict[str, list[EnvVar]]:
    """The GID variables of every node that uses RoCE."""
    kind = common_kind(chosen)
    shared: list[EnvVar] = []
    if kind == Roce(2, False):
        shared.append(
            nccl(
                "NCCL_IB_ADDR_FAMILY",
                "AF_INET6",
                "the RoCE ports of every node have routable IPv6 GIDs, but not all have IPv4 ones, which NCCL looks for",
                "NCCL before 2.21 does not know it",
            )
        )
    if kind == Roce(1, True):
        shared.append(
            nccl(
                "NCCL_IB_ROCE_VERSION_NUM",
                "1",
                "some port has only RoCE v1 GIDs, and both ends must speak the same version",
                "v1 is not routed: all nodes must be in one Ethernet segment",
            )
        )
    span = _range(nodes, chosen, kind)
    if span:
        shared.append(span)
    return {node.host: [*shared, _index(node, chosen[node.host], kind)] for node in nodes}


def _range(nodes: Sequence[NodeFacts], chosen: dict[str, list[Port]], kind: Roce | None) -> EnvVar | None:
    """Ports with addresses on several networks (VLANs): the one network that all ports of all nodes are on."""
    if kind is None or not kind.four:
        return None
    per_port = [
        {net for gid in port.routable(kind.version) if gid.ipv4 and (net := _network(node, gid.ipv4))}
        for node in nodes
        for port in chosen[node.host]
    ]
    if not per_port or max(len(nets) for nets in per_port) < 2:
        return None
    common = set.intersection(*per_port)
    if len(common) != 1:
        return None
    return nccl(
        "NCCL_IB_ADDR_RANGE",
        str(next(iter(common))),
        "RoCE ports have addresses on several networks (VLANs); this is the one that all of them are on",
        "a port added later on another network would not be used",
    )


def _network(node: NodeFacts, address: ipaddress.IPv4Address) -> ipaddress.IPv4Network | None:
    for item in node.interfaces:
        if item.address == str(address) and item.prefix:
            return ipaddress.IPv4Network(f"{item.address}/{item.prefix}", strict=False)
    return None


def _index(node: NodeFacts, ports: list[Port], kind: Roce | None) -> EnvVar:
    """NCCL_IB_GID_INDEX: alone, but for versions that do not choose."""
    name = "NCCL_IB_GID_INDEX"
    risk = (
        "the table's order differs from node to node and changes when an address comes or goes, so a number goes stale"
    )
    if kind is None:
        why = "no kind of GID (v2 or v1, IPv4 or IPv6) is on all RoCE ports of all nodes: give their interfaces addresses first"
        return nccl(name, None, why, risk)
    found = [{gid.index for gid in port.routable(kind.version, kind.four)} for port in ports]
    same = set.intersection(*found) if found else set()
    if not node.nccl or node.nccl >= CHOOSES_SINCE:
        shown = ", ".join(f"{port.name} {min(indices)}" for port, indices in zip(ports, found, strict=True) if indices)
        why = f"NCCL chooses by itself since 2.21 (on {node.host} it should take {shown})"
        return nccl(name, None, why, risk)
    text = ".".join(map(str, node.nccl))
    if same:
        why = f"NCCL {text} takes index 0 unless told; here RoCE v{kind.version} with {'IPv4' if kind.four else 'IPv6'} is at this one"
        return nccl(name, str(min(same)), why, risk)
    why = f"NCCL {text} needs it, but the ports of {node.host} have the right GID at different indices: use NCCL 2.21 or newer"
    return nccl(name, None, why, risk)
