"""Determine failing nodes and links from connections between the nodes. Pure.

    first = ConnectionRound(targets=..., answers=...)
    if retry := second_round(hosts, first, seed):
        verdict = judge_links(hosts, first, ConnectionRound(targets=retry, answers=...))

A round has targets (who connects to whom; a sample) and the answer of each node. A link is directed: it fails if any
port of its end was not reached in any attempt. A node is faulty if most of its links fail; a failure between two other
nodes is reported as a link. Only suspects take part in the second round, each with a few healthy nodes, and only
failures that repeat there are reported.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from allranks.nodes.probes.connectivity_probe import sampled_targets
from allranks.nodes.records import ConnectionResults, UnreachedPort

RETRIED_PEERS = 4
"""Number of peers of a suspect in the second round: those with a failed link to it, and the same number of healthy
ones."""
MIN_FAILED_LINKS = 2
"""With one failing link only, it is unknown which end is faulty."""

Link = tuple[str, str]
Links = dict[Link, list[UnreachedPort]]
"""Source and target of each tested link, and the ports that were not reached; empty if all were."""


class ConnectionRound(msgspec.Struct, frozen=True, kw_only=True):
    """Which nodes were to connect to which, and their answers."""

    targets: Mapping[str, Sequence[str]]
    answers: Mapping[str, ConnectionResults]

    def links(self) -> Links:
        """Return the links of the nodes that answered."""
        links: Links = {}
        for source, answer in self.answers.items():
            failed: dict[str, list[UnreachedPort]] = defaultdict(list)
            for item in answer.unreached:
                failed[item.peer].append(msgspec.structs.replace(item, source=source))
            for target in self.targets.get(source, ()):
                links[source, target] = failed[target]
        return links


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
    """Return each node's targets in the first round: the graph that `connectivity_probe.py` derives on the nodes."""
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


def suspect_nodes(hosts: Sequence[str], first: ConnectionRound) -> list[str]:
    """Return the nodes to test again: silent, unable to listen, faulty, or an end of a failing link."""
    links = first.links()
    blamed = faulty_nodes(links)
    ends = {end for link, failed in links.items() if failed and not blamed.intersection(link) for end in link}
    silent = {host for host in hosts if host not in first.answers or first.answers[host].errors}
    return [host for host in hosts if host in blamed | ends | silent]


def second_round(hosts: Sequence[str], first: ConnectionRound, seed: str) -> dict[str, list[str]]:
    """Return who connects to whom in the second round; empty if there are no suspects.

    Each suspect is tested with a few nodes with a failed link to it and the same number of healthy ones, in both
    directions. The latter are distributed: with many suspects, no healthy node is tested with all of them.
    """
    suspects = suspect_nodes(hosts, first)
    if not suspects:
        return {}
    draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
    failed_with: dict[str, list[str]] = defaultdict(list)
    for (source, target), failed in first.links().items():
        if failed:
            failed_with[source].append(target)
            failed_with[target].append(source)
    doubted = set(suspects)
    pool = [host for host in hosts if host not in doubted]
    if len(pool) < len(suspects):
        pool = list(hosts)
    draw.shuffle(pool)
    place = 0
    pairs: set[Link] = set()
    for host in suspects:
        peers = list(dict.fromkeys(failed_with[host]))
        draw.shuffle(peers)
        chosen = peers[:RETRIED_PEERS]
        for _ in range(min(len(pool), RETRIED_PEERS)):
            helper = pool[place % len(pool)]
            place += 1
            if helper != host and helper not in chosen:
                chosen.append(helper)
        pairs.update(link for peer in chosen for link in ((host, peer), (peer, host)))
    met: dict[str, list[str]] = defaultdict(list)
    for source, target in sorted(pairs):
        met[source].append(target)
    return {host: met[host] for host in hosts if host in met}


def judge_links(
    hosts: Sequence[str], first: ConnectionRound, second: ConnectionRound | None = None
) -> dict[str, NodeLinks]:
    """Return each node's verdict.

    A link that failed in the first round counts only if it failed in the second too, or if its source was asked again
    and did not answer. A node that answered in neither round is silent; this gives no information about the others.
    Failed links are listed in the order of `hosts`, independent of the seed of the second round.
    """
    links = first.links() if second is None else _merged(first, second)
    latest = {**first.answers, **(second.answers if second else {})}
    blamed = faulty_nodes(links)
    tried_from: Counter[str] = Counter(source for source, _ in links)
    tried_to: Counter[str] = Counter(target for _, target in links)
    failed_from: dict[str, list[Link]] = defaultdict(list)
    failed_to: dict[str, list[Link]] = defaultdict(list)
    place = {host: index for index, host in enumerate(hosts)}
    for link in sorted(
        (link for link, failed in links.items() if failed),
        key=lambda link: (place.get(link[0], len(place)), place.get(link[1], len(place))),
    ):
        failed_from[link[0]].append(link)
        failed_to[link[1]].append(link)
    verdicts: dict[str, NodeLinks] = {}
    for host in hosts:
        answer = latest.get(host)
        own = [link for link in failed_from[host] if link[1] not in blamed and link[1] in latest]
        if host in blamed:
            own = [*failed_from[host], *failed_to[host]]
        verdicts[host] = NodeLinks(
            host=host,
            answered=answer is not None,
            errors=answer.errors if answer else [],
            tried=tried_from[host],
            reached=tried_from[host] - len(failed_from[host]),
            tried_by=tried_to[host],
            reached_by=tried_to[host] - len(failed_to[host]),
            failed=[item for link in own for item in links[link]],
        )
    return verdicts


def _merged(first: ConnectionRound, second: ConnectionRound) -> Links:
    """Return the working links of the first round, and those of the second; unconfirmed failures are dropped."""
    before, after = first.links(), second.links()
    asked_again = {(source, target) for source, targets in second.targets.items() for target in targets}
    unconfirmed = {link for link, failed in before.items() if failed and link not in asked_again}
    confirmed = {link: failed for link, failed in before.items() if link not in unconfirmed}
    for link, failed in after.items():
        earlier = {item.port: item.tries for item in before.get(link, [])}
        confirmed[link] = [
            msgspec.structs.replace(item, tries=item.tries + earlier.get(item.port, 0)) for item in failed
        ]
    return confirmed
