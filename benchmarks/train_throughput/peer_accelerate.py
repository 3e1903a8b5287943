"""Peer (x): a plain loop over packed rows with Accelerate, as its documentation shows it.

Run as: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.train_throughput.peer_accelerate --workload W ...``
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.train_throughput.measure import Recorder, peer_parser, write_record
from benchmarks.train_throughput.workload import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Workload


def run(args: argparse.Namespace) -> None:
    """Train until the useful tokens are trained, and write the record."""
    workload = Workload(args.workload)
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=False
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    inner = workload.lora_model(args.seed)
    rows = [torch.from_numpy(row.astype(np.int64)) for row in workload.packed]
    optimizer = torch.optim.AdamW(
        [p for p in inner.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    model, optimizer, loader = accelerator.prepare(inner, optimizer, DataLoader(rows, batch_size=1))
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"Accelerate wrapped the model in {type(model).__name__}, not in DDP")
    steps, recorder = workload.packed_steps(args.useful_tokens), Recorder()
    torch.manual_seed(args.seed + accelerator.process_index)
    model.train()
    recorder.start()
    while len(recorder.seconds) < steps:
        for input_ids in loader:
            recorder.saw(input_ids, input_ids.numel())
            accelerator.backward(model(input_ids=input_ids, labels=input_ids).loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step_end()
            if len(recorder.seconds) == steps:
                break
    assert model.process_group is not None
    write_record(recorder, inner, model.process_group, workload, args, variant="accelerate")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(peer_parser(__doc__).parse_args())
