"""``allranks.report``: what it records, what it refuses to record, and that it ends and costs nothing."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.events import WRITTEN_AT_ONCE, EventLog, ProgressReporter
from allranks.rundir.heartbeat import HeartbeatPage, heartbeat, page_paths


def events(path: Path) -> list[dict[str, Any]]:
    records = map(json.loads, path.read_text().splitlines())
    return [{k: v for k, v in record.items() if k not in ("time", "last")} for record in records]


def reporter_of(folder: Path) -> tuple[ProgressReporter, Path]:
    reporter, path = ProgressReporter(), folder / "rank3.jsonl"
    reporter.open(EventLog(path, 3))
    return reporter, path


def test_the_first_reports_are_written_at_once_and_the_others_together(tmp_path: Path) -> None:
    reporter, path = reporter_of(tmp_path)
    usual = {"event": "progress", "rank": 3, "source": "report"}
    for step in range(1, WRITTEN_AT_ONCE + 3):
        reporter.report(step, 1.0, 10)
    first = [{**usual, "step": step, "loss": 1.0, "tokens": 10, "reports": 1} for step in range(1, WRITTEN_AT_ONCE + 1)]
    assert events(path) == first
    reporter.report(None, float("nan"), None)
    reporter.close()
    reporter.report(9, 9.0, 9)
    assert events(path)[len(first) :] == [{**usual, "step": step, "loss": None, "tokens": 20, "reports": 3}]


@pytest.mark.parametrize("value", ["many", -1, 1.5, float("inf"), float("nan"), [1, 2], object()])
def test_a_value_that_is_no_number_is_ignored_with_one_warning(tmp_path: Path, value: Any) -> None:
    reporter, path = reporter_of(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            reporter.report(value, 0.5, None)
    assert [str(w.message).partition("=")[0] for w in said] == ["allranks.report: step"]
    assert [e.get("step") for e in events(path)] == [None] * 3


def test_a_report_is_a_sign_of_life_and_a_forked_process_gives_none(tmp_path: Path) -> None:
    page = HeartbeatPage()
    heartbeat.open(page_paths([page]).partition(":")[0])
    reporter, path = reporter_of(tmp_path)
    reporter.report(1, None, None)
    beat = page.read()
    assert beat is not None
    child = os.fork()
    if not child:
        reporter.report(2, None, 5)
        reporter.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(events(path)) == 1
    reporter.report(3, None, None)
    after = page.read()
    assert after is not None
    assert after.beats == beat.beats + 1


def test_a_full_disk_does_not_end_the_program() -> None:
    reporter = ProgressReporter()
    reporter.open(EventLog(Path("/dev/full"), 0))
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        reporter.report(1, 0.5, 1)
    reporter.close()


def test_outside_a_run_nothing_happens_and_nothing_is_imported() -> None:
    code = (
        "import sys, allranks; before = set(sys.modules); allranks.report(step=1, loss=object(), tokens='x'); "
        "print(set(sys.modules) - before, {'torch', 'msgspec', 'click'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("set() set()\n", "")
