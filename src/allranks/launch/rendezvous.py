"""Where the ranks of several nodes meet. The driver decides it from what the nodes say; agents read it."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One node on the chosen network. An empty address or interface is found out by the node itself."""

    node: int
    host: str
    address: str
    interface: str


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Node 0 listens at ``address``:``port``; ``key`` tells this job's ranks from any other's."""

    address: str
    port: int
    key: str
    network: str
    reason: str
    places: list[Place]
