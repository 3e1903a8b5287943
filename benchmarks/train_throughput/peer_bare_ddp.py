"""Peer (c), and (k) with compiled blocks: a bare torch DDP loop over packed rows, as a careful person writes it by hand.

Run as: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.train_throughput.peer_bare_ddp --workload W ...``
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.train_throughput.measure import Recorder, peer_parser, write_record
from benchmarks.train_throughput.workload import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, WORLD, Workload


def train(model: DistributedDataParallel, packed: np.ndarray, steps: int, recorder: Recorder) -> None:
    """The loop: rank r takes row step * world + r; nothing is logged, nothing is read back from the step."""
    rank = dist.get_rank()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    model.train()
    recorder.start()
    for step in range(steps):
        row = packed[(step * WORLD + rank) % len(packed)]
        input_ids = torch.from_numpy(row.astype(np.int64))[None]
        recorder.saw(input_ids, input_ids.numel())
        model(input_ids=input_ids, labels=input_ids).loss.backward()
        clip_grad_norm_(parameters, CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.step_end()


def run(args: argparse.Namespace) -> None:
    """Train until the useful tokens are trained, and write the record."""
    workload = Workload(args.workload)
    inner = workload.lora_model(args.seed)
    if args.compile:
        for block in inner.get_base_model().model.layers:
            block.compile(dynamic=False)
    torch.manual_seed(args.seed + dist.get_rank())
    model = DistributedDataParallel(
        inner, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=False
    )
    recorder = Recorder()
    train(model, workload.packed, workload.packed_steps(args.useful_tokens), recorder)
    assert model.process_group is not None
    write_record(
        recorder,
        inner,
        model.process_group,
        workload,
        args,
        variant="bare_ddp_compiled" if args.compile else "bare_ddp",
    )


def main() -> None:
    """Torchrun's entry."""
    parser = peer_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="compile each transformer block")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        run(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
