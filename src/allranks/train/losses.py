"""Sum-losses: what a micro-batch contributes to the optimizer step, before it is divided by the step's token count."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allranks.train.data.collate import IGNORE, Batch
from allranks.train.kernels import sum_cross_entropy


class LossModel(nn.Module):
    """The model with its loss, so that a strategy wraps one module whose forward gives the loss.

    forward(batch) returns the sum over trained tokens of their negative log-likelihood in nats, a float32 scalar.
    """

    def __init__(self, model: nn.Module, *, classifier: bool) -> None:
        super().__init__()
        self.model = model
        self._classifier = classifier
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._keeps = "logits_to_keep" in inspect.signature(base.forward).parameters

    def forward(self, batch: Batch) -> torch.Tensor:
        if self._classifier:
            return F.cross_entropy(self.label_logits(batch), batch.targets, reduction="sum")
        logits, targets = self.token_logits(batch)
        return sum_cross_entropy(logits.flatten(0, 1), targets.flatten(), IGNORE)

    def label_logits(self, batch: Batch) -> torch.Tensor:
        """(B, classes) in float32."""
        return self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()

    def token_logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 logits (B, K, V) and targets (B, K) at the K positions where any row of the batch has a target.

        The vocabulary projection is often the largest layer: it is not spent on prompts and padding.
        """
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        targets = batch.targets
        if self._keeps and targets.device.type == "cpu":  # on a GPU the index would need a host sync
            wanted = (targets != IGNORE).any(dim=0).nonzero().squeeze(1)
            if 0 < len(wanted) < targets.shape[1]:
                inputs["logits_to_keep"] = wanted
                targets = targets[:, wanted]
        return self.model(**inputs).logits.float(), targets
