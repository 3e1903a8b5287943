"""What is made of a report: tables on the terminal, CSV files read back as another program would, two runs compared."""

import csv
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.analysis.trace import analyse
from allranks.analysis.trace.diff import Comparison, compare_last, compare_reports
from allranks.analysis.trace.output import collectives_csv, summary_csv
from allranks.analysis.trace.records import TraceReport
from allranks.analysis.trace.tables import Cell, Table, comparison_blocks, report_blocks, short_name, text_lines
from tests.tracegen import Scenario, generate
from tests.unit.trace_builder import nccl, step, write_ranks

SCENARIO = Scenario(slow={(3, 1): 900}, memcpy=True, offset_us={2: 500})


def report(folder: Path, **changes: Any) -> TraceReport:
    generate(replace(SCENARIO, **changes), folder)
    return analyse([folder], workers=1)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def base(folder: Path) -> TraceReport:
    return report(folder)


def plain(blocks: Any, width: int = 80) -> list[str]:
    return [click.unstyle(line) for line in text_lines(blocks, width)]


# tables


def test_columns_are_aligned_and_quoted_text_sends_no_codes() -> None:
    table = Table("a title", ("name", "n"), [("x", "1,\n22"), (Cell("long\x1b[31m", "red"), "3")])
    lines = list(text_lines([table], 9))
    assert [click.unstyle(line) for line in lines] == ["a title", "name   n", "x     1,", "      22", "long   3"]
    assert lines[4].count("\x1b[31m") == 1


@pytest.mark.parametrize("width", [80, 131])
def test_usual_reports_fit_the_terminal(base: TraceReport, width: int) -> None:
    blocks = [*report_blocks(base, width), *comparison_blocks(compare_last([base], [base]), width)]
    assert max(map(len, plain(blocks, width))) <= width


def test_waiting_for_a_later_profiler_is_not_the_longest_wait(tmp_path: Path) -> None:
    """The first step's waiting is no rank's fault."""
    ranks = [
        [step(n, 1000 * n, 1000 * n + 900) for n in (1, 2, 3, 4)]
        + [nccl("allreduce", 1000 * n + 700 - early, 1000 * n + 800, n) for n, early in enumerate(starts, 1)]
        for starts in ((690, 20, 10, 10), (10, 10, 10, 10))
    ]
    ranks[1][0] = step(1, 1680, 1900)
    text = "\n".join(plain(report_blocks(analyse([write_ranks(tmp_path, *ranks, backend="nccl")])[0], 100), 100))
    assert "(trimmed)" in text
    assert "Longest: rank 1 reached all_reduce (seq 2) 10 us after the first rank." in text


ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> "
    ">(int, at::native::CUDAFunctor_add<float>)"
)


def test_what_tells_nothing_goes_first() -> None:
    assert short_name(ADD, 80) == "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, Array<char*, 3> >"
    assert short_name("split_embedding_backward_codegen_exact_warp", 20) == "split_embeddi…t_warp"


@given(st.text("ab:<>(), _", min_size=1, max_size=60), st.integers(20, 60))
def test_any_name_fits(name: str, width: int) -> None:
    assert len(short_name(name, width)) <= width


# the verb


def python(code: str, *words: object) -> str:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_verb_does_not_load_rich(folder: Path, base: TraceReport) -> None:
    """Its import takes as long as reading a small trace."""
    code = "import sys\nfrom allranks.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: print('rich' in sys.modules)"
    shown = python(code, "trace", folder)
    assert shown.splitlines()[-1] == "False" and "Time by rank" in shown


