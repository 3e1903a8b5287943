"""Choose the network that every node is on, determine failing nodes and links, and check names, addresses, ports and clocks. Pure.

    first = ConnectionRound(targets=..., answers=...)
    if retry := second_round(hosts, first, seed):
        verdict = judge_links(hosts, first, ConnectionRound(targets=retry, answers=...))

A round has targets (who connects to whom; a sample) and the answer of each node. A link is directed: it fails if any port of its end
was not reached in any attempt. A node is faulty if most of its links fail; a failure between two other nodes is
reported as a link. Only suspects take part in the second round, each with a few healthy nodes, and only failures that
repeat there are reported.
"""

from __future__ import annotations

import ipaddress
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from allranks.errors import EnvironmentNotAble
from allranks.nodes.checks import ChecksByHost, NodeSurvey, each_node, failed_check, passed_check
from allranks.nodes.probes.connectivity_probe import sampled_targets
from allranks.nodes.records import Check, ConnectionResults, Interface, Probe, UnreachedPort
from allranks.utils.text import format_list

CONTAINER_PREFIXES = ("docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "kube", "podman", "lxc", "lxd")
"""Bridges inside one machine: every node may have the same address there, and they connect no nodes."""


class NodeInterface(msgspec.Struct, frozen=True, kw_only=True):
    """A node's interface and address on the network."""

    interface: str
    address: str


class ChosenNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The network, each node's interface and address on it by host, and the reason for the choice."""

    network: str
    seats: dict[str, NodeInterface]
    reason: str


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    network: ipaddress.IPv4Network
    seats: dict[str, Interface]

    @property
    def speed(self) -> int:
        """Return the speed of the slowest node; 0 if no driver reports it."""
        return min(item.speed_mbit or 0 for item in self.seats.values())


def choose_network(probes: Sequence[Probe], wanted_interface: str | None = None) -> ChosenNetwork:
    """Return the IPv4 network in which every node has an address on an interface that is up; names may differ.

    Of several: the fastest, then the one with the fewest different interface names, then the one to which the nodes' own
    names resolve, then the one of the lowest addresses. `wanted_interface` restricts the choice to that name (or names, joined
    by commas).

    Raises:
        EnvironmentNotAble: the nodes have no network in common; the message names the nodes without it.
    """
    names = [name.strip() for name in wanted_interface.split(",")] if wanted_interface else None
    usable = {probe.host: _usable(probe, names) for probe in probes}
    _refuse_without_interface(probes, usable, names)
    candidates = [c for c in _candidates(usable) if len(c.seats) == len(usable)]
    if not candidates:
        return _routed(usable, names)
    own = {address for probe in probes for address in probe.resolves or []}
    ranked = sorted(candidates, key=lambda c: _preference(c, own))
    best = ranked[0]
    return ChosenNetwork(
        network=str(best.network),
        seats={
            host: NodeInterface(interface=item.name, address=item.address or "")
            for host, item in sorted(best.seats.items())
        },
        reason=_reason(ranked, wanted_interface),
    )


def _routed(usable: dict[str, list[Interface]], names: list[str] | None) -> ChosenNetwork:
    """Return the interfaces without a common network: those that the user names, or the only one of each node.

    Some clouds give every machine its own network and route between them; `reach` tests whether they do.
    """
    single = all(len(items) == 1 and items[0].prefix == 32 for items in usable.values())
    if not (names or single):
        raise EnvironmentNotAble(_nothing_common(usable))
    seats = {
        host: NodeInterface(interface=items[0].name, address=items[0].address or "") for host, items in usable.items()
    }
    why = "set by cluster.rendezvous.interface" if names else "each node has only this one"
    return ChosenNetwork(network="routed", seats=seats, reason=f"no network in common, so it must be routed: {why}")


def _preference(candidate: _Candidate, own: set[str]) -> tuple[int, int, int, int]:
    named = sum(item.address in own for item in candidate.seats.values())
    names = len({item.name for item in candidate.seats.values()})
    return (-candidate.speed, names, -named, int(candidate.network.network_address))


def _usable(probe: Probe, names: list[str] | None) -> list[Interface]:
    found = []
    for item in probe.interfaces:
        if not item.address or not item.up or item.loopback or item.address.startswith(("127.", "169.254.")):
            continue
        if item.name in names if names else not item.name.startswith(CONTAINER_PREFIXES):
            found.append(item)
    return found


def _refuse_without_interface(
    probes: Sequence[Probe], usable: dict[str, list[Interface]], names: list[str] | None
) -> None:
    without = [probe for probe in probes if not usable[probe.host]]
    if not without:
        return
    wanted = f"an interface named {' or '.join(names)}" if names else "an interface that other machines can reach"
    shown = "; ".join(f"{probe.host} has {_list_interfaces(probe.interfaces)}" for probe in without[:4])
    cure = (
        "leave cluster.rendezvous.interface null, so that each node's interface is detected"
        if names
        else "fix the network of that node, or exclude it with cluster.slurm.exclude"
    )
    hosts = ", ".join(probe.host for probe in without)
    raise EnvironmentNotAble(f"{hosts}: no IPv4 address on {wanted} that is up ({shown}); {cure}")


def _list_interfaces(items: Sequence[Interface]) -> str:
    return ", ".join(f"{i.name} {i.address or 'without address'}{'' if i.up else ' (down)'}" for i in items) or "none"


def _candidates(usable: dict[str, list[Interface]]) -> list[_Candidate]:
    found: dict[ipaddress.IPv4Network, dict[str, Interface]] = {}
    for host, items in usable.items():
        for item in sorted(items, key=lambda i: -(i.speed_mbit or 0)):
            network = ipaddress.IPv4Network(f"{item.address}/{item.prefix}", strict=False)
            found.setdefault(network, {}).setdefault(host, item)
    distinct = {
        network: seats
        for network, seats in found.items()
        if len(seats) == 1 or max(Counter(item.address for item in seats.values()).values()) == 1
    }
    return [_Candidate(network=network, seats=seats) for network, seats in distinct.items()]


def _nothing_common(usable: dict[str, list[Interface]]) -> str:
    found = sorted(_candidates(usable), key=lambda c: (-len(c.seats), int(c.network.network_address)))
    cure = (
        "set the interfaces to use in cluster.rendezvous.interface, or exclude these nodes with cluster.slurm.exclude"
    )
    if not found:
        return f"the nodes have the same address on every network: {', '.join(usable)}; {cure}"
    best = found[0]
    left = [host for host in usable if host not in best.seats]
    shown = "; ".join(f"{host} has {_list_interfaces(usable[host])}" for host in left[:4])
    return (
        f"the nodes have no IPv4 network in common: {best.network} has {', '.join(best.seats)}, "
        f"but not {', '.join(left)} ({shown}); {cure}"
    )


def _reason(ranked: list[_Candidate], wanted: str | None) -> str:
    if wanted:
        return f"cluster.rendezvous.interface is {wanted}"
    best = ranked[0]
    if len(ranked) == 1:
        return "the only network that all nodes are on"
    other = ranked[1]
    if best.speed != other.speed:
        return f"the fastest of {len(ranked)} that all nodes are on: {best.speed} Mbit/s, {other.network} has {other.speed or 'no stated speed'}"
    return f"one of {len(ranked)} of the same speed; it has the fewest different interface names, or the nodes' own names resolve to it"


RETRIED_PEERS = 4
"""Number of peers of a suspect in the second round: those with a failed link to it, and the same number of healthy ones."""
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
        found: Links = {}
        for source, answer in self.answers.items():
            failed: dict[str, list[UnreachedPort]] = defaultdict(list)
            for item in answer.unreached:
                failed[item.peer].append(item)
            for target in self.targets.get(source, ()):
                found[source, target] = failed[target]
        return found


class FailedLink(msgspec.Struct, frozen=True, kw_only=True):
    """One port of one node that another node did not reach in any attempt."""

    source: str
    target: str
    address: str
    port: int
    why: str
    tries: int

    def text(self) -> str:
        """Return direction, address, port, and how often it failed: ``n1 -> n2 10.0.0.2:21000 timed out (4 of 4)``."""
        place = f" {self.address}" if self.address else ""
        return f"{self.source} -> {self.target}{place}:{self.port} {self.why} ({self.tries} of {self.tries} attempts failed)"


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
    failed: list[FailedLink] = []
    """Failures attributed to this node; failed links to a faulty node are not."""

    @property
    def ok(self) -> bool:
        return self.answered and not self.errors and not self.failed

    @property
    def peers(self) -> list[str]:
        """Return the other ends of the failed links."""
        return list(dict.fromkeys(item.target if item.source == self.host else item.source for item in self.failed))


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

    Each suspect is tested with a few nodes with a failed link to it and the same number of healthy ones, in both directions. The
    latter are distributed: with many suspects, no healthy node is tested with all of them.
    """
    asked = suspect_nodes(hosts, first)
    if not asked:
        return {}
    draw = random.Random(seed)  # noqa: S311 - a sample, not a secret
    failed_with: dict[str, list[str]] = defaultdict(list)
    for (source, target), failed in first.links().items():
        if failed:
            failed_with[source].append(target)
            failed_with[target].append(source)
    doubted = set(asked)
    pool = [host for host in hosts if host not in doubted]
    if len(pool) < len(asked):
        pool = list(hosts)
    draw.shuffle(pool)
    place = 0
    pairs: set[Link] = set()
    for host in asked:
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

    A link that failed in the first round counts only if it failed in the second too, or if its source was asked again and
    did not answer. A node that answered in neither round is silent; this gives no information about the others. Failed links are
    listed in the order of `hosts`, independent of the seed of the second round.
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
            failed=[_failed(link, item) for link in own for item in links[link]],
        )
    return verdicts


def _merged(first: ConnectionRound, second: ConnectionRound) -> Links:
    """Return the working links of the first round, and those of the second; unconfirmed failures are dropped."""
    before, after = first.links(), second.links()
    asked_again = {(source, target) for source, targets in second.targets.items() for target in targets}
    unconfirmed = {link for link, failed in before.items() if failed and link not in asked_again}
    found = {link: failed for link, failed in before.items() if link not in unconfirmed}
    for link, failed in after.items():
        found[link] = [_both(item, before.get(link, [])) for item in failed]
    return found


def _both(item: UnreachedPort, earlier: Collection[UnreachedPort]) -> UnreachedPort:
    """Combine the attempts of both rounds on one port."""
    tries = item.tries + sum(other.tries for other in earlier if other.port == item.port)
    return msgspec.structs.replace(item, tries=tries)


def _failed(link: Link, item: UnreachedPort) -> FailedLink:
    return FailedLink(
        source=link[0], target=link[1], address=item.address, port=item.port, why=item.why, tries=item.tries
    )


CLOCK_LIMIT_S = 2.0


def net(survey: NodeSurvey) -> ChecksByHost:
    """Check that all nodes share a network; interface names may differ."""
    if not survey.several:
        return {}
    if survey.network is None:
        error = survey.network_error or "no network was chosen"
        blamed = [p for p in survey.probes if not _outside(p)] or [p for p in survey.probes if p.host in error]
        return {
            p.host: failed_check("net", f"NONE({_addresses(p)})", error)
            if p in blamed
            else passed_check("net", _addresses(p))
            for p in survey.probes
        }
    seats = survey.network.seats
    return {p.host: passed_check("net", f"{seats[p.host].interface}/{seats[p.host].address}") for p in survey.probes}


def _outside(probe: Probe) -> list[str]:
    return [
        f"{i.name}/{i.address}"
        for i in probe.interfaces
        if i.address and i.up and not i.loopback and not i.name.startswith(CONTAINER_PREFIXES)
    ]


def _addresses(probe: Probe) -> str:
    down = [f"{i.name}-down" for i in probe.interfaces if not i.up and not i.loopback]
    return ",".join(_outside(probe) or down) or "no-interface"


@each_node
def ifname(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that an interface named by the user exists on every node: names often differ between nodes."""
    missing = [f"{n}={v}" for n, v in survey.need.named.items() if not _matches(n, v, probe)]
    if not missing:
        return passed_check("ifname", "ok") if survey.need.named else None
    cure = (
        f"{probe.host} has {_addresses(probe)}, but none matches {missing[0]}: remove it from cluster.env or "
        "cluster.rendezvous.interface, so that each node's interface is detected; or list all names, separated by commas"
    )
    return failed_check("ifname", f"MISSING({','.join(missing)})", cure)


def _matches(name: str, value: str, probe: Probe) -> bool:
    """Return whether an interface that is up matches. Gloo: exact names. NCCL: prefixes, `=` exact, `^` excludes."""
    up = [item.name for item in probe.interfaces if item.up and item.address]
    if name.startswith("GLOO"):
        return any(item in up for item in value.split(","))
    excludes = value.startswith("^")
    plain = value.removeprefix("^")
    exact = plain.startswith("=")
    words = [word for word in plain.removeprefix("=").split(",") if word]
    hits = [item for item in up if any(item == word if exact else item.startswith(word) for word in words)]
    return len(hits) < len(up) if excludes else bool(hits)


@each_node
def reach(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check connections between nodes. Failures are attributed to the faulty node, not to those that tried to reach it."""
    if survey.reach is None:
        return None
    host, links = probe.host, survey.reach.get(probe.host)
    if links is None or not links.answered:
        return failed_check("reach", "NO-ANSWER", f"{host} did not answer the connection test; see the error of srun")
    if links.ok:
        return passed_check("reach", f"{links.reached}/{links.tried}")
    shown = "; ".join(links.errors) or (
        f"{links.tried - links.reached} of {links.tried} nodes not reached from {host}, "
        f"{links.tried_by - links.reached_by} of {links.tried_by} did not reach it: "
        f"{format_list([item.text() for item in links.failed], 3)}"
    )
    cure = (
        f"{host}: {shown}; a firewall, a broken link or the wrong network: choose another one in "
        f"cluster.rendezvous.interface, or exclude the node (--exclude-bad, cluster.slurm.exclude)"
    )
    return failed_check("reach", f"UNREACHABLE({','.join(links.peers[:4]) or host})", cure)


@each_node
def name(survey: NodeSurvey, probe: Probe) -> Check | None:
    """Check that the node's own name resolves to a reachable address. It does not block, because ranks get addresses."""
    if not survey.several:
        return None
    if loop := [a for a in probe.resolves or [] if ipaddress.ip_address(a).is_loopback]:
        word = f"LOOPBACK({loop[0]})"
        cure = (
            f"/etc/hosts of {probe.host} maps its own name {probe.own_name} to {loop[0]}: remove that line; "
            "until then programs that listen on their host name cannot be reached (allranks passes addresses)"
        )
    elif not probe.resolves:
        word, why = f"UNKNOWN({probe.own_name})", probe.resolve_error or "no address"
        cure = f"{probe.host} cannot resolve its own name ({why}): add it to /etc/hosts or to DNS"
    else:
        return passed_check("name", "ok")
    return failed_check("name", word, cure, blocks=survey.network is None)


def port(survey: NodeSurvey) -> ChecksByHost:
    """Check that the rendezvous port is free on the first node; the other nodes do not listen on it."""
    asked = survey.required.ports
    if not asked:
        return {}
    first = survey.first
    if first.free_ports:
        return {first.host: passed_check("port", str(first.free_ports[0]))}
    if survey.need.port is not None:
        cure = f"another program listens on port {survey.need.port} of {first.host}: set cluster.rendezvous.port to null, so that a free port is chosen"
        return {first.host: failed_check("port", f"TAKEN({survey.need.port})", cure)}
    cure = f"other programs listen on all these ports on {first.host}: set a free port in cluster.rendezvous.port"
    return {first.host: failed_check("port", f"TAKEN({','.join(map(str, asked))})", cure)}


def clock(survey: NodeSurvey) -> ChecksByHost:
    """Check that clocks agree: otherwise logs do not show the first failure, nor file times the newest file."""
    off = {p.host: p.clock - survey.received[p.host] for p in survey.probes if p.host in survey.received}
    if not off:
        return {}
    middle = statistics.median(off.values())
    if abs(middle) > CLOCK_LIMIT_S and len(off) > 2:  # then the launcher's own clock is wrong
        off = {host: seconds - middle for host, seconds in off.items()}
    return {
        host: passed_check("clock", f"{seconds:+.2f}s")
        if abs(seconds) <= CLOCK_LIMIT_S
        else failed_check(
            "clock", f"WRONG({seconds:+.1f}s)", f"set the clock of {host} (chronyc makestep, or ask its administrator)"
        )
        for host, seconds in off.items()
    }
