"""Describe the hardware of a node: PCIe and NVLink topology, network interfaces, RDMA ports with their GIDs.

Frozen records; `nodes.topology` and `nodes.preflight.network_policy` fill them. A GID is the 128-bit address of an RDMA port.
On InfiniBand only one is relevant; a RoCE port (RDMA over Ethernet) has one for each address of its interface and each
protocol version: v1 stays inside one Ethernet segment, v2 is routed in UDP. An IPv4 address is written as ``::ffff:a.b.c.d``.
"""

from __future__ import annotations

import ipaddress

import msgspec

LINK_TYPES = {
    "C2C": "NVLink chip-to-chip, between GPU and CPU dies",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, no host bridge",
    "PHB": "a PCIe host bridge, that is the CPU",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
    "SOC": "the interconnect between CPU sockets (the older name of SYS)",
}
"""Types other than NVLink, nearest first. Source: the legend that nvidia-smi prints."""
LINK_TYPES_BY_DISTANCE = list(LINK_TYPES)


class TopologyDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or a network card.

    `numa` is its NUMA node, `cpus` are its local cores as printed (``0-31,64-95``), `device` is its name in the NIC legend.
    """

    name: str
    numa: int | None = None
    cpus: str | None = None
    device: str | None = None


class TopologyLink(msgspec.Struct, frozen=True, kw_only=True):
    """Two devices and the type of the connection between them; each pair once."""

    a: str
    b: str
    type: str

    @property
    def nvlinks(self) -> int:
        """Return the number of bonded NVLinks; 0 for PCIe."""
        return int(self.type[2:]) if self.type.startswith("NV") and self.type[2:].isdigit() else 0


class UnreadLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that could not be parsed, or a missing part (then `line` is 0)."""

    line: int
    text: str
    why: str


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """Topology of one machine."""

    gpus: list[TopologyDevice]
    nics: list[TopologyDevice]
    links: list[TopologyLink]
    unread: list[UnreadLine] = []
    p2p: list[TopologyLink] = []
    """Filled if ``topo -p2p`` was printed too: type is OK, NS, CNS, ..."""
    meaning: dict[str, str] = {}
    """Types that only the file's own legend explains."""

    def between(self, a: str, b: str) -> TopologyLink | None:
        """Return the link between two devices, in either order."""
        return next((link for link in self.links if {link.a, link.b} == {a, b}), None)

    def gpu_pairs(self) -> list[TopologyLink]:
        """Return the links between GPUs."""
        names = {gpu.name for gpu in self.gpus}
        return [link for link in self.links if link.a in names and link.b in names]

    def missing_pairs(self) -> list[tuple[str, str]]:
        """Return GPU pairs whose link is unknown."""
        known = {frozenset((link.a, link.b)) for link in self.gpu_pairs()}
        names = [gpu.name for gpu in self.gpus]
        return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if frozenset((a, b)) not in known]

    def nearest_nics(self, gpu: str) -> tuple[str, list[TopologyDevice]]:
        """Return the best link type from a GPU to any card, and the cards with it; ``("", [])`` without cards."""
        ways = [(link.type, nic) for nic in self.nics if (link := self.between(gpu, nic.name))]
        if not ways:
            return "", []
        best = min((kind for kind, _ in ways), key=link_distance)
        return best, [nic for kind, nic in ways if kind == best]


def link_distance(kind: str) -> int:
    """Return the sort order of a link type, nearest first; unknown types are last."""
    if kind.startswith("NV"):
        return -1
    return LINK_TYPES_BY_DISTANCE.index(kind) if kind in LINK_TYPES_BY_DISTANCE else len(LINK_TYPES_BY_DISTANCE)


class NetworkInterface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface with an IPv4 address."""

    name: str
    address: str | None
    prefix: int = 0
    speed_mbit: int | None = None


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The node's interface and address on the network that all nodes are on."""

    interface: str
    address: str


class RdmaGid(msgspec.Struct, frozen=True, kw_only=True):
    """One GID of a port."""

    index: int
    gid: str
    type: str
    interface: str = ""

    @property
    def address(self) -> ipaddress.IPv6Address | None:
        """Return the address, or None if it is zero or invalid."""
        try:
            found = ipaddress.IPv6Address(self.gid)
        except ValueError:
            return None
        return found if int(found) & 0xFFFF_FFFF_FFFF_FFFF else None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """Return the IPv4 address that the GID encodes."""
        return self.address.ipv4_mapped if self.address else None

    @property
    def routable(self) -> bool:
        """Return whether it is not link-local, so that another network segment can reach it."""
        found = self.address
        return found is not None and not found.is_link_local and not (self.ipv4 and self.ipv4.is_link_local)

    @property
    def version(self) -> int:
        """Return the RoCE version, 1 or 2; 0 for other types."""
        return 2 if "v2" in self.type else 1 if self.type else 0


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """One port of an RDMA device."""

    device: str
    port: int
    active: bool
    layer: str
    gbit: float = 0.0
    numa: int | None = None
    interfaces: list[str] = []
    gids: list[RdmaGid] = []

    @property
    def name(self) -> str:
        """Return the name in the form of NCCL_IB_HCA."""
        return f"{self.device}:{self.port}"

    @property
    def family(self) -> str:
        """Return InfiniBand, RoCE or EFA."""
        if self.layer == "InfiniBand":
            return "InfiniBand"
        if self.layer == "Ethernet":
            return "RoCE"
        return "EFA" if self.device.startswith(("efa", "rdmap")) else self.layer or "unknown"

    def routable(self, version: int, four: bool = True) -> list[RdmaGid]:
        """Return GIDs of a RoCE version with a routable IPv4 (or IPv6) address."""
        return [g for g in self.gids if g.version == version and g.routable and (g.ipv4 is not None) == four]


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one node. None means unknown."""

    host: str
    interfaces: list[NetworkInterface] = []
    ports: list[RdmaPort] = []
    gpus: int = 0
    topology: Topology | None = None
    seat: NodeAddress | None = None
    iommu: bool | None = None
    """Whether an IOMMU translates the GPUs' addresses."""
    acs: list[str] | None = None
    """Bridges above the GPUs that redirect traffic between GPUs through the CPU (ACS)."""
    copies: str = ""
    """Result of the copy test of ``doctor --collectives`` on this node: ok, failed, or empty."""
    failed_pairs: list[str] = []
    nccl: tuple[int, ...] = ()
    """Version of the packaged NCCL."""
    conf: dict[str, str] = {}
    """What /etc/nccl.conf sets."""

    @property
    def active(self) -> list[RdmaPort]:
        return [port for port in self.ports if port.active]
