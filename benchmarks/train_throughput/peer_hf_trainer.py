"""Peer (a): the seed's recipe. HF Trainer, every row padded to 512, labels a copy of the ids, pads included.

The labels are the seed's, mistake and all: pads carry loss there. It costs no time, and the held-out loss shows what
else it costs. Two things differ from the seed, both in its favour or neutral: gloo instead of NCCL, and the rows come
in a fixed order, so that the number of steps for the useful tokens is known.

With ``--packing`` the same Trainer on packed rows, (p) wrapped and (q) isolated.

Run as: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.train_throughput.peer_hf_trainer --workload W ...``
"""

from __future__ import annotations

import argparse

import numpy as np
from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator

from benchmarks.train_throughput.hf_common import StepClock, train_and_record, trainer_arguments
from benchmarks.train_throughput.measure import IGNORED, Recorder, peer_parser
from benchmarks.train_throughput.ours import best_fit, steps_for
from benchmarks.train_throughput.workload import SEQ_LEN, RaggedRows, Workload


def padded(rows: RaggedRows, pad_id: int) -> Dataset:
    """``padding="max_length"``, ``max_length=512``, ``labels = input_ids.copy()``."""
    ids = np.full((len(rows), SEQ_LEN), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), SEQ_LEN), dtype=np.int64)
    for i, row in enumerate(rows):
        length = min(len(row), SEQ_LEN)
        ids[i, :length] = row[:length]
        mask[i, :length] = 1
    return Dataset.from_dict({"input_ids": ids, "attention_mask": mask, "labels": ids}).with_format("torch")


def wrapped(workload: Workload) -> Dataset:
    """The same packed rows as the bare loop's."""
    ids = workload.packed.astype(np.int64)
    return Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")


def isolated(rows: RaggedRows, pad_id: int) -> Dataset:
    """Whole rows, best fit decreasing; position ids that start again say where rows begin, and attention stays within them."""
    cut = [np.asarray(rows[i][:SEQ_LEN]) for i in range(len(rows))]
    bins = best_fit(np.array([len(row) for row in cut]))
    ids = np.full((len(bins), SEQ_LEN), pad_id, dtype=np.int64)
    labels, positions = np.full_like(ids, IGNORED), np.zeros_like(ids)
    for i, parts in enumerate(bins):
        at = 0
        for row in (cut[part] for part in parts):
            ids[i, at : at + len(row)] = row
            labels[i, at + 1 : at + len(row)] = row[1:]
            positions[i, at : at + len(row)] = np.arange(len(row))
            at += len(row)
        positions[i, at:] = np.arange(SEQ_LEN - at)
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "position_ids": positions}).with_format("torch")


def run(args: argparse.Namespace) -> None:
    """Train until the useful tokens are trained, and write the record."""
    workload = Workload(args.workload)
    model = workload.lora_model(args.seed)
    if args.packing == "none":
        data, steps = padded(workload.train, workload.pad_id), workload.padded_steps(args.useful_tokens)
    elif args.packing == "wrapped":
        data, steps = wrapped(workload), workload.packed_steps(args.useful_tokens)
    else:
        data, steps = isolated(workload.train, workload.pad_id), steps_for(workload, "isolated", args.useful_tokens)
    recorder = Recorder()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**trainer_arguments(args.out, steps, args.seed)),
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[StepClock(recorder)],
    )
    train_and_record(trainer, recorder, workload, args, f"hf_trainer_{args.packing}")


if __name__ == "__main__":
    parser = peer_parser(__doc__)
    parser.add_argument("--packing", choices=("none", "wrapped", "isolated"), default="none")
    run(parser.parse_args())
