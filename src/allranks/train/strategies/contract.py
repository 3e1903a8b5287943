"""What a strategy must do, so that the loop knows none of them.

The loop calls, for every optimizer step with ``A`` micro-batches::

    for i in range(A):
        with (strategy.accumulate() if i < A - 1 else nullcontext()):
            loss = strategy.module(batch)           # a sum over this micro-batch's trained tokens
            strategy.backward(loss * W / T)          # T: trained tokens of the step over all ranks, W: world size
    norm = strategy.step()

Gradients that a strategy hands to the optimizer are the **mean** over ranks; the factor ``W`` makes it the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from allranks.train.shards import Shard, StateRange
from allranks.train.strategies.traffic import Sizes, Traffic

MakeOptimizer = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Strategy(Protocol):
    """One way to share the work of training between ranks.

    One that chose something by itself in `setup` says so in ``remarks``, a tuple of sentences. One that keeps weights in parts
    may have a ``filler``, set before `setup`: the model has no weights then, and `setup` asks for each unit's (see
    `allranks.train.loading`).
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    rehearse: bool  # one forward and backward, thrown away, before the first step: for what settles only then
    replicated: bool  # every rank's module holds all weights, as plain tensors
    claims_overlap: bool  # gradients travel while backward computes
    lockstep: bool  # forward communicates: every rank must make equally many forward passes, in evaluation too

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

    def weight_shards(self) -> list[Shard]:
        """This rank's parts of trained weights and buffers, ``model/<name>``: views, what is written into them is in the
        model, once ``loaded()`` was called where a strategy has it: every rank calls. No collective."""
        ...

    def state_ranges(self) -> list[StateRange]:
        """Where this rank's optimizer holds the state of which parameter. No collective."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}`` on the CPU, whole on rank 0. Every rank calls."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave. Every rank calls."""
        ...
