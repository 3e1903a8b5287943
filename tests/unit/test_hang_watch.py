"""Heartbeat, limits, stack dumps and the watch itself, without ranks."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from allranks.analysis.stacks import blocking_location, main_thread_frames
from allranks.errors import SpecError
from allranks.launch.monitor.evidence import EvidenceCollector
from allranks.launch.monitor.hang_watch import HangMonitor, WatchedNode
from allranks.planning.planner import limits_of
from allranks.planning.records import Limits
from allranks.rundir.files import read_json
from allranks.rundir.heartbeat import _LENGTH, _SEQUENCES, PAGE_SIZE, HeartbeatPage, HeartbeatWriter, page_paths
from allranks.rundir.paths import RunDir
from allranks.spec.loader import parse_spec
from tests.unit.hang_driver import InProcessDriver

FAULTHANDLER = """Thread 0x00007f01 (most recent call first):
  File "/repo/src/allranks/train/rank_hooks.py", line 56 in _live
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/u/rows.py", line 12 in load
  File "/repo/src/allranks/train/loop.py", line 80 in _step
  File "/repo/src/allranks/launch/rank.py", line 40 in main
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
PY_SPY = """Process 41: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (idle): "MainThread"
    read (rows.py:9)
    main (/home/u/train.py:80)
    <module> (/home/u/train.py:99)
Thread 50 (active): "other"
    run (/home/u/other.py:1)
"""


def pair() -> tuple[HeartbeatPage, HeartbeatWriter]:
    page, pulse = HeartbeatPage(), HeartbeatWriter()
    pulse.open(page_paths([page]).partition(":")[0])
    return page, pulse


def test_limits() -> None:
    def of(timeout: int, hang: object = "auto", **more: object) -> Limits | None:
        spec = {
            "model": {"name": "tiny:llama"},
            "data": {"source": "x"},
            "cluster": {"timeout_s": timeout},
            "observe": {"hang_s": hang},
        }
        return limits_of(parse_spec({**spec, **more}))

    assert of(600) == Limits(step_s=300, long_s=540)
    assert of(60) == Limits(step_s=30, long_s=52)
    assert of(7200) == Limits(step_s=300, long_s=6480)
    assert of(10) is None
    assert of(600, None) is None
    assert of(600, 20) == Limits(step_s=20, long_s=540)
    for late in (600, 700):
        with pytest.raises(SpecError, match=rf"hang_s is {late}.*timeout_s"):
            of(600, late)
    assert of(600, 590) == Limits(step_s=590, long_s=590)
    script = {"script": {"path": "x.py"}, "model": None, "data": None}
    assert (
        of(600, **script) == of(10, **script) == Limits(step_s=120, long_s=1200)
    )  # it sets the timeout of its collectives itself
    assert of(600, 700, **script) == Limits(step_s=700, long_s=2800)
    assert of(600, None, **script) is None


def test_a_rank_is_asked_for_its_record_and_answers() -> None:
    page, pulse = pair()
    assert not pulse.asked
    assert not page.answered
    page.ask()
    assert pulse.asked
    assert not page.answered
    pulse.answered()
    assert not pulse.asked
    assert page.answered


@pytest.mark.parametrize(("text", "size"), [('{"default', 9), ("{}", PAGE_SIZE), ("{}", -1)])
def test_a_page_that_is_half_written_is_read_as_far_as_it_goes(text: str, size: int) -> None:
    page, pulse = pair()
    pulse.phase("train")
    with mmap.mmap(page.fd, PAGE_SIZE) as raw:
        _SEQUENCES.write(raw, text)
        _LENGTH.pack_into(raw, _SEQUENCES.at, size)
    beat = page.read()
    assert beat is not None
    assert (beat.phase, beat.sequences) == ("first step", {})


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (FAULTHANDLER, "/home/u/rows.py:12 in load (within /usr/lib/python3.11/threading.py:320 wait)"),
        (PY_SPY, "rows.py:9 in read"),
    ],
)
def test_the_main_thread_of_a_dump_and_its_line(text: str, where: str) -> None:
    assert blocking_location(main_thread_frames(text)) == where
    assert main_thread_frames("nothing of the kind\n") == []


SECRET = "hf_" + "0123456789abcdefghij"  # a token stands in a path, and so in every frame
SLEEPER = """
import faulthandler, os, sys, time
os.environ["LOCAL_RANK"] = sys.argv[2]
from pathlib import Path
from allranks.train import rank_hooks
from allranks.rundir.heartbeat import heartbeat
from allranks.rundir.paths import RunDir
rank_hooks.start_rank_hooks(RunDir(Path(sys.argv[1])), 1, int(sys.argv[2]))
heartbeat.phase("train"); heartbeat.step(0); heartbeat.step(1)
def stand_still():
    time.sleep(1000)

if sys.argv[2] == "0":
    while True:
        heartbeat.part("backward"); time.sleep(0.05)
heartbeat.part("data")
stand_still()
"""


def test_the_watch_takes_stacks_of_a_silent_process_and_the_driver_judges(tmp_path: Path) -> None:
    """Two real processes; one beats, one sleeps. No torch in them, so there are no calls to compare. No secret is
    written."""
    run = RunDir(tmp_path)
    run.logs_of(1).mkdir(parents=True)
    run.events.mkdir()
    ended: list[float] = []
    driver = InProcessDriver(run, {0: "h", 1: "h"}, 1)
    pages = {0: HeartbeatPage(), 1: HeartbeatPage()}
    watch = HangMonitor(
        WatchedNode(run, 1, 0, "h", "h", pages),
        Limits(step_s=1.0, long_s=60.0),
        EvidenceCollector(run, 1, 0, "h", None, ""),
        driver,
        raise_alarm=driver.raise_alarm(0),
        end=lambda: ended.append(time.time()),
    )
    program = tmp_path / SECRET / "sleeper.py"
    program.parent.mkdir()
    program.write_text(SLEEPER)
    env = {**os.environ, "ALLRANKS_PULSE": page_paths([pages[0], pages[1]])}
    ranks = [subprocess.Popen([sys.executable, str(program), str(tmp_path), str(r)], env=env) for r in (0, 1)]
    try:
        watch.start()
        watch.join(40)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ended
    report = read_json(run.hang_report(1))
    assert [f["rank"] for f in report["stalled"]] == [1]
    assert "sleeper.py:11 in stand_still" in report["stalled"][0]["where"]
    assert report["judged"] <= ended[0]  # the ranks are there until the evidence is judged
    assert "stand_still" in run.hang_stack(1, "h", 1).read_text()
    assert [r["rank"] for r in read_json(run.hang_node(1, 0))["ranks"]] == [0, 1]
    event = json.loads(run.events_of(1).read_text())
    assert (event["event"], event["ranks"], event["host"]) == ("hang", [1], "h")
    assert event["noticed"] - event["since"] >= event["limit_s"] == 1.0
    watch.stop()
    written = [*run.hang(1).iterdir(), run.events_of(1)]
    assert len(written) >= 5
    assert not any(SECRET in path.read_text() for path in written)
    assert [len(e.ranks) for e in driver.sent] == [2]
    assert SECRET not in msgspec.json.encode(driver.sent).decode()
