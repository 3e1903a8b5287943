"""What a kind of fault is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from allranks.testcluster.box import Box
from allranks.testcluster.records import FaultRecord


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to break a box."""

    kind: str
    summary: str
    inject: Callable[[Box, str, Mapping[str, str]], dict[str, str]]
    """Breaks it; returns what mending needs to know."""
    heal: Callable[[Box, FaultRecord], None] | None = None
    """Mends it; None where there is nothing to mend."""
    on_node: bool = True
    """Whether it needs a node; otherwise it breaks the login side or a job."""
    in_namespaces: bool = False
    """It lives in the node's namespaces, so it ends when the node dies."""
    restarts: bool = False
    """The node comes back with fresh namespaces."""
