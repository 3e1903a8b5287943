"""Decide the NCCL and Gloo variables of every node of a job, with reasons: interfaces, P2P between GPUs, RDMA. Pure.

P2P is disabled only on evidence: a failed copy, or an IOMMU that translates the GPUs' addresses together with bridges that
redirect their traffic. SYS in the topology matrix is not evidence: NCCL avoids P2P where it is slow, and pairs on one switch
have hung where pairs across sockets worked.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from allranks.planning import rdma
from allranks.planning.env_vars import (
    NCCL_TROUBLESHOOTING_DOCS,
    TORCH_DISTRIBUTED_DOCS,
    EnvVar,
    ExpectedNetwork,
    NetworkJob,
    NetworkPolicy,
    NodeNetworkPolicy,
    nccl_var,
)
from allranks.planning.node_facts import NodeFacts, Topology

INTERFACE_DOCS = f"{TORCH_DISTRIBUTED_DOCS}#choosing-the-network-interface-to-use"
FAST_NETWORK_MBIT = 100_000
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
        return EnvVar(
            name=name,
            value=f"={job.interface}",
            reason=said,
            source="spec",
            documentation=INTERFACE_DOCS,
            risk=_NCCL_RISK,
        )
    if job.nodes == 1:
        why = (
            "one node: NCCL would listen for its bootstrap on an external interface, where other machines can connect; the data "
            "between GPUs does not depend on it"
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


def socket_threads(node: NodeFacts | None, over_sockets: bool) -> EnvVar:
    """Recommend measuring NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD on a fast network; never set them unmeasured."""
    speed = _interface_speed(node)
    if over_sockets and speed >= FAST_NETWORK_MBIT:
        why = (
            f"sockets over {speed // 1000} Gbit/s: one connection may not fill it; measure with NCCL_SOCKET_NTHREADS=4 and "
            "NCCL_NSOCKS_PERTHREAD=4 (their product may be 64 at most) before keeping them"
        )
    else:
        why = "matters only when NCCL sends over sockets on a network of 100 Gbit/s or more"
    return nccl_var("NCCL_SOCKET_NTHREADS", None, why, "each helper thread takes a core from the ranks")


def _interface_speed(node: NodeFacts | None) -> int:
    if node is None or node.seat is None:
        return 0
    return next((i.speed_mbit or 0 for i in node.interfaces if i.name == node.seat.interface), 0)


P2P_TEST_HINT = "`allranks doctor SPEC --collectives` tests copies between all pairs"
_P2P_OFF_RISK = (
    "data between GPUs goes through host memory: acceptable for PCIe pairs, several times slower than NVLink"
)
P2P_ON_RISK = (
    "if the driver reports peer-to-peer but the platform breaks it, ranks hang with GPUs at 100 % and no error"
)


def gpu_transport(node: NodeFacts) -> str:
    """Return the expected transport between the GPUs of a node; empty if unknown or with one GPU."""
    if node.gpus < 2 or node.topology is None:
        return ""
    return (
        "NVLink"
        if _nvlink_coverage(node.topology) == "all"
        else "PCIe or host memory"
        if _nvlink_coverage(node.topology) == "none"
        else "NVLink between some pairs"
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
        why = f"on {node.host} an IOMMU translates the GPUs' addresses and ACS redirects their traffic at {shown}; untested. {P2P_TEST_HINT}"
        return _p2p_off(nvlink, node, why, documentation=NCCL_TROUBLESHOOTING_DOCS)
    doubts = [
        f"ACS redirects traffic at {', '.join(node.acs[:3])}" if node.acs else "",
        "an IOMMU translates the GPUs' addresses" if node.iommu else "",
        "the driver refuses peer access for some pairs, and NCCL respects that" if _p2p_refused(node.topology) else "",
    ]
    told = "; ".join(d for d in doubts if d)
    if told:
        return _p2p_unset(f"no evidence that it fails, only an indication ({told}). {P2P_TEST_HINT}")
    far = _far_pairs(node.topology)
    what = (
        f"{far} of the pairs are {'SYS'}, which is not evidence: NCCL avoids slow paths itself"
        if far
        else "no evidence that it fails"
    )
    return _p2p_unset(f"{what}. {P2P_TEST_HINT}")


def _p2p_off(nvlink: str, node: NodeFacts, why: str, documentation: str = "") -> EnvVar:
    by_nvlink = nvlink == "part" and not any(_has_nvlink(node.topology, pair) for pair in node.failed_pairs)
    name, value = ("NCCL_P2P_LEVEL", "NVL") if by_nvlink else ("NCCL_P2P_DISABLE", "1")
    said = f"{why}{'; NVLink pairs still use it' if by_nvlink else ''}"
    found = nccl_var(name, value, said, _P2P_OFF_RISK)
    return EnvVar(
        name=name, value=value, reason=said, documentation=documentation or found.documentation, risk=_P2P_OFF_RISK
    )


def _p2p_unset(why: str) -> EnvVar:
    return nccl_var("NCCL_P2P_DISABLE", None, why, P2P_ON_RISK)


def gpu_defaults(node: NodeFacts | None) -> list[EnvVar]:
    """Return variables that scripts often set and that should stay unset."""
    far = _far_nics(node)
    gdr = f"NCCL decides by distance; {far}" if far else "NCCL decides by the distance of GPU and card"
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
            gdr,
            "forced across the CPU, GPUDirect is often slower than going through host memory",
        ),
        nccl_var("NCCL_CROSS_NIC", None, "2 is the default: NCCL crosses rails only where that is faster", "none"),
    ]


def _far_nics(node: NodeFacts | None) -> str:
    topology = node.topology if node else None
    if topology is None or not topology.nics:
        return ""
    far = [gpu.name for gpu in topology.gpus if topology.nearest_nics(gpu.name)[0] in ("PHB", "NODE", "SYS", "SOC")]
    if not far:
        return "every GPU has a card behind its own PCIe switch"
    return f"{', '.join(far[:8])} ha{'s' if len(far) == 1 else 've'} no card behind the same switch, so data goes through host memory there"


def _nvlink_coverage(topology: Topology | None) -> str:
    """Return whether all, some or none of the pairs have NVLink; empty if unknown."""
    if topology is None or not topology.gpu_pairs() or topology.missing_pairs():
        return ""
    joined = [link.nvlinks > 0 for link in topology.gpu_pairs()]
    return "all" if all(joined) else "part" if any(joined) else "none"


def _has_nvlink(topology: Topology | None, pair: str) -> bool:
    a, _, b = pair.partition("-")
    link = topology.between(a, b) if topology else None
    return bool(link and link.nvlinks)


def _far_pairs(topology: Topology | None) -> int:
    return sum(link.type in ("SYS", "SOC") for link in topology.gpu_pairs()) if topology else 0


def _p2p_refused(topology: Topology | None) -> bool:
    return any(link.type != "OK" for link in topology.p2p) if topology else False


DEBUG_RISK = "a few hundred lines at the start of each rank's log"


def provisional_policy(job: NetworkJob) -> list[EnvVar]:
    """Return what can be decided before the nodes report their facts: for ``plan``."""
    found = [gloo_interface(job), *([nccl_interface(job)] if job.device == "cuda" else [])]
    if job.nodes > 1 and not job.interface:
        found = [defer_to_nodes(item) for item in found]
    if not job.nccl:
        return found
    test = f"only on evidence; {P2P_TEST_HINT}"
    found += _provisional_rdma() if job.nodes > 1 else []
    return [
        *found,
        defer_to_nodes(nccl_var("NCCL_P2P_DISABLE", None, test, P2P_ON_RISK)),
        *gpu_defaults(None),
        nccl_debug(),
    ]


def _provisional_rdma() -> list[EnvVar]:
    fall = "NCCL falls back to sockets silently; allranks compares its log afterwards"
    stale = "a fixed value becomes wrong: names and order differ between nodes"
    rows = [
        nccl_var("NCCL_NET", None, "RDMA if all nodes have it, otherwise sockets", fall),
        nccl_var("NCCL_IB_HCA", None, "set only to exclude ports of other networks", stale),
        nccl_var("NCCL_IB_GID_INDEX", None, "NCCL chooses it since 2.21; it is set for older versions", stale),
    ]
    return [defer_to_nodes(item) for item in rows]


def defer_to_nodes(item: EnvVar) -> EnvVar:
    """Return the same decision, deferred until the nodes report their facts."""
    return msgspec.structs.replace(item, source="nodes")


def decide_network_policy(job: NetworkJob, nodes: Sequence[NodeFacts]) -> NetworkPolicy:
    """Return every node's variables and the expected transport."""
    if not job.nccl:
        return NetworkPolicy(nodes=[_gloo_policy(job, node) for node in nodes])
    found = rdma.decide_rdma(job, nodes) if job.nodes > 1 else None
    policies = []
    for node in nodes:
        environment = [gloo_interface(job, node), nccl_interface(job, node)]
        if found:
            environment += found.environment[node.host]
            environment.append(socket_threads(node, found.family == "Socket"))
        if node.gpus > 1:
            environment.append(decide_p2p(node))
        environment += [*gpu_defaults(node), nccl_debug()]
        expected = ExpectedNetwork(
            transport=found.family if found else "",
            interface=node.seat.interface if node.seat and "NCCL_SOCKET_IFNAME" not in job.user else "",
            devices=[port.name for port in found.ports.get(node.host, [])] if found else [],
            inside=gpu_transport(node),
            why=found.why if found else "one node",
        )
        decided = apply_user_env(environment, job.user)
        policies.append(
            NodeNetworkPolicy(host=node.host, environment=decided, expected=expected, addresses=_addresses(node))
        )
    return NetworkPolicy(nodes=policies, notes=found.notes if found else [])


