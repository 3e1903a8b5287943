"""Programs of `restart_peers`: a plain loop with its own checkpoints, and HF Trainer, with the model of its spec.

``restart_programs.py plain|hf FOLDER STEPS SAVE_EVERY``, as ranks of a launcher. Each rank adds a line for each step to
``FOLDER/rank<R>.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import MistralConfig, MistralForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 320, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH, PACE_S = 64, 0.05


def recorder(folder: Path) -> Callable[[int], None]:
    """Return a function that records a finished step, and keeps the pace."""
    path = folder / f"rank{os.environ['RANK']}.jsonl"

    def record(step: int) -> None:
        time.sleep(PACE_S)
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "pid": os.getpid()}) + "\n")

    return record


def plain(folder: Path, steps: int, save_every: int) -> None:
    """Train with DDP; continue from the newest checkpoint."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, saved, record = MistralForCausalLM(MistralConfig(**SHAPE)), folder / "checkpoint.pt", recorder(folder)
    optimizer, first = torch.optim.AdamW(model.parameters(), lr=1e-3), 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    parallel = DistributedDataParallel(model)
    for step in range(first + 1, steps + 1):
        rows = torch.randint(SHAPE["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(step))
        parallel(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record(step)
        if step % save_every == 0 and dist.get_rank() == 0:
            new = saved.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new)
            new.replace(saved)
    dist.destroy_process_group()


class Record(TrainerCallback):
    """Record the steps of a Trainer."""

    def __init__(self, record: Callable[[int], None]) -> None:
        self._record = record

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._record(state.global_step)


def hf(folder: Path, steps: int, save_every: int) -> None:
    """Train with HF Trainer; continue from its newest checkpoint."""
    rows = torch.randint(SHAPE["vocab_size"], (4 * steps, LENGTH), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(folder / "out"), max_steps=steps, save_steps=save_every, per_device_train_batch_size=2, use_cpu=True,
        report_to="none", disable_tqdm=True, ddp_backend="gloo", logging_strategy="no",
    )  # fmt: skip
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(
        MistralForCausalLM(MistralConfig(**SHAPE)), arguments, train_dataset=data, callbacks=[Record(recorder(folder))],
    )  # fmt: skip
    last = get_last_checkpoint(str(folder / "out")) if (folder / "out").is_dir() else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    {"plain": plain, "hf": hf}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
