"""Measure collectives and pairs of ranks, judge their bandwidth, and test all copies between GPUs on the nodes of a
preflight.

Results of copy tests are saved next to the runs, so that later runs on the same node respect them. The pair measurement
names the pair, or the node, that is slower than the others. Bandwidth is compared with what the hardware gives.

nccl-tests (doc/PERFORMANCE.md): the algorithm bandwidth is the size by the time. The bus bandwidth is that times
2(n-1)/n for n ranks, so that it can be compared with the rate of the slowest link for any n.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.errors import RunFailed
from allranks.nodes.network.copy_results import save_copy_test
from allranks.nodes.network.traffic import NetworkLogParser, NetworkOutcome, compare_with_policy, host_of_line
from allranks.nodes.preflight.runner import PreflightResult, TargetNodes
from allranks.nodes.probes.probe import unused_port
from allranks.nodes.records import Probe
from allranks.planning.network_policy import NetworkPolicy, NodeNetworkPolicy
from allranks.planning.records import LaunchPlan, NodeFacts
from allranks.utils.kernel_counters import count_by_interface
from allranks.utils.text import format_bytes

NVLINK_GENERATIONS = {
    "V100": 2, "A100": 3, "A800": 3, "A30": 3, "H100": 4, "H800": 4, "H200": 4, "H20": 4, "GH200": 4, "B200": 5,
    "B300": 5, "GB200": 5, "GB300": 5,
}  # fmt: skip
NVLINK_BYTES_PER_S = {2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""Of one link in one direction, by generation. The number of links between two GPUs is in the node's topology
(``NV18``).
Source: https://www.nvidia.com/en-us/data-center/nvlink/ (600 GB/s in both directions for the 12 links of an A100, 900
for the 18 of an H100,
1800 for the 18 of a B200) and the data sheet of V100 (300 for 6). The rates of InfiniBand and Ethernet ports are those
that the kernel reports."""
LOW_SHARE = 0.4
"""Below this share of what the hardware gives, large all-reduces are reported: NCCL usually reaches 70 to 95 %."""
LARGE_BYTES = 16 * 2**20
"""Below this size the latency counts, and a comparison with the rate of a link says nothing."""


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one all-reduce of all ranks."""

    kind: str
    bytes: int
    seconds: float
    ranks: int = 0

    @property
    def algorithm_bytes_per_s(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        return self.algorithm_bytes_per_s * 2 * (self.ranks - 1) / self.ranks

    def line(self) -> str:
        """Return one line for the terminal."""
        rates = f"algorithm {format_rate(self.algorithm_bytes_per_s)}, bus {format_rate(self.bus_bytes_per_s)}"
        return f"{self.kind:14} {format_bytes(self.bytes):>8} {self.seconds * 1e3:10.3f} ms  {rates}"


class HardwareLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The rate at which the slowest link of a ring of all ranks can send, and what link that is."""

    bytes_per_s: float
    what: str


