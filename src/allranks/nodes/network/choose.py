"""Choose the network that every node is on. Pure."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.nodes.records import Interface, Probe
from allranks.planning.records import NodeAddress

CONTAINER_PREFIXES = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "kube", "podman", "lxc", "lxd")
"""Bridges inside one machine: every node may have the same address there, and they connect no nodes."""


class ChosenNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The network, each node's interface and address on it by host, and the reason for the choice."""

    network: str
    seats: dict[str, NodeAddress]
    reason: str


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    network: ipaddress.IPv4Network
    seats: dict[str, Interface]

    @property
    def speed(self) -> int:
        """Return the speed of the slowest node; 0 if no driver reports it."""
        return min(item.speed_mbit or 0 for item in self.seats.values())


def choose_network(probes: Sequence[Probe], wanted_interface: str | None = None) -> ChosenNetwork:
    """Return the IPv4 network in which every node has an address on an interface that is up; names may differ.

    Of several: the fastest, then the one with the fewest different interface names, then the one to which the nodes'
    own names resolve, then the one of the lowest addresses. `wanted_interface` restricts the choice to that name (or
    names, joined by commas).

    Raises:
        EnvironmentNotAble: the nodes have no network in common; the message names the nodes without it.
    """
    names = [name.strip() for name in wanted_interface.split(",")] if wanted_interface else None
    usable = {probe.host: _usable(probe, names) for probe in probes}
    _refuse_without_interface(probes, usable, names)
    candidates = [c for c in _candidates(usable) if len(c.seats) == len(usable)]
    if not candidates:
        return _routed(usable, names)
    own = {address for probe in probes for address in probe.resolves or []}
    ranked = sorted(candidates, key=lambda c: _preference(c, own))
    best = ranked[0]
    return ChosenNetwork(
        network=str(best.network),
        seats={
            host: NodeAddress(interface=item.name, address=item.address or "")
            for host, item in sorted(best.seats.items())
        },
        reason=_reason(ranked, wanted_interface),
    )


def _routed(usable: dict[str, list[Interface]], names: list[str] | None) -> ChosenNetwork:
    """Return the interfaces without a common network: those that the user names, or the only one of each node.

    Some clouds give every machine its own network and route between them; `reach` tests whether they do.
    """
    single = all(len(items) == 1 and items[0].prefix == 32 for items in usable.values())
    if not (names or single):
        raise EnvironmentNotAble(_nothing_common(usable))
    seats = {
        host: NodeAddress(interface=items[0].name, address=items[0].address or "") for host, items in usable.items()
    }
    why = "set by cluster.rendezvous.interface" if names else "each node has only this one"
    return ChosenNetwork(network="routed", seats=seats, reason=f"no network in common, so it must be routed: {why}")


def _preference(candidate: _Candidate, own: set[str]) -> tuple[int, int, int, int]:
    named = sum(item.address in own for item in candidate.seats.values())
    names = len({item.name for item in candidate.seats.values()})
    return (-candidate.speed, names, -named, int(candidate.network.network_address))


def _usable(probe: Probe, names: list[str] | None) -> list[Interface]:
    interfaces = []
    for item in probe.interfaces:
        if not item.address or not item.up or item.loopback or item.address.startswith(("127.", "169.254.")):
            continue
        if item.name in names if names else not item.name.startswith(CONTAINER_PREFIXES):
            interfaces.append(item)
    return interfaces


def _refuse_without_interface(
    probes: Sequence[Probe], usable: dict[str, list[Interface]], names: list[str] | None
) -> None:
    without = [probe for probe in probes if not usable[probe.host]]
    if not without:
        return
    wanted = f"an interface named {' or '.join(names)}" if names else "an interface that other machines can reach"
    shown = "; ".join(f"{probe.host} has {_list_interfaces(probe.interfaces)}" for probe in without[:4])
    cure = (
        "leave cluster.rendezvous.interface null, so that each node's interface is detected"
        if names
        else "fix the network of that node, or exclude it with cluster.slurm.exclude"
    )
    hosts = ", ".join(probe.host for probe in without)
    raise EnvironmentNotAble(f"{hosts}: no IPv4 address on {wanted} that is up ({shown}); {cure}")


def _list_interfaces(items: Sequence[Interface]) -> str:
    return ", ".join(f"{i.name} {i.address or 'without address'}{'' if i.up else ' (down)'}" for i in items) or "none"


def _candidates(usable: dict[str, list[Interface]]) -> list[_Candidate]:
    by_network: dict[ipaddress.IPv4Network, dict[str, Interface]] = {}
    for host, items in usable.items():
        for item in sorted(items, key=lambda i: -(i.speed_mbit or 0)):
            network = ipaddress.IPv4Network(f"{item.address}/{item.prefix}", strict=False)
            by_network.setdefault(network, {}).setdefault(host, item)
    distinct = {
        network: seats
        for network, seats in by_network.items()
        if len(seats) == 1 or max(Counter(item.address for item in seats.values()).values()) == 1
    }
    return [_Candidate(network=network, seats=seats) for network, seats in distinct.items()]


def _nothing_common(usable: dict[str, list[Interface]]) -> str:
    candidates = sorted(_candidates(usable), key=lambda c: (-len(c.seats), int(c.network.network_address)))
    cure = (
        "set the interfaces to use in cluster.rendezvous.interface, or exclude these nodes with cluster.slurm.exclude"
    )
    if not candidates:
        return f"the nodes have the same address on every network: {', '.join(usable)}; {cure}"
    best = candidates[0]
    left = [host for host in usable if host not in best.seats]
    shown = "; ".join(f"{host} has {_list_interfaces(usable[host])}" for host in left[:4])
    return (
        f"the nodes have no IPv4 network in common: {best.network} has {', '.join(best.seats)}, "
        f"but not {', '.join(left)} ({shown}); {cure}"
    )


def _reason(ranked: list[_Candidate], wanted: str | None) -> str:
    if wanted:
        return f"cluster.rendezvous.interface is {wanted}"
    if len(ranked) == 1:
        return "the only network that all nodes are on"
    speeds = ", ".join(f"{c.network} {c.speed or 'unknown'}" for c in ranked[:4])
    return (
        f"the fastest of {len(ranked)} that all nodes are on, or the one with the most uniform names (Mbit/s: {speeds})"
    )
