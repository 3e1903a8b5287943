"""summary.csv and collectives.csv, read back as another program would."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.output import collectives_csv, summary_csv
from allranks.analysis.trace.records import TraceReport
from tests.tracegen import Scenario, Truth, generate

SCENARIO = Scenario(slow={(3, 1): 900}, memcpy=True, offset_us={2: 500})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Truth, TraceReport]:
    folder = tmp_path_factory.mktemp("csv")
    return generate(SCENARIO, folder), analyse([folder], workers=1)[0]


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_row_per_rank_adds_up_and_equals_the_report(made: tuple[Truth, TraceReport]) -> None:
    _, report = made
    found = rows(summary_csv(report))
    assert [int(r["rank"]) for r in found] == list(range(8))
    for row, rank in zip(found, report.ranks, strict=True):
        parts = sum(float(row[c]) for c in ("compute_s", "exposed_comm_s", "copy_s", "idle_s"))
        assert parts == pytest.approx(float(row["span_s"]), abs=1e-9)
        assert float(row["compute_s"]) == pytest.approx(rank.total.compute_s, abs=1e-9)
        assert float(row["forward_busy_s"]) == pytest.approx(rank.phases[0].busy_s, abs=1e-9)
    assert int(found[3]["came_last"]) == 1 and int(found[0]["came_last"]) == 0
    assert float(found[3]["caused_wait_s"]) == pytest.approx(900e-6)
    assert float(found[0]["wait_s"]) == pytest.approx(900e-6) and float(found[3]["wait_s"]) == 0
    assert float(found[2]["clock_offset_s"]) - float(found[0]["clock_offset_s"]) == pytest.approx(500e-6)


def test_collectives_have_a_row_for_all_sizes_and_one_a_size(made: tuple[Truth, TraceReport]) -> None:
    truth, report = made
    found = rows(collectives_csv(report))
    whole = {r["kind"]: r for r in found if r["size_bucket"] == "all"}
    assert set(whole) == {"all_reduce", "all_gather", "reduce_scatter"}
    for kind, row in whole.items():
        parts = [r for r in found if r["kind"] == kind and r["size_bucket"] != "all"]
        assert sum(int(p["count"]) for p in parts) == int(row["count"])
        assert sum(int(p["bytes"]) for p in parts) == int(row["bytes"])
    assert int(whole["all_reduce"]["count"]) == 2 * SCENARIO.steps * SCENARIO.world
    assert float(whole["all_reduce"]["wait_s"]) + float(whole["all_gather"]["wait_s"]) == pytest.approx(7 * 900e-6)
    assert truth is not None


def test_what_is_not_known_is_empty_and_no_name_is_a_formula(made: tuple[Truth, TraceReport], tmp_path: Path) -> None:
    generate(replace(SCENARIO, world=1, metadata="none"), tmp_path)
    alone = analyse([tmp_path], workers=1)[0]
    row = rows(summary_csv(msgspec.structs.replace(alone, name='=HYPERLINK("http://x","y")')))[0]
    assert row["wait_s"] == row["peak_allocated_bytes"] == row["clock_offset_s"] == ""
    assert row["run"].startswith("'=")
    assert all(r["transfer_s"] == r["wait_s"] == "" for r in rows(collectives_csv(alone))), "found on one rank alone"
