"""What must not end a run, and what an error leaves behind: two gloo ranks with an end planted into them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from tests.dist.harness import rows_spec, train

pytestmark = pytest.mark.dist
PLANTS = Path(__file__).parent / "planted_ends"


def plant(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLANTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PLANTED", what)


def test_an_evaluation_that_is_nan_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "nan_evaluation")
    done, run = train(tmp_path, rows_spec(tmp_path, eval={"baseline": True, "samples": 1}), code=0)
    assert "held out loss nan" in done.stdout and "nan (not finite)" in done.stdout
    metrics = read_json(run.metrics)
    wanted = {"status": "succeeded", "steps": 6, "eval_loss": None, "perplexity": None}
    assert {name: metrics[name] for name in wanted} == wanted
    assert run.report.exists()


def test_a_rank_that_fails_beside_a_collective_reports_first_and_does_not_leave_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under NCCL leaving the group waits for peers that wait for this rank; a sleep stands for it here."""
    plant(monkeypatch, "fail_beside_a_collective:1")
    began = time.monotonic()
    done, run = train(tmp_path, rows_spec(tmp_path, cluster={"timeout_s": 600}))
    assert time.monotonic() - began < 90  # far less than the ranks' own limit of 600 s
    assert done.returncode == 1
    assert "rank 1" in done.stderr and "planted failure" in done.stderr
    assert "RuntimeError: planted failure" in run.rank_logs(1)[1].read_text()
    (error,) = [e for e in read_events(run.events_of(1)) if e["event"] == "error"]
    assert error["message"] == "planted failure"
    assert not run.hang(1).exists()
