"""Decide the NCCL and Gloo variables of every node of a job, with reasons: interfaces, P2P between GPUs, RDMA.

All ranks of a job must use the same network, RDMA or sockets. NCCL chooses the GID of a RoCE port itself since 2.21;
variables are set only where it cannot. P2P is disabled only on evidence: a failed copy, or an IOMMU that translates the
GPUs' addresses together with bridges that redirect their traffic. SYS in the topology matrix is not evidence: NCCL
avoids P2P where it is slow, and pairs on one switch have hung where pairs across sockets worked. Pure, except
`save_policy` and `load_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.planning.env_vars import NCCL_TROUBLESHOOTING_DOCS, TORCH_DISTRIBUTED_DOCS, EnvVar, nccl_var
from allranks.planning.records import NodeFacts, RdmaPort, Topology
from allranks.rundir.files import read_json, write_json


class NetworkJob(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a plan that the network rules need."""

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


class ExpectedNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Expected transport between nodes. `transport`: InfiniBand, RoCE, EFA, Socket, or empty if nothing is expected."""

    transport: str = ""
    interface: str = ""
    devices: list[str] = []
    inside: str = ""
    """Between the GPUs of the node: NVLink, PCIe, host memory, or unknown."""
    why: str = ""


class NodeNetworkPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Network decisions for one node, and the transport expected from them."""

    host: str
    environment: list[EnvVar]
    expected: ExpectedNetwork
    addresses: list[str] = []
    """All IPv4 addresses of the node; they distinguish connections to other ranks from other connections."""


class NetworkPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policy for all nodes of a job; `notes` describe differences between nodes and their cost."""

    nodes: list[NodeNetworkPolicy]
    notes: list[str] = []

    def of(self, host: str) -> NodeNetworkPolicy | None:
        """Return one node's part."""
        return next((node for node in self.nodes if node.host == host), None)


USUAL_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG")


def policy_lines(policy: NetworkPolicy) -> list[str]:
    """Return one line per node with its settings (nodes with equal settings share a line), then the notes."""
    by_words: dict[str, list[str]] = {}
    for node in policy.nodes:
        words = " ".join(f"{item.name}={item.value}" for item in node.environment if item.value is not None)
        expected = node.expected.transport
        by_words.setdefault(f"{words or 'nothing set'}{f'; expected: {expected}' if expected else ''}", []).append(
            node.host
        )
    lines = []
    for words, hosts in by_words.items():
        shown = ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"
        lines.append(f"network {shown}: {words}")
    reasons: dict[str, str] = {}
    for item in (item for node in policy.nodes for item in node.environment):
        if item.value is not None and item.name not in USUAL_VARIABLES and item.source == "policy":
            reasons.setdefault(f"{item.name}={item.value}", item.reason)
    lines += [f"network why {name}: {why}" for name, why in reasons.items()]
    return [*lines, *(f"network note: {note}" for note in policy.notes)]


def save_policy(path: Path, policy: NetworkPolicy) -> None:
    """Write the policy for the agents and for the later comparison with what was observed."""
    write_json(path, msgspec.to_builtins(policy))


def load_policy(path: Path) -> NetworkPolicy | None:
    """Return the policy, or None if the file is missing or damaged."""
    raw = read_json(path)
    try:
        return msgspec.convert(raw, NetworkPolicy) if raw is not None else None
    except msgspec.ValidationError:
        return None


NCCL_SELECTS_GID_SINCE = (2, 21)


def _gid_index_var(node: NodeFacts, ports: Sequence[RdmaPort]) -> EnvVar:
    """Decide NCCL_IB_GID_INDEX, for RoCE v2 over IPv4: only for NCCL versions that do not choose it themselves."""
    name = "NCCL_IB_GID_INDEX"
    risk = (
        "the order of the GID table differs between nodes and changes with the addresses, so a fixed index becomes "
        "wrong"
    )
    indices = [{gid.index for gid in port.routable} for port in ports]
    if not all(indices):
        why = f"not every RoCE port of {node.host} has a routable RoCE v2 address (IPv4): assign addresses first"
        return nccl_var(name, None, why, risk)
    if not node.nccl or node.nccl >= NCCL_SELECTS_GID_SINCE:
        shown = ", ".join(f"{port.name} {min(own)}" for port, own in zip(ports, indices, strict=True))
        why = f"NCCL chooses it since 2.21 (on {node.host} it should choose {shown})"
        return nccl_var(name, None, why, risk)
    text = ".".join(map(str, node.nccl))
    if same := set.intersection(*indices):
        why = f"NCCL {text} uses index 0 by default; here RoCE v2 with IPv4 is at this one"
        return nccl_var(name, str(min(same)), why, risk)
    why = (
        f"NCCL {text} needs it, but the ports of {node.host} have the right GID at different indices: use NCCL 2.21 or "
        "newer"
    )
    return nccl_var(name, None, why, risk)


class RdmaDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The family that all nodes use (or Socket), the ports of each node, the variables and the reasons."""

    family: str
    ports: dict[str, list[RdmaPort]]
    environment: dict[str, list[EnvVar]]
    why: str
    notes: list[str] = []


def decide_rdma(job: NetworkJob, nodes: Sequence[NodeFacts]) -> RdmaDecision:
    """Decide the network that all nodes have in common and the variables that make all of them use it."""
    forced = _socket_reason(job, nodes)
    if forced:
        return _sockets(nodes, forced, _net_unset(forced))
    for family in ("InfiniBand", "RoCE", "EFA"):
        # a RoCE port without a routable address cannot reach other segments
        ports = {
            node.host: [
                port
                for port in node.active
                if port.family == family and (family != "RoCE" or any(gid.is_routable for gid in port.gids))
            ]
            for node in nodes
        }
        if nodes and all(ports.values()):
            return _decide_ports(nodes, family, ports)
    return _decide_sockets(nodes)


def _sockets(nodes: Sequence[NodeFacts], why: str, decided: EnvVar, notes: Sequence[str] = ()) -> RdmaDecision:
    environment = {node.host: [decided] for node in nodes}
    return RdmaDecision(family="Socket", ports={}, environment=environment, why=why, notes=list(notes))


def _socket_reason(job: NetworkJob, nodes: Sequence[NodeFacts]) -> str:
    """Return why sockets are configured: by the spec, or by /etc/nccl.conf of a node."""

    def chosen(settings: dict[str, str]) -> bool:
        return settings.get("NCCL_IB_DISABLE", "0") not in ("", "0") or settings.get("NCCL_NET", "").lower() == "socket"

    if chosen(job.user):
        return "cluster.env sets it"
    files = [node.host for node in nodes if chosen(node.conf)]
    return f"/etc/nccl.conf of {', '.join(files)} sets it" if files else ""


def _decide_ports(nodes: Sequence[NodeFacts], family: str, ports: dict[str, list[RdmaPort]]) -> RdmaDecision:
    environment = {node.host: [_ib_hca_var(node, family, ports[node.host])] for node in nodes}
    counts = {host: len(items) for host, items in ports.items()}
    notes = []
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{host} {count}" for host, count in counts.items())
        notes.append(
            f"the nodes have different numbers of usable RDMA ports ({shown}): the node with the fewest limits the "
            "bandwidth; check for ports that are down"
        )
    if family == "RoCE":
        for node in nodes:
            environment[node.host].append(_gid_index_var(node, ports[node.host]))
        if not all(port.routable for items in ports.values() for port in items):
            notes.append(
                "some RoCE port has no RoCE v2 address over IPv4, which NCCL uses by default: `show_gids` on each "
                "node; NCCL may fail or fall back to sockets"
            )
    why = f"every node has active {family} ports"
    for node in nodes:
        environment[node.host].append(_net_unset(why + (", NCCL uses them by default" if family != "EFA" else "")))
    if family == "EFA":
        notes.append("EFA needs the plugin aws-ofi-nccl; without it NCCL falls back to sockets silently")
    return RdmaDecision(family=family, ports=ports, environment=environment, why=why, notes=notes)


def _ib_hca_var(node: NodeFacts, family: str, ports: list[RdmaPort]) -> EnvVar:
    others = [port for port in node.active if port not in ports]
    names = ",".join(port.name for port in ports)
    if not others:
        why = (
            f"all active ports of {node.host} are {family} and usable ({names}); NCCL uses the nearest one to each GPU"
        )
        return nccl_var("NCCL_IB_HCA", None, why, "a fixed list is wrong on nodes with other port names")
    left = ", ".join(
        f"{port.name} ({port.family if port.family != family else 'no routable address'})" for port in others
    )
    why = f"NCCL would also use {left} of {node.host}, which does not reach the other nodes' {family} ports"
    return nccl_var(
        "NCCL_IB_HCA", f"={names}", why, "ports that come up later are not used; '=' means exactly these names"
    )


def _net_unset(why: str) -> EnvVar:
    return nccl_var(
        "NCCL_NET",
        None,
        f"{why}; NCCL chooses",
        "NCCL falls back to sockets silently; allranks compares its log with what was expected",
    )


def _decide_sockets(nodes: Sequence[NodeFacts]) -> RdmaDecision:
    lacking = [node.host for node in nodes if not node.active]
    if len(lacking) == len(nodes):
        why = "no node has an active RDMA port"
        risk = "none: setting NCCL_IB_DISABLE would change nothing"
        return _sockets(nodes, why, nccl_var("NCCL_NET", None, f"{why}: NCCL finds none and uses sockets", risk))
    names = ", ".join(lacking)
    if lacking:
        what = f"{names} ha{'s' if len(lacking) == 1 else 've'} no active RDMA port"
        cure = f"exclude {names} (cluster.slurm.exclude, --exclude-bad)"
    else:
        what = "the nodes have no kind of RDMA in common"
        cure = "choose nodes with equal hardware (cluster.slurm.constraint)"
    why = f"{what}, and all ranks must use the same network"
    risk = "the RDMA ports of the other nodes stay unused; sockets are much slower"
    notes = [f"{what}: all ranks use sockets; to use RDMA, {cure}"]
    return _sockets(nodes, why, nccl_var("NCCL_NET", "Socket", why, risk), notes)


INTERFACE_DOCS = f"{TORCH_DISTRIBUTED_DOCS}#choosing-the-network-interface-to-use"
_GLOO_RISK = "Gloo only accepts exact names and fails at once if the node has no interface with that name"
_NCCL_RISK = (
    "a missing interface is an error or, in some versions, silently replaced; NCCL uses the interface for its "
    "bootstrap even when RDMA carries the data"
)


def gloo_interface(job: NetworkJob, node: NodeFacts | None = None) -> EnvVar:
    """Decide GLOO_SOCKET_IFNAME: an exact name, per node."""

    def decided(value: str | None, reason: str, source: str = "policy") -> EnvVar:
        return EnvVar(
            name="GLOO_SOCKET_IFNAME",
            value=value,
            reason=reason,
            source=source,
            documentation=INTERFACE_DOCS,
            risk=_GLOO_RISK if value else "without it Gloo uses the address that the host's own name resolves to",
        )

    if job.interface:
        return decided(job.interface, "cluster.rendezvous.interface", "spec")
    if job.nodes == 1:
        why = "one node: Gloo would look the host name up, which fails or waits for DNS on many laptops"
        return decided("lo", why)
    if node is not None and node.seat is not None:
        return decided(node.seat.interface, f"{node.host} is on the common network by it ({node.seat.address})")
    return decided(None, "several nodes: decided on each node from its own interfaces")


def nccl_interface(job: NetworkJob, node: NodeFacts | None = None) -> EnvVar:
    """Decide NCCL_SOCKET_IFNAME: with ``=`` an exact name, without it a prefix."""
    name = "NCCL_SOCKET_IFNAME"
    if job.interface:
        said = "cluster.rendezvous.interface ('=' means exactly this name)"
        variable = nccl_var(name, f"={job.interface}", said, _NCCL_RISK)
        return msgspec.structs.replace(variable, source="spec", documentation=INTERFACE_DOCS)
    if job.nodes == 1:
        why = (
            "one node: NCCL would listen for its bootstrap on an external interface, where other machines can connect; "
            "the data between GPUs does not depend on it"
        )
        return nccl_var(name, "=lo", why, "none is known")
    if node is not None and node.seat is not None:
        said = f"{node.host} is on the common network by it ({node.seat.address}); '=' means exactly this name"
        return nccl_var(name, f"={node.seat.interface}", said, _NCCL_RISK)
    return nccl_var(
        name,
        None,
        "several nodes: decided on each node from its own interfaces; names may differ",
        "a fixed name is wrong on nodes where the interface has another name",
    )


P2P_TEST_HINT = "`allranks doctor SPEC --collectives` tests copies between all pairs"
_P2P_OFF_RISK = (
    "data between GPUs goes through host memory: acceptable for PCIe pairs, several times slower than NVLink"
)
P2P_ON_RISK = (
    "if the driver reports peer-to-peer but the platform breaks it, ranks hang with GPUs at 100 % and no error"
)


def decide_p2p(node: NodeFacts) -> EnvVar:
    """Decide NCCL_P2P_DISABLE, or NCCL_P2P_LEVEL=NVL if only pairs without NVLink are in doubt."""
    nvlink = _nvlink_coverage(node.topology)
    if node.copies == "failed":
        pairs = ", ".join(node.failed_pairs[:4]) or "GPU pairs"
        return _p2p_off(nvlink, node, f"the copy test failed on {node.host}: {pairs}")
    if node.copies == "ok":
        return _p2p_unset(f"the copy test of {node.host} passed on all pairs")
    if nvlink == "all":
        return _p2p_unset("NVLink connects every pair of GPUs; ACS and IOMMU do not affect it")
    if node.acs and node.iommu:
        shown = ", ".join(node.acs[:3])
        why = (
            f"on {node.host} an IOMMU translates the GPUs' addresses and ACS redirects their traffic at {shown}; "
            f"untested. {P2P_TEST_HINT}"
        )
        return _p2p_off(nvlink, node, why, documentation=NCCL_TROUBLESHOOTING_DOCS)
    doubts = [
        f"ACS redirects traffic at {', '.join(node.acs[:3])}" if node.acs else "",
        "an IOMMU translates the GPUs' addresses" if node.iommu else "",
    ]
    if indication := "; ".join(filter(None, doubts)):
        return _p2p_unset(f"no evidence that it fails, only an indication ({indication}). {P2P_TEST_HINT}")
    pairs = node.topology.gpu_pairs() if node.topology else []
    far = sum(link.type in ("SYS", "SOC") for link in pairs)
    sys = f"{far} of the pairs are SYS, which is not evidence: NCCL avoids slow paths itself"
    return _p2p_unset(f"{sys if far else 'no evidence that it fails'}. {P2P_TEST_HINT}")


def _p2p_off(nvlink: str, node: NodeFacts, why: str, documentation: str = "") -> EnvVar:
    pairs = [pair.split("-") for pair in node.failed_pairs]
    links = [node.topology.between(a, b) for a, b in pairs] if node.topology else []
    by_nvlink = nvlink == "part" and not any(link.nvlinks for link in links if link)
    name, value = ("NCCL_P2P_LEVEL", "NVL") if by_nvlink else ("NCCL_P2P_DISABLE", "1")
    decided = nccl_var(name, value, f"{why}{'; NVLink pairs still use it' if by_nvlink else ''}", _P2P_OFF_RISK)
    return msgspec.structs.replace(decided, documentation=documentation or decided.documentation)


def _p2p_unset(why: str) -> EnvVar:
    return nccl_var("NCCL_P2P_DISABLE", None, why, P2P_ON_RISK)


def gpu_defaults() -> list[EnvVar]:
    """Return variables that scripts often set and that should stay unset."""
    return [
        nccl_var(
            "NCCL_SHM_DISABLE",
            None,
            "0 is the default; 1 would use the path that GPUs without peer-to-peer need",
            "none",
        ),
        nccl_var(
            "NCCL_NET_GDR_LEVEL",
            None,
            "NCCL decides by the distance of GPU and card",
            "forced across the CPU, GPUDirect is often slower than going through host memory",
        ),
        nccl_var("NCCL_CROSS_NIC", None, "2 is the default: NCCL crosses rails only where that is faster", "none"),
    ]


def _nvlink_coverage(topology: Topology | None) -> str:
    """Return whether all, some or none of the pairs have NVLink; empty if unknown."""
    if topology is None or not topology.gpu_pairs():
        return ""
    joined = [link.nvlinks > 0 for link in topology.gpu_pairs()]
    return "all" if all(joined) else "part" if any(joined) else "none"


def provisional_policy(job: NetworkJob) -> list[EnvVar]:
    """Return what can be decided before the nodes report their facts: for ``plan``."""
    variables = [gloo_interface(job), *([nccl_interface(job)] if job.device == "cuda" else [])]
    if job.nodes > 1 and not job.interface:
        variables = [defer_to_nodes(item) for item in variables]
    if not job.nccl:
        return variables
    stale = "a fixed value becomes wrong: names and order differ between nodes"
    if job.nodes > 1:
        fall = "NCCL falls back to sockets silently; allranks compares its log afterwards"
        variables += [
            defer_to_nodes(nccl_var("NCCL_NET", None, "RDMA if all nodes have it, otherwise sockets", fall)),
            defer_to_nodes(nccl_var("NCCL_IB_HCA", None, "set only to exclude ports of other networks", stale)),
            defer_to_nodes(
                nccl_var("NCCL_IB_GID_INDEX", None, "NCCL chooses it since 2.21; it is set for older versions", stale)
            ),
        ]
    p2p = nccl_var("NCCL_P2P_DISABLE", None, f"only on evidence; {P2P_TEST_HINT}", P2P_ON_RISK)
    return [*variables, defer_to_nodes(p2p), *gpu_defaults(), nccl_debug()]


def defer_to_nodes(item: EnvVar) -> EnvVar:
    """Return the same decision, deferred until the nodes report their facts."""
    return msgspec.structs.replace(item, source="nodes")


def decide_network_policy(job: NetworkJob, nodes: Sequence[NodeFacts]) -> NetworkPolicy:
    """Return every node's variables and the expected transport."""
    rdma = decide_rdma(job, nodes) if job.nccl and job.nodes > 1 else None
    return NetworkPolicy(nodes=[_policy_of(job, node, rdma) for node in nodes], notes=rdma.notes if rdma else [])


