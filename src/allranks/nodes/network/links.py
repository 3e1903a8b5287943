"""Determine failing nodes and links from connections between the nodes. Pure.

A link is directed: it fails if any port of its end was not reached in any attempt. A node is faulty if most of its
links fail; a failure between two other nodes is reported as a link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from allranks.nodes.probes.connectivity_probe import sampled_targets
from allranks.nodes.records import ConnectionResults, UnreachedPort

MIN_FAILED_LINKS = 2
"""With one failing link only, it is unknown which end is faulty."""

Link = tuple[str, str]
"""Source and target."""


class NodeLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one node's connections to and from others."""

    host: str
    answered: bool = True
    errors: list[str] = []
    """Why ports of this node could not be opened."""
    tried: int = 0
    reached: int = 0
    """Number of nodes that it was to connect to, and that it reached."""
    tried_by: int = 0
    reached_by: int = 0
    """Number of nodes that were to connect to it, and that reached it."""
    failed: list[UnreachedPort] = []
    """Failures attributed to this node; failed links to a faulty node are not."""

    @property
    def ok(self) -> bool:
        return self.answered and not self.errors and not self.failed

    @property
    def peers(self) -> list[str]:
        """Return the other ends of the failed links."""
        return list(dict.fromkeys(item.peer if item.source == self.host else item.source for item in self.failed))


def sampled_links(hosts: Sequence[str], seed: str) -> dict[str, list[str]]:
    """Return each node's targets: the graph that `connectivity_probe.py` derives on the nodes."""
    return {host: [hosts[i] for i in sampled_targets(index, len(hosts), seed)] for index, host in enumerate(hosts)}


def faulty_nodes(links: Mapping[Link, object]) -> set[str]:
    """Return the nodes for which most links to or from them fail; a false value is a working link.

    The node with the most failing links is taken first and its links are dropped, so that a healthy node is not
    blamed for its neighbours. Nodes with equal numbers are taken together.
    """
    tried_from: Counter[str] = Counter(source for source, _ in links)
    tried_to: Counter[str] = Counter(target for _, target in links)
    outgoing: dict[str, set[str]] = defaultdict(set)
    incoming: dict[str, set[str]] = defaultdict(set)
    for (source, target), failed in links.items():
        if failed:
            outgoing[source].add(target)
            incoming[target].add(source)
    blamed: set[str] = set()
    while True:
        failing = {
            host: len(outgoing[host]) + len(incoming[host])
            for host in {*outgoing, *incoming}
            if _most(len(outgoing[host]), tried_from[host]) or _most(len(incoming[host]), tried_to[host])
        }
        if not failing:
            return blamed
        worst = max(failing.values())
        for host in [host for host, count in failing.items() if count == worst]:
            blamed.add(host)
            for target in outgoing.pop(host, ()):
                incoming[target].discard(host)
                tried_to[target] -= 1
            for source in incoming.pop(host, ()):
                outgoing[source].discard(host)
                tried_from[source] -= 1


def _most(failed: int, tried: int) -> bool:
    return failed >= MIN_FAILED_LINKS and 2 * failed > tried


def judge_links(targets: Mapping[str, Sequence[str]], answers: Mapping[str, ConnectionResults]) -> dict[str, NodeLinks]:
    """Return each node's verdict. A node that did not answer is silent; this gives no information about the others.

    Args:
        targets: for each node, those that it was to connect to.
        answers: of the nodes that answered.
    """
    links: dict[Link, list[UnreachedPort]] = {
        (source, target): [
            msgspec.structs.replace(item, source=source) for item in answers[source].unreached if item.peer == target
        ]
        for source, its_targets in targets.items()
        if source in answers
        for target in its_targets
    }
    outgoing: dict[str, list[Link]] = defaultdict(list)
    incoming: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        outgoing[link[0]].append(link)
        incoming[link[1]].append(link)
    blamed = faulty_nodes(links)
    verdicts: dict[str, NodeLinks] = {}
    for host in targets:
        answer = answers.get(host)
        own = [link for link in outgoing[host] if link[1] not in blamed and link[1] in answers]
        if host in blamed:
            own = [*outgoing[host], *incoming[host]]
        verdicts[host] = NodeLinks(
            host=host,
            answered=answer is not None,
            errors=answer.errors if answer else [],
            tried=len(outgoing[host]),
            reached=sum(not links[link] for link in outgoing[host]),
            tried_by=len(incoming[host]),
            reached_by=sum(not links[link] for link in incoming[host]),
            failed=[item for link in own for item in links[link]],
        )
    return verdicts
