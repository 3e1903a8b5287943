"""A machine's matrix -> which NCCL variables to set and which to leave alone. Pure.

From a matrix alone hardly anything follows, and that is said: it shows neither interfaces nor addresses, nor whether a
copy between two GPUs works.
"""

from __future__ import annotations

from allranks.fabric import gpus
from allranks.fabric.decision import EnvVar, nccl
from allranks.fabric.facts import NodeFacts
from allranks.topo.draw import label
from allranks.topo.records import Topology


def advise(topology: Topology, node: NodeFacts | None = None) -> list[EnvVar]:
    """Every variable that scripts set because of a matrix, with what it deserves. `node`: what else is known of it."""
    node = node or NodeFacts(host="this machine", gpus=len(topology.gpus), topology=topology)
    found = [gpus.peer(node)] if len(topology.gpus) > 1 else []
    found += [_level(topology)] if len(topology.gpus) > 1 else []
    found += [_hca(topology), *gpus.alone(node)]
    interface = nccl(
        "NCCL_SOCKET_IFNAME",
        None,
        "a matrix shows no interfaces: one node needs none, several nodes are asked for theirs (`allranks doctor SPEC`)",
        "a name written down by hand is wrong on the first node that calls it otherwise",
    )
    gid = nccl(
        "NCCL_IB_GID_INDEX",
        None,
        "NCCL chooses it since 2.21; a matrix shows no addresses",
        "the table's order differs from node to node, so a number goes stale",
    )
    return [*found, interface, *([gid] if topology.nics else [])]


def _level(topology: Topology) -> EnvVar:
    joined = any(link.nvlinks for link in topology.gpu_pairs())
    what = (
        "NVLink is used first anyway; NVL would forbid peer-to-peer to the other pairs"
        if joined
        else "there is no NVLink here: NVL would turn peer-to-peer off"
    )
    return nccl(
        "NCCL_P2P_LEVEL",
        None,
        f"NCCL chooses by distance; {what}",
        "a level that is too low turns peer-to-peer off in silence",
    )


def _hca(topology: Topology) -> EnvVar:
    risk = "a list written down by hand leaves cards idle, and is wrong on the first node that names them otherwise"
    if not topology.nics:
        why = "the matrix shows no network card" if topology.gpus else "the matrix shows no device"
        return nccl("NCCL_IB_HCA", None, f"{why}; within one machine none is needed", risk)
    near: dict[str, list[str]] = {}
    for gpu in topology.gpus[:16]:
        kind, cards = topology.nearest_nics(gpu.name)
        if cards:
            near.setdefault(f"{'/'.join(label(card) for card in cards[:4])} ({kind})", []).append(gpu.name)
    shown = "; ".join(f"{', '.join(names)}: {card}" for card, names in near.items())
    why = f"NCCL takes the nearest card of each GPU ({shown}); whether a card's port is up and leads to the other nodes, no matrix shows"
    return nccl("NCCL_IB_HCA", None, why, risk)
