"""Implement the strategies that keep weights and optimizer state on every rank: single, the *_ddp* and pytorch_zero1.

All but the last two are written by hand, each of them improving on the one before it; the last two use torch's
DistributedDataParallel. ``pytorch_zero1`` shards the optimizer state only. Below: P parameters, T of them trained, n of
them tensors, of g bytes each; A micro-steps; W ranks; memory with fp32 AdamW, 4P + 12T bytes unless said otherwise:
weights, gradients, two moments. On a ring, an all-reduce of T g bytes sends 2 T g (W-1)/W bytes from each rank.

``single``: one process, the reference for the other strategies. Communication: none, 0 bytes per step. Predecessor:
none.

``simple_ddp``: one blocking all-reduce per trained parameter after each micro-step's backward: n A calls and A T g
bytes per step. Averaging does not change the part of a sum that is already the mean of all ranks, so accumulation is
correct, but wasteful. Predecessor (``single``): one process.

``simple_ddp_ga``: one blocking all-reduce per trained parameter, after the backward of the last micro-step: n calls and
T g bytes per step. Predecessor (``simple_ddp``): it communicates on every micro-step, although only the last one needs
it.

``simple_ddp_hook``: one blocking all-reduce per trained parameter, called in the last backward from a hook: n calls,
T g bytes per step. The order is always from the last parameter to the first, independent of the order in which
gradients are ready; missing gradients are zeros, reduced at the end of backward. Predecessor (``simple_ddp_ga``):
communication begins only after backward. Here it begins early, but each call blocks, so nothing overlaps yet.

``simple_ddp_async``: the same all-reduces, started in backward and waited for in ``step``. Predecessor
(``simple_ddp_hook``): its hooks wait, so that communication blocks computation.

``bucket_ddp_async``: one all-reduce per bucket (25 MB by default), started in the last backward when the bucket is
full, and waited for in ``step``: about T g / 25 MB calls, T g bytes per step. Gradients are views into the buckets,
which are filled and launched from the last parameter to the first, in the same order on all ranks (checked at the
start). Predecessor (``simple_ddp_async``): hundreds of small messages, each with its own latency. Filling buckets in
the order in which hooks run would be simpler, but that order may differ between ranks, which silently corrupts
gradients.

``pytorch_ddp``: torch's DistributedDataParallel, one all-reduce per bucket (25 MB by default), launched in the last
backward as soon as a bucket is full: T g bytes per step. Memory per rank: 4P + 16T bytes. Predecessor
(``bucket_ddp_async``): buckets follow the order in which gradients were ready in the first step, the same on all ranks,
instead of a fixed order.

``pytorch_zero1``: with ZeroRedundancyOptimizer: DDP's all-reduces in the last backward (T g bytes), then one broadcast
per parameter from the rank that updated it (T g bytes). Memory per rank: 4P + 4T + about 8T/W bytes: full parameters
are assigned to ranks, so parts differ in size. Predecessor (``pytorch_ddp``): every rank keeps the same moments.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.train.strategies.base import (
    MakeOptimizer,
    Replicated,
    Sizes,
    Traffic,
    clip_and_update,
    require_one_dtype,
    trained_parameters,
)
from allranks.train.strategies.gradient_sync import (
    BucketAllReduce,
    GradientBucket,
    MicroStepState,
    OrderedCollectives,
    gradient_of,
    on_gradient,
    split_into_buckets,
)
from allranks.train.strategies.shards import StateRange, whole_states

if TYPE_CHECKING:  # slow to import
    from torch.distributed.optim import ZeroRedundancyOptimizer


class Single(Replicated):
    """Train in one process, without communication."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._hold(model, trained_parameters(model), make_optimizer, group, clip_norm)

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return []


