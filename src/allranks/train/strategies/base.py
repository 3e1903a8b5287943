"""Define the contract of strategies, the expected communication of a step, and what replicated strategies share.

The loop calls of a `LoopStrategy`, for every optimizer step with ``A`` micro-batches::

    for i in range(A):
        with (strategy.accumulate() if i < A - 1 else nullcontext()):
            loss = strategy.module(batch)           # a sum over this micro-batch's trained tokens
            strategy.backward(loss * W / T)          # T: trained tokens of the step over all ranks, W: world size
    norm = strategy.step()

Gradients that a strategy passes to the optimizer are the **mean** over ranks; the factor ``W`` makes it the sum. A
comparison checks the expected communication against the observed collectives. Strategies that gather weights use one
unit per transformer block and one for the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import SpecError
from allranks.train import distributed
from allranks.train.models.block_forward import transformer_blocks  # noqa: F401 - for strategies
from allranks.train.models.weight_loader import WeightLoader
from allranks.train.strategies.gradient_sync import broadcast_from_first, require_same_order
from allranks.train.strategies.shards import StateRange, TensorShard, whole_states, whole_weights

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
Phase = Literal["forward", "backward", "after_backward", "step"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one phase of an optimizer step, on one rank.

    ``bytes`` is the full size: for an all-gather the gathered tensor, for a reduce-scatter the tensor before it is
    scattered. ``count`` is None if a library decides it.
    """

    kind: Kind
    phase: Phase
    count: int | None
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parameters: one entry per trained parameter, in registration order."""

    trained: tuple[int, ...]

    @property
    def trained_bytes(self) -> int:
        return sum(self.trained)


MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Strategy(ABC):
    """A way to distribute training over ranks, as the worker, checkpoints, evaluation, compare and the engines see it.

    Members without a value here must be defined. An engine may require more: `TrainingLoop` runs a `LoopStrategy`.
    """

    module: nn.Module
    """What computes the loss of a batch; set by `setup`."""
    optimizer: torch.optim.Optimizer
    """What gets the learning rate; set by `setup`."""
    replicated: bool
    """Every rank's module holds all weights, as plain tensors."""
    forward_has_collectives: bool
    """Forward communicates: all ranks must run the same number of forward passes, also in evaluation."""
    claims_overlap: bool = False
    """Communication overlaps with backward."""
    loads_in_parts: bool = False
    """Before `setup`, `weight_loader` is set and the model has no weights: `setup` loads them unit by unit."""
    weight_loader: WeightLoader | None = None
    """Loads the weights if `loads_in_parts`; None: the model has its weights."""
    keeps_master: bool = False
    """The optimizer updates copies of the weights, so that master weights of a checkpoint are loaded, too."""
    remarks: tuple[str, ...] = ()
    """Sentences on choices that `setup` made by itself, for the log."""
    engine_facts: Mapping[str, Any] | None = None
    """Name, version and start-up times of another library's engine, for the event ``engine``."""
    engine_config: Mapping[str, Any] | None = None
    """Configuration of another library's engine, which is saved in the run folder."""
    bucket_bytes: int = 0
    """Bytes of gradient copies that a library keeps beside the gradients."""

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates this rank's tensors and holds their state, if `optimizer` wraps it."""
        return self.optimizer

    @property
    def update_times_comparable(self) -> bool:
        """Whether every rank updates an equal share, and no wait for other ranks is counted as time of the update."""
        return True

    @abstractmethod
    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        """Set up a model, make its weights equal on all ranks, and create the optimizer. Collective."""

    def warm_up(self, batch: Any, *, resumed: bool) -> None:  # noqa: B027 - optional
        """Run and discard what must precede the first step, of a new run or after a resume. Collective."""

    @abstractmethod
    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        """Return the expected communication of an optimizer step of `accum` micro-steps. Call after `setup`."""

    @abstractmethod
    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        """Return full weights by name in `setup`'s module, on the CPU of rank 0; ``{}`` on other ranks. Collective."""

    @abstractmethod
    def weight_shards(self) -> list[TensorShard]:
        """Return this rank's parts of trained weights and buffers, ``model/<name>``, as views. Not collective.

        Values written to them take effect in the model after all ranks have called `finish_loading`.
        """

    @abstractmethod
    def state_ranges(self) -> list[StateRange]:
        """Return which parameter's state this rank's optimizer holds where. Not collective."""

    def finish_loading(self) -> None:  # noqa: B027 - optional
        """Apply values that were read into `weight_shards` and `state_ranges` to copies of them. Collective."""

    def extra_weights(self) -> list[torch.Tensor]:
        """Return tensors with weights that this rank keeps beside those of the module and the optimizer."""
        return []


