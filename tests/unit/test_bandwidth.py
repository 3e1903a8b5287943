"""Bandwidths as nccl-tests defines them, rounds of disjoint pairs, and comparisons with hardware."""

import itertools
import math

import pytest

from allranks.nodes.network.facts import facts_of_nodes
from allranks.nodes.preflight import link_bandwidth
from allranks.nodes.preflight.link_bandwidth import CollectiveTime, compare_with_hardware, slow_node, slow_pairs
from allranks.nodes.probes.links_probe import rounds_of, tournament
from allranks.nodes.records import Interface, Probe
from allranks.planning.network_policy import ExpectedNetwork, NetworkPolicy, NodeNetworkPolicy
from allranks.planning.records import RdmaPort

MIB = 2**20


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    for ranks, factor in ((2, 1.0), (8, 1.75)):  # nccl-tests, doc/PERFORMANCE.md
        one = CollectiveTime(kind="all_reduce", bytes=10**9, seconds=0.01, ranks=ranks)
        assert one.algorithm_bytes_per_s == 1e11 and one.bus_bytes_per_s == pytest.approx(factor * 1e11)


@pytest.mark.parametrize("players", [1, 2, 3, 4, 7, 16])
def test_in_a_tournament_each_two_meet_once_and_nobody_twice_in_a_round(players: int) -> None:
    rounds = tournament(players)
    assert len(rounds) == (0 if players == 1 else players - 1 + players % 2)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(players), 2))
    for pairs in rounds:
        assert len({p for pair in pairs for p in pair}) == 2 * len(pairs) == players // 2 * 2


