"""Breaks a box on purpose, and mends it.

    inject(box, "cut-link", "n2")        breaks, and notes in the box's folder what mending needs
    heal(box, "n2")                      mends all that is noted for n2; heal(box) all that is noted
    with injected(box, "slow-link", "n2", rate="10mbit"): ...

`FAULTS` lists the kinds. Each is two small functions; those that leave nothing to mend have only the first.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from allranks.errors import RequestError
from allranks.testcluster.box import Box
from allranks.testcluster.faults import daemons, disks, links, names, nodes, ranks
from allranks.testcluster.faults.kind import Fault
from allranks.testcluster.plan import known_node
from allranks.testcluster.records import FaultRecord, save

FAULTS: Mapping[str, Fault] = {
    fault.kind: fault
    for fault in (*ranks.FAULTS, *nodes.FAULTS, *daemons.FAULTS, *links.FAULTS, *disks.FAULTS, *names.FAULTS)
}
"""Every kind of fault, by its name on the command line."""


def inject(box: Box, kind: str, node: str = "", **arguments: str) -> FaultRecord:
    """Breaks something now; what can be mended is noted, and `Box.faults` lists it."""
    fault = FAULTS.get(kind)
    if fault is None:
        near = difflib.get_close_matches(kind, FAULTS, 1, 0)[0]
        raise RequestError(f"There is no fault '{kind}'. Did you mean {near}? All: {', '.join(FAULTS)}.")
    if fault.on_node:
        known_node(node, box.node_names, f"fault {kind}")
    noted = box.faults()
    if any(_same(record, kind, node, arguments) for record in noted):
        raise RequestError(f"fault {kind}: it is in force on '{node or box.plan.login}' already. Heal it first.")
    record = FaultRecord(kind, node, fault.inject(box, node, arguments))
    if fault.heal is not None:
        kept = [old for old in noted if not (fault.restarts and old.node == node and FAULTS[old.kind].in_namespaces)]
        save([*kept, record], box.folder.faults)
    return record


def _same(record: FaultRecord, kind: str, node: str, arguments: Mapping[str, str]) -> bool:
    same_place = record.detail.get("path") == arguments.get("path") if "path" in arguments else True
    return (record.kind, record.node) == (kind, node) and same_place


def heal(box: Box, node: str | None = None, kind: str | None = None) -> list[FaultRecord]:
    """Mends what is noted (of one node, of one kind), the latest first; returns what was mended."""
    if node is not None:
        known_node(node, [*box.node_names, box.plan.login], "fault heal")
    mended: list[FaultRecord] = []
    for record in reversed(box.faults()):
        if node not in (None, record.node or box.plan.login) or kind not in (None, record.kind):
            continue
        mend = FAULTS[record.kind].heal
        if mend is not None:
            mend(box, record)
        mended.append(record)
        save([other for other in box.faults() if other != record], box.folder.faults)
    return mended


@contextmanager
def injected(box: Box, kind: str, node: str = "", **arguments: str) -> Iterator[FaultRecord]:
    """A fault for the length of a ``with`` block."""
    record = inject(box, kind, node, **arguments)
    try:
        yield record
    finally:
        heal(box, node or box.plan.login, kind)
