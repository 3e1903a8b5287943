"""What DeepSpeed sees of this run, and what the loop sees of DeepSpeed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle


class OnlyData:
    """DeepSpeed's view of who talks to whom: this run's group, with its timeout, and no model parallelism."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._group)

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


class Guarded:
    """The optimizer inside DeepSpeed's, as the loop sees it. It leaves out updates whose gradients are not finite.

    DeepSpeed updates group by group; a hook given here is called once an optimizer step.
    """

    def __init__(self, inner: torch.optim.Optimizer, found_inf: Callable[[], torch.Tensor]) -> None:
        self._inner, self._found_inf, self._update = inner, found_inf, inner.step
        self._on_device = bool(inner.defaults.get("fused"))
        self._hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()  # a plain dict cannot be referred to weakly
        self._begun = False
        inner.step = self._step  # type: ignore[method-assign]

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def next_step(self) -> None:
        """The optimizer step is over."""
        self._begun = False

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._begun:
            self._begun = True
            for hook in tuple(self._hooks.values()):
                hook(self._inner, args, kwargs)
        bad = self._found_inf()
        if self._on_device:
            self._inner.found_inf, self._inner.grad_scale = bad, None  # type: ignore[attr-defined]
        elif bool(bad):
            return None
        return self._update(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
