"""Runs that start again by themselves after a failure, or do not: two gloo ranks with an end planted into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.effective_time import KINDS
from allranks.rundir.files import read_json
from tests.dist.harness import equal, rows_spec, stall_ranks, train, weights_of

pytestmark = pytest.mark.dist
SECTIONS: dict[str, Any] = {"checkpoint": {"every": 2, "mode": "full"}, "cluster": {"restarts": {"max": 3}}}


def test_a_killed_rank_is_started_again_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = rows_spec(tmp_path, train={"max_steps": 12}, **SECTIONS)
    _, undisturbed = train(tmp_path, spec, code=0)
    stall_ranks(monkeypatch, "killed:1:9")  # batches are made ahead of their steps
    monkeypatch.setenv("STUCK_ATTEMPTS", "0")
    done, run = train(tmp_path, spec, code=0)
    assert equal(weights_of(run, 12), weights_of(undisturbed, 12))
    (one,) = read_json(run.restarts)
    step = one["after_step"]
    assert step in (4, 6, 8) and (one["action"], one["cause"], one["rank"]) == ("restart", "unknown", 1)
    metrics = read_json(run.metrics)
    assert (metrics["status"], metrics["attempts"], metrics["restarts"]) == ("succeeded", 2, [one])
    for text in (f"restart  after step {step}", "attempt 1: rank 1", "SIGKILL", "started again"):
        assert text in done.stdout, done.stdout
    page = run.report.read_text()
    assert "started again: one process crashed" in page and "Wall time of the attempts" in page
    time = metrics["effective_training_time"]
    assert time["wall_time_s"] == pytest.approx(sum(time[f"{kind}_s"] for kind in KINDS), abs=1e-6)
    assert (
        all(time[f"{kind}_s"] > 0 for kind in KINDS if kind not in ("evaluation", "repeated"))
        and len(time["attempts"]) == 2
    )
    assert f"effective      {time['share']:.1%} of the time was training that counts" in done.stdout


def test_a_second_failure_of_unknown_cause_ends_the_run_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall_ranks(monkeypatch, "killed:1:4")
    monkeypatch.setenv("STUCK_ATTEMPTS", "0,1,2")
    done, run = train(tmp_path, rows_spec(tmp_path, train={"max_steps": 12}, **SECTIONS), code=1)
    first, second = read_json(run.restarts)
    assert (first["action"], second["action"]) == ("restart", "stop") and len(run.attempts()) == 2
    assert "rank 1" in done.stderr and "SIGKILL" in done.stderr and f"restart  none: {second['reason']}" in done.stdout
    assert read_json(run.metrics)["restarts"] == [first, second]


def test_an_exception_of_the_program_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall_ranks(monkeypatch, "fail_beside_a_collective:1:4")
    done, run = train(tmp_path, rows_spec(tmp_path, **SECTIONS), code=1)
    (one,) = read_json(run.restarts)
    assert (one["action"], one["cause"], run.attempts()) == ("stop", "deterministic", [1])
    assert "the next attempt would end the same way" in done.stdout and "planted failure" in done.stderr


@pytest.mark.parametrize("most", [None, 1])
def test_an_own_program_starts_again_only_on_request_and_knows_the_attempt(tmp_path: Path, most: int | None) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    cluster = {"procs_per_node": 2, "device": "cpu", "restarts": {"max": most}}
    spec = {"name": "p", "script": {"path": str(program)}, "cluster": cluster, "run_root": str(tmp_path / "runs")}
    done, run = train(tmp_path, spec, code=0 if most else 1)
    assert run.attempts() == ([1, 2] if most else [1])
    assert ("attempt 1\n" in done.stdout) == bool(most)
