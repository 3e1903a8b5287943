"""Bandwidths as nccl-tests defines them, rounds of disjoint pairs, and comparisons with hardware and with earlier
runs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from allranks.nodes.network.facts import facts_of_nodes
from allranks.nodes.preflight.link_tests import (
    KEPT_RUNS,
    CollectiveTime,
    EarlierRun,
    HardwareLimit,
    RankPair,
    add_to_history,
    compare_with_hardware,
    compare_with_history,
    hardware_limit,
    history_file,
    slow_node,
    slow_pairs,
)
from allranks.nodes.probes.links_probe import Pair, rounds_of, tournament
from allranks.nodes.records import Interface, Probe
from allranks.planning.network_policy import ExpectedNetwork, NetworkPolicy, NodeNetworkPolicy
from allranks.planning.planner import make_plan
from allranks.planning.records import RdmaPort
from allranks.rundir.files import read_json
from allranks.spec import RunSpec
from allranks.utils.text import as_records
from tests.unit.test_plan import facts

MIB = 2**20


def read_history(path: Path) -> list[EarlierRun]:
    return as_records(read_json(path), EarlierRun)


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [("all_reduce", 2, 1.0), ("all_reduce", 8, 1.75), ("all_gather", 8, 0.875), ("reduce_scatter", 4, 0.75)],
)  # nccl-tests, doc/PERFORMANCE.md
def test_bus_bandwidth_is_that_of_nccl_tests(kind: str, ranks: int, factor: float) -> None:
    one = CollectiveTime(kind=kind, bytes=10**9, seconds=0.01, ranks=ranks)
    assert one.algorithm_bytes_per_s == 1e11
    assert one.bus_bytes_per_s == pytest.approx(factor * 1e11)


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


def times_of(pairs: list[Pair], slow: set[int]) -> list[RankPair]:
    return [
        RankPair(
            a=a,
            b=b,
            copy_s=0.1 if {a, b} & slow else 0.001,
            latency_s=1e-4,
            all_reduce_s=0.002,
            host_a=f"n{a}",
            host_b=f"n{b}",
        )
        for a, b in pairs
    ]


@pytest.mark.parametrize("nodes", [16, 101])
def test_a_logarithmic_number_of_rounds_names_the_slow_node(nodes: int) -> None:
    rounds = rounds_of(nodes, 1)
    for slow in range(nodes):
        measured = times_of([pair for pairs in rounds[: math.ceil(math.log2(nodes))] for pair in pairs], {slow})
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


def limit_of(*probes: Probe, procs: int = 2, transport: str = "InfiniBand") -> HardwareLimit | None:
    policy = NetworkPolicy(
        nodes=[
            NodeNetworkPolicy(host=p.host, environment=[], expected=ExpectedNetwork(transport=transport))
            for p in probes
        ]
    )
    return hardware_limit(probes, facts_of_nodes(probes, None), policy, procs)


def test_the_slowest_link_of_the_ring_is_the_limit() -> None:
    one = limit_of(gpu_node(1))
    assert one is not None and one.bytes_per_s == 450e9 and "18 links of NVLink 4" in one.what
    both = limit_of(gpu_node(1), gpu_node(2))
    assert both is not None and both.bytes_per_s == 50e9 and "mlx5_0:1 400 Gbit/s" in both.what
    slower = limit_of(gpu_node(1), gpu_node(2, gbit=100.0))
    assert slower is not None and slower.bytes_per_s == 12.5e9 and "n2" in slower.what
    assert limit_of(gpu_node(1, name="NVIDIA B200")) == HardwareLimit(
        bytes_per_s=900e9, what="18 links of NVLink 5 with 50 GB/s on n1"
    )


@pytest.mark.parametrize(
    "probe",
    [
        gpu_node(1, topology=TOPOLOGY.replace("NV18", "PHB")),
        gpu_node(1, name="NVIDIA L40S"),
        gpu_node(1, topology=""),
        gpu_node(1, name="NVIDIA H100 80GB HBM3").__class__(host="n1"),
    ],
    ids=["PCIe", "no NVLink", "no topology", "no GPU"],
)
def test_an_unknown_link_gives_no_limit(probe: Probe) -> None:
    assert limit_of(probe) is None
    assert limit_of(gpu_node(1), gpu_node(2, gbit=0.0)) is None
    assert limit_of(gpu_node(1), gpu_node(2), transport="Socket") is None  # the network was not chosen


def sweep_of(bytes_per_s: float, size: int = 64 * MIB) -> list[CollectiveTime]:
    """All-reduces of two ranks, whose bus bandwidth is the algorithm's."""
    return [CollectiveTime(kind="all_reduce", bytes=s, seconds=s / bytes_per_s, ranks=2) for s in (1024, size)]


