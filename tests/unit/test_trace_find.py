"""What cannot be looked at under a path is told, and the rest is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.files import find_trace_files
from allranks.errors import RequestError
from tests.unit.trace_builder import op, step, write_ranks

WORK = [step(1, 0, 100), op("aten::mm", 10, 60)]


def test_a_link_to_nothing_is_told_beside_the_others(tmp_path: Path) -> None:
    write_ranks(tmp_path, WORK, WORK)
    (tmp_path / "rank2.json").symlink_to(tmp_path / "gone")
    (report,) = analyse([tmp_path])
    (problem,) = [p for p in report.problems if p.kind == "unreadable"]
    assert problem.file == str(tmp_path / "rank2.json") and "link" in problem.message and problem.severity == "error"
    assert len(report.ranks) == 2


def test_only_links_to_nothing_are_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").symlink_to(tmp_path / "gone")
    with pytest.raises(RequestError, match=r"rank0\.json cannot be read"):
        find_trace_files(tmp_path)
    with pytest.raises(RequestError, match="broken link"):
        find_trace_files(tmp_path / "rank0.json")


def test_a_folder_is_no_trace_whatever_its_name(tmp_path: Path) -> None:
    write_ranks(tmp_path / "x.json", WORK)
    files, problems = find_trace_files(tmp_path)
    assert [f.name for f in files] == ["rank0.json.gz"] and not problems


def test_a_name_that_is_no_utf_8_can_be_written_about(tmp_path: Path) -> None:
    from allranks.analysis.trace.output import write_all

    folder = tmp_path / os.fsdecode(b"run\xff")
    write_ranks(folder, WORK)
    written = write_all(analyse([folder]), tmp_path / "out")
    assert "run\\udcff" in (tmp_path / "out" / "summary.csv").read_text(encoding="utf-8") and len(written) == 4
