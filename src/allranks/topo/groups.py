"""Which devices stand together: by NUMA node, and in it by the PCIe switch or host bridge they share. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.topo.records import Device, Link, Topology, distance

SWITCH, SWITCHES, BRIDGE = "one PCIe switch", "joined PCIe switches", "one host bridge"
_LEVELS = ((SWITCHES, ("PIX", "PXB")), (BRIDGE, ("PHB",)))


_Key = tuple[int | None, str | None]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that share a switch or a host bridge; `what` is empty for one that stands alone."""

    what: str
    gpus: list[Device]
    nics: list[Device]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node and what is on it; `number` None: the matrix does not say."""

    number: int | None
    cpus: str | None
    groups: list[Group]

    @property
    def title(self) -> str:
        """For people."""
        return "NUMA node not told" if self.number is None else f"NUMA node {self.number}"


def numa_nodes(topology: Topology) -> list[Node]:
    """NUMA nodes in order of their numbers; where older drivers tell none, devices are parted by the cores near them.

    A card is put where a GPU is that it reaches without leaving the NUMA node: the matrix has no column for it.
    """
    place: dict[str, _Key] = {gpu.name: (gpu.numa, None if gpu.numa is not None else gpu.cpus) for gpu in topology.gpus}
    for nic in topology.nics:
        near = _gpu_near(topology, nic)
        place[nic.name] = place[near] if near else (None, None)
    nodes = []
    for key in sorted(set(place.values()), key=_order):
        gpus = [gpu for gpu in topology.gpus if place[gpu.name] == key]
        nics = [nic for nic in topology.nics if place[nic.name] == key]
        cpus = next((gpu.cpus for gpu in gpus if gpu.cpus), None)
        nodes.append(Node(number=key[0], cpus=cpus, groups=_groups(topology, gpus, nics)))
    return nodes


def _order(key: _Key) -> tuple[int, int]:
    first = (key[1] or "").replace(",", "-").split("-")[0]
    return (key[0] if key[0] is not None else 10**9, int(first[:9]) if first.isdigit() else 10**9)


def _gpu_near(topology: Topology, nic: Device) -> str | None:
    near = [
        (distance(link.type), gpu.name)
        for gpu in topology.gpus
        if (link := topology.between(gpu.name, nic.name)) and link.type in ("PIX", "PXB", "PHB", "NODE")
    ]
    return min(near, key=lambda pair: pair[0])[1] if near else None


def _groups(topology: Topology, gpus: Sequence[Device], nics: Sequence[Device]) -> list[Group]:
    """Connected by PIX or PXB: one switch; else by PHB: one host bridge."""
    names = [device.name for device in (*gpus, *nics)]
    left = set(names)
    found: list[tuple[str, set[str]]] = []
    for what, kinds in _LEVELS:
        for members in _components([n for n in names if n in left], topology.links, kinds):
            if len(members) > 1:
                found.append((_switch(what, members, topology.links), members))
                left -= members
    found += [("", {name}) for name in names if name in left]
    found.sort(key=lambda pair: min(names.index(name) for name in pair[1]))
    return [
        Group(what=what, gpus=[g for g in gpus if g.name in members], nics=[n for n in nics if n.name in members])
        for what, members in found
    ]


def _switch(what: str, members: set[str], links: Sequence[Link]) -> str:
    """One switch if all its ways are PIX."""
    inside = [link for link in links if link.a in members and link.b in members and not link.nvlinks]
    return SWITCH if what == SWITCHES and all(link.type == "PIX" for link in inside) else what


def _components(names: Sequence[str], links: Sequence[Link], kinds: Sequence[str]) -> list[set[str]]:
    near: dict[str, set[str]] = {name: set() for name in names}
    for link in links:
        if link.type in kinds and link.a in near and link.b in near:
            near[link.a].add(link.b)
            near[link.b].add(link.a)
    seen: set[str] = set()
    found = []
    for name in names:
        if name in seen:
            continue
        members, todo = set(), [name]
        while todo:
            one = todo.pop()
            if one not in members:
                members.add(one)
                todo += near[one] - members
        seen |= members
        found.append(members)
    return found


def nvlink_mesh(topology: Topology) -> int:
    """Number of links of each pair if NVLink joins every pair of GPUs alike, else 0."""
    pairs = topology.gpu_pairs()
    counts = {link.nvlinks for link in pairs}
    whole = len(topology.gpus) > 1 and len(pairs) == len(topology.gpus) * (len(topology.gpus) - 1) // 2
    return counts.pop() if whole and len(counts) == 1 else 0
