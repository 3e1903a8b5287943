"""Wrong names and wrong clocks: what a node believes of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

from allranks.errors import RequestError
from allranks.testcluster import render
from allranks.testcluster.box import Box
from allranks.testcluster.faults.kind import Fault
from allranks.testcluster.records import FaultRecord


def loopback_hosts(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """The node's /etc/hosts maps its own name to 127.0.1.1, as Debian's installer writes it."""
    box.folder.hosts(node).write_text(render.hosts(box.plan, node, self_loopback=True))
    return {}


def right_hosts(box: Box, record: FaultRecord) -> None:
    """The node's name means its address again. The file is written in place: nodes have it bound, not its name."""
    box.folder.hosts(record.node).write_text(render.hosts(box.plan, record.node))


def wrong_clock(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Tasks on the node are told an offset of ``seconds``; a namespace cannot have a clock of its own."""
    text = arguments["seconds"]
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise RequestError(f"fault wrong-clock {node} {text}: give a number of seconds, such as 300 or -2.5.")
    box.folder.clock(node).write_text(f"{seconds!r}\n")
    return {"seconds": repr(seconds)}


def right_clock(box: Box, record: FaultRecord) -> None:
    """The node's clock is said to be right."""
    box.folder.clock(record.node).unlink(missing_ok=True)


FAULTS = (
    Fault(
        kind="loopback-hosts",
        summary="Let a node's /etc/hosts map its own name to 127.0.1.1.",
        inject=loopback_hosts,
        heal=right_hosts,
    ),
    Fault(
        kind="wrong-clock",
        summary="Tell the tasks of a node that its clock is wrong.",
        inject=wrong_clock,
        heal=right_clock,
    ),
)
