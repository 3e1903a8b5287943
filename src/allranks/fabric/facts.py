"""What a node has for its ranks to talk over: interfaces, RDMA ports with their GIDs, GPUs. Pure records.

A GID is the 128-bit address of an RDMA port. On InfiniBand there is one that counts; a RoCE port (RDMA over Ethernet) has
one for each address of its interface and each protocol version: v1 stays inside one Ethernet segment, v2 is routed in
UDP. An IPv4 address is written as ``::ffff:a.b.c.d``.
"""

from __future__ import annotations

import ipaddress

import msgspec

from allranks.topo.records import Topology


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """An interface with an IPv4 address."""

    name: str
    address: str | None
    prefix: int = 0
    speed_mbit: int | None = None


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The node's interface and address on the network that all nodes are on."""

    interface: str
    address: str


class Gid(msgspec.Struct, frozen=True, kw_only=True):
    """One GID of a port."""

    index: int
    gid: str
    type: str
    interface: str = ""

    @property
    def address(self) -> ipaddress.IPv6Address | None:
        """None for zeros and for what is no address."""
        try:
            found = ipaddress.IPv6Address(self.gid)
        except ValueError:
            return None
        return found if int(found) & 0xFFFF_FFFF_FFFF_FFFF else None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """The IPv4 address that it stands for."""
        return self.address.ipv4_mapped if self.address else None

    @property
    def routable(self) -> bool:
        """Not link-local: usable by a machine on another network segment."""
        found = self.address
        return found is not None and not found.is_link_local and not (self.ipv4 and self.ipv4.is_link_local)

    @property
    def version(self) -> int:
        """1 or 2 of RoCE; 0 for neither."""
        return 2 if "v2" in self.type else 1 if self.type else 0


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One port of an RDMA device."""

    device: str
    port: int
    active: bool
    layer: str
    gbit: float = 0.0
    numa: int | None = None
    interfaces: list[str] = []
    gids: list[Gid] = []

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA wants it."""
        return f"{self.device}:{self.port}"

    @property
    def family(self) -> str:
        """InfiniBand, RoCE or EFA."""
        if self.layer == "InfiniBand":
            return "InfiniBand"
        if self.layer == "Ethernet":
            return "RoCE"
        return "EFA" if self.device.startswith(("efa", "rdmap")) else self.layer or "unknown"

    def routable(self, version: int, four: bool = True) -> list[Gid]:
        """GIDs of a RoCE version with an IPv4 (or IPv6) address that others can reach."""
        return [g for g in self.gids if g.version == version and g.routable and (g.ipv4 is not None) == four]


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node. None means: not known."""

    host: str
    interfaces: list[Card] = []
    ports: list[Port] = []
    gpus: int = 0
    topology: Topology | None = None
    seat: Place | None = None
    iommu: bool | None = None
    """Whether addresses of the GPUs are translated."""
    acs: list[str] | None = None
    """Bridges above the GPUs that send what GPUs say to each other up to the CPU."""
    copies: str = ""
    """What the copy test of ``doctor --collectives`` found here: ok, failed, or nothing yet."""
    failed_pairs: list[str] = []
    nccl: tuple[int, ...] = ()
    """Version of the packaged NCCL."""
    conf: dict[str, str] = {}
    """What /etc/nccl.conf sets."""

    @property
    def active(self) -> list[Port]:
        return [port for port in self.ports if port.active]
