"""Input of the node checks, and helpers that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from allranks.nodes.records import Check, FolderFacts, NodeRequirements, Probe
from allranks.spec.records import RunSpec

if TYPE_CHECKING:
    from allranks.nodes.network.choose import ChosenNetwork
    from allranks.nodes.network.links import NodeLinks

Value = TypeVar("Value")


class PlanRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan requires of each node."""

    procs_per_node: int = 1
    threads: int | None = None
    device: str = "cpu"
    share_gpus: bool = False
    """Several ranks may use one GPU; NCCL needs one for each."""
    port: int | None = None
    """A port that the user fixed; None: any of the candidates."""
    rank_memory_bytes: int | None = None
    """Estimated memory that a rank needs on its device; None: unknown, or not checked."""
    named: dict[str, str] = {}
    """Variables of NCCL and Gloo in which the user names interfaces."""


class NodeSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """Every node's answers, and the request."""

    probes: list[Probe]
    required: NodeRequirements
    need: PlanRequirements = PlanRequirements()
    network: ChosenNetwork | None = None
    network_error: str | None = None
    reach: dict[str, NodeLinks] | None = None
    """Each node's connections to and from others, by host; None: not tested."""
    nonces: dict[str, str] = {}
    """The secret that every node must read in a shared folder, by role."""
    received: dict[str, float] = {}
    """The launcher's clock when the node's line arrived, by host."""
    remote: bool = False
    """The nodes are not the launcher's machine: even a single node must share the launcher's folders."""
    own_folders: dict[str, FolderFacts] = {}
    """The launcher's own view of the folders, by role: it decides a tie."""
    program_here: dict[str, bool] = {}
    """Whether the launcher's own interpreter has each package of the program."""

    @property
    def first(self) -> Probe:
        """Return the node of rank 0."""
        return min(self.probes, key=lambda probe: probe.node_id)

    @property
    def must_share(self) -> bool:
        return self.remote or self.several

    @property
    def several(self) -> bool:
        return len(self.probes) > 1


ChecksByHost = dict[str, Check]
"""Checks by host. A check that does not apply returns none."""
Judge = Callable[[NodeSurvey], ChecksByHost]
Ask = Callable[[RunSpec, Path, NodeRequirements], NodeRequirements]
"""Adds to the request to every node. Arguments: spec, folder from which its relative paths start, request so far."""


def each_node(judge: Callable[[NodeSurvey, Probe], Check | None]) -> Judge:
    """Make a check of all nodes from one that judges a node by itself; None: the check does not apply to it."""

    @wraps(judge)
    def of_all(survey: NodeSurvey) -> ChecksByHost:
        return {probe.host: check for probe in survey.probes if (check := judge(survey, probe))}

    return of_all


def passed_check(name: str, found: str) -> Check:
    """Return a check that passed."""
    return Check(name=name, ok=True, found=found)


def failed_check(name: str, found: str, cure: str, *, blocks: bool = True, stageable: bool = True) -> Check:
    """Return a check that failed; `found` is a word in capitals, with the detail in brackets."""
    return Check(name=name, ok=False, found=found, cure=cure, blocks=blocks, stageable=stageable)


def majority_value(values: Mapping[str, Value], tie: Value | None = None) -> Value | None:
    """Return the most common value; in a tie `tie`, else the value of the first node."""
    if not values:
        return None
    counts = Counter(values.values())
    most = max(counts.values())
    leaders = [value for value in values.values() if counts[value] == most]
    return tie if tie is not None and tie in leaders else leaders[0]
