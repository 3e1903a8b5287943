"""Cutting and slowing a node's cable."""

from __future__ import annotations

import re
from collections.abc import Mapping

from allranks.errors import EnvironmentNotAble, RequestError
from allranks.testcluster.box import Box
from allranks.testcluster.command import attempt, last_lines, program, run
from allranks.testcluster.faults.kind import Fault
from allranks.testcluster.records import FaultRecord, NodePlan
from allranks.testcluster.render import BRIDGE

_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_SMALLEST_BURST_BYTES = 16_384


def cut_link(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """Packets vanish in silence: the interface stays up, as behind a broken switch or a firewall that drops."""
    _ip(box, box.plan.login, "link", "set", _plan(box, node).port, "nomaster")
    return {}


def join_link(box: Box, record: FaultRecord) -> None:
    """Puts the cable back into the bridge."""
    _ip(box, box.plan.login, "link", "set", _plan(box, record.node).port, "master", BRIDGE)


def interface_down(box: Box, node: str, _arguments: Mapping[str, str]) -> dict[str, str]:
    """The node's interface is down, and the node knows it: connecting fails at once."""
    _ip(box, node, "link", "set", _plan(box, node).interface, "down")
    return {}


def interface_up(box: Box, record: FaultRecord) -> None:
    """Takes the interface up again; its address is still there."""
    _ip(box, record.node, "link", "set", _plan(box, record.node).interface, "up")


def slow_link(box: Box, node: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Limits both directions to ``rate`` (tbf); ``delay_ms`` needs netem, which not every kernel has."""
    rate, delay_ms = arguments["rate"], arguments.get("delay_ms", "")
    burst = max(_SMALLEST_BURST_BYTES, bits_per_s(rate) // 8 // 100)
    shape = ["tbf", "rate", rate, "burst", str(burst), "latency", "200ms"]
    if delay_ms:
        shape = ["netem", "delay", f"{delay_ms}ms", "rate", rate]
    for place, device in _ends(box, node):
        done = attempt([*box.setup_prefix(place), program("tc"), "qdisc", "replace", "dev", device, "root", *shape])
        if done.returncode != 0:
            raise EnvironmentNotAble(
                f"fault slow-link {node}: this kernel cannot do '{shape[0]}' ({last_lines(done.stderr)})."
                + (" Leave out --delay-ms: limiting the rate alone needs only tbf." if delay_ms else "")
            )
    return {"rate": rate} | ({"delay_ms": delay_ms} if delay_ms else {})


def full_speed(box: Box, record: FaultRecord) -> None:
    """Takes the limits away."""
    for place, device in _ends(box, record.node):
        attempt([*box.setup_prefix(place), program("tc"), "qdisc", "delete", "dev", device, "root"])


def bits_per_s(rate: str) -> int:
    """The number that a rate such as 10mbit means."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or float(found[1]) <= 0:
        raise RequestError(f"--rate {rate}: give a number and a unit, such as 500kbit, 10mbit or 1gbit.")
    return int(float(found[1]) * _UNITS[found[2]])


def _plan(box: Box, node: str) -> NodePlan:
    return next(plan for plan in box.plan.nodes if plan.name == node)


def _ends(box: Box, node: str) -> list[tuple[str, str]]:
    plan = _plan(box, node)
    return [(node, plan.interface), (box.plan.login, plan.port)]


def _ip(box: Box, place: str, *words: str) -> None:
    run([*box.setup_prefix(place), program("ip"), *words])


FAULTS = (
    Fault(
        kind="cut-link",
        summary="Drop all packets to and from a node, in silence.",
        inject=cut_link,
        heal=join_link,
        in_namespaces=True,
    ),
    Fault(
        kind="slow-link",
        summary="Limit the rate of a node's cable.",
        inject=slow_link,
        heal=full_speed,
        in_namespaces=True,
    ),
    Fault(
        kind="interface-down",
        summary="Take a node's interface down.",
        inject=interface_down,
        heal=interface_up,
        in_namespaces=True,
    ),
)
