"""The text without rich against the text of rich: in a pipe nobody may see which of them wrote it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from allranks.analysis.trace import analyse
from allranks.analysis.trace.diff import compare_last
from allranks.analysis.trace.tables import (
    BLANK,
    Block,
    Cell,
    Line,
    Rule,
    Table,
    comparison_blocks,
    plain_text,
    report_blocks,
    show_blocks,
)
from tests.conftest import shared
from tests.tracegen import Scenario, generate


def by_rich(blocks: list[Block], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_blocks(console, blocks)
    return console.file.getvalue().removesuffix("\n")  # type: ignore[attr-defined]


WORDS = st.text("ab:[] \u2026\n\t\u4e2d\u0301", max_size=12) | st.sampled_from(
    ["12.5 %", "all_reduce", "[bold]x", ":smile:"]
)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    columns = tuple(draw(st.lists(WORDS, min_size=1, max_size=4)))
    cells = st.one_of(WORDS, st.builds(Cell, WORDS, st.sampled_from(["red", ""])))
    rows = draw(st.lists(st.tuples(*[cells] * len(columns)), max_size=4))
    return Table(draw(WORDS), columns, rows, left=draw(st.integers(0, 2)))


LINES = st.builds(
    Line,
    st.lists(st.tuples(st.text("ab 1\u2026\n\u4e2d", max_size=40), st.sampled_from(["", "dim"])), max_size=3).map(
        tuple
    ),
    wrap=st.booleans(),
    highlight=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(tables(), LINES, st.just(Rule()), st.just(BLANK)), min_size=1, max_size=4), st.integers(5, 60)
)
@example([Table("a b", ("a", "b"), [("x", "1,\n22")])], 60)
def test_plain_text_is_the_text_of_rich(blocks: list[Block], width: int) -> None:
    text = plain_text(blocks, width)
    assert text is None or text == by_rich(blocks, width)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("traces")
    generate(Scenario(world=4, slow={(2, 1): 900}, memcpy=True), found)
    return found


@pytest.mark.parametrize("width", [80, 100, 131])
def test_no_usual_report_needs_rich(folder: Path, width: int) -> None:
    reports = analyse([folder], workers=1)
    blocks = [*report_blocks(reports[0], width), Rule(), *comparison_blocks(compare_last(reports, reports), width)]
    assert plain_text(blocks, width) == by_rich(blocks, width)


@pytest.mark.parametrize("name", ["a100_nccl_rank0_of_2.json.gz", "cpu_gloo_rank34_of_300.json.gz", "sampled_128rank"])
def test_no_real_report_needs_rich(name: str) -> None:
    (report,) = analyse([shared("traces", name)])
    blocks = list(report_blocks(report, 80))
    assert plain_text(blocks, 80) == by_rich(blocks, 80)


def test_the_verb_in_a_pipe_does_not_load_rich(folder: Path) -> None:
    """Its import takes as long as reading a small trace."""
    code = (
        "import sys; from allranks.cli.main import main\ntry: main()\nexcept SystemExit: print('rich' in sys.modules)"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE")}
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", str(folder)],
        env=env | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "False" and "Time by rank" in done.stdout, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", str(folder)],
        env=env | {"FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "True" and "\x1b[1m" in done.stdout, done.stderr
