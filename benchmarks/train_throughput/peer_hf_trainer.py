"""Peer (p): HF Trainer over packed rows; (pi) over isolated rows: transformers makes a dense mask of position ids.

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
from benchmarks.train_throughput.workload import Workload


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
    model, steps = workload.lora_model(args.seed), steps_for(workload, args.packing, args.useful_tokens)
    recorder = Recorder()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**trainer_arguments(args.out, steps, args.seed)),
        train_dataset=wrapped(workload) if args.packing == "wrapped" else isolated(workload),
        data_collator=default_data_collator,
        callbacks=[StepClock(recorder)],
    )
    train_and_record(trainer, recorder, workload, args, f"hf_trainer_{args.packing}")


if __name__ == "__main__":
    run(peer_parser(__doc__).parse_args())
