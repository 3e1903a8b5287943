"""Keep the routers of mixture-of-experts models in float32, add their load-balancing loss, and count tokens per expert.

A router is a module whose transformers class is named like one (``Glm4MoeTopkRouter``, ``MixtralTopKRouter``, ...) and
whose outputs hold the ids of the selected experts, (tokens, k) integers.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from allranks.spec.models import EXPERT_COUNTS, router_loss
from allranks.train.data.batches import Batch


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return routers by name, in the model's order; none in a dense model."""
    return {
        name: m for name, m in model.named_modules() if type(m).__name__.endswith("Router") and hasattr(m, "weight")
    }


def keep_routers_in_float32(model: nn.Module) -> None:
    """Store routers in float32 for any dtype of the model: in bfloat16 most updates of a trained router would be
    rounded away.

    This applies only to routers that compute in float32 (those with a correction bias for balance, as in DeepSeek-V3
    and GLM); others expect their weight in the dtype of their input.
    """
    for router in routers_of(model).values():
        if hasattr(router, "e_score_correction_bias"):
            router.float()


def active_parameters(model: nn.Module) -> tuple[int, int] | None:
    """Return how many (all, trained) parameters a token uses: of the experts of a block only those to which it is
    routed.

    Returns:
        None for a mixture of experts whose routers or experts are not found.
    """
    config: Any = getattr(model, "config", None)
    shares: dict[str, float] = {}
    for name, router in routers_of(model).items():
        chosen = getattr(router, "top_k", None) or getattr(config, "num_experts_per_tok", None)
        if not isinstance(chosen, int):
            return None
        experts = f"{name.rpartition('.')[0]}.experts."
        shares[experts] = chosen / int(router.weight.shape[0])  # type: ignore[union-attr,arg-type]
    by_prefix = {prefix: [p for n, p in model.named_parameters() if n.startswith(prefix)] for prefix in shares}
    counts = (getattr(config, key, None) for key in EXPERT_COUNTS)
    has_experts = any(isinstance(count, int) and count > 1 for count in counts)
    if not all(by_prefix.values()) or (not shares and has_experts):
        return None
    unused = [(p, 1 - shares[prefix]) for prefix, parameters in by_prefix.items() for p in parameters]
    everything, trained = count_parameters(model)
    return (
        everything - round(sum(p.numel() * share for p, share in unused)),
        trained - round(sum(p.numel() * share for p, share in unused if p.requires_grad)),
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of (all, trained) parameters."""
    everything = list(model.parameters())
    return sum(p.numel() for p in everything), sum(p.numel() for p in everything if p.requires_grad)


def router_coefficient(model: Any, wanted: float | str | bool) -> tuple[float, str]:
    """Return the coefficient of the load-balancing loss, 0 for none, and a sentence on it for the log, empty for a
    dense model.

    Args:
        model: a model of transformers, or PEFT's around it.
        wanted: ``model.router_aux_loss``.

    Raises:
        SpecError: a coefficient is asked for, and transformers computes no such loss for this model.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    places = ((base, "router_aux_loss_coef"), (base, "aux_loss_coef"), (config, "router_aux_loss_coef"))
    own: Any = next(
        (coefficient for place, key in places if (coefficient := getattr(place, key, None)) is not None), None
    )
    has_loss = own is not None and "output_router_logits" in inspect.signature(base.forward).parameters
    routers = routers_of(base).values()
    return router_loss(
        wanted,
        type(base).__name__,
        experts=bool(routers),
        biased=any(hasattr(router, "e_score_correction_bias") for router in routers),
        own=float(own) if own is not None and has_loss else None,
        requested=bool(getattr(base.config, "output_router_logits", False)),
    )


class RouterLoss:
    """Add the load-balancing loss that transformers computes within the forward pass of a causal language model.

    It counts once per micro-batch, weighted by its trained tokens. transformers leaves out padding by the attention
    mask, which the blocks must not get: padding is behind all tokens, and positions separate packed rows.
    """

    def __init__(self, model: Any, coefficient: float) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._coefficient, self._computing = coefficient, False
        self._sum: torch.Tensor | None = None
        getattr(base, base.base_model_prefix).register_forward_pre_hook(self._hide_mask, with_kwargs=True)

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return what the forward pass of the model gets for a loss of this batch."""
        self._computing = True
        return {
            "output_router_logits": True,
            "attention_mask": batch.real_tokens().long() if batch.tokens_padded else None,
        }

    def _hide_mask(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden, self._computing = {"attention_mask": None} if self._computing else {}, False
        return args, {**kwargs, **hidden}

    def of(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the loss times the coefficient and the trained tokens of the batch, a float32 scalar."""
        share = output.aux_loss.float() * (self._coefficient * batch.tokens_trained)
        self._sum = share.detach() if self._sum is None else self._sum + share.detach()
        return share

    def take(self) -> torch.Tensor | None:
        """Return the sum since the last call; None if there was no batch."""
        total, self._sum = self._sum, None
        return total


class ExpertCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that each expert received in the training steps after `from_step` up to `step`, over all ranks.

    ``layers`` is indexed by block number. A token counts once for each expert it is routed to; padding does not count.
    """

    step: int
    from_step: int
    layers: dict[str, list[int]]


class ExpertLoad:
    """Count routed tokens on the device, in training only; `counts` adds them over the ranks."""

    def __init__(self, loss_model: nn.Module, device: torch.device, *, compiled: bool = False) -> None:
        self._from = 0
        routers = routers_of(loss_model)
        # the block's number, such as 3 for model.layers.3.mlp.gate; the full name if there is none
        self._names = [next((part for part in name.split(".") if part.isdigit()), name) for name in routers]
        width = max((int(r.weight.shape[0]) for r in routers.values()), default=0)  # type: ignore[union-attr,arg-type]
        self._experts = [int(r.weight.shape[0]) for r in routers.values()]  # type: ignore[union-attr,arg-type]
        self._seen = torch.zeros(len(routers), width, dtype=torch.int64, device=device)
        self._real: torch.Tensor | None = None
        if routers:  # evaluation and generation do not call this forward; a recomputation in backward runs after it
            loss_model.register_forward_pre_hook(self._look_at)
            loss_model.register_forward_hook(lambda module, args, output: setattr(self, "_real", None))
        # not within a compiled program, because a recomputation does not count
        count = torch.compiler.disable(self._count) if compiled and routers else self._count
        for i, router in enumerate(routers.values()):
            router.register_forward_hook(partial(count, i))

    def __bool__(self) -> bool:
        return bool(self._names)

    def begin(self, step: int) -> None:
        """Reset the counts; `step` is the first step of the next interval."""
        self._seen.zero_()
        self._from = step

    def _look_at(self, module: nn.Module, args: tuple[Batch, ...]) -> None:
        if module.training:
            self._real = args[0].real_tokens().flatten().long()

    def _count(self, i: int, module: nn.Module, args: Any, output: Any) -> None:
        if self._real is None:
            return
        chosen = next(t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.dtype == torch.int64)
        self._seen[i].scatter_add_(0, chosen.flatten(), self._real.unsqueeze(1).expand_as(chosen).flatten())

    def counts(self, step: int, group: dist.ProcessGroup) -> ExpertCounts:
        """Return the counts since the last call, summed over all ranks with one all-reduce. Collective."""
        dist.all_reduce(self._seen, group=group)
        rows = self._seen.tolist()
        self._seen.zero_()
        layers = {name: row[:n] for name, row, n in zip(self._names, rows, self._experts, strict=True)}
        expert_counts = ExpertCounts(step=step, from_step=self._from, layers=layers)
        self._from = step
        return expert_counts
