"""How long a step takes, what of it is a rank's own work, what samples leave out, requests to stop, a program's end."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from allranks.analysis.machine_load import read_load
from allranks.planning.records import BatchPlan
from allranks.rundir.events import EventLog, read_events
from allranks.spec.records import TrainSpec
from allranks.train import step_metrics, step_timers
from allranks.train.data.batches import SampleOrder
from allranks.train.data.prepared import TokenSet
from allranks.train.distributed import SINGLE_PROCESS
from allranks.train.step_metrics import LoopPlan, MachineSamples, StepMetrics, StepWork, TokenCounts, TrainingRows
from allranks.train.step_timers import CudaComputeTimer, StepTimer

STEP_S, STEPS = 0.05, 4


class Done:
    """In the place of the event after a step, for a device that does each queued step in `STEP_S`, one after another."""

    free_at = 0.0

    def __init__(self) -> None:
        self._at = Done.free_at = max(Done.free_at, time.perf_counter()) + STEP_S

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._at - time.perf_counter()))


class Control(step_metrics.AsyncStepReduction):
    """As on a GPU: the vector of a step is reduced one step later, when its event has come."""

    def start(self, step: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor, **more: Any) -> None:
        vector = torch.zeros(7, dtype=torch.float64)
        vector[0], vector[5], vector[6] = float(loss_sum), float(more["rows"]), float(more["planned_rows"])
        earlier, self._copied = self._copied, (step, vector, cast(torch.cuda.Event, Done()))
        self._reduce_copied(earlier)


@pytest.mark.parametrize("edges", [{2}, set()], ids=["an edge", "only the end"])
def test_times_of_steps_are_those_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: set[int]) -> None:
    """On a GPU the host ends a step when it is queued: what the GPU still has to do belongs to that step."""
    world = dataclasses.replace(SINGLE_PROCESS, device=torch.device("cuda"))
    monkeypatch.setattr(step_metrics, "AsyncStepReduction", Control)
    monkeypatch.setattr(step_metrics, "memory_usage", lambda device: {})
    ones: Any = np.ones(64, np.int64)
    ends: Any = np.arange(65, dtype=np.int64)
    tokens = TokenSet(
        ids=np.zeros(0, np.int32), mask=np.zeros(0, np.uint8), offsets=ends, pack_offsets=ends, pack_rows=ends[:-1],
        labels=ends[:-1], real=ones, trained=ones,
    )  # fmt: skip
    order = SampleOrder(64, 1, BatchPlan(micro_batch_size=1, grad_accum=1, global_batch_size=1), 0, 1)
    rows = TrainingRows(order, tokens, lambda rows: pytest.fail("no batch is made"))
    plan = LoopPlan(train=TrainSpec(), total_steps=STEPS, is_due=lambda done: done in edges)
    clock = StepTimer(torch.device("cuda"))
    with EventLog(tmp_path / "rank0.jsonl", 0) as events:
        metrics = StepMetrics(world, rows, plan, events, clock)
        clock.pause()
        for step in range(STEPS):
            clock.parts = {}
            numbers = [int(i) for part in order.micro_batches(step) for i in part]
            times = {"step_time_s": clock.end_step()["step_time_s"]}
            one = torch.ones(())
            values: dict[str, Any] = {"loss_sum": one, "grad_norm": one, "trained": 1, "lr": 0.1, "times": times}
            work = StepWork(step=step, counts=TokenCounts(1, 1, 0), sequences=numbers, **values)
            metrics.process_reduced(metrics.exchange(work))
            if plan.is_due(step + 1):
                metrics.run_callbacks(step + 1, False)
                clock.pause()
        metrics.count_queued_work()
        metrics.drain()
    steps = [e["step_time_s"] for e in written(tmp_path, "step")]
    assert len(steps) == STEPS and sum(steps) >= 0.99 * STEPS * STEP_S  # other load only adds


SAMPLE_S = 0.15


def written(tmp_path: Path, kind: str = "cpu_load") -> list[dict[str, Any]]:
    return [e for e in read_events(tmp_path / "rank0.jsonl") if e["event"] == kind]


def test_samples_are_written_at_most_once_per_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_metrics, "LOAD_INTERVAL_S", SAMPLE_S)
    samples = MachineSamples(EventLog(tmp_path / "rank0.jsonl", 0), "cpu")
    for _ in range(50):
        samples.write_if_due()
    before = len(written(tmp_path))
    time.sleep(2 * SAMPLE_S)
    samples.write_if_due()
    found = written(tmp_path)
    assert len(found) == before + 1
    assert all(read_load(e) is not None and e["seconds"] >= SAMPLE_S for e in found)
    assert found[-1]["compute_threads"] >= 1


def test_what_comes_between_steps_is_left_out(tmp_path: Path) -> None:
    began = time.monotonic()
    samples = MachineSamples(EventLog(tmp_path / "rank0.jsonl", 0), "cpu")
    time.sleep(SAMPLE_S)
    samples.write_before_pause()
    first = time.monotonic() - began
    time.sleep(3 * SAMPLE_S)  # an evaluation
    rest = time.monotonic()
    samples.restart()
    time.sleep(SAMPLE_S)
    samples.write_before_pause()
    second = time.monotonic() - rest
    one, other = (e["seconds"] for e in written(tmp_path))
    assert SAMPLE_S <= one <= first and SAMPLE_S <= other <= second
    samples.write_before_pause()  # nothing since
    assert len(written(tmp_path)) == 2


def test_time_without_a_core_while_waiting_for_others_is_no_part_of_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=1.0)
    clock.read = lambda: clock.seconds

    def wait(work: object) -> None:
        clock.seconds += 5.0

    monkeypatch.setattr(step_timers, "_run_queue", clock)
    monkeypatch.setattr(step_timers, "_original_wait", wait)
    before, waits = step_timers.queued_s(), step_timers._waits
    step_timers._timed_wait(object())  # type: ignore[arg-type]
    assert (step_timers.queued_s(), step_timers._waits) == (before, waits + 1)
    clock.seconds += 2.0
    assert before is not None and step_timers.queued_s() == before + 2.0


PAUSE_S = 0.05


def one_step(clock: StepTimer, layers: nn.Module, *, within: bool, after: bool, passes: int = 2) -> dict[str, Any]:
    clock.begin()
    for _ in range(passes):
        clock.lap("data")
        x = layers(torch.ones(2, 4))
        if within:
            x.register_hook(lambda _: time.sleep(PAUSE_S))
        clock.lap("forward")
        x.sum().backward()
        if after:
            time.sleep(PAUSE_S)  # as torch's DDP waits at the end
        clock.lap("backward")
    return clock.end_step()


def clock_of(layers: nn.Module) -> StepTimer:
    clock = StepTimer(torch.device("cpu"))
    clock.follow(layers)
    return clock


def test_what_comes_after_the_first_weights_gradient_is_no_own_work() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[0].weight.requires_grad_(False)  # as with adapters: the first that is trained counts
    clock = clock_of(layers)
    slow = one_step(clock, layers, within=True, after=False)
    assert slow["own_backward_s"] >= 2 * PAUSE_S
    waits_only = one_step(clock, layers, within=False, after=True)
    assert waits_only["backward_s"] - waits_only["own_backward_s"] >= 2 * PAUSE_S
    assert waits_only["own_s"] <= waits_only["data_s"] + waits_only["forward_s"] + 1e-3


def test_a_pass_whose_end_is_not_seen_is_not_told() -> None:
    layers = nn.Linear(4, 4)
    unfollowed = StepTimer(torch.device("cpu"))
    assert "own_backward_s" not in one_step(unfollowed, layers, within=True, after=False)
    clock = clock_of(layers)
    assert "own_backward_s" in one_step(clock, layers, within=False, after=False)
    clock.begin()
    for seen in (True, False):  # in the second pass of the step the first weight is not reached
        clock.lap("forward")
        (layers(torch.ones(1, 4)).sum() if seen else torch.ones(1, requires_grad=True).sum()).backward()
        clock.lap("backward")
    assert "own_backward_s" not in clock.end_step()


def test_update_times_that_cannot_be_compared_are_not_reported() -> None:
    for comparable in (True, False):
        clock = StepTimer(torch.device("cpu"))
        clock.follow(nn.Linear(4, 4), update_times_comparable=comparable)
        clock.begin()
        clock.lap("optimizer")
        assert ("own_optimizer_s" in clock.end_step()) == comparable


def test_time_without_a_core_is_told_beside_each_part(monkeypatch: Any) -> None:
    queued: float | None = 1.0
    monkeypatch.setattr(step_timers, "queued_s", lambda: queued)
    clock = clock_of(nn.Linear(4, 4))
    clock.begin()
    for part, at in (("data", 1.5), ("forward", 2.0), ("backward", 4.0), ("optimizer", 8.0)):
        queued = at
        if part == "backward":
            clock._own.backward_over()
        clock.lap(part)
    found = clock.end_step()
    assert [found[f"own_{part}queued_s"] for part in ("", "backward_", "optimizer_")] == [1.0, 2.0, 4.0]
    queued = None  # a kernel without schedstat
    clock.begin()
    clock.lap("data")
    assert "own_queued_s" not in clock.end_step()


device = SimpleNamespace(now=0.0)


def mark() -> Any:
    """Stands for an event of the device, which this machine does not have; its clock is that of the test."""
    at = device.now
    return SimpleNamespace(at=at, query=lambda: True, elapsed_time=lambda end: 1000 * (end.at - at))


def device_step(clock: CudaComputeTimer, wait: bool) -> dict[str, float]:
    clock.begin()
    for part, seconds in (("data", 0.0), ("forward", 1.0), ("backward", 2.0), ("optimizer", 4.0)):
        device.now += seconds
        if part == "backward":
            clock.backward_over()
            device.now += 8.0  # for the other ranks
        if part == "optimizer" and wait:
            step_timers._waits += 1
        clock.lap(part)
    return clock.end_step()


def test_on_a_device_parts_are_told_one_step_later_and_no_optimizer_that_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(step_timers, "_record_event", mark)
    monkeypatch.setattr(step_timers, "_waits", 0)
    clock = CudaComputeTimer()
    assert device_step(clock, wait=False) == {}
    first, second = device_step(clock, wait=True), device_step(clock, wait=False)
    for found, optimizer in ((first, 4.0), (second, None)):
        assert (found["own_backward_s"], found.get("own_optimizer_s")) == (2.0, optimizer)
        assert 1.0 <= found["own_s"] < 1.5


NESTED = """
import signal, sys
from allranks.train.step_metrics import StopRequest
stop = StopRequest()
seen = set()

