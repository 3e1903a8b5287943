"""Bytes that a strategy really holds on this rank, counted from storages, each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from allranks.train.strategies.contract import Strategy


class Held:
    """Looks at weights, gradients and optimizer state at the moment of an update, when all of them exist."""

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._model = strategy, model
        self._inner: Any = getattr(strategy.optimizer, "optim", strategy.optimizer)  # ZeroRedundancyOptimizer's own
        self.gradients = 0
        self._gradient_storages: list[tuple[StorageWeakRef, int]] = []
        self.updates = 0
        self._buckets = 0  # copies of gradients that a library keeps out of sight
        self._handle = self._inner.register_step_pre_hook(self._look)

    def _parameters(self) -> list[torch.Tensor]:
        own = [p for group in self._inner.param_groups for p in group["params"]]
        return [*self._model.parameters(), *own]

    def _look(self, *_: Any) -> None:
        self.updates += 1
        storages = _storages(p.grad for p in self._parameters() if p.grad is not None)
        self._buckets = getattr(self._strategy, "bucket_bytes", 0)
        self.gradients = sum(s.nbytes() for s in storages.values()) + self._buckets
        self._gradient_storages = [(StorageWeakRef(s), s.nbytes()) for s in storages.values()]

    def weights(self) -> int:
        """With shards in place of weights that are gathered only for a while."""
        return _total([*self._parameters(), *getattr(self._strategy, "shards", ())])

    def optimizer_state(self) -> int:
        return _total(v for state in self._inner.state.values() for v in state.values() if isinstance(v, torch.Tensor))

    def kept_between_steps(self) -> int:
        """What is there when a step begins: gradients count if their storage outlives the update."""
        kept = sum(n for ref, n in self._gradient_storages if not ref.expired())
        return self.weights() + self.optimizer_state() + kept + self._buckets

    def remove(self) -> None:
        self._handle.remove()


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    found = {}
    for t in tensors:
        local = t.to_local() if isinstance(t, DTensor) else t
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return found


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(s.nbytes() for s in _storages(tensors).values())
