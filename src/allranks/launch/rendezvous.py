"""The network on which the ranks of several nodes meet. The driver chooses it from what the nodes report; agents read it.

Also the addresses and ports of it that are derived: this node's own on the route to another, and that of the control channel.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec
import psutil

from allranks.planning.records import LaunchPlan


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """One node on the chosen network. The node itself determines an empty address or interface."""

    node: int
    host: str
    address: str
    interface: str


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Node 0 opens the store at ``address``:``port``, or at any free port if the port is 0, or taken and not ``port_fixed``
    (by the spec); the other nodes learn the port over the control channel."""

    address: str
    port: int
    port_fixed: bool = False
    network: str
    reason: str
    places: list[NodeAddress]


def hosts_of_ranks(plan: LaunchPlan, meeting: Rendezvous | None, own: str) -> dict[int, str]:
    """Return the host of each rank of a run, as shown in messages."""
    named = {p.node: p.host for p in meeting.places} if meeting else {}
    return {r: named.get(n.node) or n.host or own for n in plan.nodes for r in n.ranks}


def interface_towards(address: str) -> str:
    """Return the interface that the kernel's routes use for an address; nothing is sent."""
    own = own_address_towards(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == own for a in addresses):
            return name
    return "lo"


def own_address_towards(address: str) -> str:
    """Return this node's own address on the route to another one; nothing is sent.

    Raises:
        OSError: there is no route, or the name does not resolve.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def control_port(rendezvous_port: int) -> int:
    """Return the control channel's port for a given store port; 0 (any free port) if none is given."""
    return rendezvous_port + 1 if rendezvous_port else 0


def host_labels(hosts: Sequence[str]) -> list[str]:
    """Return a name for each of ``cluster.hosts``; a host that is named again gets a number."""
    return [name if name not in hosts[:i] else f"{name}#{i}" for i, name in enumerate(hosts)]
