"""Measure collectives and pairs of ranks, and test all copies between GPUs on the nodes of a preflight.

Results of copy tests are saved next to the runs, so that later runs on the same node respect them. The pair measurement names
the pair, or the node, that is slower than the others.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from allranks.errors import RunFailed
from allranks.nodes.network_verification import (
    NetworkLogParser,
    NetworkOutcome,
    compare_with_policy,
    count_by_interface,
    host_of_line,
)
from allranks.nodes.preflight.bandwidth import CollectiveTime, format_rate
from allranks.nodes.preflight.runner import PreflightResult, TargetNodes
from allranks.nodes.probes.probe import unused_port
from allranks.nodes.records import Probe
from allranks.planning.env_vars import NetworkPolicy
from allranks.planning.records import LaunchPlan
from allranks.rundir.files import read_json, write_json

COPY_TESTS_FOLDER = ".copy-tests"
COPY_TEST_VALID_S = 30 * 86400
"""Maximum age of a valid test."""


class CopyTestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One node's result: pairs with a wrong or hanging copy. Valid for these GPUs and this driver."""

    host: str
    failed: list[str]
    tested: int
    gpus: list[str]
    driver: str
    time: float


def save_copy_test(run_root: Path, probe: Probe, failed: Sequence[str], tested: int) -> None:
    """Save the test. If the folder cannot be written, only the record is lost."""
    test = CopyTestRecord(
        host=probe.host,
        failed=list(failed),
        tested=tested,
        gpus=_gpu_names(probe),
        driver=_driver_version(probe),
        time=time.time(),
    )
    try:
        (run_root / COPY_TESTS_FOLDER).mkdir(parents=True, exist_ok=True)
        write_json(run_root / COPY_TESTS_FOLDER / f"{probe.host}.json", msgspec.to_builtins(test))
    except OSError:
        return


def load_copy_tests(run_root: Path, probes: Sequence[Probe]) -> dict[str, list[str]]:
    """Return failed pairs by tested host; nodes with changed GPUs or driver count as untested."""
    found = {}
    for probe in probes:
        raw = read_json(run_root / COPY_TESTS_FOLDER / f"{probe.host}.json")
        try:
            test = msgspec.convert(raw, CopyTestRecord)
        except msgspec.ValidationError:
            continue
        same = test.gpus == _gpu_names(probe) and test.driver == _driver_version(probe)
        if same and test.tested > 0 and time.time() - test.time < COPY_TEST_VALID_S:
            found[probe.host] = test.failed
    return found


def _gpu_names(probe: Probe) -> list[str]:
    return [str(gpu.get("name")) for gpu in probe.gpus]


def _driver_version(probe: Probe) -> str:
    return str(probe.gpus[0].get("driver")) if probe.gpus else ""


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
            return f"{self.host}: copies between {', '.join(self.failed)} hang or return wrong values; runs on this node do not use peer-to-peer"
        told = f" ({self.error})" if self.error else ""
        return f"{self.host}: {self.tested} copies between GPUs were correct{told}"


def run_copy_test(where: TargetNodes, found: PreflightResult, run_root: Path) -> list[CopyResult]:
    """Test copies between all pairs of GPUs of every node with several GPUs. Nodes without an answer have an error."""
    probes = {probe.host: probe for probe in found.probes if len(probe.gpus) > 1}
    if not probes:
        return []
    argv = [
        sys.executable,
        "-m",
        "allranks.nodes.probes.copies_probe",
        "--json-args",
        json.dumps({"limit_s": COPY_LIMIT_S}),
    ]
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
        """Return the bandwidth of an all-reduce: each of two ranks sends and receives the data once, so this is the load of the link."""
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
    where: TargetNodes, found: PreflightResult, plan: LaunchPlan, procs: int, policy: NetworkPolicy
) -> CollectiveMeasurements:
    """Start the program on all nodes, with each node's own environment, and wait for it.

    Raises:
        RunFailed: it ended without results; the message says how.
    """
    hosts = [probe.host for probe in found.probes]
    seats = found.network.seats if found.network else {}
    alone = not seats
    request = {
        "hosts": hosts,
        "environment": {host: _environment(policy, host) for host in hosts},
        "master": "127.0.0.1" if alone else seats[hosts[0]].address,
        "port": found.port or unused_port(),
        "procs": procs,
        "backend": plan.backend,
        "bytes": PAIR_BYTES[plan.backend],
        "limit_s": COLLECTIVES_LIMIT_S,
        "budget_s": BUDGET_S[plan.backend],
    }
    argv = [sys.executable, "-m", "allranks.nodes.probes.pairs_probe"]
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
                outcome=_network_outcome(found, policy, lines, facts.get("connections", []), procs),
                sweep=[msgspec.structs.replace(one, ranks=len(hosts) * procs) for one in sweep],
                rounds=tuple(facts.get("rounds", (0, 0))),
            )
    last = [text for text in answers.said.splitlines() if text.strip()][-3:]
    raise RunFailed(f"the collectives gave no results (exit code {answers.returncode}): {' / '.join(last)}")


def _environment(policy: NetworkPolicy, host: str) -> dict[str, str]:
    node = policy.of(host)
    return {item.name: item.value for item in (node.environment if node else []) if item.value is not None}


def _network_outcome(
    found: PreflightResult, policy: NetworkPolicy, lines: list[str], seen: list[dict[str, int]], procs: int
) -> NetworkOutcome:
    """Compare NCCL's log and the connections of the ranks with the policy."""
    observed = []
    for place, probe in enumerate(found.probes):
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
    found: list[RankPair] = []
    for inside in (True, False):
        alike = [pair for pair in pairs if (pair.host_a == pair.host_b) is inside]
        if len(alike) < MIN_PAIRS:
            continue
        for figure in ("copy_bytes_per_s", "all_reduce_bytes_per_s"):
            # With one bad node of three, two of three pairs are slow: so the fastest half is the reference.
            best = sorted((getattr(pair, figure) for pair in alike), reverse=True)
            usual = statistics.median(best[: max(1, len(best) // 2)])
            found += [pair for pair in alike if getattr(pair, figure) < SLOW_SHARE * usual and pair not in found]
    return sorted(found, key=lambda pair: pair.copy_bytes_per_s)


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
