"""Measure a strategy's steps: bytes held on this rank, collectives sent, a profiled window, and the load of the
machines meanwhile.

Bytes are counted from storages, each once. Collectives are recorded where torch dispatches them to the process group,
not inside a strategy. The trace stays in the run folder; `experiments.compare` reads it after the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allranks.train.distributed import DistContext
from allranks.train.loop import StepWatcher
from allranks.train.profiler import TraceNotWritten, publish_trace
from allranks.train.strategies.base import Strategy
from allranks.utils.kernel_counters import CpuUse, judge_machine, sample_cpu, use_between

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
EXTRA_ROUNDS = 2
"""A strategy is timed again at most so often, because its repeats were disturbed."""
Result = TypeVar("Result")


class MemoryUsage:
    """Measure weights, gradients and optimizer state at the time of an update, when all of them exist."""

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._model = strategy, model
        self._inner = strategy.updating_optimizer
        self.gradients = 0
        self._gradient_storages: list[tuple[StorageWeakRef, int]] = []
        self.updates = 0
        self._buckets = 0  # gradient copies that a library keeps internally
        self._handle = self._inner.register_step_pre_hook(self._look)

    def _parameters(self) -> list[torch.Tensor]:
        own = [p for group in self._inner.param_groups for p in group["params"]]
        return [*self._model.parameters(), *own]

    def _look(self, *_: Any) -> None:
        self.updates += 1
        storages = _storages(p.grad for p in self._parameters() if p.grad is not None)
        self._buckets = self._strategy.bucket_bytes
        self.gradients = sum(s.nbytes() for s in storages.values()) + self._buckets
        self._gradient_storages = [(StorageWeakRef(s), s.nbytes()) for s in storages.values()]

    def weights(self) -> int:
        """Return the bytes of weights; for weights that are gathered temporarily, those of the shards."""
        return _total([*self._parameters(), *self._strategy.extra_weights()])

    def optimizer_state(self) -> int:
        return _total(v for state in self._inner.state.values() for v in state.values() if isinstance(v, torch.Tensor))

    def kept_between_steps(self) -> int:
        """Return the bytes at the beginning of a step: gradients count if their storage is kept after the update."""
        kept = sum(n for ref, n in self._gradient_storages if not ref.expired())
        return self.weights() + self.optimizer_state() + kept + self._buckets

    def remove(self) -> None:
        self._handle.remove()


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    storages = {}
    for t in tensors:
        local = t.to_local() if isinstance(t, DTensor) else t
        storage = local.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    return storages


def _total(tensors: Iterable[torch.Tensor]) -> int:
    return sum(s.nbytes() for s in _storages(tensors).values())


class CollectiveRecorder(TorchDispatchMode, StepWatcher):
    """Record every c10d operation of a window of steps: (kind, phase, bytes).

    The phase is where it was launched: ``forward``, ``backward`` while autograd's engine runs, ``after_backward`` in
    the rest of the strategy's backward, ``step``. Bytes are the larger of input and output.
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

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
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
            tensors = [[t for t in tree_leaves(arg) if isinstance(t, torch.Tensor)] for arg in args]
            sizes = [sum(t.numel() * t.element_size() for t in each) for each in tensors]
            self.seen.append((KINDS.get(name) or name, self._phase(), max(sizes, default=0)))
        return func(*args, **(kwargs or {}))

    def _phase(self) -> str:
        if self._part == "backward":
            return "backward" if torch._C._current_graph_task_id() != -1 else "after_backward"
        return "step" if self._part == "optimizer" else str(self._part)

    def totals(self) -> list[dict[str, Any]]:
        """Return totals per optimizer step: ``[{"kind", "phase", "count", "bytes"}]``."""
        sums: dict[tuple[str, str], list[int]] = {}
        for kind, phase, size in self.seen:
            entry = sums.setdefault((kind, phase), [0, 0])
            entry[0] += 1
            entry[1] += size
        n = max(self.steps, 1)
        return [{"kind": k, "phase": p, "count": c / n, "bytes": b / n} for (k, p), (c, b) in sorted(sums.items())]


def wait_for_collectives(quiet: Callable[[], None]) -> None:
    """Wait until no collective runs on any rank: starting or stopping torch's profiler while Gloo threads work can
    corrupt the heap, which crashes the process later."""
    if dist.is_initialized():
        quiet()
        dist.barrier()
        time.sleep(0.2)  # the barrier does not cover collectives of other groups


class ProfileWindow(StepWatcher):
    """Record collectives in the steps of `recorder`; later profile steps `first` to `last`, with a trace in `path`."""

    def __init__(
        self, recorder: CollectiveRecorder, held: MemoryUsage, first: int, last: int, device: torch.device, path: Path
    ) -> None:
        self._recorder, self._held = recorder, held
        self._first, self._last, self._device, self._path = first, last, device, path
        self._profile: profile | None = None
        self._on = False
        self.peak_bytes = 0
        self.before_bytes = 0  # bytes held at the start of the window; on a CPU the profiler counts from there

    def attach(self, quiet: Callable[[], None]) -> None:
        self._quiet = quiet

    def step_begins(self, step: int) -> None:
        self._recorder.step_begins(step)
        if step == self._first:
            self.before_bytes = self._held.kept_between_steps()
            cuda = self._device.type == "cuda"
            if cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            wait_for_collectives(self._quiet)
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
            self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profile.start()
            self._on = True
        if self._on:
            self._mark = record_function(f"ProfilerStep#{step + 1}")
            self._mark.__enter__()

    def part(self, name: str) -> AbstractContextManager[Any]:
        return self._recorder.part(name) if self._recorder.inside else record_function(f"allranks.{name}")

    def step_ends(self, step: int) -> bool:
        self._recorder.step_ends(step)
        if self._on:
            self._mark.__exit__(None, None, None)
        if step == self._last and self._profile is not None:
            self._on = False
            wait_for_collectives(self._quiet)
            self._profile.stop()
            if self._device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            with suppress(TraceNotWritten):  # `experiments.compare` excludes the strategy, on all ranks
                publish_trace(self._profile.export_chrome_trace, self._path)
        return step == self._last

    def close(self) -> None:
        self._recorder.close()


def with_load(world: DistContext, action: Callable[[], Result]) -> tuple[Result, dict[str, Any]]:
    """Run an action; return its result, and this rank's host and CPU time meanwhile."""
    first = sample_cpu()
    result = action()
    return result, {"host": world.host, **msgspec.to_builtins(use_between(first, sample_cpu()))}


def was_disturbed(world: DistContext, load: dict[str, Any]) -> bool:
    """Return whether CPU time was taken from the ranks of any host. Collective: all ranks get the same answer."""
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, load, group=world.control)
    hosts: dict[str, list[CpuUse]] = {}
    for one in every:
        hosts.setdefault(one["host"], []).append(msgspec.convert(one, CpuUse))
    return any(judge_machine(host, uses).overloaded for host, uses in hosts.items())
