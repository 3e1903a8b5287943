"""``allranks trace`` as a person and as a program call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.trace_builder import kernel, launch, nccl, op, step, write_ranks
from tests.warm import allranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ranks = [
        [
            step(1, 0, 1000),
            op("[red]odd[/red]::<b>", 101, 105),
            launch(1, 102),
            kernel("gemm<x>", 120, 300, 1),
            launch(2, 110),
            nccl("allreduce", 250 + 100 * r, 600, 0, 2),
        ]
        for r in (0, 1)
    ]
    return write_ranks(tmp_path / "traces here", *ranks, backend="nccl")


def trace(*words: object, width: int = 100) -> subprocess.CompletedProcess[str]:
    return allranks("trace", *words, env={"COLUMNS": str(width)})


def test_waiting_for_a_later_profiler_is_not_the_longest_wait(tmp_path: Path) -> None:
    """The first step's waiting is no rank's fault."""
    ranks = [
        [step(n, 1000 * n, 1000 * n + 900) for n in (1, 2, 3, 4)]
        + [nccl("allreduce", 1000 * n + 700 - early, 1000 * n + 800, n) for n, early in enumerate(starts, 1)]
        for starts in ((690, 20, 10, 10), (10, 10, 10, 10))
    ]
    ranks[1][0] = step(1, 1680, 1900)
    told = trace(write_ranks(tmp_path / "t", *ranks, backend="nccl")).stdout
    assert "(trimmed)" in told
    assert "Longest: rank 1 reached all_reduce (seq 2) 10 us after the first rank." in told


def test_what_cannot_be_read_ends_with_2_and_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("no")
    for path in (tmp_path / "x.json", tmp_path / "none", tmp_path):
        done = trace(path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("allranks: ") and "Traceback" not in done.stderr


def test_a_working_folder_with_modules_of_the_same_names_changes_nothing(folder: Path) -> None:
    """Readers are processes of their own; they must not import from where the user happens to be."""
    (folder.parent / "msgspec.py").write_text("raise SystemExit('wrong one')")
    code = (
        "import sys, os\nfrom pathlib import Path\nimport allranks.analysis.trace as "
        "t\nos.chdir(sys.argv[1])\nt.SMALL_BYTES = 0\n"
        "print(len(t.analyse([Path(sys.argv[2])], workers=2)[0].ranks))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder.parent), str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "2", done.stderr