def _policy_of(job: NetworkJob, node: NodeFacts, rdma: RdmaDecision | None) -> NodeNetworkPolicy:
    gloo = gloo_interface(job, node)
    environment = [gloo, *([nccl_interface(job, node)] if job.device == "cuda" else [])]
    if job.nccl:
        environment += rdma.environment[node.host] if rdma else []
        environment += [decide_p2p(node)] if node.gpus > 1 else []
        environment += [*gpu_defaults(), nccl_debug()]
        coverage = _nvlink_coverage(node.topology) if node.gpus > 1 else ""
        expected = ExpectedNetwork(
            transport=rdma.family if rdma else "",
            interface=node.seat.interface if node.seat and "NCCL_SOCKET_IFNAME" not in job.user else "",
            devices=[port.name for port in rdma.ports.get(node.host, [])] if rdma else [],
            inside={"all": "NVLink", "none": "PCIe or host memory", "part": "NVLink between some pairs"}.get(
                coverage, ""
            ),
            why=rdma.why if rdma else "one node",
        )
    else:
        chosen = "" if "GLOO_SOCKET_IFNAME" in job.user else gloo.value or ""
        expected = ExpectedNetwork(transport="Socket", interface=chosen, why="Gloo uses TCP")
    return NodeNetworkPolicy(
        host=node.host,
        environment=apply_user_env(environment, job.user),
        expected=expected,
        addresses=[i.address for i in node.interfaces if i.address and not i.address.startswith("127.")],
    )


def nccl_debug() -> EnvVar:
    """Decide NCCL_DEBUG=INFO: without it, what NCCL used cannot be determined afterwards."""
    why = (
        "NCCL then logs at startup which network and GPU transport it uses, and allranks compares that with what is "
        "expected"
    )
    return nccl_var("NCCL_DEBUG", "INFO", why, "a few hundred lines at the start of each rank's log")


def apply_user_env(decisions: Sequence[EnvVar], user: dict[str, str]) -> list[EnvVar]:
    """Apply ``cluster.env``: its values replace the policy's, which stay visible in the reason."""
    kept = []
    for item in decisions:
        if item.name not in user:
            kept.append(item)
            continue
        would = f"would have set {item.value}" if item.value is not None else "would not have set it"
        would = "lets each node decide" if item.source == "nodes" else would
        why = f"cluster.env (the policy {would}: {item.reason})"
        kept.append(msgspec.structs.replace(item, value=user[item.name], reason=why, source="user"))
    return kept
