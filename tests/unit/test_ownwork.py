"""What a rank does itself in a backward pass ends with the first weight's gradient; waiting is nobody's own work."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from allranks.train import step_timers
from allranks.train.step_timers import CudaComputeTimer, StepTimer

PAUSE_S = 0.05


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return grad


def one_step(clock: StepTimer, layers: nn.Module, *, within: bool, after: bool, passes: int = 2) -> dict[str, Any]:
    clock.begin()
    for _ in range(passes):
        clock.lap("data")
        x = layers(torch.ones(2, 4))
        loss = (Slow.apply(x) if within else x).sum()
        clock.lap("forward")
        loss.backward()
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
    assert one_step(clock, layers, within=True, after=False)["own_backward_s"] >= 2 * PAUSE_S
    waits_only = one_step(clock, layers, within=False, after=True)
    assert waits_only["backward_s"] - waits_only["own_backward_s"] >= 2 * PAUSE_S
    assert waits_only["own_s"] <= waits_only["data_s"] + waits_only["forward_s"] + 1e-3


def test_a_pass_whose_end_is_not_seen_is_not_told() -> None:
    layers = nn.Linear(4, 4)
    assert "own_backward_s" not in one_step(StepTimer(torch.device("cpu")), layers, within=True, after=False)
    clock = clock_of(layers)
    assert "own_backward_s" in one_step(clock, layers, within=False, after=False)
    clock.begin()
    for seen in (True, False):  # in the second pass of the step the first weight is not reached
        clock.lap("forward")
        (layers(torch.ones(1, 4)).sum() if seen else torch.ones(1, requires_grad=True).sum()).backward()
        clock.lap("backward")
    assert "own_backward_s" not in clock.end_step()


def test_update_times_that_cannot_be_compared_are_not_reported() -> None:
    for told in (True, False):
        clock = StepTimer(torch.device("cpu"))
        clock.follow(nn.Linear(4, 4), update_times_comparable=told)
        clock.begin()
        clock.lap("optimizer")
        assert ("own_optimizer_s" in clock.end_step()) == told


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
    assert found["own_queued_s"] == 1.0
    assert found["own_backward_queued_s"] == 2.0
    assert found["own_optimizer_queued_s"] == 4.0
    queued = None  # a kernel without schedstat
    clock.begin()
    clock.lap("data")
    assert "own_queued_s" not in clock.end_step()


class Mark:
    """Stands for an event of the device, which this machine does not have; its clock is that of the test."""

    now = 0.0

    def __init__(self) -> None:
        self.at = Mark.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Mark) -> float:
        return 1000 * (end.at - self.at)


def device_step(clock: CudaComputeTimer, wait: bool) -> dict[str, float]:
    clock.begin()
    for part, seconds in (("data", 0.0), ("forward", 1.0), ("backward", 2.0), ("optimizer", 4.0)):
        if part == "backward":
            Mark.now += seconds
            clock.backward_over()
            Mark.now += 8.0  # for the other ranks
        else:
            Mark.now += seconds
        if part == "optimizer" and wait:
            step_timers._waits += 1
        clock.lap(part)
    return clock.end_step()


def test_on_a_device_parts_are_told_one_step_later_and_no_optimizer_that_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(step_timers, "_record_event", Mark)
    monkeypatch.setattr(step_timers, "_waits", 0)
    clock = CudaComputeTimer()
    assert device_step(clock, wait=False) == {}
    first, second = device_step(clock, wait=True), device_step(clock, wait=False)
    for found in (first, second):
        assert found["own_backward_s"] == 2.0
        assert 1.0 <= found["own_s"] < 1.5
    assert first["own_optimizer_s"] == 4.0
    assert "own_optimizer_s" not in second
