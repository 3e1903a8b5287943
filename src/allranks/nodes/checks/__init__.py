"""Input of the node checks, and helpers that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from allranks.nodes.checks.connectivity import ChosenNetwork, NodeLinks
from allranks.nodes.records import Check, FolderFacts, NodeRequirements, Probe

Value = TypeVar("Value")


class PlanRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan wants of each node."""

    procs_per_node: int = 1
    threads: int | None = None
    device: str = "cpu"
    port: int | None = None
    """A port that the user fixed; None: one of the candidates will do."""
    rank_memory_bytes: int | None = None
    """What a rank will need of its device, as estimated; None: not known, or not to be looked at."""
    named: dict[str, str] = {}
    """Variables of NCCL and Gloo by which the user names interfaces."""


class NodeSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """Every node's answers, beside what was asked."""

    probes: list[Probe]
    wish: NodeRequirements
    need: PlanRequirements = PlanRequirements()
    network: ChosenNetwork | None = None
    network_error: str | None = None
    reach: dict[str, NodeLinks] | None = None
    """Each node's connections to and from others, by host; None: not tried."""
    nonces: dict[str, str] = {}
    """The secret that whoever shares the folder must see, by role."""
    received: dict[str, float] = {}
    """The launcher's clock when the node's line came, by host."""
    remote: bool = False
    """The nodes are not the launcher's machine: even one of them must share what the launcher writes."""
    here: dict[str, FolderFacts] = {}
    """The launcher's own view of the folders, by role: it settles a draw."""

    @property
    def first(self) -> Probe:
        """The node of rank 0."""
        return min(self.probes, key=lambda probe: probe.node_id)

    @property
    def must_share(self) -> bool:
        return self.remote or self.several

    @property
    def several(self) -> bool:
        return len(self.probes) > 1


ChecksByHost = dict[str, Check]
"""By host. A check that means nothing here gives none."""
Judge = Callable[[NodeSurvey], ChecksByHost]


def passed_check(name: str, found: str) -> Check:
    """A check that went well."""
    return Check(name=name, ok=True, found=found)


def failed_check(name: str, found: str, cure: str, *, blocks: bool = True) -> Check:
    """A check that failed; `found` is a word in capitals, with the detail in brackets."""
    return Check(name=name, ok=False, found=found, cure=cure, blocks=blocks)


def majority_value(values: Mapping[str, Value], tie: Value | None = None) -> Value | None:
    """What most nodes have; in a draw what `tie` says, else what the first of them has."""
    if not values:
        return None
    counts = Counter(values.values())
    most = max(counts.values())
    leaders = [value for value in values.values() if counts[value] == most]
    return tie if tie is not None and tie in leaders else leaders[0]


def join_names(names: Sequence[str], limit: int = 4) -> str:
    """Names in one phrase."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
