"""Compute summed losses per micro-batch, with memory-saving cross-entropy and dropout.

The caller divides the sum by the token count of the optimizer step.

Cross-entropy is computed within the output projection, some tokens at a time, so that the logits of a batch never
exist. `HeadLoss` replaces the forward pass of a causal language model's output projection ("head"). While `scoring`, it
returns the summed loss instead of logits, and transformers' model passes it on. So the head is called once, as always:
hooks that gather its weight, and autocast, apply. What the model does with the logits after its head, it does with the
loss. If it multiplies them by a number (`logit_scale`), that is reckoned with; models that do something else (soft
capping) keep the usual way.

With a plain linear head, gradients are computed with the loss, from each part of the logits while it exists, so that
nothing is computed twice; other heads (with an adapter) recompute each part in backward. The method is that of fused
linear cross-entropy kernels (Hsu et al. 2024, Liger Kernel), in plain torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from allranks.planning.memory.activations import loss_chunk_tokens, probabilities_in_place
from allranks.train.data.batches import IGNORE, Batch
from allranks.train.models.moe import RouterLoss
from allranks.train.models.packed_attention import PackedAttention, flash_lengths, known_packing
from allranks.train.models.rope import use_row_lengths
from allranks.train.patches import replace_forward


@dataclass
class _Scoring:
    """Targets (K,) of the flattened positions `index` (K,), or of all; and how the losses are returned."""

    targets: torch.Tensor
    index: torch.Tensor | None
    ignore: int
    each: bool
    shape: torch.Size | None = None


class HeadLoss:
    """The forward pass of an output projection that can return losses. See the top of this file.

    Args:
        head: what `get_output_embeddings` of a causal language model returns; its forward pass is replaced.
        scale: by what the model multiplies the head's output.
    """

    def __init__(self, head: nn.Module, scale: float = 1.0) -> None:
        self._head, self._logits, self._scale = head, head.forward, scale
        self._scoring: _Scoring | None = None
        replace_forward(head, self._forward)

    @contextmanager
    def scoring(
        self, targets: torch.Tensor, index: torch.Tensor | None, ignore: int, *, each: bool = False
    ) -> Iterator[Callable[[Any], torch.Tensor]]:
        """Let forward passes within this context compute the loss.

        Args:
            targets: int64, one per position of the flattened batch.
            index: the positions that matter, (K,) int64; None: all.
            each: the loss of every position, without gradients, instead of their sum.

        Yields:
            A function that takes the model's output and returns the loss in nats, float32: a scalar, or (K,).
        """
        wanted = targets if index is None else targets[index]
        self._scoring = scoring = _Scoring(wanted, index, ignore, each)

        def loss_of(output: Any) -> torch.Tensor:
            if output.logits.shape != scoring.shape:  # not the same tensor: DeepSpeed's hooks make another one of it
                raise RuntimeError("the model changed what its output projection returned")
            return output.logits

        try:
            yield loss_of
        finally:
            self._scoring = None

    def _forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._scoring is None:
            return self._logits(hidden, *args, **kwargs)
        result = self._loss(hidden, self._scoring)
        if self._scale != 1:
            result = result / self._scale  # the model multiplies by it
        self._scoring.shape = result.shape
        return result

    @torch.compiler.disable()
    def _loss(self, hidden: torch.Tensor, scoring: _Scoring) -> torch.Tensor:
        flat = hidden.flatten(0, -2)
        if scoring.index is not None:
            flat = flat.index_select(0, scoring.index)
        plain = plain_head(self._head)
        if plain is None:
            return self._through_module(flat, scoring)
        weight, bias = plain.weight, plain.bias
        if self._scale != 1:
            flat, bias = flat * self._scale, None if bias is None else bias * self._scale
        if torch.is_autocast_enabled(flat.device.type):
            flat = flat.to(torch.get_autocast_dtype(flat.device.type))
        with torch.autocast(flat.device.type, enabled=False):
            if scoring.each:
                weight, bias = weight.to(flat.dtype), None if bias is None else bias.to(flat.dtype)
                size = loss_chunk_tokens(weight.shape[0], flat.device.type)
                return _in_parts(lambda part: F.linear(part, weight, bias), flat, scoring.targets, scoring.ignore, size)
            targets, ignore = scoring.targets, scoring.ignore
            return _LinearCrossEntropy.apply(flat, weight, bias, targets, ignore)  # type: ignore[return-value]

    def _through_module(self, flat: torch.Tensor, scoring: _Scoring) -> torch.Tensor:
        """Compute the loss with the module's own forward pass on each part.

        Hooks on submodules may communicate, and ranks may have different numbers of parts: then there is only one.
        """
        size = (
            len(flat)
            if _has_hooks(self._head)
            else loss_chunk_tokens(max((p.shape[0] for p in self._head.parameters()), default=1), flat.device.type)
        )
        each = _in_parts(
            lambda part: self._logits(part).float() * self._scale, flat, scoring.targets, scoring.ignore, size
        )
        return each if scoring.each else each.sum()


def plain_head(head: nn.Module) -> nn.Linear | None:
    """Return the linear layer that a head is, or that PEFT trains in full in its place; None for another head."""
    if type(head) is nn.Linear:
        return head
    copies, active = getattr(head, "modules_to_save", None), getattr(head, "active_adapters", ())
    if isinstance(copies, nn.ModuleDict) and len(active) == 1 and not getattr(head, "disable_adapters", True):
        copy = copies[active[0]]
        if type(copy) is nn.Linear and not _has_hooks(head):
            return copy
    return None


def _has_hooks(head: nn.Module) -> bool:
    return any(m._forward_pre_hooks or m._forward_hooks for m in head.modules() if m is not head)


def logit_scale(model: Any) -> float:
    """Return by what a causal language model multiplies what its output projection returns to get logits, mostly 1.

    Its forward pass is run with a stand-in for the base model, which returns one hidden state of zeros, and one for the
    projection: no weight is used, so that they need not be loaded.

    Raises:
        LogitsError: it does something else with them, such as soft capping.
    """
    head = model.get_output_embeddings()
    inner = getattr(model, model.base_model_prefix, None)
    if head is None or inner is None or inner is model:
        raise LogitsError("it has no separate output projection")
    returned = [torch.tensor(x) for x in (1.0, -2.5, 1e-3, 1e4)]
    stood_in = [(module, vars(module).get("forward")) for module in (inner, head)]
    hidden = torch.zeros(1, 1, model.config.get_text_config().hidden_size)
    replace_forward(inner, lambda *args, **kwargs: _Output(last_hidden_state=hidden))
    scales = []
    try:
        for scalar in returned:
            replace_forward(head, lambda *args, scalar=scalar, **kwargs: scalar)
            with torch.no_grad():
                ids = torch.zeros(1, 1, dtype=torch.int64)
                scales.append(type(model).forward(model, input_ids=ids, use_cache=False).logits)
    except Exception as error:  # noqa: BLE001 - code of any model, with stand-ins it may not accept
        raise LogitsError(f"its forward pass could not be examined ({type(error).__name__})") from None
    finally:
        for module, own in stood_in:
            if own is None:
                del module.forward
            else:
                replace_forward(module, own)
    scale = float(scales[0])
    if scale == 0 or any(
        out.shape != () or not torch.allclose(out, x * scale) for out, x in zip(scales, returned, strict=True)
    ):
        raise LogitsError("it changes the logits after its output projection by more than a factor")
    return scale


class LogitsError(ValueError):
    """The logits of a model are not its output projection's output times a number."""


