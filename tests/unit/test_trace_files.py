"""Which files belong together."""

import os
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.trace import analyse
from allranks.analysis.trace.output import write_all
from allranks.errors import RequestError
from tests.unit.trace_builder import Event, op, step, write, write_ranks


def work(start: float = 0, number: int = 1) -> list[Event]:
    return [step(number, start, start + 100), op("aten::mm", start + 10, start + 60)]


def kinds(report: object) -> set[str]:
    return {p.kind for p in report.problems}  # type: ignore[attr-defined]


def test_a_folder_for_each_rank_as_a_profile_folder_has_it(tmp_path: Path) -> None:
    for name in ("simple_ddp", "zero2"):
        for rank in (0, 1):
            folder = tmp_path / "profile" / name / f"rank_{rank}"
            write(folder / f"vm_{77 + rank}.16999999999{rank}.pt.trace.json.gz", work(), rank, 2)
    reports = analyse([tmp_path / "profile"])
    assert [(r.name, [x.rank for x in r.ranks]) for r in reports] == [("simple_ddp", [0, 1]), ("zero2", [0, 1])]
    assert all(r.window is None for r in reports)


def test_windows_of_a_rank_newest_or_all(tmp_path: Path) -> None:
    for rank, worker in ((0, "a_10"), (1, "b_22")):
        for number, stamp in ((5, 1700000000000 + rank), (9, 1800000000000 + 3 * rank)):
            write(tmp_path / f"{worker}.{stamp}.pt.trace.json", work(number * 1e6, number), rank, 2)
    (latest,) = analyse([tmp_path])
    assert [[s.step for s in r.steps] for r in latest.ranks] == [[9], [9]]
    assert "windows" in kinds(latest)
    every = analyse([tmp_path], select="all")
    assert [(r.window, r.ranks[0].steps[0].step, len(r.ranks)) for r in every] == [("1 of 2", 5, 2), ("2 of 2", 9, 2)]


def test_a_run_folder_has_its_traces_under_traces_and_earlier_attempts_below(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "spec.yaml").write_text("name: x\n")
    (run / "metrics.json").write_text("{}")
    for rank in (0, 1):
        write(run / "traces" / f"rank{rank}.json.gz", work(5e6, 8), rank, 2)
        write(run / "traces" / "attempt-1" / f"rank{rank}.json.gz", work(1e6, 3), rank, 2)
    (latest,) = analyse([run])
    assert [r.steps[0].step for r in latest.ranks] == [8, 8]
    assert latest.name == analyse([run / "traces"])[0].name == "run"
    assert [r.ranks[0].steps[0].step for r in analyse([run], select="all")] == [3, 8]


@pytest.mark.parametrize(
    ("files", "ranks", "world", "problems"),
    [
        ({"rank_5/trace.json": (None, None)}, [[5]], None, set()),  # from the folder
        ({"some.json": (None, None)}, [[0]], None, {"no_rank"}),
        ({"nodeA.json": (0, 2), "other.json": (1, 2)}, [[0, 1]], 2, set()),  # hosts in names do not part a run
        ({"ddp.json": (0, 1), "zero.json": (0, 1)}, [[0], [0]], 1, set()),  # unrelated files do
        ({"x.json": ("3", "4")}, [[3]], 4, set()),  # as some tools write it
        ({f"rank{'9' * 30}.json": (10**30, 10**30)}, [[0]], None, {"no_rank"}),  # which cannot be
    ],
)
def test_whose_trace_it_is(tmp_path: Path, files: Any, ranks: Any, world: int | None, problems: set[str]) -> None:
    for name, (rank, size) in files.items():
        write(tmp_path / name, work(), rank, size)
    reports = analyse([tmp_path])
    assert [[r.rank for r in report.ranks] for report in reports] == ranks
    assert (reports[0].world_size, kinds(reports[0]) & {"no_rank"}) == (world, problems)
    assert world is not None or reports[0].missing_ranks == ()


def test_one_file_that_is_no_trace_does_not_hide_the_others(tmp_path: Path) -> None:
    write_ranks(tmp_path, work(), work())
    (tmp_path / "rank1.json.gz").write_bytes(b"")
    (report,) = analyse([tmp_path])
    assert [r.rank for r in report.ranks] == [0]
    (error,) = [p for p in report.problems if p.severity == "error"]
    assert error.file is not None and error.file.endswith("rank1.json.gz") and "empty" in error.message
    assert report.missing_ranks == (1,)


def test_ranks_read_by_several_processes_give_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.analysis.trace.SMALL_BYTES", 0)
    write_ranks(tmp_path, work(), work(), work())
    (tmp_path / "rank2.json.gz").write_bytes(b"no")
    assert analyse([tmp_path], workers=2) == analyse([tmp_path], workers=1)


def test_nothing_to_read_is_a_request_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file or directory; give a trace"):
        analyse([tmp_path / "none"])
    with pytest.raises(RequestError, match="has no traces"):
        analyse([tmp_path])
    (tmp_path / "spec.yaml").write_text("name: x\n")
    (tmp_path / "metrics.json").write_text("{}")  # the other JSON files of a run are no damaged traces
    with pytest.raises(RequestError, match=r"has no traces .*observe\.profile"):
        analyse([tmp_path])


def test_a_comparison_has_the_traces_of_each_strategy(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: x\n")
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "measured.json").write_text("{}")
    for name in ("a", "b"):
        write_ranks(tmp_path / "compare" / name / "traces", work(), work())
    assert [(len(r.ranks), {p.kind for p in r.problems}) for r in analyse([tmp_path])] == [(2, {"not_aligned"})] * 2


def test_a_name_that_is_no_utf_8_can_be_written_about(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run\xff")
    write_ranks(folder, work())
    written = write_all(analyse([folder]), tmp_path / "out")
    assert "run\\udcff" in (tmp_path / "out" / "summary.csv").read_text(encoding="utf-8") and len(written) == 4
