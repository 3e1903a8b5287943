"""What a matrix of ``nvidia-smi topo -m`` says. Frozen records, pure."""

from __future__ import annotations

import msgspec

MEANING = {
    "C2C": "NVLink chip-to-chip, between GPU and CPU dies",
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges, no host bridge",
    "PHB": "a PCIe host bridge, that is the CPU",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
    "SOC": "the interconnect between CPU sockets (the older name of SYS)",
}
"""Types other than NVLink, nearest first. Source: the legend that nvidia-smi prints."""
NEAREST = list(MEANING)
P2P_STATES = {
    "OK": "works",
    "CNS": "the chip set does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "disabled by the driver's registry key",
    "U": "unknown",
}
"""Cells of ``nvidia-smi topo -p2p``. Source: its legend."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or a network card.

    `numa` is the NUMA node of its CPU side, `cpus` the cores near it as printed (``0-31,64-95``), `device` the name that
    the NIC legend gives it.
    """

    name: str
    numa: int | None = None
    cpus: str | None = None
    device: str | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Two devices and the type of the way between them; each pair once."""

    a: str
    b: str
    type: str

    @property
    def nvlinks(self) -> int:
        """Number of bonded NVLinks; 0 for PCIe."""
        return int(self.type[2:]) if self.type.startswith("NV") and self.type[2:].isdigit() else 0


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """A line that was not understood, or something that is missing (then `line` is 0)."""

    line: int
    text: str
    why: str


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """One machine."""

    gpus: list[Device]
    nics: list[Device]
    links: list[Link]
    unread: list[Unread] = []
    p2p: list[Link] = []
    """Where ``topo -p2p`` was printed too: type is OK, NS, CNS, ..."""
    meaning: dict[str, str] = {}
    """Types that only the file's own legend explains."""

    def between(self, a: str, b: str) -> Link | None:
        """The link of two devices, whichever way it was printed."""
        return next((link for link in self.links if {link.a, link.b} == {a, b}), None)

    def gpu_pairs(self) -> list[Link]:
        """Links between GPUs."""
        names = {gpu.name for gpu in self.gpus}
        return [link for link in self.links if link.a in names and link.b in names]

    def missing_pairs(self) -> list[tuple[str, str]]:
        """Pairs of GPUs whose link is not known."""
        known = {frozenset((link.a, link.b)) for link in self.gpu_pairs()}
        names = [gpu.name for gpu in self.gpus]
        return [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if frozenset((a, b)) not in known]

    def nearest_nics(self, gpu: str) -> tuple[str, list[Device]]:
        """The best type of link from a GPU to any card, and the cards that have it; ``("", [])`` without cards."""
        ways = [(link.type, nic) for nic in self.nics if (link := self.between(gpu, nic.name))]
        if not ways:
            return "", []
        best = min((kind for kind, _ in ways), key=distance)
        return best, [nic for kind, nic in ways if kind == best]


def distance(kind: str) -> int:
    """Order of link types, nearest first; a type that nobody knows is last."""
    if kind.startswith("NV"):
        return -1
    return NEAREST.index(kind) if kind in NEAREST else len(NEAREST)
