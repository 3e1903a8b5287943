"""Real ranks on two cores that other processes use, too: the machine is named, and slow ranks still are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.rundir.events import read_events
from allranks.rundir.files import read_json
from allranks.utils.kernel_counters import RunQueueClock
from tests.dist.harness import rows_spec, stall_ranks, step_events, train

pytestmark = [pytest.mark.skipif(not RunQueueClock().available, reason="this kernel has no /proc/<pid>/schedstat")]
LIMIT_S = 150
BUSY = f"""
import glob, sys, time
end = time.monotonic() + {LIMIT_S}
while len(sys.argv) > 1 and time.monotonic() < end:
    if any('"step"' in open(file).read() for file in glob.glob(sys.argv[1])):
        break
    time.sleep(0.2)
while time.monotonic() < end:
    pass
"""


@contextmanager
def two_cores() -> Iterator[None]:
    """Let this process and those that it starts use two cores, so that a few others overload any machine."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:2]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def busy_loops(count: int, events: str = "") -> Iterator[None]:
    """Run busy loops beside the ranks, from their first step on if `events` names the files that tell of it."""
    command = [sys.executable, "-c", BUSY, *filter(None, [events])]
    # Each in a session of its own: the kernel shares the cores equally between sessions (sched_autogroup).
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def spec(tmp_path: Path, steps: int) -> dict[str, Any]:
    return rows_spec(
        tmp_path, 80, train={"max_steps": steps}, eval={"samples": 0}, cluster={"env": {"OMP_NUM_THREADS": "1"}},
        strategy={"name": "pytorch_ddp"},
    )  # fmt: skip


def test_an_overloaded_machine_is_named_and_no_rank(tmp_path: Path) -> None:
    with two_cores(), busy_loops(6, str(tmp_path / "runs" / "*" / "events" / "rank*.jsonl")):
        done, run = train(tmp_path, spec(tmp_path, 200), code=0)
    assert "is slow" not in done.stdout and "is overloaded: " in done.stdout
    metrics = read_json(run.metrics)
    assert metrics["own_time"]["stragglers"] == []
    (load,) = metrics["machine_load"]
    assert load["cores"] == 2 and 0.1 <= load["taken_share"] <= 1 and load["others_cores"] > 0.5, load
    assert "CPU time of the ranks" in run.report.read_text()
    for rank in range(2):
        steps = step_events(run, rank)
        assert all(e["own_queued_s"] >= 0 for e in steps)
        assert sum(e["own_queued_s"] for e in steps) <= sum(e["own_s"] for e in steps)
        assert any(e["event"] == "cpu_load" for e in read_events(run.events_of(rank)))


def test_a_slow_rank_is_named_beside_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall_ranks(monkeypatch, "burn_a_while:1:-1", 0.1)
    with two_cores(), busy_loops(2):
        done, run = train(tmp_path, spec(tmp_path, 40), code=0)
    slow_lines = [line for line in done.stdout.splitlines() if "is slow" in line]
    assert len(slow_lines) == 1 and "rank 1 on" in slow_lines[0], done.stdout
    own_time = read_json(run.metrics)["own_time"]
    assert own_time["stragglers"] == [1]
    assert {r["rank"]: (r["slow_in"], r["reason"]) for r in own_time["ranks"]}[1] == (["own_s"], "own")