def test_the_largest_all_reduce_is_compared_with_the_hardware() -> None:
    limit = HardwareLimit(bytes_per_s=450e9, what="18 links")
    well = compare_with_hardware(sweep_of(380e9), limit)
    assert (
        "64.0 MiB by 2 ranks: bus bandwidth 380.00 GB/s, 84% of 450.00 GB/s (18 links)" in well
        and "far below" not in well
    )
    assert "far below" in compare_with_hardware(sweep_of(20e9), limit)
    assert compare_with_hardware(sweep_of(20e9), None).endswith("what the hardware gives is not known")
    assert compare_with_hardware(sweep_of(1e6, MIB), limit) == "", "there the latency counts"


def test_a_run_is_compared_with_the_earlier_ones_of_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "history.json"
    assert compare_with_history(sweep_of(1e9), read_history(path)).startswith("no earlier run")
    for rate in (1.0e9, 1.2e9, 1.1e9):
        add_to_history(path, sweep_of(rate), ["n1", "n2"], slow=False)
    add_to_history(path, sweep_of(1e6), ["n1", "n2"], slow=True)
    earlier = read_history(path)
    assert len(earlier) == 4
    assert (
        compare_with_history(sweep_of(1.1e9), earlier)
        == "as fast as in 3 earlier runs of this shape: 100% of their bus bandwidths"
    )
    slower = compare_with_history(sweep_of(0.55e9), earlier)
    assert slower.startswith(
        "slower than in 3 earlier runs of this shape: all_reduce of 64.0 MiB has a bus bandwidth of 550.0 MB/s, 50% of"
    )
    assert "n1, n2" in slower
    for _ in range(KEPT_RUNS):
        add_to_history(path, sweep_of(2e9), ["n3"], slow=False)
    assert len(read_history(path)) == KEPT_RUNS and compare_with_history(sweep_of(2e9), read_history(path)).startswith(
        "as fast"
    )
    path.write_text('[{"time": "x"}, 7, {"time": 1.0, "hosts": [], "bus_bytes_per_s": {"all_reduce/67108864": 0.0}}]')
    assert compare_with_history(sweep_of(1e9), read_history(path)).startswith("no earlier run")
    path.write_text("{")
    assert read_history(path) == []
    (tmp_path / "file").write_text("")
    add_to_history(tmp_path / "file" / "history.json", sweep_of(1e9), [], slow=False)  # the record is lost


def test_the_shape_of_a_run_decides_with_what_it_is_compared(tmp_path: Path) -> None:
    plan, none = make_plan(RunSpec(), facts(gpus=2)), NetworkPolicy(nodes=[])

    def file_of(*probes: Probe, procs: int = 2) -> Path:
        return history_file(tmp_path, plan, probes, none, procs)

    usual = file_of(gpu_node(1), gpu_node(2))
    assert file_of(gpu_node(3), gpu_node(4)) == usual
    others = {
        file_of(gpu_node(1)),
        file_of(gpu_node(1), gpu_node(2), procs=1),
        file_of(gpu_node(1), gpu_node(2, "NVIDIA L40S")),
    }
    assert usual not in others and len(others) == 3
    assert file_of(Probe(host="hpc1"), Probe(host="hpc2")) != file_of(Probe(host="lab1"), Probe(host="lab2"))