def format_rate(bytes_per_s: float) -> str:
    """Return ``12.30 GB/s``, or ``350.0 MB/s``."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def hardware_limit(
    probes: Sequence[Probe], facts: Sequence[NodeFacts], policy: NetworkPolicy, procs: int
) -> HardwareLimit | None:
    """Return what the links of these nodes give; None if a link on the way is unknown (PCIe, virtual interfaces)."""
    known_nodes = {node.host: node for node in facts}
    limits: list[HardwareLimit | None] = []
    for probe in probes:
        node = known_nodes[probe.host]
        if procs > 1:
            limits.append(_nvlink(probe, node))
        if len(probes) > 1:
            limits.append(_network(probe, node, policy.of(probe.host)))
    known = [limit for limit in limits if limit is not None]
    return min(known, key=lambda limit: limit.bytes_per_s) if known and len(known) == len(limits) else None


def _nvlink(probe: Probe, node: NodeFacts) -> HardwareLimit | None:
    topology = node.topology
    words = {word for gpu in probe.gpus for word in re.split(r"[\s-]+", str(gpu.get("name")))}
    generations = {NVLINK_GENERATIONS[word] for word in words & NVLINK_GENERATIONS.keys()}
    links = [link.nvlinks for link in topology.gpu_pairs()] if topology else []
    if len(generations) != 1 or not links or min(links) == 0:
        return None
    generation, count = generations.pop(), min(links)
    each = NVLINK_BYTES_PER_S[generation]
    return HardwareLimit(
        bytes_per_s=count * each, what=f"{count} links of NVLink {generation} with {each / 1e9:g} GB/s on {probe.host}"
    )


def _network(probe: Probe, node: NodeFacts, policy: NodeNetworkPolicy | None) -> HardwareLimit | None:
    expected = policy.expected if policy else None
    if expected and expected.transport in ("InfiniBand", "RoCE"):
        ports = [
            p for p in node.ports if p.active and (not expected.devices or {p.name, p.device} & set(expected.devices))
        ]
        if not ports or not all(port.gbit for port in ports):
            return None
        names = ", ".join(f"{port.name} {port.gbit:g} Gbit/s" for port in ports)
        return HardwareLimit(
            bytes_per_s=sum(port.gbit for port in ports) * 1e9 / 8,
            what=f"{expected.transport} of {probe.host}: {names}",
        )
    name = node.seat.interface if node.seat else ""
    one = next(
        (item for item in probe.interfaces if item.name == name and item.speed_mbit and item.driver), None
    )  # veth has no rate
    if one is None or not one.speed_mbit:
        return None
    return HardwareLimit(
        bytes_per_s=one.speed_mbit * 1e6 / 8, what=f"{name} of {probe.host} with {one.speed_mbit / 1000:g} Gbit/s"
    )


def compare_with_hardware(sweep: Sequence[CollectiveTime], limit: HardwareLimit | None) -> str:
    """Return one sentence about the largest all-reduce; empty if there is none."""
    large = max((c for c in sweep if c.bytes >= LARGE_BYTES), key=lambda c: c.bytes, default=None)
    if large is None:
        return ""
    done = f"all_reduce of {format_bytes(large.bytes)} by {large.ranks} ranks"
    rate = f"{done}: bus bandwidth {format_rate(large.bus_bytes_per_s)}"
    if limit is None:
        return f"{rate}; what the hardware gives is not known"
    share = large.bus_bytes_per_s / limit.bytes_per_s
    low = ": far below; see `allranks topo`, and the network that the ranks used" if share < LOW_SHARE else ""
    return f"{rate}, {share:.0%} of {format_rate(limit.bytes_per_s)} ({limit.what}){low}"


COPY_TEST_LIMIT_S = 300.0
COPY_LIMIT_S = 20.0


class CopyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One node: ordered pairs tested, pairs that failed (``GPU0-GPU1``), and why it could not be tested."""

    host: str
    tested: int = 0
    failed: list[str] = []
    error: str = ""

    def line(self) -> str:
        """Return one line for the terminal."""
        if self.failed:
            return (
                f"{self.host}: copies between {', '.join(self.failed)} hang or return wrong values; runs on this node "
                "do not use peer-to-peer"
            )
        reason = f" ({self.error})" if self.error else ""
        return f"{self.host}: {self.tested} copies between GPUs were correct{reason}"


def run_copy_test(where: TargetNodes, preflight: PreflightResult, run_root: Path) -> list[CopyResult]:
    """Test copies between all pairs of GPUs of every node with several GPUs. Nodes without an answer have an error."""
    probes = {probe.host: probe for probe in preflight.probes if len(probe.gpus) > 1}
    if not probes:
        return []
    program = [sys.executable, "-m", "allranks.nodes.probes.links_probe"]
    argv = [*program, "copies", "--json-args", json.dumps({"limit_s": COPY_LIMIT_S})]
    answers = where.run(argv, COPY_TEST_LIMIT_S, None, list(probes)).by_host()
    results = []
    for host, probe in probes.items():
        facts = answers[host].facts() if host in answers else None
        result = msgspec.convert(facts or {"host": host, "error": "no answer"}, CopyResult)
        if result.tested:
            save_copy_test(run_root, probe, result.failed, result.tested)
        results.append(result)
    return results


