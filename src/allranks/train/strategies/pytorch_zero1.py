"""Implement ``pytorch_zero1``: torch's DistributedDataParallel with its ZeroRedundancyOptimizer.

Communication per step: DDP's all-reduces in the last backward (T g bytes, T trained parameters of g bytes), then one
broadcast per parameter from the rank that has updated it (T g bytes).
Memory per rank (P parameters, fp32 AdamW): 4P + 4T + about 8T/W bytes: full parameters are assigned to ranks, so that parts
differ in size.
Predecessor (``pytorch_ddp``): every rank keeps the same moments.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from allranks.train.strategies.base import (
    MakeOptimizer,
    Sizes,
    Traffic,
    clip_and_update,
    require_one_dtype,
    trained_parameters,
)
from allranks.train.strategies.pytorch_ddp import PyTorchDDP
from allranks.train.strategies.shards import StateRange, whole_states


class PyTorchZero1(PyTorchDDP):
    """Use DistributedDataParallel and ZeroRedundancyOptimizer."""

    def __init__(self, bucket_mb: float, find_unused_parameters: bool) -> None:
        super().__init__(bucket_mb, find_unused_parameters, static_graph=False)

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        refuse_two_dtypes(model)
        super().setup(model, make_optimizer, group, clip_norm)
        plain = self.optimizer  # provides class, groups and options; it has no state yet
        known = inspect.signature(type(plain)).parameters
        options = {k: v for k, v in plain.defaults.items() if k in known}
        groups = [{k: v for k, v in part.items() if k == "params" or k in known} for part in plain.param_groups]
        self._zero = ZeroRedundancyOptimizer(groups, type(plain), process_group=group, **options)
        self.optimizer = self._zero

    @property
    def updating_optimizer(self) -> torch.optim.Optimizer:
        return self._zero.optim

    @property
    def update_times_comparable(self) -> bool:
        """False: ZeroRedundancyOptimizer assigns full weights to ranks, so that some update more than others."""
        return False

    def step(self) -> torch.Tensor:
        return clip_and_update(_Outer(self._zero), (p for _, p in self._named), self._clip_norm)  # type: ignore[arg-type]

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [
            Traffic("all_reduce", "backward", None, sizes.trained_bytes),
            Traffic("broadcast", "step", None, sizes.trained_bytes),
        ]

    def state_ranges(self) -> list[StateRange]:
        mine = {p for part in self._zero.optim.param_groups for p in part["params"]}
        return whole_states([(n, p) for n, p in self._named if p in mine], self._zero.optim, everywhere=False)


def refuse_two_dtypes(model: nn.Module) -> None:
    """Refuse trained parameters of several dtypes, which ZeroRedundancyOptimizer does not support.

    Raises:
        SpecError: names two parameters that differ.
    """
    who, others = "torch's ZeroRedundancyOptimizer", "zero1, pytorch_zero2 or pytorch_ddp"
    if named := trained_parameters(model):
        require_one_dtype(named, named[0], where="strategy pytorch_zero1", who=who, others=others)


class _Outer:
    """Wrapper of the optimizer for `clip_and_update`: attributes that it sets must reach the inner optimizer."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        object.__setattr__(self, "_zero", zero)

    def __getattr__(self, name: str) -> Any:
        inner = self._zero.optim if name in ("found_inf", "grad_scale") else self._zero
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._zero.optim, name, value)