def nested(number, frame):
    stop.ask("SIGTERM")

def tracer(frame, event, argument):
    if event == "line" and (frame.f_code.co_name, frame.f_lineno) not in seen:
        seen.add((frame.f_code.co_name, frame.f_lineno))
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
        sys.settrace(tracer)
    return tracer

def handler(number, frame):
    sys.settrace(tracer)
    stop.ask("SIGUSR1")
    sys.settrace(None)

signal.signal(signal.SIGTERM, nested)
signal.signal(signal.SIGUSR1, handler)
for _ in range(50):  # each time the other signal comes at a line where it has not come yet
    signal.raise_signal(signal.SIGUSR1)
print(stop.asked, stop.reason in ("SIGUSR1", "SIGTERM"), len(seen) > 1)
"""


def test_a_signal_within_the_handler_of_another_does_not_block() -> None:
    """In the same thread, at any line of the handler."""
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True True True\n", "")


PROGRAM = """
import os
from allranks.train import user_script

class Lazy:
    @property
    def __class__(self):
        print("asked", flush=True)
        return object

kept, file = Lazy(), open("left.txt", "w")
file.write("text")
user_script._close_files(os.getpid())
os._exit(0)
"""


def test_files_left_open_are_written_and_no_object_is_asked_for_anything(tmp_path: Path) -> None:
    """torch.distributed.reduce_op warns when it is asked for its class; others import modules."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "left.txt").read_text() == "text"
