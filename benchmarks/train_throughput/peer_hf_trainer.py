"""Peer (a): the seed's recipe. HF Trainer, every row padded to 512, labels a copy of the ids, pads included.

The labels are the seed's, mistake and all: pads carry loss there. It costs no time, and the held-out loss shows what
else it costs. Two things differ from the seed, both in its favour or neutral: gloo instead of NCCL, and the rows come
in a fixed order, so that the number of steps for the useful tokens is known.

With ``--packing`` the same Trainer on packed rows, (p) wrapped and (pi) isolated: the rows carry position ids that begin anew, and transformers
makes a dense mask of them.

Run as: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.train_throughput.peer_hf_trainer --workload W ...``
"""

from __future__ import annotations

import argparse

import numpy as np
from datasets import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator

from benchmarks.train_throughput.hf_common import StepClock, train_and_record, trainer_arguments
from benchmarks.train_throughput.measure import Recorder, peer_parser
from benchmarks.train_throughput.packing import isolated_rows, steps_for
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


def isolated(workload: Workload) -> Dataset:
    """Whole documents; no row has padding, since a batch is one row."""
    rows = isolated_rows(workload)
    return Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]}).with_format("torch")


def run(args: argparse.Namespace) -> None:
    """Train until the useful tokens are trained, and write the record."""
    workload = Workload(args.workload)
    model = workload.lora_model(args.seed)
    if args.packing == "none":
        data, steps = padded(workload.train, workload.pad_id), workload.padded_steps(args.useful_tokens)
    elif args.packing == "wrapped":
        data, steps = wrapped(workload), steps_for(workload, "wrapped", args.useful_tokens)
    else:
        data, steps = isolated(workload), steps_for(workload, "isolated", args.useful_tokens)
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
    run(peer_parser(__doc__).parse_args())
