"""Batches that are copied to the device ahead of their use, while the device is late."""

from typing import Any

import pytest
import torch

from allranks.planning.records import BatchPlan
from allranks.train.data.batch_feed import BatchFeed
from allranks.train.data.batches import NoiseBatch, SampleOrder

pytestmark = pytest.mark.gpu
STEPS, WIDTH = 60, 4096


def order() -> SampleOrder:
    return SampleOrder(1000, 1, BatchPlan(micro_batch_size=2, grad_accum=2, global_batch_size=4), 0, 1)


def make(rows: Any) -> NoiseBatch:
    values = torch.as_tensor(rows).float()[:, None].expand(-1, WIDTH)
    return NoiseBatch(values.contiguous(), -values.contiguous(), sequences=tuple(int(r) for r in rows))


def late(cycles: int = 2_000_000) -> None:
    """Keep the current stream busy for about a millisecond."""
    torch.cuda._sleep(cycles)


def test_each_batch_has_its_own_values_when_the_device_comes_to_it(device: str) -> None:
    """Fails if memory of the host is filled again before its copy, or memory of the device before it was read."""
    feed = BatchFeed(order(), make, torch.device(device), 0, STEPS, ahead=True)
    found, planned = [], []
    for step in range(STEPS):
        for rows in order().micro_batches(step):
            batch = feed.take()
            assert batch.inputs.device.type == device
            if device == "cuda":
                late()
            found.append(torch.stack([batch.inputs.double().sum(), batch.targets.double().sum()]))
            planned.append([float(rows.sum()) * WIDTH, -float(rows.sum()) * WIDTH])
            del batch  # its memory is free while the device has yet to read it
    feed.close()
    assert torch.stack(found).cpu().tolist() == planned


def test_the_host_does_not_wait_for_the_device(cuda: str) -> None:
    feed = BatchFeed(order(), make, torch.device(cuda), 0, STEPS)
    feed.take()
    spare = [torch.empty(2 * WIDTH, pin_memory=True) for _ in range(32)]  # an allocation may wait for the device
    del spare
    end = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        late(2_000_000_000)  # about a second
        for _ in range(4):
            feed.take().inputs.add(1)
        end.record()
        assert not end.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    feed.close()
