"""Peer (x): a plain loop over packed rows with Accelerate, as its documentation shows it; (xi) over isolated rows.

Isolated rows carry position ids that begin anew; transformers makes a dense mask of them for the model.

Run as: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.train_throughput.peer_accelerate --workload W ...``
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.train_throughput.measure import Recorder, peer_parser, write_record
from benchmarks.train_throughput.packing import isolated_rows, steps_for
from benchmarks.train_throughput.workload import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Workload


def rows_of(workload: Workload, packing: str) -> list[dict[str, Any]]:
    """What the loader reads."""
    if packing == "isolated":
        return [{name: torch.from_numpy(ids) for name, ids in row.items()} for row in isolated_rows(workload)]
    ids = [torch.from_numpy(row.astype(np.int64)) for row in workload.packed]
    return [{"input_ids": row, "labels": row} for row in ids]


def run(args: argparse.Namespace) -> None:
    """Train until the useful tokens are trained, and write the record."""
    workload = Workload(args.workload)
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=False
    )
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    inner = workload.lora_model(args.seed)
    optimizer = torch.optim.AdamW(
        [p for p in inner.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    loader = DataLoader(rows_of(workload, args.packing), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(inner, optimizer, loader)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"Accelerate wrapped the model in {type(model).__name__}, not in DDP")
    steps, recorder = steps_for(workload, args.packing, args.useful_tokens), Recorder()
    torch.manual_seed(args.seed + accelerator.process_index)
    model.train()
    recorder.start()
    while len(recorder.seconds) < steps:
        for batch in loader:
            recorder.saw(batch["input_ids"], batch["input_ids"].numel())
            recorder.saw_documents(batch)
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step_end()
            if len(recorder.seconds) == steps:
                break
    assert model.process_group is not None
    write_record(recorder, inner, model.process_group, workload, args, variant=f"accelerate_{args.packing}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(peer_parser(__doc__).parse_args())
