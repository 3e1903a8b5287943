"""The text of reports: columns are aligned, a usual report fits the terminal, and quoted text cannot send codes to
it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.analysis.trace import analyse
from allranks.analysis.trace.diff import compare_last
from allranks.analysis.trace.tables import (
    BLANK,
    Cell,
    Line,
    Table,
    comparison_blocks,
    report_blocks,
    short_name,
    text_lines,
)
from tests.conftest import shared
from tests.tracegen import Scenario, generate


def test_columns_are_aligned_and_cells_may_have_several_lines() -> None:
    table = Table("a title", ("name", "n"), [("x", "1,\n22"), (Cell("long\x1b[31m", "red"), "3")])
    lines = list(text_lines([BLANK, table, Line((("one two three", "dim"),), wrap=True)], 9))
    plain = [click.unstyle(line) for line in lines]
    assert plain == ["", "a title", "name   n", "x     1,", "      22", "long   3", "one two", "three"]
    assert lines[1].startswith("\x1b[1m") and "\x1b[31mlong" in lines[5] and lines[5].count("\x1b[31m") == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("traces")
    generate(Scenario(world=4, slow={(2, 1): 900}, memcpy=True), found)
    return found


@pytest.mark.parametrize("width", [80, 100, 131])
def test_usual_reports_fit_the_terminal(folder: Path, width: int) -> None:
    reports = analyse([folder], workers=1)
    blocks = [*report_blocks(reports[0], width), *comparison_blocks(compare_last(reports, reports), width)]
    assert max(len(click.unstyle(line)) for line in text_lines(blocks, width)) <= width


@pytest.mark.parametrize("name", ["a100_nccl_rank0_of_2.json.gz", "cpu_gloo_rank34_of_300.json.gz", "sampled_128rank"])
def test_real_tables_fit_the_terminal(name: str) -> None:
    (report,) = analyse([shared("traces", name)])
    tables = [block for block in report_blocks(report, 80) if isinstance(block, Table)]
    assert len(tables) > 2 and max(len(click.unstyle(line)) for line in text_lines(tables, 80)) <= 80


def test_the_verb_does_not_load_rich(folder: Path) -> None:
    """Its import takes as long as reading a small trace."""
    code = (
        "import sys; from allranks.cli.main import main\ntry: main()\nexcept SystemExit: print('rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False" and "Time by rank" in done.stdout, done.stderr


ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> "
    ">(int, at::native::CUDAFunctor_add<float>)"
)


def test_what_tells_nothing_goes_first() -> None:
    assert short_name(ADD, 500) == ADD
    assert short_name(ADD, 80) == "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, Array<char*, 3> >"
    assert (
        short_name("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWork*)", 40) == "ncclKernel_AllReduce_RING_LL_Sum_float"
    )
    assert short_name("split_embedding_backward_codegen_exact_warp", 20) == "split_embeddi…t_warp"


@given(st.text("ab:<>(), _", min_size=1, max_size=60), st.integers(20, 60))
def test_any_name_fits(name: str, width: int) -> None:
    assert len(short_name(name, width)) <= width
