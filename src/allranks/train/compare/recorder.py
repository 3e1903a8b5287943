"""Which collectives really went to the process group, seen where torch hands them over, not inside a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "broadcast_": "broadcast",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
}


class Recorder(TorchDispatchMode):
    """Watches steps (`StepWatcher`) and notes every c10d operation of some of them: (kind, phase, bytes).

    The phase is where it was launched: ``forward``, ``backward`` while autograd's engine runs, ``after_backward`` in the
    rest of the strategy's backward, ``step``. Bytes are those of the larger of what goes in and what comes out.
    """

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self._first, self._last = first, last
        self._part: str | None = None
        self.inside = False
        self.steps = 0
        self.seen: list[tuple[str, str, int]] = []

    def step_begins(self, step: int) -> None:
        if self._first <= step <= self._last:
            self.steps += 1
            self.inside = True
            self.__enter__()

    def part(self, name: str) -> AbstractContextManager[Any]:
        return self._within(name)

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self._part = name
        try:
            yield
        finally:
            self._part = None

    def step_ends(self, step: int) -> bool:
        if self.inside:
            self.inside = False
            self.__exit__(None, None, None)
        return False

    def close(self) -> None:
        self.step_ends(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and self._part in ("forward", "backward", "optimizer"):
            name = str(func._schema.name).split("::")[1]
            sizes = [_bytes(tree_leaves(arg)) for arg in args]
            self.seen.append((KINDS.get(name) or name, self._phase(), max(sizes, default=0)))
        return func(*args, **(kwargs or {}))

    def _phase(self) -> str:
        if self._part == "backward":
            return "backward" if torch._C._current_graph_task_id() != -1 else "after_backward"
        return "step" if self._part == "optimizer" else str(self._part)

    def totals(self) -> list[dict[str, Any]]:
        """Per optimizer step: ``[{"kind", "phase", "count", "bytes"}]``."""
        sums: dict[tuple[str, str], list[int]] = {}
        for kind, phase, size in self.seen:
            entry = sums.setdefault((kind, phase), [0, 0])
            entry[0] += 1
            entry[1] += size
        n = max(self.steps, 1)
        return [{"kind": k, "phase": p, "count": c / n, "bytes": b / n} for (k, p), (c, b) in sorted(sums.items())]


def _bytes(values: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))
