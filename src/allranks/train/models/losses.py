"""Compute summed losses per micro-batch, with memory-saving cross-entropy and dropout.

The caller divides the sum by the token count of the optimizer step.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from allranks.train.data.batches import IGNORE, Batch
from allranks.train.models.head_loss import HeadLoss, LogitsError, logit_scale
from allranks.train.models.packed_attention import PackedAttention, known_packing


class _SumCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore: int) -> torch.Tensor:
        log_p = F.log_softmax(logits, dim=-1)
        kept = targets != ignore
        index = targets.masked_fill(~kept, 0).unsqueeze(1)
        loss = -(log_p.gather(1, index).squeeze(1) * kept).sum()
        ctx.save_for_backward(log_p, index, kept)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        log_p, index, kept = ctx.saved_tensors
        # softmax - onehot, in place: nothing else refers to the saved buffer
        slope = log_p.exp_().scatter_add_(1, index, torch.full_like(index, -1, dtype=log_p.dtype))
        return slope.mul_((kept * grad_outputs[0]).unsqueeze(1)), None, None


def sum_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignore: int) -> torch.Tensor:
    """Return the sum of negative log-likelihoods like ``F.cross_entropy(..., reduction="sum")``, with one buffer instead of three.

    Args:
        logits: (N, V) float32.
        targets: (N,) int64; rows with `ignore` do not contribute.

    Returns:
        A float32 scalar in nats. It can be differentiated only once.
    """
    return _SumCrossEntropy.apply(logits, targets, ignore)  # type: ignore[return-value]


class LowMemoryDropout(nn.Module):
    """Dropout that on a CPU draws 16 random bits per element, where ``nn.Dropout`` (bernoulli_) draws 64.

    The probability is rounded to a multiple of 2^-16, and kept elements are scaled by the rounded value, so the mean is exact.
    On a GPU it is ``F.dropout``.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._dropped = round(p * 65536)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drops:
            return x
        if x.is_cuda or torch.compiler.is_compiling():
            return F.dropout(x, self.p, training=True)
        kept, scale = self.draw(x)
        return x * (kept.to(x.dtype) * scale)

    @property
    def drops(self) -> bool:
        """Whether a forward pass drops elements."""
        return self.training and self._dropped > 0

    def draw(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return 1 where an element of `x` is kept, else 0 (one byte each), and the factor of kept elements."""
        if x.is_cuda or torch.compiler.is_compiling():  # random_ would end the compiled graph
            return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.p), 1 / (1 - self.p)
        n, first = x.numel(), self._dropped - 32768  # the smallest int16 that is kept
        words = torch.empty((n + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.int16).clamp_(first - 1, first) - (first - 1)  # comparisons are not vectorized
        return kept.to(torch.int8)[:n].view(x.shape), 65536 / (65536 - self._dropped)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def replace_dropout(model: nn.Module) -> int:
    """Replace every ``nn.Dropout`` of LoRA layers with `LowMemoryDropout`; return their number."""
    found = 0
    for module in model.modules():
        layers = getattr(module, "lora_dropout", None)
        if isinstance(layers, nn.ModuleDict):
            for name, layer in layers.items():
                if type(layer) is nn.Dropout:
                    layers[name] = LowMemoryDropout(layer.p)
                    found += 1
    return found


class LossModel(nn.Module):
    """The model with its loss, so that a strategy wraps one module whose forward gives the loss.

    forward(batch) returns the sum over trained tokens of their negative log-likelihood in nats, a float32 scalar. Logits are
    computed some tokens at a time (`HeadLoss`), and only where there are targets; ``whole_logits`` says why they are not.
    """

    packed: PackedAttention | None = None
    """How attention of packed rows is computed; None: as it comes from transformers."""

    def __init__(self, model: nn.Module, *, classifier: bool) -> None:
        super().__init__()
        self.model = model
        self.classifier = classifier
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._keeps = "logits_to_keep" in inspect.signature(base.forward).parameters
        self.whole_logits, self._head = "", None
        if not classifier:
            try:
                self._head = HeadLoss(base.get_output_embeddings(), logit_scale(base))
            except LogitsError as error:
                self.whole_logits = str(error)

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.classifier:
            return F.cross_entropy(self.label_logits(batch), batch.targets, reduction="sum")
        if self._head is not None:
            return self._head_losses(self._head, batch, each=False)
        logits, targets = self.token_logits(batch)
        return sum_cross_entropy(logits.flatten(0, 1), targets.flatten(), IGNORE)

    def label_logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits (B, classes) in float32."""
        return self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """Return the negative log-likelihoods of tokens in nats, float32, without gradients: 0 where there is no target.

        They are those of all positions, (B L,), or at least of all with a target.
        """
        with torch.no_grad():
            if self._head is not None:
                return self._head_losses(self._head, batch, each=True)
            logits, targets = self.token_logits(batch)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")

    def _head_losses(self, head: HeadLoss, batch: Batch, *, each: bool) -> torch.Tensor:
        index, targets = batch.scored, batch.targets.flatten()
        if index is None and targets.device.type == "cpu":  # on a GPU, looking them up would need a host sync
            index = (targets != IGNORE).nonzero().squeeze(1)
        if (
            index is not None and len(index) == 0
        ):  # the loss is 0, but communication in forward and backward takes place
            index = torch.zeros(1, dtype=torch.int64, device=targets.device)
        with head.scoring(targets, index, IGNORE, each=each) as loss_of, self._packing(batch):
            return loss_of(self.model(input_ids=batch.input_ids, position_ids=batch.position_ids))

    def _packing(self, batch: Batch) -> AbstractContextManager[None]:
        return known_packing(batch.rows, packed=batch.position_ids is not None)

    def token_logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 logits (B, K, V) and targets (B, K) at the K positions where any row of the batch has a target.

        The vocabulary projection, often the largest layer, is not computed for prompts and padding.
        """
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        targets = batch.targets
        if self._keeps and targets.device.type == "cpu":  # on a GPU the index would need a host sync
            wanted = (targets != IGNORE).any(dim=0).nonzero().squeeze(1)
            if 0 < len(wanted) < targets.shape[1]:
                inputs["logits_to_keep"] = wanted
                targets = targets[:, wanted]
        with self._packing(batch):
            return self.model(**inputs).logits.float(), targets
