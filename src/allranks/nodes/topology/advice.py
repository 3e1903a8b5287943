"""Derive from a machine's topology matrix which NCCL variables to set and which to leave unset. Pure.

A matrix alone justifies almost no setting: it shows no interfaces or addresses, nor whether copies between GPUs work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.nodes.topology.drawings import device_label, group_by_links
from allranks.planning import network_policy
from allranks.planning.env_vars import EnvVar, nccl_var
from allranks.planning.records import NodeFacts, Topology
from allranks.utils.text import format_ranges

MAX_NAMED = 8


def advise_nccl(topology: Topology, node: NodeFacts | None = None) -> list[EnvVar]:
    """Return a recommendation for every variable that scripts set because of a matrix, those to set first.

    Args:
        node: other known facts about the machine.
    """
    node = node or NodeFacts(host="this machine", gpus=len(topology.gpus), topology=topology)
    variables = []
    if len(topology.gpus) > 1:
        why = "there is no NVLink: NVL would disable peer-to-peer"
        if any(link.nvlinks for link in topology.gpu_pairs()):
            why = "NVLink is used first anyway; NVL would forbid peer-to-peer to the other pairs"
        risk = "a level that is too low silently disables peer-to-peer"
        level = nccl_var("NCCL_P2P_LEVEL", None, f"NCCL chooses by distance; {why}", risk)
        variables = [network_policy.decide_p2p(node), level]
    risk = "a fixed list leaves cards unused, and is wrong on nodes with other names"
    variables += [nccl_var("NCCL_IB_HCA", None, _nearest_cards(topology), risk), *network_policy.gpu_defaults()]
    why = "a matrix shows no interfaces: one node needs none, several nodes report theirs (`allranks doctor SPEC`)"
    risk = "a fixed name is wrong on nodes where the interface has another name"
    variables.append(nccl_var("NCCL_SOCKET_IFNAME", None, why, risk))
    if topology.nics:
        why = "NCCL chooses it since 2.21; a matrix shows no addresses"
        risk = "the order of the GID table differs between nodes, so a fixed index becomes wrong"
        variables.append(nccl_var("NCCL_IB_GID_INDEX", None, why, risk))
    return sorted(variables, key=lambda item: item.value is None)


def machine_notes(topology: Topology, advice: Sequence[EnvVar]) -> list[str]:
    """Return what matters on this machine, most important first; empty if nothing is special about it."""
    notes = [f"set {item.name}={item.value}: {item.reason}" for item in advice if item.value is not None]
    refused = [link for link in topology.p2p if link.type != "OK"]
    if refused:
        pairs = ", ".join(f"{link.a}-{link.b}" for link in refused[:MAX_NAMED])
        notes.append(
            f"the driver refuses direct copies between {len(refused)} pairs ({pairs}): NCCL uses host memory there"
        )
    return [*notes, *_islands(topology), *_far_cards(topology), *_cores(topology)]


def _islands(topology: Topology) -> list[str]:
    """Say which GPUs belong together, if not all pairs are alike."""
    pairs = topology.gpu_pairs()
    if len(topology.gpus) < 2 or all(link.nvlinks for link in pairs):
        return []
    names = [gpu.name for gpu in topology.gpus]
    joined = [link for link in pairs if link.nvlinks]
    if joined:
        groups = group_by_links(names, joined)
        if len(joined) < sum(len(group) * (len(group) - 1) // 2 for group in groups):
            return [
                "NVLink does not connect all pairs of GPUs: ranks that communicate most belong on pairs that it does"
            ]
        shown = "; ".join(short_names(group) for group in groups[:MAX_NAMED])
        return [f"NVLink only connects GPUs within these groups: {shown}. Tensor parallelism fits into one group"]
    numa = {gpu.name: gpu.numa for gpu in topology.gpus}
    note = "the GPUs only reach each other over PCIe, which limits what communicates in every layer (FSDP) most"
    if None in numa.values() or len(set(numa.values())) < 2:
        return [note]
    groups = [[n for n in names if numa[n] == node] for node in sorted(set(numa.values()), key=str)]
    shown = "; ".join(short_names(group) for group in groups)
    return [f"{note}, and between these groups over the CPUs' link: {shown}"]


def _far_cards(topology: Topology) -> list[str]:
    far = [
        gpu.name
        for gpu in topology.gpus
        if topology.nics and topology.nearest_nics(gpu.name)[0] in ("PHB", "NODE", "SYS", "SOC")
    ]
    if not far:
        return []
    return [
        f"{short_names(far)}: no network card behind the same PCIe switch, so data for other nodes goes through the CPU"
    ]


def _cores(topology: Topology) -> list[str]:
    """Say which cores are near which GPUs, if there is a choice."""
    near: dict[str, list[str]] = {}
    for gpu in topology.gpus:
        if gpu.cpus:
            near.setdefault(gpu.cpus, []).append(gpu.name)
    if len(near) < 2:
        return []
    shown = "; ".join(f"{short_names(names)}: {cpus}" for cpus, names in list(near.items())[:MAX_NAMED])
    return [
        f"run each rank and its data loaders on the cores of its GPU ({shown}): srun --cpu-bind, numactl or taskset"
    ]


def short_names(names: Sequence[str]) -> str:
    """Return ``GPU0-3, GPU6`` for devices with numbers, and the names of others."""
    numbers = [int(name[3:]) for name in names if re.fullmatch(r"GPU\d+", name)]
    others = [name for name in names if not re.fullmatch(r"GPU\d+", name)]
    return ", ".join([*([f"GPU{format_ranges(numbers, ', GPU')}"] if numbers else []), *others])


def _nearest_cards(topology: Topology) -> str:
    if not topology.nics:
        why = "the matrix shows no network card" if topology.gpus else "the matrix shows no device"
        return f"{why}; within one machine none is needed"
    near: dict[str, list[str]] = {}
    for gpu in topology.gpus[:16]:
        kind, cards = topology.nearest_nics(gpu.name)
        if cards:
            near.setdefault(f"{'/'.join(device_label(card) for card in cards[:4])} ({kind})", []).append(gpu.name)
    shown = "; ".join(f"{', '.join(names)}: {card}" for card, names in near.items())
    why = "a matrix does not show whether a card's port is up and connected to the other nodes"
    return f"NCCL uses the nearest card of each GPU ({shown}); {why}"
