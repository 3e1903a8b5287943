"""What follows a failed attempt, by its cause."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from allranks.analysis.diagnose.catalogue import CATALOGUE
from allranks.errors import SpecError
from allranks.launch.restarts import (
    CAUSES,
    Restart,
    cause_of,
    decide,
    decide_and_record,
    read_restarts,
    restart_limit,
    restart_line,
)
from allranks.rundir.paths import RunDir
from allranks.spec import parse_spec

NODE, KILLED, OWN = "node_unhealthy", "rank_died", "application_error"
TRAINING = {"model": {"name": "tiny:mistral"}, "data": {"source": "x"}}


def after(failure: str, *before: tuple[str, int | None], limit: int = 3, step: int | None = None) -> Restart:
    """The decision after `failure`, with a checkpoint of `step`, and earlier restarts (failure, step)."""
    earlier = [decide(i, {"id": name}, "m", [], 9, at) for i, (name, at) in enumerate(before, 1)]
    return decide(len(before) + 1, {"id": failure, "rank": 1, "host": "n2"}, "rank 1 failed.", earlier, limit, step)


def test_every_class_of_the_table_exists_once() -> None:
    named = [name for names in CAUSES.values() for name in names]
    assert len(named) == len(set(named)) and set(named) <= CATALOGUE.keys()
    assert cause_of("a_new_class") == cause_of("loss_not_finite") == cause_of("disk_full") == "deterministic"


@pytest.mark.parametrize(
    ("one", "action", "said"),
    [
        (after(NODE), "restart", "infrastructure"),
        (after("stale_file_handle"), "restart", "transient"),
        (after(KILLED), "restart", "cause unknown"),
        (after(OWN), "stop", "would end the same way"),
        (after("slurm_cancelled"), "stop", "ended from outside"),
        (after(NODE, limit=0), "stop", "max (0)"),
        (after(NODE, (NODE, 2), (NODE, 4), (NODE, 6), step=8), "stop", "max (3)"),
        (after(NODE, (NODE, 2), step=4), "restart", "infrastructure"),
        (after(NODE, (NODE, 2), step=2), "stop", "no checkpoint was written in between"),
        (after(NODE, (NODE, None)), "stop", "no checkpoint was written in between"),
        (after(NODE, (KILLED, None)), "restart", "infrastructure"),
        (after(KILLED, (KILLED, 2), step=4), "stop", "once for an unknown cause"),
        (after("collective_hang", (KILLED, 2), (NODE, 4), step=6), "stop", "once for an unknown cause"),
    ],
)
def test_the_cause_decides(one: Restart, action: str, said: str) -> None:
    assert one.action == action and said in one.reason
    assert (one.rank, one.host, one.message) == (1, "n2", "rank 1 failed")


@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        (TRAINING, 3),
        ({**TRAINING, "cluster": {"restarts": {"max": 0}}}, 0),
        ({"script": {"path": "p.py"}}, 0),
        ({"script": {"path": "p.py"}, "cluster": {"restarts": {"max": 2}}}, 2),
    ],
)
def test_own_programs_are_not_started_again_unless_asked(spec: dict[str, object], limit: int) -> None:
    parsed = parse_spec(spec)
    assert restart_limit(parsed) == limit and ("none" in restart_line(parsed)) == (not limit)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(SpecError, match=r"cluster\.restarts\.max"):
        parse_spec({"script": {"path": "p.py"}, "cluster": {"restarts": {"max": -1}}})


def test_a_record_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    gone = RunDir(tmp_path / "gone")
    metrics = {"failure": {"id": NODE}, "message": "m"}
    decided = decide_and_record(gone, parse_spec(TRAINING), 1, metrics, [])
    assert decided is not None and decided.action == "restart" and read_restarts(gone) == []


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for text in ("", "[1]", "{}", "["):
        run.restarts.write_text(text)
        assert read_restarts(run) == []
    run.restarts.write_bytes(msgspec.json.encode([after(NODE)]))
    assert [one.failure for one in read_restarts(run)] == [NODE]
