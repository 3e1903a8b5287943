"""Killing a whole node, as a loss of power would."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.testcluster import daemons, places, procs
from allranks.testcluster.box import Box
from allranks.testcluster.command import attempt, program
from allranks.testcluster.faults.kind import Fault
from allranks.testcluster.records import FaultRecord


def kill_node(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Every process of the node ends at once, and with them its namespaces and its cable."""
    init = box.init(node)
    space = procs.namespace(init, "pid")
    victims = procs.in_namespaces("pid", [space] if space else [])
    procs.kill([init])
    procs.wait_gone(victims, 10)
    return {}


def start_node(box: Box, record: FaultRecord) -> None:
    """The node starts again: fresh namespaces, an empty /tmp, its slurmd."""
    if record.node not in box.inits():
        login = box.plan.login
        port = next(node.port for node in box.plan.nodes if node.name == record.node)
        attempt([*box.setup_prefix(login), program("ip"), "link", "delete", port])
        places.make_nodes(box, box.init(login), [record.node])
    daemons.start_slurmd_and_wait(box, record.node)


FAULTS = (
    Fault(
        kind="kill-node",
        summary="Kill a node with all that runs on it; healing starts it anew.",
        inject=kill_node,
        heal=start_node,
        restarts=True,
    ),
)
