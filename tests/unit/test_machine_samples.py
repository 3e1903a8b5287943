"""When a rank samples its CPU time and links, and what the samples leave out."""

import time
from pathlib import Path
from typing import Any

import pytest

from allranks.analysis.machine_load import read_load
from allranks.rundir.events import EventLog, read_events
from allranks.train import step_metrics, step_timers
from allranks.train.step_metrics import MachineSamples

PAUSE_S = 0.15


def samples(tmp_path: Path) -> tuple[MachineSamples, EventLog]:
    events = EventLog(tmp_path / "rank0.jsonl", 0)
    return MachineSamples(events, "cpu"), events


def written(tmp_path: Path, kind: str = "cpu_load") -> list[dict[str, Any]]:
    return [e for e in read_events(tmp_path / "rank0.jsonl") if e["event"] == kind]


def test_samples_are_written_at_most_once_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_metrics, "LOAD_INTERVAL_S", PAUSE_S)
    here, _ = samples(tmp_path)
    for _ in range(50):
        here.write_if_due()
    before = len(written(tmp_path))
    time.sleep(2 * PAUSE_S)
    here.write_if_due()
    found = written(tmp_path)
    assert len(found) == before + 1
    assert all(read_load(e) is not None and e["seconds"] >= PAUSE_S for e in found)
    assert found[-1]["compute_threads"] >= 1


def test_what_comes_between_steps_is_left_out(tmp_path: Path) -> None:
    began = time.monotonic()
    here, _ = samples(tmp_path)
    time.sleep(PAUSE_S)
    here.write_before_pause()
    first = time.monotonic() - began
    time.sleep(3 * PAUSE_S)  # an evaluation
    rest = time.monotonic()
    here.restart()
    time.sleep(PAUSE_S)
    here.write_before_pause()
    second = time.monotonic() - rest
    told = [e["seconds"] for e in written(tmp_path)]
    assert len(told) == 2
    assert PAUSE_S <= told[0] <= first
    assert PAUSE_S <= told[1] <= second
    here.write_before_pause()  # nothing since
    assert len(written(tmp_path)) == 2


def test_time_without_a_core_while_waiting_for_others_is_no_part_of_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        seconds = 1.0

        def read(self) -> float:
            return self.seconds

    clock = Clock()

    def wait(work: object) -> None:
        clock.seconds += 5.0

    monkeypatch.setattr(step_timers, "_run_queue", clock)
    monkeypatch.setattr(step_timers, "_original_wait", wait)
    before, waits = step_timers.queued_s(), step_timers._waits
    step_timers._timed_wait(object())  # type: ignore[arg-type]
    assert step_timers.queued_s() == before
    assert step_timers._waits == waits + 1
    clock.seconds += 2.0
    assert before is not None
    assert step_timers.queued_s() == before + 2.0