class LoopStrategy(Strategy):
    """A strategy whose optimizer steps `train.loop.TrainingLoop` runs (see the top of this file)."""

    warmup: Literal["never", "after_resume", "always"] = "never"
    """When one forward and backward pass is run and discarded before the first step."""

    def accumulate(self) -> AbstractContextManager[Any]:
        """Return a context for micro-steps that must not communicate."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, with communication if the strategy communicates there."""
        loss.backward()

    @abstractmethod
    def step(self) -> torch.Tensor:
        """Finish communication, clip, update, clear gradients.

        An update with non-finite gradients is skipped, without synchronising with the device.

        Returns:
            The gradient norm before clipping, a float32 scalar on the device.
        """

    def warm_up(self, batch: Any, *, resumed: bool) -> None:
        """Run a forward and backward pass with loss 0 if `warmup` says so, for libraries that record gradient order."""
        if self.warmup == "never" or (self.warmup == "after_resume" and not resumed):
            return
        state = distributed.rng_state()
        self.module.train()
        self.backward(self.module(batch) * 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        distributed.set_rng_state(state)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return named parameters that get gradients, each once (tied weights under their first name)."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def has_weight_decay(name: str, parameter: torch.Tensor) -> bool:
    """Return whether AdamW decays a parameter: a matrix, no bias (of experts, two-dimensional) and no norm's scale."""
    parts = name.split(".")
    return parameter.ndim >= 2 and not parts[-1].endswith("bias") and not any(p.endswith("norm") for p in parts[:-1])


def require_one_dtype(named: Sequence[tuple[str, nn.Parameter]], *, where: str, who: str, others: str) -> None:
    """Raise `SpecError` that names two parameters whose dtypes differ.

    Args:
        who: what requires one dtype, for the message.
        others: strategies without this requirement, for the message.
    """
    for name, p in named:
        first, own = named[0]
        if p.is_floating_point() and p.dtype != own.dtype:
            raise SpecError(
                f"{where}: {name} is {p.dtype}, {first} is {own.dtype}: {who} supports only one dtype; set "
                f"model.dtype so that they agree, or use {others}"
            )


NORM_ROW = 1024  # elements whose squares are added up in float32


def clip_and_update(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    clip_norm: float | None,
    shards_of: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Clip by the global norm, update, and return the norm before clipping, a float32 scalar. After a non-finite
    gradient, skip this update and all later ones.

    The decision stays on the device: fused optimizers take it as ``found_inf``. It is sticky, so that the weights
    are still those before the bad step when the host learns of it some steps later. If the parameters are shards,
    `shards_of` is the group over which their norms are added. If they are on the host, `device` is that of the group's
    collectives, and of the result.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if parameters and parameters[0].device.type == "cpu":
        wait_for_host_copies(device)
    norm = total_norm([p.grad for p in parameters if p.grad is not None], joined=shards_of is not None)
    home, norm = norm.device, norm.to(device or norm.device)
    if shards_of is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=shards_of)
        norm = squared.sqrt()
    placed_norm = norm.to(parameters[0].device if parameters else home)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, placed_norm)
    skip_if_not_finite(optimizer, placed_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def total_norm(gradients: Sequence[torch.Tensor], *, joined: bool = False) -> torch.Tensor:
    """Return the global L2 norm as a float32 scalar, computed in float32 for any dtype of the gradients.

    `joined`: the gradients of several parameters are parts of one tensor. On a CPU torch adds up a tensor in few
    float32 sums: for 3e6 elements the norm is wrong by 2e-4, for 1e8 by 0.9 %. Here it is then the norm of the norms of
    rows. Otherwise it is torch's, which other libraries clip by.
    """
    if joined and gradients and all(g.device.type == "cpu" for g in gradients):
        return torch.linalg.vector_norm(
            torch.cat([_row_norms(g.float().flatten()) for g in gradients]).double()
        ).float()
    if all(g.dtype == torch.float32 for g in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]))


def _row_norms(flat: torch.Tensor) -> torch.Tensor:
    whole = flat.numel() - flat.numel() % NORM_ROW
    return torch.cat([torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1), flat[whole:]])


def skip_if_not_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> None:
    """Make a fused optimizer skip the next step and all later ones if the norm is not finite."""
    bad = (~torch.isfinite(norm)).float()
    earlier = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = bad if earlier is None else torch.maximum(bad, earlier)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def replicated_weights(model: nn.Module, trained_only: bool) -> dict[str, torch.Tensor]:
    """Return the full weights of a replicated model, copied to the CPU of rank 0; ``{}`` on other ranks."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    return {
        n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters() if p.requires_grad or not trained_only
    }


def forward_entry_points(model: nn.Module) -> list[nn.Module]:
    """Return modules where a forward pass may start: the loss, the model, and the base model that generation calls."""
    inner = getattr(model, "model", model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # type: ignore[operator]
    return list(dict.fromkeys([model, inner, base]))


class ReplicatedWeights(Strategy):
    """Base class of strategies with full weights on every rank."""

    replicated, forward_has_collectives = True, False

    def _hold(
        self,
        model: nn.Module,
        named: list[tuple[str, nn.Parameter]],
        make_optimizer: MakeOptimizer,
        group: dist.ProcessGroup,
        clip_norm: float | None,
    ) -> None:
        """Store the model, which is equal on all ranks, and its trained parameters."""
        self.module = self._model = model
        self._named, self._group, self._clip_norm = named, group, clip_norm
        self.optimizer = make_optimizer(named)

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self._model, trained_only)

    def weight_shards(self) -> list[TensorShard]:
        return whole_weights([*self._named, *self._model.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return whole_states(self._named, self.optimizer, everywhere=True)


class Replicated(ReplicatedWeights, LoopStrategy):
    """Base class of strategies that average gradients of full weights; subclasses add the communication."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        named = trained_parameters(model)
        require_same_order(named, group)
        broadcast_from_first(model, group)
        self._hold(model, named, make_optimizer, group, clip_norm)
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the communication, after the optimizer is made."""

    def _average(self, gradient: torch.Tensor) -> None:
        """All-reduce a gradient to the mean over ranks, and wait for it."""
        dist.all_reduce(gradient, group=self._group)
        gradient.div_(dist.get_world_size(self._group))

    def step(self) -> torch.Tensor:
        return clip_and_update(self.optimizer, (p for _, p in self._named), self._clip_norm)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a host copy. From a GPU it is pinned and asynchronous: call `wait_for_host_copies` before it is read."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return made.copy_(tensor, non_blocking=True)


def wait_for_host_copies(device: torch.device | None) -> None:
    """Wait once for all copies that were started from a device."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