PAIR_BYTES = {"nccl": 256 * 2**20, "gloo": 4 * 2**20}
"""What two ranks copy, by backend: with 4 MiB, NVLink and InfiniBand would show their latency."""
COLLECTIVES_LIMIT_S = 180.0
BUDGET_S = {"nccl": 100.0, "gloo": 40.0}
"""Time for the measurements themselves, after the ranks have started."""
SLOW_SHARE = 0.33
"""A pair is slow if it has less than this share of the usual bandwidth."""
MIN_PAIRS = 3
"""Minimum number of pairs for a comparison."""


class RankPair(msgspec.Struct, frozen=True, kw_only=True):
    """Two ranks, and the measurements between them."""

    a: int
    b: int
    copy_s: float
    latency_s: float
    all_reduce_s: float
    bytes: int = PAIR_BYTES["gloo"]
    host_a: str = ""
    host_b: str = ""

    @property
    def copy_bytes_per_s(self) -> float:
        """Return the bandwidth of a copy in one direction."""
        return self.bytes / self.copy_s

    @property
    def all_reduce_bytes_per_s(self) -> float:
        """Return an all-reduce's bandwidth, the link's load: each of two ranks sends and receives the data once."""
        return self.bytes / self.all_reduce_s

    def line(self) -> str:
        """Return one line for the terminal."""
        ends = f"{self.host_a}:{self.a} - {self.host_b}:{self.b}"
        return (
            f"{ends:24} copy {_ms(self.copy_s)} {format_rate(self.copy_bytes_per_s)}, latency {_ms(self.latency_s)}, "
            f"all-reduce {_ms(self.all_reduce_s)} {format_rate(self.all_reduce_bytes_per_s)}"
        )


