"""Measures all pairs of ranks on the nodes of a preflight, and names the pair, or the node, that stands out."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter

import msgspec

from allranks.errors import RunFailed
from allranks.fabric.connections import by_interface
from allranks.fabric.job import Policy
from allranks.fabric.judge import Outcome, judge
from allranks.fabric.observed import Collector, host_of
from allranks.planning import LaunchPlan
from allranks.preflight.gather import Preflight, Where
from allranks.preflight.probe import unused_port

BYTES = 4 * 2**20
LIMIT_S = 180.0
SLOW = 0.33
"""A pair stands out if it has less than this share of the usual bandwidth."""
ENOUGH = 3
"""Of two pairs, none can stand out."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two ranks, and what passes between them."""

    a: int
    b: int
    copy_s: float
    latency_s: float
    all_reduce_s: float
    bytes: int = BYTES
    host_a: str = ""
    host_b: str = ""

    @property
    def copy_bytes_per_s(self) -> float:
        """One way."""
        return self.bytes / self.copy_s

    @property
    def all_reduce_bytes_per_s(self) -> float:
        """Of two ranks each sends and gets the whole once, so this is what the link carries."""
        return self.bytes / self.all_reduce_s

    def line(self) -> str:
        """One line for people."""
        ends = f"{self.host_a}:{self.a} - {self.host_b}:{self.b}"
        return (
            f"{ends:24} copy {_ms(self.copy_s)} {_rate(self.copy_bytes_per_s)}, latency {_ms(self.latency_s)}, "
            f"all-reduce {_ms(self.all_reduce_s)} {_rate(self.all_reduce_bytes_per_s)}"
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs, and what the ranks that measured them really used."""

    pairs: list[Pair]
    outcome: Outcome


def measure(where: Where, found: Preflight, plan: LaunchPlan, procs: int, policy: Policy) -> Measured:
    """Starts the program on all nodes, with each node's own environment, and waits for it.

    Raises:
        RunFailed: it ended without figures; the message says how.
    """
    hosts = [probe.host for probe in found.probes]
    seats = found.network.seats if found.network else {}
    alone = not seats
    wish = {
        "hosts": hosts,
        "environment": {host: _environment(policy, host) for host in hosts},
        "master": "127.0.0.1" if alone else seats[hosts[0]].address,
        "port": found.port or unused_port(),
        "procs": procs,
        "backend": plan.backend,
        "bytes": BYTES,
        "limit_s": LIMIT_S,
    }
    argv = [sys.executable, "-m", "allranks.preflight.pairs", "--json-args", json.dumps(wish)]
    answers = where.run(argv, LIMIT_S + 10, None)
    for line in answers.lines:
        facts = line.facts()
        if facts and "pairs" in facts:
            pairs = msgspec.convert(facts["pairs"], list[Pair])
            named = [msgspec.structs.replace(p, host_a=hosts[p.a // procs], host_b=hosts[p.b // procs]) for p in pairs]
            lines = [item.text for item in answers.lines] + answers.said.splitlines()
            return Measured(pairs=named, outcome=_outcome(found, policy, lines, facts.get("connections", []), procs))
    last = [text for text in answers.said.splitlines() if text.strip()][-3:]
    raise RunFailed(f"the collectives gave no figures (exit code {answers.returncode}): {' / '.join(last)}")


def _environment(policy: Policy, host: str) -> dict[str, str]:
    node = policy.of(host)
    return {item.name: item.value for item in (node.environment if node else []) if item.value is not None}


def _outcome(found: Preflight, policy: Policy, lines: list[str], seen: list[dict[str, int]], procs: int) -> Outcome:
    """What NCCL said and whom the ranks were connected by, against the policy."""
    observed = []
    for place, probe in enumerate(found.probes):
        collector = Collector(probe.host)
        names = {probe.host, probe.own_name, probe.own_name.partition(".")[0]}
        collector.take(line for line in lines if host_of(line) in names)
        counts: Counter[str] = Counter()
        for one in seen[place * procs : (place + 1) * procs]:
            counts.update(one)
        interfaces = {item.address: item.name for item in probe.interfaces if item.address}
        observed.append(collector.observed(by_interface(counts, interfaces)))
    return judge({node.host: node.expected for node in policy.nodes}, observed)


def slow_pairs(pairs: list[Pair]) -> list[Pair]:
    """Pairs far below the others, slowest first. Pairs within a node are compared with each other only."""
    found: list[Pair] = []
    for inside in (True, False):
        alike = [pair for pair in pairs if (pair.host_a == pair.host_b) is inside]
        if len(alike) < ENOUGH:
            continue
        for figure in ("copy_bytes_per_s", "all_reduce_bytes_per_s"):
            # With one bad node of three, two of three pairs are slow: so the fastest half is the yardstick.
            best = sorted((getattr(pair, figure) for pair in alike), reverse=True)
            usual = statistics.median(best[: max(1, len(best) // 2)])
            found += [pair for pair in alike if getattr(pair, figure) < SLOW * usual and pair not in found]
    return sorted(found, key=lambda pair: pair.copy_bytes_per_s)


def blamed(pairs: list[Pair], slow: list[Pair]) -> str | None:
    """The one node that all slow pairs have in common, if there is one and the others are well."""
    shared = set.intersection(*({pair.host_a, pair.host_b} for pair in slow)) if slow else set()
    if len(shared) != 1:
        return None
    host = next(iter(shared))
    of_host = [pair for pair in pairs if host in (pair.host_a, pair.host_b) and pair.host_a != pair.host_b]
    return host if len(of_host) > 1 and all(pair in slow for pair in of_host) else None


def verdict(pairs: list[Pair]) -> str:
    """One sentence: who stands out."""
    slow = slow_pairs(pairs)
    if not slow:
        return "no pair stands out" if len(pairs) >= ENOUGH else "too few pairs for one to stand out"
    host = blamed(pairs, slow)
    worst = slow[0]
    shown = f"{worst.host_a}:{worst.a} - {worst.host_b}:{worst.b} with {_rate(worst.copy_bytes_per_s)}"
    if host:
        return f"{host} is slow to everybody (worst {shown}): look at its cable, its port and its interface"
    others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    return f"this pair is slow: {shown}{others}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"
