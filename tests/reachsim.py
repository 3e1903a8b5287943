"""Simulate the connection test of N nodes in one process: real `Node` objects and graph, simulated time and transport.

    run = Simulated(1024, faults=Faults(down={"n7"}))
    run.verdicts()["n7"].failed

Each node's counts of connects, messages and bytes are those that `reach.Node` itself keeps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from allranks.nodes.network import links as network
from allranks.nodes.network.links import ConnectionRound, NodeLinks
from allranks.nodes.preflight.runner import connect_window_s
from allranks.nodes.probes import connectivity_probe
from allranks.nodes.records import ConnectionResults

TRIP_S = 0.001
PORTS = [21000, 40000]


@dataclass(frozen=True)
class Faults:
    """What does not work. Packets are dropped unless it says otherwise."""

    down: Collection[str] = ()
    """Nothing to or from these nodes arrives."""
    deaf: Collection[str] = ()
    """Nobody can connect to these nodes; they can connect to others."""
    links: Collection[tuple[str, str]] = ()
    """No connection from the first to the second."""
    start_s: Mapping[str, float] = field(default_factory=dict)
    """Nodes that start late."""
    silent: Collection[str] = ()
    """Nodes that give no answer, and do not run."""
    busy: Mapping[str, int] = field(default_factory=dict)
    """Nodes that drop as many of the first connections to them."""

    def cut(self, source: str, target: str) -> bool:
        return source in self.down or target in self.down or target in self.deaf or (source, target) in self.links


def hosts_of(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def seats_of(hosts: Sequence[str]) -> str:
    return connectivity_probe.encode_seats(
        [[host, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", PORTS] for n, host in enumerate(hosts, 1)]
    )


class Simulated:
    """Both rounds of the connection test of N nodes. `late` names the faults of the second round, if they differ."""

    def __init__(self, nodes: int, faults: Faults | None = None, later: Faults | None = None, seed: str = "7") -> None:
        self.hosts = hosts_of(nodes)
        faults = faults or Faults()
        everybody = {"seats": seats_of(self.hosts), "seed": seed, "window_s": connect_window_s(nodes)}
        self.first, self.first_cost, self.first_s = self._round(
            everybody, network.sampled_links(self.hosts, seed), faults
        )
        self.again = network.second_round(self.hosts, self.first, seed)
        self.second: ConnectionRound | None = None
        self.second_cost: dict[str, dict[str, int]] = {}
        if self.again:
            some = list(self.again)
            links = [[some.index(peer) for peer in self.again[host]] for host in some]
            asked = {"seats": seats_of(some), "links": links, "window_s": connect_window_s(len(some))}
            self.second, self.second_cost, _ = self._round(asked, self.again, faults if later is None else later)

    def verdicts(self) -> dict[str, NodeLinks]:
        return network.judge_links(self.hosts, self.first, self.second)

    def bad(self) -> dict[str, NodeLinks]:
        return {host: found for host, found in self.verdicts().items() if not found.ok}

    @staticmethod
    def _round(
        request: dict, targets: Mapping[str, Sequence[str]], faults: Faults
    ) -> tuple[ConnectionRound, dict[str, dict[str, int]], float]:
        nodes, seconds = simulate(request, faults)
        answers = {name: msgspec.convert(node.report(), ConnectionResults) for name, node in nodes.items()}
        return (
            ConnectionRound(targets=targets, answers=answers),
            {name: node.cost for name, node in nodes.items()},
            seconds,
        )


def simulate(request: dict, faults: Faults) -> tuple[dict[str, connectivity_probe.ProbedNode], float]:
    """Run all nodes of one request to their ends; return them, and the simulated seconds."""
    nodes: dict[str, connectivity_probe.ProbedNode] = {}
    ended: set[str] = set()
    busy = dict(faults.busy)
    events: list[tuple[float, int, Callable[[float], None]]] = []
    number = count()

    def at(when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(number), what))

    names = [line.split(" ")[0] for line in request["seats"].split("\n")]

    def start(index: int, now: float) -> None:
        name = names[index]
        nodes[name] = connectivity_probe.node_of(request, index, now)
        at(nodes[name].deadline, lambda now: step(name, now))
        at(now, lambda now: step(name, now))  # after all that start at the same time: they listen before they connect

    def step(name: str, now: float) -> None:
        node = nodes[name]
        if name in ended:
            return
        if node.done(now):
            ended.add(name)
            return
        for link in node.due(now):
            node.begin(link, now)
            connect(name, link, now)

    def connect(name: str, link: connectivity_probe.Link, now: float) -> None:
        peer = names[link[0]]
        if faults.cut(name, peer) or busy.get(peer, 0) > 0:
            busy[peer] = busy.get(peer, 0) - 1
            at(
                min(now + connectivity_probe.TRY_S, nodes[name].deadline),
                lambda now: fail(name, link, "timed out", now),
            )
        elif peer not in nodes or peer in ended:
            at(now + TRIP_S, lambda now: fail(name, link, "Connection refused", now))
        else:
            nodes[peer].cost["accepts"] += 1
            nodes[name].sent(len(name) + 1)
            nodes[peer].sent(len(peer) + 1)
            at(now + TRIP_S, lambda now: arrive(name, peer, link, now))

    def fail(name: str, link: connectivity_probe.Link, why: str, now: float) -> None:
        nodes[name].failed(link, why, now)
        at(nodes[name].links[link].next_s, lambda now: step(name, now))
        step(name, now)

    def arrive(name: str, peer: str, link: connectivity_probe.Link, now: float) -> None:
        nodes[name].answered(link, peer, now)
        nodes[peer].visited(name, link[1])
        step(name, now)
        step(peer, now)

    for index, name in enumerate(names):
        if name not in faults.silent:
            at(faults.start_s.get(name, 0.0), lambda now, index=index: start(index, now))
    now = 0.0
    while events:
        now, _, what = heapq.heappop(events)
        what(now)
        if len(ended) == len(names) - len(set(faults.silent).intersection(names)):
            break
    return nodes, now