def test_rounds_between_nodes_use_each_node_once() -> None:
    nodes, procs = 4, 8
    rounds = rounds_of(nodes, procs)
    assert len(rounds) == procs - 1 + procs * (nodes - 1)  # 31 instead of the 496 pairs of 32 ranks one after another
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
        between = [(a // procs, b // procs) for a, b in pairs if a // procs != b // procs]
        assert len({n for pair in between for n in pair}) == 2 * len(between)
    within = {pair for pairs in rounds for pair in pairs if pair[0] // procs == pair[1] // procs}
    assert len(within) == nodes * math.comb(procs, 2)


def pair(a: int, b: int, seconds: float, *hosts: str) -> link_bandwidth.RankPair:
    """Two ranks, each on a node of its own unless hosts are given."""
    first, second = hosts or (f"n{a}", f"n{b}")
    times = {"copy_s": seconds, "latency_s": 1e-4, "all_reduce_s": 2 * seconds}
    return link_bandwidth.RankPair(a=a, b=b, host_a=first, host_b=second, **times)


def test_the_slow_pair_and_the_slow_node_are_named() -> None:
    alike = [pair(1, 2, 0.010), pair(1, 3, 0.011), pair(2, 3, 0.012)]
    assert slow_pairs(alike) == [] and link_bandwidth.slow_pair_summary(alike) == "no pair is slower than the others"
    node = [pair(1, 2, 0.3), pair(1, 3, 0.011), pair(2, 3, 0.4)]
    assert slow_node(node, slow_pairs(node)) == "n2"
    assert link_bandwidth.slow_pair_summary(node).startswith("n2 is slow to all other nodes")
    one = [*alike[:2], pair(2, 3, 0.2)]
    assert slow_node(one, slow_pairs(one)) is None
    assert "this pair is slow: n2:2 - n3:3" in link_bandwidth.slow_pair_summary(one)
    some = [*alike, pair(1, 4, 0.3), pair(2, 4, 0.2), pair(3, 4, 0.01)]
    assert slow_node(some, slow_pairs(some)) is None, "n4 is well with n3"
    assert slow_pairs([pair(1, 2, 1.0)]) == []
    within = [pair(a, a + 1, 0.001, f"n{a}", f"n{a}") for a in (0, 2)]
    two = within + [pair(a, b, 0.01, "n0", "n2") for a in (0, 1) for b in (2, 3)]
    assert slow_pairs(two) == [], "between nodes it is slower than within one"


@pytest.mark.parametrize("nodes", [16, 101])
def test_a_logarithmic_number_of_rounds_names_the_slow_node(nodes: int) -> None:
    first = [ranks for pairs in rounds_of(nodes, 1)[: math.ceil(math.log2(nodes))] for ranks in pairs]
    for slow in range(nodes):
        measured = [pair(a, b, 0.1 if slow in (a, b) else 0.001) for a, b in first]
        assert slow_node(measured, slow_pairs(measured)) == f"n{slow}"


TOPOLOGY = """\tGPU0\tGPU1\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tPIX\t0-31
GPU1\tNV18\t X \tSYS\t0-31
NIC0\tPIX\tSYS\t X
"""


def gpu_node(n: int, name: str = "NVIDIA H100 80GB HBM3", topology: str = TOPOLOGY, gbit: float = 400.0) -> Probe:
    port = RdmaPort(device="mlx5_0", port=1, active=True, layer="InfiniBand", gbit=gbit)
    return Probe(
        host=f"n{n}", node_id=n, gpus=[{"name": name}, {"name": name}], topo=topology, infiniband=[port],
        interfaces=[Interface(name="eth0", address=f"10.0.0.{n}", speed_mbit=25_000, driver="mlx5_core")],
    )  # fmt: skip


def limit_of(*probes: Probe, transport: str = "InfiniBand") -> link_bandwidth.HardwareLimit | None:
    expected = ExpectedNetwork(transport=transport)
    nodes = [NodeNetworkPolicy(host=p.host, environment=[], expected=expected) for p in probes]
    return link_bandwidth.hardware_limit(probes, facts_of_nodes(probes, None), NetworkPolicy(nodes=nodes), 2)


@pytest.mark.parametrize(
    ("nodes", "gbytes_per_s", "words"),
    [
        ([gpu_node(1)], 450, "18 links of NVLink 4"), ([gpu_node(1), gpu_node(2)], 50, "mlx5_0:1 400 Gbit/s"),
        ([gpu_node(1), gpu_node(2, gbit=100.0)], 12.5, "n2"),
        ([gpu_node(1, name="NVIDIA B200")], 900, "18 links of NVLink 5 with 50 GB/s on n1"),
    ],
)  # fmt: skip
def test_the_slowest_link_of_the_ring_is_the_limit(nodes: list[Probe], gbytes_per_s: float, words: str) -> None:
    limit = limit_of(*nodes)
    assert limit is not None and limit.bytes_per_s == gbytes_per_s * 1e9 and words in limit.what


def test_an_unknown_link_gives_no_limit() -> None:
    pcie, no_nvlink = gpu_node(1, topology=TOPOLOGY.replace("NV18", "PHB")), gpu_node(1, name="NVIDIA L40S")
    for probe in (pcie, no_nvlink, gpu_node(1, topology=""), Probe(host="n1")):
        assert limit_of(probe) is None, probe
    assert limit_of(gpu_node(1), gpu_node(2, gbit=0.0)) is None
    assert limit_of(gpu_node(1), gpu_node(2), transport="Socket") is None  # the network was not chosen


def sweep_of(bytes_per_s: float, size: int = 64 * MIB) -> list[CollectiveTime]:
    """All-reduces of two ranks, whose bus bandwidth is the algorithm's."""
    return [CollectiveTime(kind="all_reduce", bytes=s, seconds=s / bytes_per_s, ranks=2) for s in (1024, size)]


def test_the_largest_all_reduce_is_compared_with_the_hardware() -> None:
    limit = link_bandwidth.HardwareLimit(bytes_per_s=450e9, what="18 links")
    well = compare_with_hardware(sweep_of(380e9), limit)
    assert "64.0 MiB by 2 ranks: bus bandwidth 380.00 GB/s, 84% of 450.00 GB/s (18 links)" in well
    assert "far below" not in well and "far below" in compare_with_hardware(sweep_of(20e9), limit)
    assert compare_with_hardware(sweep_of(20e9), None).endswith("what the hardware gives is not known")
    assert compare_with_hardware(sweep_of(1e6, MIB), limit) == "", "there the latency counts"
