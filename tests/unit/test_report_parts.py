"""Single cards, tables and charts of the page: the rules behind what each of them shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allranks.analysis.report.figures import downsample
from allranks.analysis.report.html import MAX_ROWS
from allranks.analysis.report.page import proof
from allranks.analysis.report.run_data import RunData, read_run_data
from allranks.analysis.report.tables import (
    checkpoint_table,
    error_table,
    hang_table,
    link_table,
    machine_table,
    straggler_table,
)
from allranks.rundir.files import write_json
from tests.unit.report_runs import Maker


def made(root: Path, *, ranks: int = 2, **written: Any) -> RunData:
    make = Maker(root, ranks=ranks)
    make.begin()
    make.steps(1, 10)
    return read_run_data(make.write(**written))


def test_ranks_that_did_not_answer_are_no_tick(tmp_path: Path) -> None:
    shown = proof(made(tmp_path, plan={"world_size": 3}))
    assert shown is not None
    assert (shown.items[0].detail, shown.items[0].mark) == ("2 of 3", "✗")


def test_errors_stand_before_what_followed_from_them(tmp_path: Path) -> None:
    make = Maker(tmp_path)
    make.begin()
    make.tell("error", only=0, type="ConnectionError", message="lost a peer", attempt=1, echo=True)
    make.tell("error", only=1, after=1.0, type="ValueError", message="x", attempt=1, echo=False)
    assert [e["type"] for e in read_run_data(make.write()).errors()] == ["ValueError", "ConnectionError"]


def test_a_killed_rank_is_the_error_of_an_attempt_that_another_has_continued(tmp_path: Path) -> None:
    """It has written no event; the other rank has, and it was not at fault."""
    make = Maker(tmp_path)
    make.begin()
    make.tell("error", only=0, type="DistBackendError", message="Connection closed", attempt=1, echo=True)
    end = {"rank": 1, "host": "one", "exitcode": -9, "time": make.time}
    write_json(make.run.agent_exit(1, "one"), {"failed": [end, {**end, "rank": 0, "exitcode": 1}]})
    make.begin(attempt=2, resumed_from=0)
    make.steps(1, 3)
    found = error_table(read_run_data(make.write()))
    assert found is not None
    assert [[cell.text for cell in row] for row in found.rows] == [
        ["1", "1", "SIGKILL", "the rank was killed", ""],
        ["1", "0", "DistBackendError", "Connection closed", "another rank had failed"],
    ]


def test_the_log_shown_is_that_of_the_rank_that_fell_out(tmp_path: Path) -> None:
    make = Maker(tmp_path)
    make.begin()
    make.tell("error", only=0, type="RuntimeError", message="timeout", attempt=1, echo=False)
    for rank in (0, 1):
        make.run.log_of(1, "one", rank).write_text(f"last words of rank {rank}\n")
    make.run.hang(1).mkdir(parents=True)
    make.run.hang_report(1).write_text(json.dumps({"stalled": [{"rank": 1}]}))
    assert read_run_data(make.write(status="failed")).log == ("one.rank1.log", "last words of rank 1")
    make.run.hang_report(1).unlink()
    assert read_run_data(make.run).log == ("one.rank0.log", "last words of rank 0")


def test_thinning_keeps_the_lowest_and_the_highest_of_every_stretch() -> None:
    ys = [5.0, 9.0, 1.0, 5.0, 5.0, 2.0, 8.0, 5.0]
    assert downsample(range(8), ys, 4) == ([1, 2, 5, 6], [9.0, 1.0, 2.0, 8.0])


def test_what_became_of_a_checkpoint(tmp_path: Path) -> None:
    make = Maker(tmp_path)
    make.begin()
    for step in (1, 2, 3):
        make.save(step)
    run = make.write()
    (run.checkpoint(1) / "manifest.json").unlink()
    run.checkpoint(1).rmdir()
    (run.checkpoint(2) / "manifest.json").unlink()
    found = checkpoint_table(read_run_data(run))
    assert found is not None
    assert [row[-1].text for row in found.rows] == ["removed", "no manifest", "✓ exists"]


def test_ranks_beyond_those_shown_are_counted(tmp_path: Path) -> None:
    own = [{"rank": r, "host": "n", "own_s": 0.1, "relative": 1.0, "slow": r == 0} for r in range(MAX_ROWS + 3)]
    data = made(tmp_path, metrics={"own_time": {"factor": 1.4, "ranks": own}})
    pace = straggler_table(data)
    assert pace is not None
    assert (len(pace.rows), pace.rows[0][-1].text) == (MAX_ROWS, "slow: the others wait")
    assert pace.note.endswith(f"3 of {MAX_ROWS + 3} ranks are left out, before the last.")
    stood = {"stalled": [{"rank": 1}], "waiting": [{"rank": r} for r in range(2, MAX_ROWS + 6)]}
    hang = hang_table(RunData(**{**vars(data), "hang": stood}))
    assert hang is not None
    assert [row[2].text for row in hang.rows] == ["stalled", *["waits"] * (MAX_ROWS - 1)]
    assert "5 of 21 ranks are left out" in hang.note


def test_ranks_that_lost_their_cpu_time_are_not_called_slow(tmp_path: Path) -> None:
    own = [
        {"rank": 0, "own_s": 0.3, "relative": 1.0, "slow": False, "reason": "machine", "queued_share": 0.6},
        {"rank": 1, "own_s": 0.2, "relative": 2.0, "slow": True, "reason": "unknown"},
        {"rank": 2, "own_s": 0.1, "relative": 1.0, "slow": False, "reason": ["damaged"]},
    ]
    loads = [{"host": "a", "taken_share": 0.1, "cores": 2}, {"host": "b", "taken_share": 0.5, "others_cores": 1.25}, 3]
    links = [{"host": "a", "peer": "b", "ranks": [0, 1, "x"], "lossy": True, "resent_share": 0.04}, {"host": None}]
    data = made(tmp_path, metrics={"own_time": {"ranks": own}, "machine_load": loads, "links": links})
    pace, machines, between = straggler_table(data), machine_table(data), link_table(data)
    assert pace is not None and machines is not None and between is not None
    said = [row[-1].text for row in pace.rows]
    assert said == ["its CPU time was taken", "slow: the others wait; reason not known", ""]
    assert [(row[0].text, row[2].text) for row in machines.rows] == [("b", "50.0%"), ("a", "10.0%")]
    assert [row[-1].text for row in between.rows] == ["slow", ""]
    assert machine_table(made(tmp_path / "none", metrics={})) is None
