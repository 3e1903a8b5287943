"""Between the GPUs of one node: peer-to-peer, shared memory, GPUDirect. Pure.

Peer-to-peer is turned off on evidence alone: a copy that failed, or both an IOMMU that translates the GPUs' addresses and
bridges that redirect their traffic. That a matrix says SYS is none: NCCL itself takes another way where peer-to-peer is
slow, and pairs on one switch have hung where pairs across sockets worked.
"""

from __future__ import annotations

from allranks.fabric.decision import NCCL_TROUBLE, EnvVar, nccl
from allranks.fabric.facts import NodeFacts
from allranks.topo.records import Topology

TEST = "`allranks doctor SPEC --collectives` copies between all pairs and settles it"
_OFF_RISK = (
    "data between GPUs goes through host memory: fine for PCIe pairs, several times slower where there is NVLink"
)
ON_RISK = "if the driver claims peer-to-peer and the platform breaks it, ranks hang with GPUs at 100 % and no error"


def inside(node: NodeFacts) -> str:
    """What should carry data between the GPUs of a node; empty if it is not known or there is one GPU."""
    if node.gpus < 2 or node.topology is None:
        return ""
    return (
        "NVLink"
        if _nvlink(node.topology) == "all"
        else "PCIe or host memory"
        if _nvlink(node.topology) == "none"
        else "NVLink in part"
    )


def peer(node: NodeFacts) -> EnvVar:
    """NCCL_P2P_DISABLE, or NCCL_P2P_LEVEL=NVL where only the pairs without NVLink are in doubt."""
    nvlink = _nvlink(node.topology)
    if node.copies == "failed":
        pairs = ", ".join(node.failed_pairs[:4]) or "GPU pairs"
        return _off(nvlink, node, f"the copy test failed on {node.host}: {pairs}")
    if node.copies == "ok":
        return _on(f"the copy test of {node.host} passed on all pairs")
    if nvlink == "all":
        return _on("NVLink joins every pair of GPUs, which ACS and IOMMU do not touch")
    if node.acs and node.iommu:
        shown = ", ".join(node.acs[:3])
        why = f"on {node.host} an IOMMU translates the GPUs' addresses and ACS redirects their traffic at {shown}; untested. {TEST}"
        return _off(nvlink, node, why, documentation=NCCL_TROUBLE)
    doubts = [
        f"ACS redirects traffic at {', '.join(node.acs[:3])}" if node.acs else "",
        "an IOMMU translates the GPUs' addresses" if node.iommu else "",
        "the driver refuses peer access to some pairs, and NCCL heeds that" if _refused(node.topology) else "",
    ]
    told = "; ".join(d for d in doubts if d)
    if told:
        return _on(f"no evidence that it fails, only a doubt ({told}). {TEST}")
    far = _far_pairs(node.topology)
    what = (
        f"{far} of the pairs are {'SYS'}, which is no evidence: NCCL avoids slow ways itself"
        if far
        else "no evidence that it fails"
    )
    return _on(f"{what}. {TEST}")


def _off(nvlink: str, node: NodeFacts, why: str, documentation: str = "") -> EnvVar:
    by_nvlink = nvlink == "part" and not any(_joined(node.topology, pair) for pair in node.failed_pairs)
    name, value = ("NCCL_P2P_LEVEL", "NVL") if by_nvlink else ("NCCL_P2P_DISABLE", "1")
    said = f"{why}{'; NVLink pairs keep it' if by_nvlink else ''}"
    found = nccl(name, value, said, _OFF_RISK)
    return EnvVar(
        name=name, value=value, reason=said, documentation=documentation or found.documentation, risk=_OFF_RISK
    )


def _on(why: str) -> EnvVar:
    return nccl("NCCL_P2P_DISABLE", None, why, ON_RISK)


def alone(node: NodeFacts | None) -> list[EnvVar]:
    """Variables that scripts set and that need no setting."""
    far = _far_cards(node)
    gdr = f"NCCL decides by distance; {far}" if far else "NCCL decides by the distance of GPU and card"
    return [
        nccl(
            "NCCL_SHM_DISABLE",
            None,
            "0 is the default; 1 would take the way that GPUs without peer-to-peer need",
            "none",
        ),
        nccl(
            "NCCL_NET_GDR_LEVEL",
            None,
            gdr,
            "forced across the CPU, GPUDirect is often slower than going through host memory",
        ),
        nccl("NCCL_CROSS_NIC", None, "2 is the default: NCCL crosses rails only where that is faster", "none"),
    ]


def _far_cards(node: NodeFacts | None) -> str:
    topology = node.topology if node else None
    if topology is None or not topology.nics:
        return ""
    far = [gpu.name for gpu in topology.gpus if topology.nearest_nics(gpu.name)[0] in ("PHB", "NODE", "SYS", "SOC")]
    if not far:
        return "every GPU has a card behind its own PCIe switch"
    return f"{', '.join(far[:8])} ha{'s' if len(far) == 1 else 've'} no card behind the same switch, so data goes through host memory there"


def _nvlink(topology: Topology | None) -> str:
    """all, part, none of the pairs; empty if it is not known."""
    if topology is None or not topology.gpu_pairs() or topology.missing_pairs():
        return ""
    joined = [link.nvlinks > 0 for link in topology.gpu_pairs()]
    return "all" if all(joined) else "part" if any(joined) else "none"


def _joined(topology: Topology | None, pair: str) -> bool:
    a, _, b = pair.partition("-")
    link = topology.between(a, b) if topology else None
    return bool(link and link.nvlinks)


def _far_pairs(topology: Topology | None) -> int:
    return sum(link.type in ("SYS", "SOC") for link in topology.gpu_pairs()) if topology else 0


def _refused(topology: Topology | None) -> bool:
    return any(link.type != "OK" for link in topology.p2p) if topology else False
