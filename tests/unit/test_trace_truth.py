"""The analysis against traces whose answer is known by construction, which `tests.tracegen` makes."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.records import PairReport, RankReport, TraceReport
from tests.tracegen import CollectiveTruth, Scenario, StepTruth, Truth, generate

NANOSECOND = 1e-9
SLOW = {(3, 1): 900, (6, 2): 450}
Made = tuple[Truth, TraceReport]

# HTA 0.5.0 fails at new_names, gloo and only_one_rank_of_eight, sees no communication in rccl, takes syncs for compute,
# and names the rank whose clock is off in clock_offsets.
CASES: dict[str, Scenario] = {
    "new_names": Scenario(slow=SLOW),
    "old_names": Scenario(slow=SLOW, names="old"),
    "rccl": Scenario(slow=SLOW, names="rccl"),
    "no_seq": Scenario(slow=SLOW, metadata="no_seq"),
    "rccl_no_metadata": Scenario(slow=SLOW, metadata="none", names="rccl"),
    "clock_offsets": Scenario(slow=SLOW, offset_us={0: 40, 3: -7000, 5: 5000, 7: 1_000_000}),
    "missing_rank": Scenario(slow=SLOW, absent=frozenset({0, 4})),
    "only_one_rank_of_eight": Scenario(absent=frozenset(range(1, 8))),
    "one_rank_in_all": Scenario(world=1),
    "streams_and_copies": Scenario(slow=SLOW, second_stream=True, memcpy=True),
    "two_groups_no_seq": Scenario(slow=SLOW, second_group=True, metadata="no_seq"),
    "syncs": Scenario(slow=SLOW, syncs=True),
    "no_part_marks": Scenario(slow=SLOW, part_marks=False),
    "all": Scenario(
        slow=SLOW, second_stream=True, memcpy=True, second_group=True, twins=True, syncs=True, offset_us={5: 5000},
        absent=frozenset({2}),
    ),
    "gloo": Scenario(slow=SLOW, backend="gloo"),
    "gloo_clock_offsets": Scenario(slow=SLOW, backend="gloo", world=3, offset_us={1: -2500}),
}  # fmt: skip
SHARED = [name for name, s in CASES.items() if s.world - len(s.absent) > 1]  # with something to pair


def make(scenario: Scenario, folder: Path) -> Made:
    truth = generate(scenario, folder)
    (report,) = analyse([folder], workers=1)
    return truth, report


@cache
def made(name: str) -> Made:
    with TemporaryDirectory() as folder:
        return make(CASES[name], Path(folder))


def rank_of(report: TraceReport, number: int) -> RankReport:
    return next(r for r in report.ranks if r.rank == number)


def seconds(microseconds: float, slack: float = 2 * NANOSECOND) -> Any:
    return pytest.approx(microseconds / 1e6, abs=slack)


def assert_step(found: Any, true: StepTruth) -> None:
    b = found.breakdown
    told = (b.span_s, b.compute_s, b.exposed_comm_s, b.copy_s, b.idle_s, b.comm_s, b.overlapped_comm_s, b.copy_total_s)
    assert [round(t * 1e6, 3) for t in told] == [
        true.duration, true.compute, true.exposed_comm, true.memcpy_alone, true.idle, true.comm, true.overlapped_comm,
        true.memcpy,
    ]  # fmt: skip
    assert b.overlap == pytest.approx(true.overlapped_comm / true.comm)


@pytest.mark.parametrize("name", CASES)
def test_how_each_step_of_each_rank_spent_its_time(name: str) -> None:
    truth, report = made(name)
    assert tuple(r.rank for r in report.ranks) == truth.ranks
    for rank in report.ranks:
        assert [s.step for s in rank.steps] == [n + 1 for r, n in truth.steps if r == rank.rank]
        assert rank.total.exposed_comm_s == seconds(truth.total(rank.rank, "exposed_comm"))
        for step in rank.steps:
            true = truth.steps[rank.rank, step.step - 1]
            assert_step(step, true)
            told = {p.phase: p.host_s for p in step.phases}
            if CASES[name].part_marks and not CASES[name].second_group:
                assert all(told[phase] == seconds(t) for phase, t in true.parts.items())  # type: ignore[index]


@pytest.mark.parametrize("name", CASES)
def test_collectives_by_kind_with_bytes_time_and_bandwidth(name: str) -> None:
    truth, report = made(name)
    assert {r.kind for r in report.collectives} == {c.kind for c in truth.collectives}
    for row in report.collectives:
        mine = [c for c in truth.collectives if c.kind == row.kind]
        assert row.count == sum(len(c.waits) for c in mine)
        assert row.total_s == seconds(sum(c.transfer + w for c in mine for w in c.waits.values()))
        if CASES[name].metadata == "none":
            continue
        assert row.bytes == sum(c.size_bytes * len(c.waits) for c in mine)
        if name in SHARED:  # over the transfer, not over the waiting
            rate = sum(c.size_bytes for c in mine) / sum(c.transfer for c in mine) * 1e6
            assert row.algbw_bytes_s == pytest.approx(rate, rel=1e-6)
            assert row.busbw_bytes_s == pytest.approx(rate * mine[0].bus_factor, rel=1e-6)


def match(report: TraceReport, c: CollectiveTruth, many: bool) -> PairReport:
    """The pair that stands for a true collective: told apart by step, kind and size, in each step one."""
    found = [p for p in report.pairing.longest if p.step == c.step + 1 and p.kind == c.kind]
    found = [p for p in found if p.bytes == c.size_bytes] if many else found
    found.sort(key=lambda p: abs(p.transfer_s * 1e6 - c.transfer))
    return found[0]


@pytest.mark.parametrize("name", SHARED)
def test_waiting_transfer_and_the_last_rank_of_each_collective(name: str) -> None:
    truth, report = made(name)
    assert report.pairing.paired == len(truth.collectives)
    assert report.pairing.unpaired == 0
    expected = len(truth.collectives) if CASES[name].metadata == "full" and CASES[name].backend == "nccl" else 0
    assert (report.pairing.by_sequence, report.pairing.by_order) == (expected, len(truth.collectives) - expected)
    for c in truth.collectives:
        pair = match(report, c, CASES[name].metadata != "none")
        assert pair.transfer_s == seconds(c.transfer)
        assert {r: round(w * 1e6, 2) for r, w in zip(pair.ranks, pair.wait_s, strict=True)} == c.waits
        if c.last_rank is not None:
            assert pair.last_rank == c.last_rank

    rows = {r.rank: r for r in report.stragglers}
    decided = [c for c in truth.collectives if c.last_rank is not None]
    for rank in truth.ranks:
        mine = [max(c.waits.values()) for c in decided if c.last_rank == rank]
        assert rows[rank].wait_s == seconds(sum(c.waits[rank] for c in truth.collectives))
        assert rows[rank].caused_wait_s == seconds(sum(mine))
        assert rows[rank].max_late_s == seconds(max(mine, default=0))
        assert rows[rank].pairs == len(truth.collectives)

    # clock offsets are found from the ends of collectives
    base = rank_of(report, truth.ranks[0]).clock_offset_s
    for rank in report.ranks:
        assert rank.clock_offset_s - base == seconds(truth.offset_us[rank.rank])
    zero = min(s.start for s in truth.steps.values())
    for rank in report.ranks:  # moments of all ranks on one clock
        starts = [s.start_s for s in rank.steps]
        assert starts == [seconds(t.start - zero) for (r, _), t in truth.steps.items() if r == rank.rank]


# without marks the phase is guessed from operators, which the generator has none of
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.part_marks])
def test_the_phase_that_each_collective_was_launched_in(name: str) -> None:
    truth, report = made(name)
    for c in truth.collectives:
        same = [x for x in truth.collectives if (x.step, x.kind) == (c.step, c.kind)]
        for rank in c.waits:
            rows = [r for r in report.launches if (r.rank, r.step, r.kind) == (rank, c.step + 1, c.kind)]
            assert [(r.phase, r.count) for r in rows] == [("backward", len(same))]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_collective_that_one_rank_lacks_is_said_and_spoils_no_other(tmp_path: Path, backend: Any) -> None:
    truth, report = make(Scenario(world=4, slow={(2, 1): 300}, dropped=(1, 0, 1), backend=backend), tmp_path)
    if backend == "gloo":
        assert any(p.kind == "missing_collective" for p in report.problems), report.problems
    else:
        pairs = {p.key: p.ranks for p in report.pairing.longest}
        assert (pairs["seq 1"], pairs["seq 2"]) == ((0, 2, 3), (0, 1, 2, 3))
    for c in truth.collectives[4:]:
        pair = match(report, c, True)
        assert dict(zip(pair.ranks, (round(w * 1e6) for w in pair.wait_s), strict=True)) == c.waits


def test_without_step_marks_the_sums_stay_and_it_is_said(tmp_path: Path) -> None:
    """HTA's straggler search raises ValueError here."""
    truth, report = make(Scenario(slow=SLOW, step_marks=False), tmp_path)
    assert any(p.kind == "no_steps" for p in report.problems)
    for rank in report.ranks:
        assert rank.steps == ()
        assert rank.total.compute_s == seconds(truth.total(rank.rank, "compute"))
        assert rank.total.exposed_comm_s == seconds(truth.total(rank.rank, "exposed_comm"))
    assert report.pairing.paired == len(truth.collectives)


def test_profilers_that_start_late_are_no_stragglers(tmp_path: Path) -> None:
    """Rank 2's profiler starts 4 ms late; without trimming it would be the straggler."""
    truth, report = make(Scenario(start_skew_us={2: 4000}, slow={(5, 2): 300}), tmp_path)
    assert report.startup is not None
    assert report.startup.skew_s == seconds(4000)
    assert {r: round(w * 1e6) for r, w in report.startup.fake_wait_s.items()} == {r: 4000 * (r != 2) for r in range(8)}
    worst = max(report.stragglers, key=lambda row: row.caused_wait_s)
    assert (worst.rank, round(worst.caused_wait_s * 1e6)) == (5, 300)
    for rank in report.ranks:
        assert report.startup.removed_s[rank.rank] > 0
        first = rank.steps[0]
        assert first.trimmed and first.breakdown.span_s < truth.steps[rank.rank, 0].duration / 1e6
        assert rank.total.span_s == pytest.approx(sum(s.breakdown.span_s for s in rank.steps))
        for step in rank.steps[1:]:
            assert_step(step, truth.steps[rank.rank, step.step - 1])
            assert not step.trimmed
