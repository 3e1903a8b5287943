"""Ends of all kinds: signals, kills, bad numbers; and going on after them. Real processes, real signals."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from allranks.launch.local_job import INTERRUPT_GRACE_S
from allranks.rundir.files import read_json
from tests.dist.harness import (
    Background,
    equal,
    rows_spec,
    slow_down,
    stall_ranks,
    step_events,
    train,
    until,
    weights_of,
    write_spec,
)

pytestmark = pytest.mark.dist


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    """A run that goes on until something happens to it."""
    slow_down(monkeypatch, 0.05)
    background = Background(tmp_path, "run", str(write_spec(tmp_path, rows_spec(tmp_path, train={"max_steps": 10**6}))))
    try:
        background.until_step(5)
        yield background
    finally:
        background.stop()


def all_gone(pids: list[int], limit_s: float) -> None:
    until(lambda: not any(psutil.pid_exists(p) for p in pids), limit_s)


def resumable(folder: Path, name: str) -> dict[str, Any]:
    """A mixture of two files, one of them repeated."""
    (folder / "pairs.csv").write_text("prompt,response\n" + "".join(f"say {i},word {i}\n" for i in range(9)))
    train = {"max_steps": 80, "grad_accum": 2, "warmup_steps": 5}
    spec = rows_spec(folder, name=name, train=train, checkpoint={"mode": "full"}, eval={"samples": 0})
    del spec["data"]["source"]
    spec["data"]["sources"] = [
        {"source": str(folder / "rows.json")}, {"source": str(folder / "pairs.csv"), "weight": 0.5}
    ]  # fmt: skip
    return spec


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGUSR1, signal.SIGTERM)], ids=["Ctrl-C", "twice"])
def test_a_resumed_run_is_bitwise_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[signal.Signals, ...]
) -> None:
    """Dropout, packing, accumulation, schedule, optimizer and a mixture of data, whose cache is gone, go on.

    After Ctrl-C the steps and the save take longer than ranks with nothing to save get.
    """
    _, whole = train(tmp_path, resumable(tmp_path, "whole"), code=0)
    slow = signals == (signal.SIGINT,)
    if slow:
        stall_ranks(monkeypatch, "slow_everywhere:0:-7;slow_everywhere:1:-7", 0.8)
    background = Background(tmp_path, "run", str(write_spec(tmp_path, resumable(tmp_path, "parts"))))
    monkeypatch.delenv("STUCK", raising=False)
    parts, stops = background.run, []
    for asked in signals:
        background.until_step((stops or [0])[-1] + 3)
        pids = background.all_pids()
        background.signal(asked)
        began = time.monotonic()
        all_gone(pids, 30 if slow else 5)
        assert not slow or time.monotonic() - began > INTERRUPT_GRACE_S
        code, out = background.wait(limit_s=20)
        assert code == 1
        told = "interrupted" if asked == signal.SIGINT else f"(allranks received {asked.name})"
        assert "stopped after step" in out and told in out, out
        assert read_json(parts.metrics)["steps"] >= 3 and parts.report.exists()
        stops.append(parts.checkpoint_steps()[-1])
        shutil.rmtree(tmp_path / "cache" / "allranks" / "data")
        background = Background(tmp_path, "resume", parts.name)
    code, out = background.wait()
    assert code == 0, out
    assert stops[0] >= 3 and stops[-1] < 80 and sorted(set(stops)) == stops
    for rank in (0, 1):
        one, other = ([(e["step"], e["loss"], e["tokens"]) for e in step_events(run, rank)] for run in (whole, parts))
        assert one == other
    assert equal(weights_of(whole, 80), weights_of(parts, 80))
    attempts = [*range(1, len(signals) + 2)]
    assert parts.attempts() == attempts
    assert read_json(parts.metrics)["attempts"] == len(attempts)
    assert all(parts.rank_logs(attempt) for attempt in attempts)


def test_a_killed_rank_is_named_and_the_others_end(endless: Background) -> None:
    pids = endless.all_pids()
    psutil.Process(endless.pid_of(1)).kill()
    began = time.monotonic()
    code, out = endless.wait(limit_s=30)
    assert time.monotonic() - began < 15
    assert code == 1
    for words in ("rank 1 ", "SIGKILL", "after step ", ".rank1.log"):
        assert words in out, out
    all_gone(pids, 1)
    assert "[RANK 1]" in endless.run.rank_logs(1)[1].read_text()
    assert read_json(endless.run.metrics)["status"] == "failed"


def test_a_rank_that_is_deaf_is_ended_with_the_others(endless: Background) -> None:
    """The peer of the dead rank is stopped: it can heed no signal but SIGKILL, like one inside a collective."""
    pids = endless.all_pids()
    psutil.Process(endless.pid_of(0)).suspend()
    psutil.Process(endless.pid_of(1)).kill()
    began = time.monotonic()
    code, out = endless.wait(limit_s=40)
    assert time.monotonic() - began < 15
    assert code == 1 and "rank 1" in out
    all_gone(pids, 1)


@pytest.mark.parametrize("asked_twice", [False, True], ids=["once", "twice"])
def test_ctrl_c_while_a_rank_is_deaf(endless: Background, asked_twice: bool) -> None:
    pids = endless.all_pids()
    psutil.Process(endless.pid_of(0)).suspend()
    endless.signal(signal.SIGINT)
    if asked_twice:
        until(lambda: "Ctrl-C again kills them now" in endless.out.read_text())
        endless.signal(signal.SIGINT)
    all_gone(pids, 5 if asked_twice else 20)
    code, out = endless.wait(limit_s=20)
    assert code == 1 and "were killed" in out


def test_ranks_do_not_outlive_a_killed_launcher(endless: Background) -> None:
    pids = endless.all_pids()
    endless.process.kill()
    endless.process.wait(timeout=5)
    all_gone(pids, 20)
    assert endless.run.checkpoint_steps() != []


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    wild = {"max_steps": 20, "lr": 1e30, "schedule": "constant", "max_grad_norm": None}
    spec = rows_spec(tmp_path, train=wild, cluster={"procs_per_node": 1})
    done, run = train(tmp_path, {**spec, "adapter": {"type": "none"}}, code=1)
    for words in ("not finite", "rank 0", "step 2"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert run.checkpoint_steps() == [1]
    assert all(bool(torch.isfinite(v).all()) for v in weights_of(run, 1).values())
