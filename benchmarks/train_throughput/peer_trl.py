"""Peer (t): TRL's SFTTrainer, rows joined and cut ("wrapped") as in the bare loop; (ti): "bfd" isolates documents.

With "bfd", TRL passes position ids and the ends of documents. Its documentation asks for flash attention, which CPUs
lack; with ``sdpa`` transformers makes a dense mask of the position ids, and documents stay isolated, which is tested
after training.

Two of TRL's defaults are turned off because the bare loop does without them too: gradient checkpointing and bfloat16.
The chunked loss, once ``chunked_nll`` and now ``nll``, and the metrics of tokens per step cannot be turned off.

Run as: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.train_throughput.peer_trl --workload W ...``
"""

from __future__ import annotations

import argparse

from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.train_throughput.hf_common import StepClock, train_and_record, trainer_arguments
from benchmarks.train_throughput.measure import Recorder, peer_parser
from benchmarks.train_throughput.packing import steps_for
from benchmarks.train_throughput.workload import DATA_SEED, SEQ_LEN, RaggedRows, Workload


def tokenized(rows: RaggedRows) -> Dataset:
    """Token ids alone: TRL adds the labels and packs."""
    return Dataset.from_dict({"input_ids": [row.tolist() for row in rows]})


def whole_rows(trainer: SFTTrainer, workload: Workload) -> Dataset:
    """What TRL packed, without its short last row; the same rows as the bare loop's."""
    packed = trainer.train_dataset
    assert isinstance(packed, Dataset)
    whole = packed.select(range(len(workload.packed)))
    assert all(packed[i]["input_ids"] == workload.packed[i].tolist() for i in (0, len(whole) - 1))
    return whole


def isolated_order(trainer: SFTTrainer) -> Dataset:
    """What TRL packed, in a drawn order: its packing puts rows of one long document first."""
    packed = trainer.train_dataset
    assert isinstance(packed, Dataset)
    return packed.shuffle(seed=DATA_SEED)


def run(args: argparse.Namespace) -> None:
    """Train until the useful tokens are trained, and write the record."""
    workload = Workload(args.workload)
    steps = steps_for(workload, args.packing, args.useful_tokens)
    recorder = Recorder()
    trainer = SFTTrainer(
        model=workload.lora_model(args.seed),
        args=SFTConfig(
            **trainer_arguments(args.out, steps, args.seed),
            packing=True,
            packing_strategy="wrapped" if args.packing == "wrapped" else "bfd",
            max_length=SEQ_LEN,
            loss_type="nll",
        ),
        train_dataset=tokenized(workload.train),
        processing_class=AutoTokenizer.from_pretrained(workload.model_path),
        callbacks=[StepClock(recorder)],
    )
    trainer.train_dataset = whole_rows(trainer, workload) if args.packing == "wrapped" else isolated_order(trainer)
    train_and_record(trainer, recorder, workload, args, f"trl_{args.packing}")


if __name__ == "__main__":
    run(peer_parser(__doc__).parse_args())
