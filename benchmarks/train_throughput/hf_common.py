"""What the two peers that are built on the Hugging Face Trainer share: arguments, clock and checks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.train_throughput.measure import Recorder, write_record
from benchmarks.train_throughput.workload import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Workload


class StepClock(TrainerCallback):
    """Tells the recorder when steps end."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The clock starts before the first batch is fetched, as in the bare loop."""
        self.recorder.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the optimizer's step and zero_grad."""
        self.recorder.step_end()


def trainer_arguments(out: Path, steps: int, seed: int) -> dict[str, Any]:
    """Arguments of both trainers, set so that nothing but training costs time.

    ``use_cpu`` and ``ddp_backend`` together: without them the Trainer starts no DDP on CPU ranks and says nothing.
    ``ddp_find_unused_parameters`` is True by default for adapted models, and costs a walk of the graph every step.
    """
    return {
        "output_dir": str(out.with_suffix(".trainer")),
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": CLIP_NORM,
        "optim": "adamw_torch_fused",
        "bf16": False,
        "seed": seed,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "average_tokens_across_devices": False,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def training_group(trainer: Trainer) -> ProcessGroup:
    """The group of the DDP wrapper that the Trainer really used."""
    wrapped = trainer.model_wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        raise TypeError(f"the Trainer wrapped the model in {type(wrapped).__name__}, not in DDP")
    assert wrapped.process_group is not None
    return wrapped.process_group


def train_and_record(
    trainer: Trainer, recorder: Recorder, workload: Workload, args: argparse.Namespace, variant: str
) -> None:
    """Train, then check and write the record."""
    model = trainer.model
    assert model is not None
    recorder.watch(model, workload.pad_id)
    torch.manual_seed(args.seed + trainer.args.process_index)
    trainer.train()
    recorder.unwatch()
    write_record(recorder, model, training_group(trainer), workload, args, variant=variant)
    dist.destroy_process_group()  # the Trainer leaves it open, and a rank may then abort while it exits
