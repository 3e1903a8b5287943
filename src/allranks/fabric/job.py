"""What is asked of the network, and what is expected of it. Frozen records."""

from __future__ import annotations

import msgspec

from allranks.fabric.decision import EnvVar


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that the network's rules need."""

    nodes: int = 1
    device: str = "cpu"
    backend: str = "gloo"
    interface: str | None = None
    """``cluster.rendezvous.interface``."""
    user: dict[str, str] = {}
    """``cluster.env``."""

    @property
    def nccl(self) -> bool:
        return self.backend == "nccl"


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of a node should get between nodes. `transport`: InfiniBand, RoCE, EFA, Socket, or nothing to expect."""

    transport: str = ""
    interface: str = ""
    devices: list[str] = []
    inside: str = ""
    """Between the GPUs of the node: NVLink, PCIe, host memory, or not known."""
    why: str = ""


class NodePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions for one node, and what follows."""

    host: str
    environment: list[EnvVar]
    expected: Expected
    addresses: list[str] = []
    """All IPv4 addresses of the node: they tell connections to other ranks from those to anybody else."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes of a job; `notes` are for people: what differs, what is lost by it."""

    nodes: list[NodePolicy]
    notes: list[str] = []

    def of(self, host: str) -> NodePolicy | None:
        """One node's part."""
        return next((node for node in self.nodes if node.host == host), None)
