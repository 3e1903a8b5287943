"""The heartbeat thread survives its own failures, reports them on the page alone, and is no part of the rank's log."""

import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from allranks.rundir import heartbeat
from allranks.rundir.heartbeat import _LENGTH, _SEQUENCES, PAGE_SIZE, HeartbeatPage, HeartbeatWriter, page_paths
from allranks.train import rank_hooks

IMPORTS = """
import os, sys, threading, time
from pathlib import Path
from allranks.train import rank_hooks
from allranks.rundir.heartbeat import HeartbeatPage, page_paths
from allranks.rundir.paths import RunDir
rank_hooks.HEARTBEAT_INTERVAL_S = 0.0002
page = HeartbeatPage()
os.environ["ALLRANKS_PULSE"], os.environ["LOCAL_RANK"] = page_paths([page]), "0"
rank_hooks.start_rank_hooks(RunDir(Path(sys.argv[1])), 1, 0)
import torch.distributed
before = page.read().alive_beats
time.sleep(0.2)
after = page.read()
pulses = any(t.name == "allranks-pulse" for t in threading.enumerate())
print(pulses, after.alive_beats > before, repr(after.monitor_error))
"""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> HeartbeatPage:
    made, beats = HeartbeatPage(), HeartbeatWriter()
    beats.open(page_paths([made]).partition(":")[0])
    beats.phase("start")
    monkeypatch.setattr(rank_hooks, "heartbeat", beats)
    return made


def read(page: HeartbeatPage) -> heartbeat.Heartbeat:
    beat = page.read()
    assert beat is not None
    return beat


@pytest.mark.full
def test_torch_may_be_imported_while_the_heartbeat_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("True True ''\n", "")


def test_a_rank_is_asked_for_its_record_and_answers(page: HeartbeatPage) -> None:
    beats, states = rank_hooks.heartbeat, []
    for change in (lambda: None, page.ask, beats.answered):
        change()
        states.append((beats.asked, page.answered))
    assert states == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize(("text", "size"), [('{"default', 9), ("{}", PAGE_SIZE), ("{}", -1)])
def test_a_page_that_is_half_written_is_read_as_far_as_it_goes(page: HeartbeatPage, text: str, size: int) -> None:
    rank_hooks.heartbeat.phase("train")
    with mmap.mmap(page.fd, PAGE_SIZE) as raw:
        _SEQUENCES.write(raw, text)
        _LENGTH.pack_into(raw, _SEQUENCES.at, size)
    assert (read(page).phase, read(page).sequences) == ("first step", {})


def test_a_failure_of_the_heartbeat_is_on_the_page_until_it_is_over(
    page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def state() -> tuple[int, str, dict[str, int]]:
        return read(page).alive_beats, read(page).monitor_error, read(page).sequences

    assert state() == (0, "", {})
    monkeypatch.setattr(rank_hooks, "_sequences", Mock(side_effect=AttributeError("module has no attribute")))
    rank_hooks._report(Path("unused"))
    assert state() == (1, "AttributeError: module has no attribute", {})
    monkeypatch.setattr(rank_hooks, "_sequences", lambda: {"default_pg": 4})
    rank_hooks._report(Path("unused"))
    assert state() == (2, "", {"default_pg": 4})
    assert capfd.readouterr() == ("", "")


def test_the_agent_is_answered_although_the_record_fails(page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_hooks, "_write_flight_record", Mock(side_effect=MemoryError()))
    page.ask()
    rank_hooks._report(Path("unused"))
    assert page.answered
    assert read(page).monitor_error.startswith("MemoryError")


def test_the_thread_survives_and_records_what_ended_a_report(
    page: HeartbeatPage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    survived = threading.Event()

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            survived.set()
            threading.Event().wait()  # this thread has shown what it was to show
        raise RuntimeError

    monkeypatch.setattr(rank_hooks, "HEARTBEAT_INTERVAL_S", 0.001)
    monkeypatch.setattr(rank_hooks, "_report", fails)
    threading.Thread(target=rank_hooks._heartbeat_loop, args=(Path("unused"),), daemon=True).start()
    assert survived.wait(20)
    assert read(page).monitor_error.startswith("RuntimeError")
    assert capfd.readouterr().err == ""


def test_a_thread_that_cannot_be_started_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made, beats = HeartbeatPage(), HeartbeatWriter()
    monkeypatch.setattr(rank_hooks, "heartbeat", beats)
    monkeypatch.setenv("ALLRANKS_PULSE", page_paths([made]))
    monkeypatch.setenv("LOCAL_RANK", "0")

    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    rank_hooks.start_rank_hooks(rank_hooks.RunDir(tmp_path), 1, 0)
    assert (read(made).phase, read(made).alive_beats) == ("start", 0)
    assert read(made).monitor_error == "RuntimeError: can't start new thread"
    assert capfd.readouterr() == ("", "")


def test_texts_of_a_page_are_cut_and_do_not_run_into_each_other(page: HeartbeatPage) -> None:
    beats = rank_hooks.heartbeat
    beats.monitor_error("m" * 5000)
    beats.failure("é" * 5000)
    beats.alive({f"group {i}": i for i in range(20000)}, ["s" * 40000])
    found = read(page)
    assert set(found.monitor_error) == {"m"}
    assert set(found.failure.rstrip("\ufffd")) == {"é"}
    assert (found.phase, found.sequences) == ("start", {})  # more groups than there is room for
    beats.alive({"default_pg": 3})
    assert read(page).sequences == {"default_pg": 3}
    assert set("".join(found.stack)) == {"s"}
    assert read(page).stack == ()
    beats.step(3)
    time.sleep(0.01)
    beats.part("data")
    beats.step(4)
    assert (read(page).step, read(page).part) == (4, "")  # the last part of a step is not the first of the next
