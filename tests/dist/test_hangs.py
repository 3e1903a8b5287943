"""Ranks that stand still: noticed, looked at, named with their line, and ended; and slow ones, which are not."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pytest import MonkeyPatch

from allranks.analysis.diagnose import diagnose
from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.rundir.paths import RunDir
from tests.dist.harness import Background, rows_spec, stall_ranks, step_events, train, write_spec

WITHIN_S = 30  # promised: from the limit to the report


def spec(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"train": {"max_steps": 40}, "observe": {"hang_s": 4}, "strategy": {"name": "pytorch_ddp"}}
    return rows_spec(tmp_path, 80, **{**usual, **sections, "eval": {"samples": 0, **sections.get("eval", {})}})


def plant(monkeypatch: MonkeyPatch, what: str, seconds: float = 0) -> None:
    stall_ranks(monkeypatch, what, seconds)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")


def the_report(run: RunDir) -> dict[str, Any]:
    found = read_json(run.hang_report(1))
    assert found is not None, "no report"
    print(found["sentence"], round(found["judged"] - found["alarm"]["since"], 2))
    assert 0 < found["judged"] - (found["alarm"]["since"] + found["alarm"]["limit_s"]) < WITHIN_S
    return found


def nothing_left(run: RunDir) -> bool:
    return not any(str(run.root) in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def test_slow_ranks_are_named_and_one_that_sleeps_with_its_line(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """One is slow with its data, the other in its backward passes; at last one sleeps."""
    plant(monkeypatch, "sleep_a_while:1:-1;slow_backward:0:-1;sleep_forever:1:33", seconds=0.2)
    done, run = train(tmp_path, spec(tmp_path), code=1)
    slow_ranks_are_named(done.stdout, run)
    report = the_report(run)
    (stalled,) = report["stalled"]
    assert (stalled["rank"], report["waiting"][0]["rank"], report["kind"]) == (1, 0, "dataloader_hang")
    assert "stuck/sitecustomize.py:" in stalled["where"] and "in sleep_forever" in stalled["where"]
    assert "never joined collective" in stalled["why"]
    for words in ("hang: rank 1 on", "sleep_forever", "rank 0 in"):
        assert words in done.stderr, done.stderr
        assert words in read_json(run.metrics)["message"]
    assert nothing_left(run)
    (event,) = [e for e in read_events(run.events_of(1)) if e["event"] == "hang"]
    assert event["ranks"] == [1] and event["noticed"] - event["since"] >= event["limit_s"] == 4.0
    first = diagnose([run.root]).findings[0]
    assert (first.id, first.rank) == ("dataloader_hang", 1) and "sleep_forever" in first.cause
    page = run.report.read_text()
    assert "Position of the ranks" in page and "sleep_forever" in page
    folder = run.hang(1)
    assert {"flight.rank0", "flight.rank1", "node0.json", "hang.json"} <= {p.name for p in folder.iterdir()}
    node = read_json(run.hang_node(1, 0))
    assert node["interfaces"]["lo"]["up"] and [bool(r["stack"]) for r in node["ranks"]] == [True, True]
    assert not any(b"0123456789abcdef0123" in p.read_bytes() for p in folder.iterdir())
    assert sum(p.stat().st_size for p in folder.iterdir()) < 4 << 20


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "strategy", "why", "kind"),
    [
        ("other_collective", "pytorch_ddp", "all_gather", "collective_mismatch"),
        ("hold_the_interpreter", "pytorch_zero3", "holds the interpreter", "dataloader_hang"),
        ("spin_forever", "hf_trainer", "never joined collective", "dataloader_hang"),
    ],
)
def test_other_ways_to_fall_out(
    tmp_path: Path, monkeypatch: MonkeyPatch, how: str, strategy: str, why: str, kind: str
) -> None:
    # a C call that holds the interpreter is told from other silence by heartbeats before, and after 5 s
    plant(monkeypatch, f"sleep_a_while:1:-1;{how}:1:12", seconds=0.3)
    _, run = train(tmp_path, spec(tmp_path, strategy={"name": strategy}, observe={"hang_s": 7}), code=1)
    report = the_report(run)
    assert report["kind"] == kind
    mine = next(f for f in report["stalled"] if f["rank"] == 1)
    assert why in mine["why"] and f"in {how}" in mine["where"]
    assert nothing_left(run)


@pytest.mark.full
def test_the_first_collective_is_bounded_by_what_the_others_can_wait(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    plant(monkeypatch, "sleep_forever:0:2")  # the first batch is that of the rehearsal
    _, run = train(tmp_path, spec(tmp_path, cluster={"timeout_s": 20}), code=1)
    report = the_report(run)
    assert report["alarm"]["phase"] == "first step" and [f["rank"] for f in report["stalled"]] == [0]


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Background]:
    background = Background(tmp_path, "run", str(write_spec(tmp_path, spec(tmp_path, train={"max_steps": 1000000}))))
    try:
        background.until_step(8)
        yield background
    finally:
        background.stop()


@pytest.mark.full
def test_a_stopped_process_is_named_by_its_state(endless: Background) -> None:
    os.kill(endless.pid_of(1), signal.SIGSTOP)
    code, out = endless.wait()
    assert code == 1
    assert [f["rank"] for f in the_report(endless.run)["stalled"]] == [1]
    assert "stopped by a signal (SIGSTOP or SIGTSTP)" in out


@pytest.mark.full
def test_a_stopped_job_that_goes_on_is_not_called_a_hang(endless: Background) -> None:
    """As a scheduler suspends and resumes it: all of its processes stand still together, the agent too."""
    pids = endless.all_pids()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(7)
    endless.until_step(step_events(endless.run)[-1]["step"] + 5)
    assert endless.process.poll() is None and not endless.run.hang_report(1).exists()


@pytest.mark.full
def test_slow_steps_a_long_evaluation_and_checkpoint_are_no_hang(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    plant(monkeypatch, "slow_everywhere:1:-6", seconds=2.5)
    _, run = train(tmp_path, spec(tmp_path, train={"max_steps": 9}, eval={"every": 7}, checkpoint={"every": 8}), code=0)
    assert not run.hang(1).exists() and sum(e["step_time_s"] > 2 for e in step_events(run, 1)) >= 3


def slow_ranks_are_named(shown: str, run: RunDir) -> None:
    """Rank 1 in its data, rank 0 in its backward passes: in the terminal, in the metrics and in the report."""
    said = [line for line in shown.splitlines() if "is slow" in line]
    assert sorted(line.split("rank ")[1][0] for line in said) == ["0", "1"]
    assert any("rank 1 on" in line and "its own work (data and forward)" in line for line in said)
    assert any("rank 0 on" in line and "its backward passes" in line for line in said)
    found = read_json(run.metrics)["own_time"]
    assert sorted(found["stragglers"]) == [0, 1]
    assert {r["rank"]: r["slow_in"] for r in found["ranks"]} == {0: ["own_backward_s"], 1: ["own_s"]}
    assert "the others wait" in run.report.read_text()
