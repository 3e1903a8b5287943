"""How a box is doing: one record, made from its processes and from what its Slurm says."""

from __future__ import annotations

import msgspec

from allranks.testcluster.box import Box
from allranks.testcluster.command import attempt
from allranks.testcluster.daemons import node_states

GOOD = ("idle", "mix", "alloc", "comp")
"""States of a node that works; a trailing * (it does not answer) or ``drain`` and ``down`` are not."""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as planned and as it is."""

    name: str
    address: str
    interface: str
    cpus: int
    memory_mb: int
    gpus: int
    hidden: tuple[str, ...]
    running: bool
    """Whether the node itself is alive; its slurmd may not be."""
    state: str
    """Slurm's word for it, empty if Slurm does not answer."""
    faults: tuple[str, ...]


class BoxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A box, or that there is none."""

    up: bool
    healthy: bool = False
    """The controller answers, and every node works."""
    name: str = ""
    folder: str = ""
    slurm_conf: str = ""
    network: str = ""
    login: str = ""
    login_address: str = ""
    partitions: tuple[str, ...] = ()
    rootless: bool = False
    shared_tmp: bool = False
    accounting: bool = False
    controller: bool = False
    nodes: tuple[NodeStatus, ...] = ()


def box_status(box: Box | None) -> BoxStatus:
    """The state of a box now."""
    if box is None:
        return BoxStatus(up=False)
    plan = box.plan
    controller = " is UP" in attempt([*box.command_prefix("/"), "scontrol", "ping"]).stdout
    states = node_states(box) if controller else {}
    # Without root, the login side itself may not look at the first processes.
    alive = set(box.inits() or box.node_names)
    faults = box.faults()
    nodes = tuple(
        NodeStatus(
            name=node.name,
            address=node.address,
            interface=node.interface,
            cpus=node.cpus,
            memory_mb=node.memory_mb,
            gpus=node.gpus,
            hidden=node.hidden,
            running=node.name in alive,
            state=states.get(node.name, ""),
            faults=tuple(fault.kind for fault in faults if fault.node == node.name),
        )
        for node in plan.nodes
    )
    return BoxStatus(
        up=True,
        healthy=controller and all(node.running and node.state in GOOD for node in nodes),
        name=plan.name,
        folder=plan.folder,
        slurm_conf=str(box.folder.slurm_conf),
        network=plan.network,
        login=plan.login,
        login_address=plan.login_address,
        partitions=plan.partitions,
        rootless=plan.rootless,
        shared_tmp=plan.shared_tmp,
        accounting=plan.accounting,
        controller=controller,
        nodes=nodes,
    )
