"""Several ranks: pairing, clocks, profilers that start apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.records import TraceReport
from tests.unit.trace_builder import GLOO, Event, kernel, launch, mark, nccl, op, step, write_ranks


def run(folder: Path, *ranks: list[Event]) -> TraceReport:
    (report,) = analyse([write_ranks(folder, *ranks, backend="nccl")], workers=1)
    return report


def told(report: TraceReport, kind: str) -> list[str]:
    return [p.message for p in report.problems if p.kind == kind]


def gloo(n: int, at: float, start: float, end: float, kind: str = "all_reduce") -> list[Event]:
    call = {"all_reduce": "c10d::allreduce_", "broadcast": "c10d::broadcast_"}[kind]
    return [
        op(call, at, at + 1, in_dims=[[[n]]], in_types=["TensorList"]),
        mark(f"gloo:{kind}", start, end, GLOO, in_dims=[[n]], in_types=["float"]),
    ]


def test_the_first_numbers_of_a_later_profiler_are_no_mismatch(tmp_path: Path) -> None:
    one = [step(1, 0, 1000), *(nccl("allreduce", 100 * i, 100 * i + 50, i) for i in range(1, 8))]
    other = [step(1, 0, 1000), *(nccl("allreduce", 100 * i, 100 * i + 50, i) for i in range(3, 8))]
    report = run(tmp_path, one, other)
    assert (report.pairing.paired, report.pairing.unpaired) == (5, 2)


def test_different_collectives_of_one_number_are_not_paired(tmp_path: Path) -> None:
    one = [step(1, 0, 1000), nccl("allreduce", 100, 200, 1), nccl("allreduce", 300, 400, 2)]
    other = [step(1, 0, 1000), nccl("allreduce", 100, 200, 1), nccl("_allgather_base", 300, 400, 2)]
    report = run(tmp_path, one, other)
    assert (report.pairing.paired, report.pairing.unpaired) == (1, 2)


def test_order_alone_pairs_no_all_to_alls_of_wholly_other_sizes(tmp_path: Path) -> None:
    """As in samples of a long run: the ranks' n-th need not be the same. Uneven shares of one are paired."""

    def rank(*sizes: int) -> list[Event]:
        calls = [nccl("alltoallv", 100 * n, 100 * n + 50, None, elements=size) for n, size in enumerate(sizes, 1)]
        return [step(1, 0, 1000), *calls]

    report = run(tmp_path, rank(1000, 80, 500), rank(900_000, 90, 700))
    assert (report.pairing.by_order, report.pairing.unpaired) == (2, 2)


def test_a_send_and_its_receive_are_one(tmp_path: Path) -> None:
    to = {"Src Rank": 0, "Dst Rank": 1, "Group size": 2}
    back = {"Src Rank": 1, "Dst Rank": 0, "Group size": 2}
    one = [step(1, 0, 1000), nccl("send", 100, 200, 0, **to), nccl("recv", 300, 420, 1, **back)]
    other = [step(1, 0, 1000), nccl("recv", 50, 200, 0, **to), nccl("send", 400, 420, 1, **back)]
    report = run(tmp_path, one, other)
    assert [p.kind for p in report.pairing.longest] == ["send_recv", "send_recv"]
    assert [r.last for r in sorted(report.stragglers, key=lambda r: r.rank)] == [1, 1]
    assert report.ranks[0].clock_pairs == 0, "a receive may end long after its send: no clock"


def test_clocks_are_aligned_along_a_chain_of_groups(tmp_path: Path) -> None:
    def group(members: str, start: float, end: float, seq: int) -> Event:
        return nccl("allreduce", start, end, seq, **{"Process Group Name": members, "Process Group Ranks": members})

    rows = [
        [step(1, 0, 1000), group("[0, 1]", 100, 200, 0)],
        [step(1, 50, 1050), group("[0, 1]", 150, 250, 0), group("[1, 2]", 350, 450, 0)],
        [step(1, -930, 70), group("[1, 2]", -600, -500, 0)],
    ]
    report = run(tmp_path, *rows)
    assert [round(r.clock_offset_s * 1e6) for r in report.ranks] == [0, 50, -900]
    assert report.pairing.unpaired == 0


def skewed(lag: float, steps: int = 3, slow: float = 0.0) -> list[Event]:
    """A rank whose profiler starts `lag` later; `slow`: it comes later to each step's collective too. Ends of
    collectives are common."""
    events, end = [], 0.0
    for n in range(steps):
        start = lag if n == 0 else end + 10
        common = max(1000.0 * n + 600, 0)
        events += [step(n + 1, start, common + 300), kernel("gemm", start + 20, start + 120, 10 * n + 1)]
        events += [launch(10 * n + 1, start + 10), launch(10 * n + 2, start + 130)]
        events.append(nccl("allreduce", start + 150 + slow, common, n, 10 * n + 2))
        end = common + 300
    return events


def test_profilers_that_start_apart_are_seen_and_the_first_step_begins_where_ranks_are_level(tmp_path: Path) -> None:
    report = run(tmp_path, skewed(0), skewed(400))
    assert report.startup is not None
    assert report.startup.skew_s == pytest.approx(400e-6)
    assert report.startup.fake_wait_s == {0: pytest.approx(400e-6), 1: 0.0}
    assert report.startup.removed_s == {0: pytest.approx(600e-6), 1: pytest.approx(200e-6)}
    assert report.pairing.wait_s == 0
    assert all(r.caused_wait_s == 0 for r in report.stragglers)
    assert [[s.trimmed for s in r.steps] for r in report.ranks] == [[True, False, False]] * 2
    first = report.ranks[0].steps[0]
    assert first.breakdown.exposed_comm_s == 0 and first.breakdown.span_s == pytest.approx(300e-6)
    assert report.ranks[0].total.span_s == pytest.approx(sum(s.breakdown.span_s for s in report.ranks[0].steps))


def test_ranks_without_a_common_collective_keep_their_clocks_and_it_is_said(tmp_path: Path) -> None:
    report = run(tmp_path, [step(1, 0, 100), kernel("a", 10, 20)], [step(1, 30, 130), kernel("a", 40, 50)])
    assert len(told(report, "not_aligned")) == 1
    assert [round(r.start_s * 1e6) for r in report.ranks] == [0, 30]


@pytest.mark.parametrize(("name", "paired"), [("all_gather", 2), ("_allgather_base", 0), ("_reduce_scatter_base", 0)])
def test_only_a_call_that_accepts_uneven_sizes_is_paired_in_spite_of_them(
    tmp_path: Path, name: str, paired: int
) -> None:
    def rank(size: int) -> list[Event]:
        return [step(1, 0, 1000), *(nccl(name, 100 * n, 100 * n + 50, None, elements=size) for n in (1, 2))]

    report = run(tmp_path, rank(1000), rank(960))
    assert report.pairing.by_order == paired


def test_a_rank_whose_first_step_began_late_is_paired_from_its_end(tmp_path: Path) -> None:
    one = [
        step(1, 0, 1000),
        *gloo(8, 10, 20, 120),
        *gloo(8, 200, 210, 300),
        step(2, 1000, 2000),
        *gloo(8, 1100, 1110, 1200),
    ]
    other = [step(1, 0, 1000), *gloo(8, 200, 280, 300), step(2, 1000, 2000), *gloo(8, 1100, 1150, 1200)]
    report = run(tmp_path, one, other)
    (text,) = told(report, "missing_collective")
    assert "step 1, all_reduce of 32 B: rank 1 has 1, the others have 2" in text
    assert report.pairing.wait_s == pytest.approx((70 + 40) * 1e-6)
    assert report.pairing.unpaired == 1