def test_modules_in_the_working_folder_change_nothing(folder: Path, base: TraceReport, tmp_path: Path) -> None:
    """Readers are processes of their own; they must not import from where the user happens to be."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('wrong one')")
    code = (
        "import sys, os\nfrom pathlib import Path\nimport allranks.analysis.trace as t\nos.chdir(sys.argv[1])\n"
        "t.SMALL_BYTES = 0\nprint(len(t.analyse([Path(sys.argv[2])], workers=2)[0].ranks))\n"
    )
    assert python(code, tmp_path, folder) == "8\n"


# summary.csv and collectives.csv


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_row_per_rank_adds_up_and_equals_the_report(base: TraceReport) -> None:
    found = rows(summary_csv(base))
    assert [int(r["rank"]) for r in found] == list(range(8))
    for row, rank in zip(found, base.ranks, strict=True):
        parts = sum(float(row[c]) for c in ("compute_s", "exposed_comm_s", "copy_s", "idle_s"))
        assert parts == pytest.approx(float(row["span_s"]), abs=1e-9)
        assert float(row["compute_s"]) == pytest.approx(rank.total.compute_s, abs=1e-9)
        assert float(row["forward_busy_s"]) == pytest.approx(rank.phases[0].busy_s, abs=1e-9)
    waits = [(int(r["came_last"]), float(r["caused_wait_s"]), float(r["wait_s"])) for r in (found[3], found[0])]
    assert waits == [(1, pytest.approx(900e-6), 0), (0, 0, pytest.approx(900e-6))]
    assert float(found[2]["clock_offset_s"]) - float(found[0]["clock_offset_s"]) == pytest.approx(500e-6)


def test_collectives_have_a_row_for_all_sizes_and_one_a_size(base: TraceReport) -> None:
    found = rows(collectives_csv(base))
    whole = {r["kind"]: r for r in found if r["size_bucket"] == "all"}
    assert set(whole) == {"all_reduce", "all_gather", "reduce_scatter"}
    for kind, row in whole.items():
        parts = [r for r in found if r["kind"] == kind and r["size_bucket"] != "all"]
        assert all(sum(int(p[name]) for p in parts) == int(row[name]) for name in ("count", "bytes"))
    assert int(whole["all_reduce"]["count"]) == 2 * SCENARIO.steps * SCENARIO.world
    assert float(whole["all_reduce"]["wait_s"]) + float(whole["all_gather"]["wait_s"]) == pytest.approx(7 * 900e-6)


def test_what_is_not_known_is_empty_and_no_name_is_a_formula(tmp_path: Path) -> None:
    alone = report(tmp_path, world=1, metadata="none")
    row = rows(summary_csv(msgspec.structs.replace(alone, name='=HYPERLINK("http://x","y")')))[0]
    assert row["wait_s"] == row["peak_allocated_bytes"] == row["clock_offset_s"] == ""
    assert row["run"].startswith("'=")
    assert all(r["transfer_s"] == r["wait_s"] == "" for r in rows(collectives_csv(alone))), "found on one rank alone"


# two runs against each other


def ratios(comparison: Comparison) -> dict[str, float | None]:
    return {row.name: row.ratio for row in comparison.rows}


def test_slower_transfer_is_seen_where_it_is_and_nowhere_else(base: TraceReport, tmp_path: Path) -> None:
    even, slow = report(tmp_path / "a", slow={}), report(tmp_path / "b", slow={}, transfer_us=1400)
    same = compare_reports(base, base)
    assert {row.ratio for row in (*same.rows, *same.changed) if row.a} == {1.0}
    assert same.per == "rank and step" and not same.remarks
    comparison = compare_reports(slow, even)
    found = ratios(comparison)
    # four collectives of 700, 800, 900 and 1000 us take 700 us more each
    assert found["transfer"] == pytest.approx((3400 + 2800) / 3400)
    assert found["all_gather, time"] == pytest.approx(1600 / 900)
    assert found["all_gather, bus bandwidth"] == pytest.approx(900 / 1600)
    assert found["all_gather, bytes"] == found["all_gather, count"] == found["compute"] == pytest.approx(1)
    kinds = ("AllReduce", "AllGather", "ReduceScatter")
    assert all(any(kind in row.name for kind in kinds) for row in comparison.changed[:3])
    assert ratios(compare_reports(even, slow))["transfer"] == pytest.approx(3400 / 6200)


def test_what_only_one_run_has_has_no_ratio_and_is_shown(base: TraceReport, tmp_path: Path) -> None:
    comparison = compare_reports(base, report(tmp_path, collectives=("all_reduce",) * 4, step_marks=False))
    found = {row.name: row for row in comparison.rows}["all_gather, count"]
    assert found.a and found.b is None and found.ratio is None
    assert comparison.per == "rank" and "no steps" in " ".join(comparison.remarks)
    text = plain(comparison_blocks(comparison, 80))
    assert "all_gather, count" in "\n".join(text) and "per rank" in "\n".join(text)
