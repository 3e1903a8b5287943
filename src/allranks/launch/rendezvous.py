"""Where the ranks meet: address and interface of every node, and the port. Pure.

Nothing is guessed from names: an address that a node cannot be reached at (127.0.1.1 from /etc/hosts), an interface
that is called otherwise elsewhere, and two jobs on one port are the three commonest ways to wait for ever.
"""

from __future__ import annotations

import hashlib
import ipaddress

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.launch.ask import Answer, Interface
from allranks.spec.records import RendezvousSpec

LOWEST_PORT = 20000
HIGHEST_PORT = 32767  # below Linux' usual ephemeral range, which loses races against any client's socket
TRIES = 8
VIRTUAL = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One node on the chosen network."""

    node: int
    host: str
    address: str
    interface: str


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where all meet. Node 0 listens at ``address``:``port``; ``key`` tells this job's ranks from any other's."""

    address: str
    port: int
    key: str
    network: str
    reason: str
    places: list[Place]


def port_of(key: str, attempt: int = 0) -> int:
    """A port from a hash of the job, so that two jobs on one node rarely try the same."""
    digest = hashlib.sha256(f"{key}/{attempt}".encode()).digest()
    return LOWEST_PORT + int.from_bytes(digest[:4], "big") % (HIGHEST_PORT - LOWEST_PORT + 1)


def choose(answers: list[Answer], wanted: RendezvousSpec, key: str, port: int) -> Rendezvous:
    """The network on which every node has an address.

    Raises:
        EnvironmentNotAble: there is none; the message shows what each node has.
    """
    answers = sorted(answers, key=lambda a: a.node)
    common: dict[str, list[Interface]] = {}
    for network in networks(answers[0], wanted.interface):
        members = [next((i for i in usable(a, wanted.interface) if network_of(i) == network), None) for a in answers]
        if all(m is not None for m in members):
            common[network] = [m for m in members if m is not None]
    if not common:
        have = "; ".join(
            f"{a.host}: {', '.join(f'{i.name} {i.address}' for i in usable(a, None)) or 'no address'}"
            for a in answers[:8]
        )
        asked = f" on the interface {wanted.interface} (cluster.rendezvous.interface)" if wanted.interface else ""
        raise EnvironmentNotAble(f"the nodes have no network in common{asked}. They have: {have}")
    best = max(common, key=lambda n: (min(i.speed_mbit for i in common[n]), -list(common).index(n)))
    places = [
        Place(node=a.node, host=a.host, address=i.address, interface=i.name)
        for a, i in zip(answers, common[best], strict=True)
    ]
    reason = (
        "the only network that all nodes share"
        if len(common) == 1
        else f"the fastest of {len(common)} networks that all nodes share"
    )
    return Rendezvous(
        address=wanted.address or places[0].address, port=port, key=key, network=best, reason=reason, places=places
    )


def usable(answer: Answer, only: str | None) -> list[Interface]:
    """Interfaces that can carry traffic between nodes."""
    if only is not None:
        return [i for i in answer.interfaces if i.name == only and i.up]
    return [
        i
        for i in answer.interfaces
        if i.up and not i.name.startswith(VIRTUAL) and not ipaddress.ip_address(i.address).is_loopback
    ]


def networks(answer: Answer, only: str | None) -> list[str]:
    """Networks of a node, in the order of its interfaces."""
    return list(dict.fromkeys(network_of(i) for i in usable(answer, only)))


def network_of(interface: Interface) -> str:
    """``10.1.2.0/24`` of an interface."""
    return str(ipaddress.ip_network(f"{interface.address}/{interface.netmask}", strict=False))
