"""Ends of all kinds: signals, kills, bad numbers, a full disk; and going on after them. Real processes, real
signals."""

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
from safetensors.torch import load_file

from allranks.launch.local_job import INTERRUPT_GRACE_S
from allranks.rundir.files import read_json
from tests.conftest import tiny_spec, write_rows
from tests.dist.harness import Background, slow_down, stall_ranks, step_events, train, until, write_spec

pytestmark = pytest.mark.dist


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    """A run that goes on until something happens to it."""
    slow_down(monkeypatch, 0.05)
    write_rows(tmp_path / "rows.json", 60)
    background = Background(
        tmp_path,
        "run",
        str(write_spec(tmp_path, tiny_spec(tmp_path / "rows.json", tmp_path, train={"max_steps": 1000000}))),
    )
    try:
        background.until_step(5)
        yield background
    finally:
        background.stop()


def all_gone(pids: list[int], limit_s: float) -> None:
    began = time.monotonic()
    while any(psutil.pid_exists(p) for p in pids):
        assert time.monotonic() - began < limit_s, "processes are left"
        time.sleep(0.05)


def resumable(folder: Path, name: str) -> dict[str, Any]:
    """A mixture of two files, one of them repeated."""
    (folder / "pairs.csv").write_text("prompt,response\n" + "".join(f"say {i},word {i}\n" for i in range(9)))
    spec = tiny_spec(
        folder / "rows.json",
        folder,
        name=name,
        train={"max_steps": 80, "grad_accum": 2, "warmup_steps": 5},
        checkpoint={"mode": "full"},
        eval={"samples": 0},
    )
    del spec["data"]["source"]
    spec["data"]["sources"] = [
        {"source": str(folder / "rows.json")}, {"source": str(folder / "pairs.csv"), "weight": 0.5}
    ]  # fmt: skip
    return spec


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGUSR1, signal.SIGTERM)], ids=["Ctrl-C", "twice"])
def test_a_resumed_run_is_bitwise_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: tuple[signal.Signals, ...]
) -> None:
    """Stopped, and stopped again by another signal: dropout, packing, accumulation, schedule and optimizer go on as if
    nothing had been.

    So does a mixture of data, although its cache is gone. Every rank ends soon after a signal, and leaves a folder that
    can be read. After Ctrl-C the steps and the save take longer than ranks with nothing to save get.
    """
    write_rows(tmp_path / "rows.json", 60)
    done, whole = train(tmp_path, resumable(tmp_path, "whole"))
    assert done.returncode == 0, done.stderr
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
    a, b = (load_file(run.checkpoint(80) / "adapter_model.safetensors") for run in (whole, parts))
    assert all(torch.equal(a[k], b[k]) for k in a)
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
    """The peer of the dead rank is stopped (SIGSTOP): it can heed no signal but SIGKILL, like one inside a
    collective."""
    pids = endless.all_pids()
    psutil.Process(endless.pid_of(0)).suspend()
    psutil.Process(endless.pid_of(1)).kill()
    began = time.monotonic()
    code, out = endless.wait(limit_s=40)
    assert time.monotonic() - began < 15
    assert code == 1
    assert "rank 1" in out
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
    assert code == 1
    assert "were killed" in out


def test_ranks_do_not_outlive_a_killed_launcher(endless: Background) -> None:
    pids = endless.all_pids()
    endless.process.kill()
    endless.process.wait(timeout=5)
    all_gone(pids, 20)
    assert endless.run.checkpoint_steps() != []


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.json", 60)
    spec = tiny_spec(
        tmp_path / "rows.json",
        tmp_path,
        train={"max_steps": 20, "lr": 1e30, "schedule": "constant", "max_grad_norm": None},
        cluster={"procs_per_node": 1},
    )
    spec["adapter"] = {"type": "none"}
    done, run = train(tmp_path, spec)
    assert done.returncode == 1
    for words in ("not finite", "rank 0", "step 2"):
        assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert run.checkpoint_steps() == [1]
    weights = load_file(run.checkpoint(1) / "model.safetensors")
    assert all(bool(torch.isfinite(v).all()) for v in weights.values())
