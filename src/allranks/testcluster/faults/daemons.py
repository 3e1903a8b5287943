"""Stopping and restarting Slurm's own daemons."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.testcluster import daemons
from allranks.testcluster.box import Box
from allranks.testcluster.faults.kind import Fault
from allranks.testcluster.records import FaultRecord


def stop_slurmd(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """The node runs on, and so do its jobs; Slurm no longer hears of it."""
    daemons.stop_daemon(box, node, "slurmd")
    return {}


def start_slurmd(box: Box, record: FaultRecord) -> None:
    """Starts the node's slurmd, and waits until Slurm hears of it."""
    daemons.start_slurmd_and_wait(box, record.node)


def restart_slurmd(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Stops and starts a node's slurmd."""
    stop_slurmd(box, node, arguments)
    daemons.start_slurmd_and_wait(box, node)
    return {}


def stop_slurmctld(box: Box, _node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Jobs run on; nothing can be submitted, asked or cancelled."""
    daemons.stop_daemon(box, box.plan.login, "slurmctld")
    return {}


def start_slurmctld(box: Box, _record: FaultRecord) -> None:
    """Starts the controller, which reads its saved jobs."""
    daemons.start_slurmctld(box)


def restart_slurmctld(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Stops and starts the controller."""
    stop_slurmctld(box, node, arguments)
    daemons.start_slurmctld(box)
    return {}


FAULTS = (
    Fault(
        kind="stop-slurmd",
        summary="Stop a node's slurmd; its jobs run on unheard.",
        inject=stop_slurmd,
        heal=start_slurmd,
        in_namespaces=True,
    ),
    Fault(kind="restart-slurmd", summary="Stop and start a node's slurmd.", inject=restart_slurmd),
    Fault(
        kind="stop-slurmctld",
        summary="Stop Slurm's controller.",
        inject=stop_slurmctld,
        heal=start_slurmctld,
        on_node=False,
    ),
    Fault(
        kind="restart-slurmctld", summary="Stop and start Slurm's controller.", inject=restart_slurmctld, on_node=False
    ),
)
