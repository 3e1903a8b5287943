"""The bridge and the cables of a box, all inside its own network namespaces."""

from __future__ import annotations

from allranks.testcluster import enter, render
from allranks.testcluster.box import Box
from allranks.testcluster.command import program, run


def make_bridge(box: Box, login_pid: int) -> None:
    """The bridge, on the login side; it is also the login side's own interface."""
    ip_batch(box, login_pid, render.bridge_batch(box.plan))


def plug_in(box: Box, login_pid: int, pids: dict[str, int]) -> None:
    """One cable to each node in ``pids``, with the node's address at its end."""
    ip_batch(box, login_pid, render.cable_batch(box.plan, pids))
    for name, pid in pids.items():
        ip_batch(box, pid, render.node_batch(box.plan, name))


def ip_batch(box: Box, pid: int, commands: str) -> None:
    """Runs ``ip`` commands in the network of ``pid``. Process ids in them are ours, so no PID namespace is entered."""
    run([*enter.as_setup(box.plan, pid, ("net",)), program("ip"), "-batch", "-"], text=commands)
