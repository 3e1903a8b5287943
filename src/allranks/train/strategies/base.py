"""Define the Strategy contract, the expected communication of a step, and what replicated strategies share.

The loop calls, for every optimizer step with ``A`` micro-batches::

    for i in range(A):
        with (strategy.accumulate() if i < A - 1 else nullcontext()):
            loss = strategy.module(batch)           # a sum over this micro-batch's trained tokens
            strategy.backward(loss * W / T)          # T: trained tokens of the step over all ranks, W: world size
    norm = strategy.step()

Gradients that a strategy passes to the optimizer are the **mean** over ranks; the factor ``W`` makes it the sum. The expected
communication is what a comparison checks against the observed process group. Strategies that gather weights use one unit per
transformer block and one for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import SpecError
from allranks.train.strategies.gradient_sync import broadcast_from_first, require_same_order
from allranks.train.strategies.shards import StateRange, TensorShard, whole_states, whole_weights

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
Phase = Literal["forward", "backward", "after_backward", "step"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one phase of an optimizer step, on one rank.

    ``bytes`` is the size of what is reduced or gathered as a whole: for a gather the gathered tensor, for a
    reduce-scatter the tensor before it is scattered. ``count`` is None where a library decides it.
    """

    kind: Kind
    phase: Phase
    count: int | None
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model as a strategy sees it: one entry a trained parameter, in registration order."""

    trained: tuple[int, ...]

    @property
    def trained_bytes(self) -> int:
        return sum(self.trained)


MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Strategy(Protocol):
    """One way to share the work of training between ranks.

    One that chose something by itself in `setup` says so in ``remarks``, a tuple of sentences. One that keeps weights in parts
    may have a ``filler``, set before `setup`: the model has no weights then, and `setup` asks for each unit's (see
    `allranks.train.loading`).
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    warmup: bool  # one forward and backward, thrown away, before the first step: for what settles only then
    replicated: bool  # every rank's module holds all weights, as plain tensors
    claims_overlap: bool  # gradients travel while backward computes
    forward_has_collectives: (
        bool  # forward communicates: every rank must make equally many forward passes, in evaluation too
    )

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        """Take a model (weights equal on all ranks after this) and build the optimizer. Every rank calls."""
        ...

    def accumulate(self) -> AbstractContextManager[Any]:
        """Around micro-steps that must not communicate."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate, and communicate where this strategy does so within backward."""
        ...

    def step(self) -> torch.Tensor:
        """Finish communication, clip, update, clear gradients.

        An update whose gradients are not finite is left out, without waiting for the device to say so.

        Returns:
            The gradients' norm before clipping, a float32 scalar on the device.
        """
        ...

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        """What one optimizer step of `accum` micro-steps is to send, once `setup` is done."""
        ...

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        """Whole weights by the names of the module given to `setup`, on the CPU of rank 0; ``{}`` elsewhere.
        Every rank calls."""
        ...

    def weight_shards(self) -> list[TensorShard]:
        """This rank's parts of trained weights and buffers, ``model/<name>``: views, what is written into them is in the
        model, once ``loaded()`` was called where a strategy has it: every rank calls. No collective."""
        ...

    def state_ranges(self) -> list[StateRange]:
        """Where this rank's optimizer holds the state of which parameter. No collective."""
        ...


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters that get gradients, each once (tied weights appear under their first name)."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def require_one_dtype(
    named: Iterable[tuple[str, nn.Parameter]], first: tuple[str, nn.Parameter], *, where: str, who: str, others: str
) -> None:
    """Refuse parameters of another dtype than that of `first`; `who` trains in one, `others` name strategies that need not.

    Raises:
        SpecError: it names two that differ.
    """
    for name, p in named:
        if p.is_floating_point() and p.dtype != first[1].dtype:
            raise SpecError(
                f"{where}: {name} is {p.dtype}, {first[0]} is {first[1].dtype}: {who} trains in one dtype; set model.dtype so that they "
                f"agree, or take {others}"
            )


def clip_and_update(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    clip_norm: float | None,
    shards_of: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Clip by the global norm and update, unless a gradient is not finite; then nothing at all changes, now and later.

    The decision stays on the device: fused optimizers take it as ``found_inf``. It is sticky, so that the weights
    are still those before the bad step when the host learns of it some steps later.

    Where the parameters are this rank's shards, `shards_of` is the group over which their norms are added: one
    all-reduce of a float32 number. Where they are on the host, `device` is the one of the group's collectives.

    Returns:
        The norm before clipping, a float32 scalar on that device.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = total_norm([p.grad for p in parameters if p.grad is not None])
    home, norm = norm.device, norm.to(device or norm.device)
    if shards_of is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=shards_of)
        norm = squared.sqrt()
    here = norm.to(parameters[0].device if parameters else home)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, here)
    skip_if_not_finite(optimizer, here)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the global L2 norm as a float32 scalar, computed in float32 for any dtype of the gradients."""
    if all(g.dtype == torch.float32 for g in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]))


def skip_if_not_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> None:
    """Tell a fused optimizer to leave out the step that follows, and all later ones, if the norm is not finite."""
    bad = (~torch.isfinite(norm)).float()
    earlier = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = bad if earlier is None else torch.maximum(bad, earlier)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def replicated_weights(model: nn.Module, trained_only: bool) -> dict[str, torch.Tensor]:
    """Whole weights of a model that every rank holds, copied to the CPU of rank 0; ``{}`` elsewhere."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    return {
        n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters() if p.requires_grad or not trained_only
    }


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks in the order in which they run: the children of its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += transformer_blocks(child)
    return found


def forward_entry_points(model: nn.Module) -> list[nn.Module]:
    """Modules through which a forward may begin: the loss, the model, and what generation calls beneath an adapter."""
    inner = getattr(model, "model", model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # type: ignore[operator]
    return list(dict.fromkeys([model, inner, base]))


class Replicated:
    """A strategy (`contract.Strategy`) but for how gradients travel, which is all that those that share this differ in."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicated, forward_has_collectives, warmup = True, False, False
    claims_overlap = False

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        named = trained_parameters(model)
        require_same_order(named, group)
        broadcast_from_first(model, group)
        self._hold(model, named, make_optimizer, group, clip_norm)

    def _hold(
        self,
        model: nn.Module,
        named: list[tuple[str, nn.Parameter]],
        make_optimizer: MakeOptimizer,
        group: dist.ProcessGroup,
        clip_norm: float | None,
    ) -> None:
        """A model that is the same on all ranks, and what is trained of it."""
        self.module = self._model = model
        self._named, self._group, self._clip_norm = named, group, clip_norm
        self.optimizer = make_optimizer(named)

    def step(self) -> torch.Tensor:
        return clip_and_update(self.optimizer, (p for _, p in self._named), self._clip_norm)

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self._model, trained_only)

    def weight_shards(self) -> list[TensorShard]:
        return whole_weights([*self._named, *self._model.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return whole_states(self._named, self.optimizer, everywhere=True)
