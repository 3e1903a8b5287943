"""On a GPU the host ends a step when it is queued; the GPU's rest of it belongs to that step. The clock is played."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from allranks.planning.records import BatchPlan
from allranks.rundir.events import EventLog, read_events
from allranks.spec.records import TrainSpec
from allranks.train import step_metrics
from allranks.train.data.batches import SampleOrder
from allranks.train.data.prepared import TokenSet
from allranks.train.distributed import SINGLE_PROCESS
from allranks.train.step_metrics import LoopPlan, StepMetrics, StepWork, TokenCounts, TrainingRows
from allranks.train.step_timers import StepTimer

STEP_S, STEPS = 0.05, 4


class Gpu:
    """A device that does each queued step in `STEP_S`, one after another, while the host goes on."""

    def __init__(self) -> None:
        self.free_at = time.perf_counter()

    def queue(self) -> Gpu.Done:
        self.free_at = max(self.free_at, time.perf_counter()) + STEP_S
        return Gpu.Done(self.free_at)

    class Done:
        """In the place of the event that is recorded after a step."""

        def __init__(self, at: float) -> None:
            self._at = at

        def synchronize(self) -> None:
            time.sleep(max(0.0, self._at - time.perf_counter()))


class Control(step_metrics.AsyncStepReduction):
    """As on a GPU: the vector of a step is reduced one step later, when its event has come."""

    gpu: Gpu

    def start(self, step: int, loss_sum: torch.Tensor, grad_norm: torch.Tensor, **more: Any) -> None:
        vector = torch.zeros(8, dtype=torch.float64)
        vector[0], vector[5], vector[6] = float(loss_sum), float(more["rows"]), float(more["planned_rows"])
        earlier, self._copied = self._copied, (step, vector, cast(torch.cuda.Event, self.gpu.queue()))
        self._reduce_copied(earlier)


@pytest.mark.parametrize("edges", [{2}, set()], ids=["an edge", "only the end"])
def test_the_times_of_steps_add_up_to_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: set) -> None:
    world = dataclasses.replace(SINGLE_PROCESS, device=torch.device("cuda"))
    monkeypatch.setattr(step_metrics, "AsyncStepReduction", Control)
    monkeypatch.setattr(step_metrics, "memory_usage", lambda device: {})
    Control.gpu = Gpu()
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
            done: Any = {"step": step, "times": {"step_time_s": clock.end_step()["step_time_s"]}, "sequences": numbers}
            done |= {"loss_sum": torch.ones(()), "grad_norm": torch.ones(()), "counts": TokenCounts(1, 1, 0)}
            work = StepWork(**done, trained=1, lr=0.1)
            metrics.process_reduced(metrics.exchange(work))
            if plan.is_due(step + 1):
                metrics.run_callbacks(step + 1, False)
                clock.pause()
        metrics.count_queued_work()
        metrics.drain()
    steps = [e["step_time_s"] for e in read_events(tmp_path / "rank0.jsonl") if e["event"] == "step"]
    assert len(steps) == STEPS
    assert sum(steps) >= 0.99 * STEPS * STEP_S  # other load only adds