class CollectiveMeasurements(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs, collectives of all ranks by size, and the network that the measuring ranks used.

    ``rounds``: how many rounds of pairs were measured in time, and of how many.
    """

    pairs: list[RankPair]
    outcome: NetworkOutcome | None
    sweep: list[CollectiveTime] = []
    rounds: tuple[int, int] = (0, 0)


def measure_collectives(
    where: TargetNodes, preflight: PreflightResult, plan: LaunchPlan, procs: int, policy: NetworkPolicy
) -> CollectiveMeasurements:
    """Start the program on all nodes, with each node's own environment, and wait for it.

    Raises:
        RunFailed: it ended without results; the message says how.
    """
    hosts = [probe.host for probe in preflight.probes]
    seats = preflight.network.seats if preflight.network else {}
    alone = not seats
    request = {
        "hosts": hosts,
        "environment": {host: _environment(policy, host) for host in hosts},
        "master": "127.0.0.1" if alone else seats[hosts[0]].address,
        "port": preflight.port or unused_port(),
        "procs": procs,
        "backend": plan.backend,
        "bytes": PAIR_BYTES[plan.backend],
        "limit_s": COLLECTIVES_LIMIT_S,
        "budget_s": BUDGET_S[plan.backend],
    }
    argv = [sys.executable, "-m", "allranks.nodes.probes.links_probe", "pairs"]
    answers = where.run(argv, COLLECTIVES_LIMIT_S + 10, json.dumps(request))
    for line in answers.lines:
        facts = line.facts()
        if facts and "pairs" in facts:
            pairs = msgspec.convert(facts["pairs"], list[RankPair])
            named = [msgspec.structs.replace(p, host_a=hosts[p.a // procs], host_b=hosts[p.b // procs]) for p in pairs]
            lines = [item.text for item in answers.lines] + answers.said.splitlines()
            sweep = msgspec.convert(facts.get("sweep", []), list[CollectiveTime])
            return CollectiveMeasurements(
                pairs=named,
                outcome=_network_outcome(preflight, policy, lines, facts.get("connections", []), procs),
                sweep=[msgspec.structs.replace(one, ranks=len(hosts) * procs) for one in sweep],
                rounds=tuple(facts.get("rounds", (0, 0))),
            )
    last = [text for text in answers.said.splitlines() if text.strip()][-3:]
    raise RunFailed(f"the collectives gave no results (exit code {answers.returncode}): {' / '.join(last)}")


def _environment(policy: NetworkPolicy, host: str) -> dict[str, str]:
    node = policy.of(host)
    return {item.name: item.value for item in (node.environment if node else []) if item.value is not None}


def _network_outcome(
    preflight: PreflightResult, policy: NetworkPolicy, lines: list[str], seen: list[dict[str, int]], procs: int
) -> NetworkOutcome:
    """Compare NCCL's log and the connections of the ranks with the policy."""
    observed = []
    for place, probe in enumerate(preflight.probes):
        collector = NetworkLogParser(probe.host)
        names = {probe.host, probe.own_name, probe.own_name.partition(".")[0]}
        collector.take(line for line in lines if host_of_line(line) in names)
        counts: Counter[str] = Counter()
        for one in seen[place * procs : (place + 1) * procs]:
            counts.update(one)
        interfaces = {item.address: item.name for item in probe.interfaces if item.address}
        observed.append(collector.observed(count_by_interface(counts, interfaces)))
    return compare_with_policy({node.host: node.expected for node in policy.nodes}, observed)


def slow_pairs(pairs: list[RankPair]) -> list[RankPair]:
    """Return pairs far below the others, slowest first. Pairs inside a node are only compared with each other."""
    slow: list[RankPair] = []
    for inside in (True, False):
        alike = [pair for pair in pairs if (pair.host_a == pair.host_b) is inside]
        if len(alike) < MIN_PAIRS:
            continue
        for figure in ("copy_bytes_per_s", "all_reduce_bytes_per_s"):
            # With one bad node of three, two of three pairs are slow: so the fastest half is the reference.
            best = sorted((getattr(pair, figure) for pair in alike), reverse=True)
            usual = statistics.median(best[: max(1, len(best) // 2)])
            slow += [pair for pair in alike if getattr(pair, figure) < SLOW_SHARE * usual and pair not in slow]
    return sorted(slow, key=lambda pair: pair.copy_bytes_per_s)


def slow_node(pairs: list[RankPair], slow: list[RankPair]) -> str | None:
    """Return the one node that all slow pairs have in common, if there is one and the others are healthy."""
    shared = set.intersection(*({pair.host_a, pair.host_b} for pair in slow)) if slow else set()
    if len(shared) != 1:
        return None
    host = next(iter(shared))
    of_host = [pair for pair in pairs if host in (pair.host_a, pair.host_b) and pair.host_a != pair.host_b]
    return host if len(of_host) > 1 and all(pair in slow for pair in of_host) else None


def slow_pair_summary(pairs: list[RankPair]) -> str:
    """Return one sentence about the slow pairs."""
    slow = slow_pairs(pairs)
    if not slow:
        return "no pair is slower than the others" if len(pairs) >= MIN_PAIRS else "too few pairs for a comparison"
    host = slow_node(pairs, slow)
    worst = slow[0]
    shown = f"{worst.host_a}:{worst.a} - {worst.host_b}:{worst.b} with {format_rate(worst.copy_bytes_per_s)}"
    if host:
        return f"{host} is slow to all other nodes (slowest: {shown}): check its cable, port and interface"
    others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    return f"this pair is slow: {shown}{others}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