def _gloo_policy(job: NetworkJob, node: NodeFacts) -> NodeNetworkPolicy:
    seat = gloo_interface(job, node)
    environment = [seat, *([nccl_interface(job, node)] if job.device == "cuda" else [])]
    chosen = "" if "GLOO_SOCKET_IFNAME" in job.user else seat.value or ""
    return NodeNetworkPolicy(
        host=node.host,
        environment=apply_user_env(environment, job.user),
        expected=ExpectedNetwork(transport="Socket", interface=chosen, why="Gloo uses TCP"),
        addresses=_addresses(node),
    )


def _addresses(node: NodeFacts) -> list[str]:
    return [item.address for item in node.interfaces if item.address and not item.address.startswith("127.")]


def nccl_debug() -> EnvVar:
    """Decide NCCL_DEBUG=INFO: without it, what NCCL used cannot be determined afterwards."""
    why = "NCCL then logs at startup which network and GPU transport it uses, and allranks compares that with what is expected"
    return nccl_var("NCCL_DEBUG", "INFO", why, DEBUG_RISK)


def apply_user_env(decisions: Sequence[EnvVar], user: dict[str, str]) -> list[EnvVar]:
    """Apply ``cluster.env``: its values replace the policy's, which stay visible in the reason."""
    kept = []
    for item in decisions:
        if item.name in user:
            would = f"would have set {item.value}" if item.value is not None else "would not have set it"
            would = "lets each node decide" if item.source == "nodes" else would
            why = f"cluster.env (the policy {would}: {item.reason})"
            kept.append(
                EnvVar(
                    name=item.name,
                    value=user[item.name],
                    reason=why,
                    source="user",
                    documentation=item.documentation,
                    risk=item.risk,
                )
            )
        else:
            kept.append(item)
    return kept