class _Output(SimpleNamespace):
    """An output of a base model: attributes that are not there are None, and item 0 is the hidden state."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, at: Any) -> Any:
        return self.last_hidden_state if at == 0 else (None,)[:0]


def _in_parts(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    targets: torch.Tensor,
    ignore: int,
    size: int,
) -> torch.Tensor:
    """Return the loss (N,) of each row of `given` (N, ...), `size` rows at a time, which backward computes again."""

    def loss(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits_of(part).float(), wanted, ignore_index=ignore, reduction="none")

    parts = zip(given.split(size), targets.split(size), strict=True)
    if torch.is_grad_enabled() and size < len(given):
        return torch.cat([checkpoint(loss, *part, use_reentrant=False) for part in parts])  # type: ignore[misc]
    return torch.cat([loss(*part) for part in parts])


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of ``F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)``, with gradients computed in forward.

    The projection is computed in the dtype of `hidden`; gradients of the weight are added in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignore: int,
    ) -> torch.Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias and bias is not None else None
        kinds = weight.dtype, None if bias is None else bias.dtype
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        each = hidden.new_empty(len(hidden), dtype=torch.float32)
        size = loss_chunk_tokens(weight.shape[0], hidden.device.type)
        for at in range(0, len(hidden), size):
            rows = slice(at, at + size)
            part = hidden[rows]
            logits = F.linear(part, weight, bias)
            kept = targets[rows] != ignore
            index = targets[rows].masked_fill(~kept, 0).unsqueeze(1)
            # -log p[target] by the largest p, which cannot be 0; one exponential less than from log_softmax
            behind = (logits.amax(-1, keepdim=True).float() - logits.gather(1, index).float()).squeeze(1)
            # in float32; float32 logits on a CPU are overwritten, which halves the memory that is touched
            if probabilities_in_place(logits.element_size(), logits.device.type):
                p = torch.ops.aten._softmax.out(logits, -1, False, out=logits)
            else:
                p = logits.softmax(dim=-1, dtype=torch.float32)
            each[rows] = (behind - p.amax(-1).log()) * kept
            del logits
            if d_hidden is None and d_weight is None and d_bias is None:
                continue
            slope = p.scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float32))
            slope = slope.mul_(kept.unsqueeze(1)).to(hidden.dtype)
            del p
            if d_hidden is not None:
                torch.mm(slope, weight, out=d_hidden[rows])
            if d_weight is not None:
                if slope.dtype == torch.float32:
                    d_weight.addmm_(slope.t(), part)
                else:
                    d_weight += slope.t() @ part
            if d_bias is not None:
                d_bias += slope.sum(0, dtype=torch.float32)
            del slope  # before the next logits exist
        ctx.save_for_backward(d_hidden)
        ctx.gradients, ctx.dtypes = (d_weight, d_bias), kinds
        return each.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        (d_weight, d_bias), ctx.gradients = ctx.gradients, None  # changed in place
        hidden = None if hidden is None else hidden * grad_outputs[0]
        weight, bias = (
            None if d is None else d.mul_(grad_outputs[0]).to(dtype)
            for d, dtype in zip((d_weight, d_bias), ctx.dtypes, strict=True)
        )
        return hidden, weight, bias, None, None


class LossModel(nn.Module):
    """The model with its loss, so that a strategy wraps one module whose forward gives the loss.

    forward(batch) returns the sum over trained tokens of their negative log-likelihood in nats, a float32 scalar, with
    the `router_loss` in training. Logits are computed some tokens at a time (`HeadLoss`), and only where there are
    targets; ``whole_logits`` says why they are not.
    """

    packed: PackedAttention | None = None
    """How attention of packed rows is computed; None: as it comes from transformers."""
    router_loss: RouterLoss | None = None
    """The load-balancing loss of a mixture of experts; None: not added."""
    routers = ""
    """A sentence on that loss for the log; empty for a dense model."""

    def __init__(self, model: nn.Module, *, classifier: bool) -> None:
        super().__init__()
        self.model = model
        self.classifier = classifier
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._own_lengths = use_row_lengths(base)
        parameters = inspect.signature(base.forward).parameters
        self._keeps, self._routes = "logits_to_keep" in parameters, "output_router_logits" in parameters
        self.whole_logits, self._head = "", None
        if not classifier:
            try:
                self._head = HeadLoss(base.get_output_embeddings(), logit_scale(base))
            except LogitsError as error:
                self.whole_logits = str(error)

    def forward(
        self, batch: Batch, returns: Literal["loss", "token_losses", "label_logits", "token_logits"] = "loss"
    ) -> torch.Tensor:
        if returns == "token_logits":
            return self.token_logits(batch)[0]
        if returns == "token_losses":
            return self._token_losses(batch)
        if self.classifier:
            positions = {"position_ids": batch.positions()} if self._own_lengths else {}
            output = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **positions)
            logits = output.logits.float()
            return logits if returns == "label_logits" else F.cross_entropy(logits, batch.targets, reduction="sum")
        if self._head is not None:
            return self._head_losses(self._head, batch, each=False)
        output, targets = self._token_output(batch, self.router_loss)
        logits = output.logits.flatten(0, 1)
        size = loss_chunk_tokens(logits.shape[1], logits.device.type)
        loss = _in_parts(lambda part: part, logits, targets.flatten(), IGNORE, size).sum()
        return loss if self.router_loss is None else loss + self.router_loss.of(output, batch)

    def label_logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits (B, classes) in float32."""
        return self(batch, "label_logits")

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """Return the negative log-likelihoods of tokens in nats, float32, without gradients: 0 where there is no
        target.

        They are those of all positions, (B L,), or at least of all with a target.
        """
        # by the module's call, not below it: FSDP2's root then gathers the next block while one computes
        with torch.no_grad():
            return self(batch, "token_losses")

    def _token_losses(self, batch: Batch) -> torch.Tensor:
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
        router_loss = None if each else self.router_loss
        packing = known_packing(batch.rows, packed=batch.position_ids is not None)
        with head.scoring(targets, index, IGNORE, each=each) as loss_of, packing:
            output = self.model(**self._inputs(batch, router_loss))
            loss = loss_of(output)
        return loss if router_loss is None else loss + router_loss.of(output, batch)

    def _inputs(self, batch: Batch, router_loss: RouterLoss | None) -> dict[str, Any]:
        inputs = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            **flash_lengths(self.model, batch.rows),
        }
        if self._own_lengths and batch.position_ids is None and batch.tokens_padded:
            inputs["position_ids"] = batch.positions()
        if router_loss is not None:
            return inputs | router_loss.arguments(batch)
        return inputs | {"output_router_logits": False} if self._routes else inputs

    def token_logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 logits (B, K, V) and targets (B, K) at the K positions where any row of the batch has a
        target.

        The vocabulary projection, often the largest layer, is not computed for prompts and padding.
        """
        output, targets = self._token_output(batch, None)
        return output.logits.float(), targets

    def _token_output(self, batch: Batch, router_loss: RouterLoss | None) -> tuple[Any, torch.Tensor]:
        inputs = self._inputs(batch, router_loss)
        targets = batch.targets
        if self._keeps and targets.device.type == "cpu":  # on a GPU the index would need a host sync
            wanted = (targets != IGNORE).any(dim=0).nonzero().squeeze(1)
            if 0 < len(wanted) < targets.shape[1]:
                inputs["logits_to_keep"] = wanted
                targets = targets[:, wanted]
        with known_packing(batch.rows, packed=batch.position_ids is not None):
            return self.model(**inputs), targets
