"""Two runs against each other: ratios that are known by construction."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.diff import Comparison, compare_reports
from allranks.analysis.trace.records import TraceReport
from allranks.analysis.trace.tables import comparison_blocks, text_lines
from tests.tracegen import Scenario, generate


def report(folder: Path, **scenario: object) -> TraceReport:
    generate(Scenario(**scenario), folder)  # type: ignore[arg-type]
    return analyse([folder], workers=1)[0]


def ratios(comparison: Comparison) -> dict[str, float | None]:
    return {row.name: row.ratio for row in comparison.rows}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TraceReport:
    return report(tmp_path_factory.mktemp("base"), world=4)


def test_a_run_against_itself_is_one_everywhere(base: TraceReport) -> None:
    comparison = compare_reports(base, base)
    assert {row.ratio for row in (*comparison.rows, *comparison.changed) if row.a} == {1.0}
    assert comparison.per == "rank and step" and not comparison.remarks


def test_slower_transfer_is_seen_where_it_is_and_nowhere_else(base: TraceReport, tmp_path: Path) -> None:
    slow = report(tmp_path, world=4, transfer_us=1400)
    found = ratios(compare_reports(slow, base))
    # four collectives of 700, 800, 900 and 1000 us take 700 us more each
    assert found["transfer"] == pytest.approx((3400 + 2800) / 3400)
    assert found["all_gather, time"] == pytest.approx(1600 / 900)
    assert found["all_gather, bus bandwidth"] == pytest.approx(900 / 1600)
    assert found["all_gather, bytes"] == found["all_gather, count"] == pytest.approx(1)
    assert found["compute"] == pytest.approx(1)
    changed = compare_reports(slow, base).changed
    assert {
        "AllReduce" in row.name or "AllGather" in row.name or "ReduceScatter" in row.name for row in changed[:3]
    } == {True}
    inverse = ratios(compare_reports(base, slow))
    assert inverse["transfer"] == pytest.approx(3400 / 6200)


def test_what_only_one_run_has_has_no_ratio_and_is_shown(base: TraceReport, tmp_path: Path) -> None:
    other = report(tmp_path, world=4, collectives=("all_reduce",) * 4, step_marks=False)
    comparison = compare_reports(base, other)
    found = {row.name: row for row in comparison.rows}
    assert found["all_gather, count"].a and found["all_gather, count"].b is None
    assert found["all_gather, count"].ratio is None
    assert comparison.per == "rank" and "no steps" in " ".join(comparison.remarks)
    text = click.unstyle("\n".join(text_lines(comparison_blocks(comparison, 80), 80)))
    assert "all_gather, count" in text and "per rank" in text
    assert max(map(len, text.splitlines())) <= 80 or "note" in text
