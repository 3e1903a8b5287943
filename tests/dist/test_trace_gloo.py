"""Traces of real gloo ranks: what was launched where is known from the program, not from a clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.records import Breakdown, TraceReport
from tests.conftest import REPO
from tests.dist.harness import free_port
from tests.dist.profiled import LATE_S, LAYERS, STEPS, WIDTH
from tests.trace_totals import collectives_per_step

pytestmark = pytest.mark.dist
PARAMETERS = 2 * LAYERS
GRADIENT_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4


def report_of(how: str, folder: Path, world: int = 2) -> TraceReport:
    port = str(free_port())
    folder.mkdir(exist_ok=True)
    ranks = []
    for rank in range(world):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.dist.profiled", how, str(folder)]
        ranks.append(
            subprocess.Popen(command, env=env, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [p.communicate(timeout=120)[0] for p in ranks]
    assert not any(p.returncode for p in ranks), outputs
    (report,) = analyse([folder])
    assert [len(r.steps) for r in report.ranks] == [STEPS] * world
    for rank in report.ranks:
        for step in rank.steps:
            assert_adds_up(step.breakdown)
    return report


def assert_adds_up(b: Breakdown) -> None:
    assert b.compute_s + b.exposed_comm_s + b.copy_s + b.idle_s == pytest.approx(b.span_s)
    assert b.exposed_comm_s + b.overlapped_comm_s == pytest.approx(b.comm_s)


def launched(report: TraceReport, rank: int, phase: str | None = None) -> set[tuple[str, int, int | None]]:
    """(kind, count, bytes) of a step; the same in all steps."""
    steps = collectives_per_step(report, rank, phase)  # type: ignore[arg-type]
    sets = [{(kind, row.count, row.bytes) for kind, row in found.items()} for found in steps.values()]
    assert len(sets) == STEPS and all(s == sets[0] for s in sets), steps
    return sets[0]


@pytest.mark.parametrize("how", ["hook", "ddp"])
def test_reductions_in_hooks_are_launched_in_backward_and_only_there(tmp_path: Path, how: str) -> None:
    report = report_of(how, tmp_path / how)
    for rank in (0, 1):
        (row,) = launched(report, rank, "backward")
        assert row[0] == "all_reduce" and row[2] == GRADIENT_BYTES
        assert row[1] == PARAMETERS if how == "hook" else 1 < row[1] < PARAMETERS
        assert launched(report, rank) == {row}
    assert (report.pairing.unpaired, report.pairing.by_order) == (0, report.pairing.paired)
    for found in report.ranks if how == "hook" else ():
        # the node's span lies over the whole collective, and yet nothing is calculated meanwhile: hooks that block hide nothing
        assert found.total.comm_s > 0
        assert found.total.overlapped_comm_s < 0.02 * found.total.comm_s


def test_reductions_after_backward_are_not_launched_in_it(tmp_path: Path) -> None:
    report = report_of("after", tmp_path / "after")
    for rank in (0, 1):
        assert launched(report, rank, "backward") == set()
        assert launched(report, rank, "other") == {("all_reduce", PARAMETERS, GRADIENT_BYTES)}


def test_each_kind_is_named_by_what_was_called(tmp_path: Path) -> None:
    report = report_of("kinds", tmp_path / "kinds", 3)
    for rank in range(3):
        assert launched(report, rank) == {
            ("reduce_scatter", 1, 3 * 4096),
            ("all_gather", 2, 3 * 4096 + 3 * 40),
            ("broadcast", 1, 3 * 4096),
            ("reduce", 1, 3 * 4096),
            ("all_to_all", 1, 3 * 32),
            ("barrier", 1, 0),
        }
        assert launched(report, rank, "forward") == set()


def test_a_rank_that_comes_late_is_the_one_that_others_waited_for(tmp_path: Path) -> None:
    report = report_of("late", tmp_path / "late")
    rows = {r.rank: r for r in report.stragglers}
    assert report.startup is None or report.startup.fake_wait_s
    assert rows[1].max_late_s > 0.5 * LATE_S
    assert rows[1].caused_wait_s > 2 * rows[0].caused_wait_s
