"""Frozen records of planning: ranks on nodes, batch, device and hang limits; and the hardware of nodes. Pure, no torch.

The hardware of a node is its PCIe and NVLink topology, its network interfaces, and its RDMA ports with their GIDs;
`nodes.topology` and `nodes.network.facts` fill these records. A GID is the 128-bit address of an RDMA port. On
InfiniBand only one is relevant; a RoCE port (RDMA over Ethernet) has one for each address of its interface and each
protocol version: v1 stays in one Ethernet segment, v2 is routed in UDP. IPv4 is written ``::ffff:a.b.c.d``.
"""

from __future__ import annotations

import ipaddress

import msgspec

from allranks.errors import RequestError
from allranks.planning.env_vars import EnvVar
from allranks.rundir.files import UNVERSIONED
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_regular


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Number of sequences in one optimizer step."""

    micro_batch_size: int
    grad_accum: int
    global_batch_size: int


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One node and its ranks; host is None until the scheduler assigns it."""

    node: int
    host: str | None
    ranks: list[int]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that is decided before it starts."""

    run_name: str
    launcher: str
    strategy: str
    strategy_options: dict[str, object]
    device: str
    backend: str
    dtype: str
    """Precision of compute and of frozen weights."""
    world_size: int
    procs_per_node: int
    nodes: list[NodePlan]
    rendezvous: str
    batch: BatchPlan | None
    max_steps: int | None
    epochs: float | None
    environment: list[EnvVar]
    warnings: list[str]
    timeout_s: int
    param_dtype: str = "float32"
    """Storage of trained weights and optimizer state."""
    device_source: str = ""
    """What decided the device: a constant of `allranks.planning.planner`."""
    device_reason: str = ""
    """The same as a phrase, with the spec key or machine fact."""
    replication: str = ""
    """Whether weights are replicated between nodes, and why; empty on one node, and for strategies that cannot."""
    recomputation: str = "none"
    """Activations that are recomputed in backward: none | selective | full."""
    recomputation_reason: str = ""
    """Why, if ``model.gradient_checkpointing`` is auto."""
    compiled: bool = False
    """Transformer blocks are compiled for training."""
    compile_reason: str = ""
    """Why they are, or are not; empty for ``model.compile: false``."""
    rank_memory_bytes: int | None = None
    """Estimated peak memory per rank; None if unknown, or if `--force` was given."""
    hang: Limits | None = None
    """How long ranks may be silent; None if hangs are not monitored."""
    grace_s: float | None = None
    """For a user's own program: seconds from SIGTERM, which a stop sends, to SIGKILL."""
    schema_version: int = UNVERSIONED
    """`SCHEMA_VERSION` in new plans. The default is for files that were written before there were versions."""

    @property
    def device_is_provisional(self) -> bool:
        """Return whether the device depends on GPUs that the nodes have not yet reported (`resolve_device`)."""
        return self.device_source == ON_NODE

    @property
    def needs_store(self) -> bool:
        """Return whether ranks of other nodes, or a user's own program, need a store on the network."""
        return len(self.nodes) > 1 or self.batch is None

    @property
    def shard_ranks(self) -> int:
        """Return over how many ranks a strategy that shards does so: those of a node under HSDP, else all."""
        return self.procs_per_node if self.strategy_options.get("replicate") == "nodes" else self.world_size

    @property
    def work(self) -> str:
        """Return strategy, backend, device and dtype as text; strategy and dtype are unknown for a user's program."""
        if self.batch is None:
            return f"your own program, {self.backend} on {self.device}"
        stored = f", {self.param_dtype} trained weights" if self.is_mixed else ""
        return f"{self.strategy}, {self.backend} on {self.device}, {self.dtype}{stored}"

    @property
    def is_mixed(self) -> bool:
        """Return whether trained weights are stored in another dtype than that of compute."""
        return self.batch is not None and self.dtype != self.param_dtype

    def rank_rows(self) -> list[tuple[int, int, int, str]]:
        """Return (rank, node, local rank, host) for every rank."""
        return [(r, n.node, i, n.host or f"node {n.node}") for n in self.nodes for i, r in enumerate(n.ranks)]


REQUESTED = "asked"
"""The spec names the device, or its allocation requests GPUs."""
THIS_MACHINE = "this machine"
PARTITION = "partition"
"""The GPUs of the nodes of the partition."""
ON_NODE = "resolved on the node"
"""Provisional: the plan is for the CPU until the nodes report their GPUs."""


def load_plan(run: RunDir) -> LaunchPlan:
    """Return the plan of a run.

    Raises:
        RequestError: plan.json is missing or damaged.
    """
    try:
        return msgspec.json.decode(read_regular(run.plan), type=LaunchPlan)
    except (OSError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{run.plan}: cannot read the plan: {why}") from None


class DeviceChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The device of a plan."""

    device: str
    source: str
    """One of `ASKED`, `MACHINE`, `PARTITION`, `ON_NODE`."""
    reason: str
    gpus: int | None = None
    """GPUs of each node; None if unknown."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Hang limits: ``step_s`` within training steps, ``long_s`` in other phases."""

    step_s: float
    long_s: float


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

    `numa`: NUMA node; `cpus`: local cores as printed (``0-31,64-95``); `device`: name in the NIC legend.
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
    """A line that is not part of the matrix."""

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

    def between(self, a: str, b: str) -> TopologyLink | None:
        """Return the link between two devices, in either order."""
        return next((link for link in self.links if {link.a, link.b} == {a, b}), None)

    def gpu_pairs(self) -> list[TopologyLink]:
        """Return the links between GPUs."""
        names = {gpu.name for gpu in self.gpus}
        return [link for link in self.links if link.a in names and link.b in names]

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
            parsed = ipaddress.IPv6Address(self.gid)
        except ValueError:
            return None
        return parsed if int(parsed) & 0xFFFF_FFFF_FFFF_FFFF else None

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        """Return the IPv4 address that the GID encodes."""
        return self.address.ipv4_mapped if self.address else None

    @property
    def is_routable(self) -> bool:
        """Return whether it is not link-local, so that another network segment can reach it."""
        address = self.address
        return address is not None and not address.is_link_local and not (self.ipv4 and self.ipv4.is_link_local)


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

    @property
    def routable(self) -> list[RdmaGid]:
        """Return the GIDs of RoCE v2 with a routable IPv4 address, which NCCL uses by default."""
        return [g for g in self.gids if "v2" in g.type and g.is_routable and g.ipv4 is not None]


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
