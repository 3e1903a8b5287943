"""HF Trainer's own ``evaluate()``, set up as well as it can be, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from allranks.train.data.batches import IGNORE
from allranks.train.data.prepared import TokenSet


class HeldOut(Dataset[dict[str, Any]]):
    """The rows of a token set as the Trainer wants them: labels are the ids that carry loss, -100 elsewhere."""

    def __init__(self, tokens: TokenSet) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens.offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        own = slice(int(self._tokens.offsets[row]), int(self._tokens.offsets[row + 1]))
        ids = torch.from_numpy(self._tokens.ids[own].astype(np.int64))
        wanted = torch.from_numpy(self._tokens.mask[own].astype(bool))
        return {"input_ids": ids, "labels": torch.where(wanted, ids, IGNORE)}


def collator(pad_id: int) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Pads to the longest row of a batch, on the right."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(r["input_ids"]) for r in rows)

        def padded(key: str, fill: int) -> torch.Tensor:
            return torch.stack([F.pad(r[key], (0, width - len(r[key])), value=fill) for r in rows])

        lengths = torch.tensor([len(r["input_ids"]) for r in rows])
        mask = (torch.arange(width) < lengths[:, None]).long()
        return {"input_ids": padded("input_ids", pad_id), "labels": padded("labels", IGNORE), "attention_mask": mask}

    return collate


def trainer(model: Any, tokens: TokenSet, batch_size: int, folder: Path, *, pad_id: int = 0) -> Trainer:
    """A Trainer that only evaluates. It computes the loss alone: by default it would gather all logits on all ranks."""
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=batch_size,
        prediction_loss_only=True,
        use_cpu=True,  # with ddp_backend, or ranks on CPUs would each be a world of their own
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    made = Trainer(model=model, args=args, eval_dataset=HeldOut(tokens), data_collator=collator(pad_id))
    made.remove_callback(PrinterCallback)
    return made


class Collectives(TorchDispatchMode):
    """Names of the collectives that are called meanwhile, in `seen`; those of a barrier and of objects among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))
