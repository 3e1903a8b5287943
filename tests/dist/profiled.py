"""Training under `torch.profiler` as other people's programs do it: ``python -m tests.dist.profiled HOW FOLDER``, one process a rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

STEPS, LAYERS, WIDTH = 3, 4, 96
LATE_S = 0.03


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def prepare(how: str, model: nn.Module) -> nn.Module:
    """Where gradients are reduced: by DDP, in hooks that block, or by hand."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.04)
    if how == "hook":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


def every_kind(world: int) -> None:
    """One collective of each kind that gloo names after another."""
    whole, part = torch.ones(1024 * world), torch.empty(1024)
    dist.reduce_scatter_tensor(part, whole)
    dist.all_gather_into_tensor(whole, part)
    dist.all_gather([torch.empty(10) for _ in range(world)], torch.ones(10))
    dist.broadcast(whole, 0)
    dist.reduce(whole, 0)
    dist.all_to_all_single(torch.empty(8 * world), torch.ones(8 * world))
    dist.barrier()


def one_step(how: str, model: nn.Module, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "kinds":
        with torch.no_grad():
            every_kind(dist.get_world_size())
    loss = wrapped(torch.randn(16, WIDTH)).pow(2).mean()
    if how == "late" and dist.get_rank() == 1:
        time.sleep(LATE_S)
    loss.backward()
    if how in ("after", "late"):
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(LAYERS)))
    wrapped = prepare(how, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    target = str(folder / f"rank{os.environ['RANK']}.json.gz")
    window = schedule(wait=1, warmup=1, active=STEPS, repeat=1)  # DDP settles its buckets in the second step
    made = profile(
        activities=[ProfilerActivity.CPU],
        schedule=window,
        on_trace_ready=lambda p: p.export_chrome_trace(target),
        record_shapes=True,
        profile_memory=True,
        with_stack=how == "after",
    )
    with made as profiler:
        for _ in range(STEPS + 2):
            one_step(how, model, wrapped, optimizer)
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
