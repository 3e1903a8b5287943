"""Derive from a machine's topology matrix which NCCL variables to set and which to leave unset. Pure.

A matrix alone justifies almost no setting: it shows neither interfaces nor addresses, nor whether copies between two GPUs work.
"""

from __future__ import annotations

from allranks.nodes.topology.drawings import device_label
from allranks.planning import network_policy
from allranks.planning.env_vars import EnvVar, nccl_var
from allranks.planning.node_facts import NodeFacts, Topology


def advise_nccl(topology: Topology, node: NodeFacts | None = None) -> list[EnvVar]:
    """Return a recommendation for every variable that scripts set because of a matrix. `node`: other known facts about it."""
    node = node or NodeFacts(host="this machine", gpus=len(topology.gpus), topology=topology)
    found = [network_policy.decide_p2p(node)] if len(topology.gpus) > 1 else []
    found += [_p2p_level(topology)] if len(topology.gpus) > 1 else []
    found += [_ib_hca(topology), *network_policy.gpu_defaults(node)]
    interface = nccl_var(
        "NCCL_SOCKET_IFNAME",
        None,
        "a matrix shows no interfaces: one node needs none, several nodes report theirs (`allranks doctor SPEC`)",
        "a fixed name is wrong on nodes where the interface has another name",
    )
    gid = nccl_var(
        "NCCL_IB_GID_INDEX",
        None,
        "NCCL chooses it since 2.21; a matrix shows no addresses",
        "the order of the GID table differs between nodes, so a fixed index becomes wrong",
    )
    return [*found, interface, *([gid] if topology.nics else [])]


def _p2p_level(topology: Topology) -> EnvVar:
    joined = any(link.nvlinks for link in topology.gpu_pairs())
    what = (
        "NVLink is used first anyway; NVL would forbid peer-to-peer to the other pairs"
        if joined
        else "there is no NVLink: NVL would disable peer-to-peer"
    )
    return nccl_var(
        "NCCL_P2P_LEVEL",
        None,
        f"NCCL chooses by distance; {what}",
        "a level that is too low silently disables peer-to-peer",
    )


def _ib_hca(topology: Topology) -> EnvVar:
    risk = "a fixed list leaves cards unused, and is wrong on nodes with other names"
    if not topology.nics:
        why = "the matrix shows no network card" if topology.gpus else "the matrix shows no device"
        return nccl_var("NCCL_IB_HCA", None, f"{why}; within one machine none is needed", risk)
    near: dict[str, list[str]] = {}
    for gpu in topology.gpus[:16]:
        kind, cards = topology.nearest_nics(gpu.name)
        if cards:
            near.setdefault(f"{'/'.join(device_label(card) for card in cards[:4])} ({kind})", []).append(gpu.name)
    shown = "; ".join(f"{', '.join(names)}: {card}" for card, names in near.items())
    why = f"NCCL uses the nearest card of each GPU ({shown}); a matrix does not show whether a card's port is up and connected to the other nodes"
    return nccl_var("NCCL_IB_HCA", None, why, risk)
