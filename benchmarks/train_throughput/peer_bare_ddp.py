"""Peer (c): a bare torch DDP loop over packed rows, as a careful person writes it by hand; (k): with compiled blocks.

(ci) is the loop over isolated rows, with attention of each document by itself (`document_attention`). With compiled
blocks, (ki), each row is filled up to one length and transformers makes a dense mask of its position ids, since each
shape would be compiled anew.

Run as: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.train_throughput.peer_bare_ddp --workload W ...``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks.train_throughput import document_attention
from benchmarks.train_throughput.measure import Recorder, peer_parser, write_record
from benchmarks.train_throughput.packing import Row, filled_up, isolated_rows, steps_for
from benchmarks.train_throughput.workload import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, WORLD, Workload

Batch = dict[str, torch.Tensor]


def train(model: DistributedDataParallel, batch_at: Callable[[int], Batch], steps: int, recorder: Recorder) -> None:
    """The loop: rank r takes row step * world + r; nothing is logged, nothing is read back from the step."""
    rank = dist.get_rank()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    model.train()
    recorder.start()
    for step in range(steps):
        model(**batch_at(step * WORLD + rank)).loss.backward()
        clip_grad_norm_(parameters, CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.step_end()


def wrapped(packed: np.ndarray, recorder: Recorder) -> Callable[[int], Batch]:
    """Batches of rows that are joined and cut."""

    def batch_at(row: int) -> Batch:
        input_ids = torch.from_numpy(packed[row % len(packed)].astype(np.int64))[None]
        recorder.saw(input_ids, input_ids.numel())
        return {"input_ids": input_ids, "labels": input_ids}

    return batch_at


def isolated(rows: list[Row], recorder: Recorder, pad_id: int, *, one_shape: bool) -> Callable[[int], Batch]:
    """Batches of whole documents that do not attend to one another."""

    def batch_at(row: int) -> Batch:
        found = filled_up(rows[row % len(rows)], pad_id) if one_shape else rows[row % len(rows)]
        batch = {name: torch.from_numpy(values)[None] for name, values in found.items()}
        if not one_shape:
            begins = (batch["position_ids"][0] == 0).nonzero().flatten()
            batch["cu_seq_lens_q"] = torch.cat([begins, torch.tensor([batch["input_ids"].shape[1]])])
        recorder.saw(batch["input_ids"], int((batch["input_ids"] != pad_id).sum()))
        recorder.saw_documents(batch)
        return batch

    return batch_at


def run(args: argparse.Namespace) -> None:
    """Train until the useful tokens are trained, and write the record."""
    workload, recorder = Workload(args.workload), Recorder()
    by_document = args.packing == "isolated" and not args.compile
    inner = workload.lora_model(args.seed, document_attention.NAME if by_document else "sdpa")
    if args.compile:
        for block in inner.get_base_model().model.layers:
            block.compile(dynamic=False)
    torch.manual_seed(args.seed + dist.get_rank())
    model = DistributedDataParallel(
        inner, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=False
    )
    if args.packing == "isolated":
        batch_at = isolated(isolated_rows(workload), recorder, workload.pad_id, one_shape=args.compile)
    else:
        batch_at = wrapped(workload.packed, recorder)
    train(model, batch_at, steps_for(workload, args.packing, args.useful_tokens), recorder)
    assert model.process_group is not None
    name = f"bare_ddp_{args.packing}{'_compiled' if args.compile else ''}"
    write_record(recorder, inner, model.process_group, workload, args, variant=name)


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