class SimpleDDP(Replicated):
    """Run a blocking all-reduce per parameter after every backward."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for _, parameter in self._named:
            self._average(gradient_of(parameter))

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "after_backward", len(sizes.trained) * accum, sizes.trained_bytes * accum)]


class SimpleDDPAccumulating(Replicated):
    """Run a blocking all-reduce per parameter after the last backward of the step."""

    def _prepare(self) -> None:
        self._micro = MicroStepState()

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if not self._micro.last:
            return
        for _, parameter in self._named:
            self._average(gradient_of(parameter))

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "after_backward", len(sizes.trained), sizes.trained_bytes)]


class _ReducedInBackward(Replicated):
    """All-reduce each gradient in the last backward, in the order from the last parameter to the first."""

    def _prepare(self) -> None:
        self._micro = MicroStepState()
        backwards = [parameter for _, parameter in self._named[::-1]]  # backward runs from the last layer to the first
        self._order = OrderedCollectives(len(backwards), lambda turn: self._reduce(gradient_of(backwards[turn])))
        for turn, parameter in enumerate(backwards):
            on_gradient(parameter, partial(self._ready, turn))

    def _ready(self, turn: int) -> None:
        if self._micro.last:
            self._order.ready(turn)

    def _reduce(self, gradient: torch.Tensor) -> None:
        raise NotImplementedError

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._micro.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if self._micro.last:
            self._order.finish()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", len(sizes.trained), sizes.trained_bytes)]


class SimpleDDPHook(_ReducedInBackward):
    """Run a blocking all-reduce per parameter in the last backward."""

    def _reduce(self, gradient: torch.Tensor) -> None:
        self._average(gradient)


class SimpleDDPAsync(_ReducedInBackward):
    """Start an asynchronous all-reduce per parameter in the last backward."""

    claims_overlap = True

    def _prepare(self) -> None:
        self._in_flight: list[tuple[dist.Work, torch.Tensor]] = []
        super()._prepare()

    def _reduce(self, gradient: torch.Tensor) -> None:
        work = cast(dist.Work, dist.all_reduce(gradient, group=self._group, async_op=True))
        self._in_flight.append((work, gradient))

    def step(self) -> torch.Tensor:
        for work, gradient in self._in_flight:
            work.wait()
            gradient.div_(dist.get_world_size(self._group))
        self._in_flight.clear()
        return super().step()


class BucketDDPAsync(Replicated):
    """Start an asynchronous all-reduce per bucket in the last backward."""

    claims_overlap = True

    def __init__(self, bucket_mb: float) -> None:
        self._bucket_bytes = bucket_mb * 2**20

    def _prepare(self) -> None:
        backwards = [parameter for _, parameter in self._named[::-1]]  # backward runs from the last layer to the first
        self._buckets = [GradientBucket(part) for part in split_into_buckets(backwards, self._bucket_bytes)]
        self._gradients = BucketAllReduce(self._buckets, self._group)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._gradients.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._gradients.finish()

    def step(self) -> torch.Tensor:
        self._gradients.wait()
        return super().step()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", len(self._buckets), sizes.trained_bytes)]


class PyTorchDDP(Replicated):
    """Use DistributedDataParallel with gradients as bucket views."""

    claims_overlap = True
    # DDP rebuilds its buckets after the first backward. With three or more ranks the order of a ring's sums depends on
    # the layout: without a warm-up the first step after a resume would be rounded differently than without the stop. A
    # new run needs none: its first step is always rounded alike.
    warmup = "after_resume"

    def __init__(self, bucket_mb: float, find_unused_parameters: bool, static_graph: bool = False) -> None:
        self._bucket_mb, self._search, self._static = bucket_mb, find_unused_parameters, static_graph

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._hold(model, trained_parameters(model), make_optimizer, group, clip_norm)
        with warnings.catch_warnings():  # the new name has another meaning at the start
            warnings.filterwarnings("ignore", ".*broadcast_buffers. is deprecated", FutureWarning)
            self._ddp = DistributedDataParallel(
                model,
                process_group=group,
                gradient_as_bucket_view=True,
                # buffers are constant and equal from the start: no broadcast per step is needed
                broadcast_buffers=False,
                bucket_cap_mb=self._bucket_mb,
                find_unused_parameters=self._search,
                static_graph=self._static,
            )
        self.module = self._ddp

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._ddp.no_sync()

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [Traffic("all_reduce", "backward", None, sizes.trained_bytes)]


class PyTorchZero1(PyTorchDDP):
    """Use DistributedDataParallel and ZeroRedundancyOptimizer."""

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        named = trained_parameters(model)
        who, others = "torch's ZeroRedundancyOptimizer", "zero1, pytorch_zero2 or pytorch_ddp"
        require_one_dtype(named, where="strategy pytorch_zero1", who=who, others=others)
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
        return clip_and_update(_Outer(self._zero), (p for _, p in self._named), self._clip_norm)  # type: ignore

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        return [
            Traffic("all_reduce", "backward", None, sizes.trained_bytes),
            Traffic("broadcast", "step", None, sizes.trained_bytes),
        ]

    def state_ranges(self) -> list[StateRange]:
        mine = {p for part in self._zero.optim.param_groups for p in part["params"]}
        return whole_states([(n, p) for n, p in self._named if p in mine], self._zero.optim, everywhere=False)


class _Outer:
    """Wrapper of the optimizer for `clip_and_update`: attributes that it sets must reach the inner optimizer."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        object.__setattr__(self, "_zero", zero)

    def __getattr__(self, name: str) -> Any:
        inner = self._zero.optim if name in ("found_inf", "grad_scale") else self._zero
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._zero.optim, name, value)
