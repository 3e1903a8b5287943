"""Run DeepSpeed's engine on this run's ranks, for all three DeepSpeed strategies, and find its weights and state for
checkpoints.

DeepSpeed is imported when a strategy is set up, because the import takes seconds, which are recorded separately.
Parameters without a gradient in a backward are refused or zero-filled, because ranks would otherwise reduce different
parameters together.

State is stored by parameter name and range, as for all other strategies, so that any world size can read it. In every
stage the optimizer updates a float32 copy of this rank's part of the weights, also for float32 models.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from allranks.errors import EnvironmentNotAble, RunFailed, SpecError
from allranks.spec.strategies.deepspeed_zero import (
    BUCKET_ELEMENTS,
    DeepSpeedExpectations,
    complete_config,
    without_auto,
)
from allranks.train.strategies.base import (
    LoopStrategy,
    MakeOptimizer,
    Sizes,
    Traffic,
    has_weight_decay,
    replicated_weights,
    require_one_dtype,
    trained_parameters,
)
from allranks.train.strategies.shards import StateRange, TensorShard, whole_weights

Json = dict[str, Any]
Named = Sequence[tuple[str, nn.Parameter]]


def load_deepspeed() -> Any:
    """Import DeepSpeed; if torch sees no GPU, for the CPU and without compiled extensions.

    Raises:
        EnvironmentNotAble: DeepSpeed is not installed, or does not work with this torch.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with silence_deepspeed():
            deepspeed: Any = import_module("deepspeed")
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError, AssertionError) as error:
        if isinstance(error, ImportError) and error.name == "deepspeed":
            problem = "DeepSpeed is not installed here; pip install 'allranks[deepspeed]', or use zero1, zero2, zero3"
        else:
            problem = (
                f"DeepSpeed cannot be imported: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}; "
                f"it may require another torch than {torch.__version__}: pip install --upgrade 'deepspeed>=0.16', or "
                "use zero1, zero2, zero3"
            )
        raise EnvironmentNotAble(problem) from None
    deepspeed.utils.logger.setLevel(logging.WARNING)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):  # torch 2.13 warns of new names at every call
        warnings.filterwarnings("ignore", rf".*{name}. is deprecated", FutureWarning)
    if _accelerator() == "cpu":  # otherwise a shared-memory all-reduce is compiled at the start if there is a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _accelerator() -> str:
    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    return str(accelerator.device_name())


_ARCHITECTURE = re.compile(r"(\d+\.\d+(\+PTX)?)?")


@contextmanager
def silence_deepspeed() -> Iterator[None]:
    """Suppress the messages that DeepSpeed logs at every start."""
    logger = logging.getLogger("DeepSpeed")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def readable_arch_list(device: torch.device) -> Iterator[None]:
    """Let DeepSpeed compile for this GPU if TORCH_CUDA_ARCH_LIST has entries that only torch reads, like ``9.0a``."""
    name = "TORCH_CUDA_ARCH_LIST"
    before = os.environ.get(name, "")
    readable = all(_ARCHITECTURE.fullmatch(word) for word in re.split(r"[;\s]+", before.strip()))
    if device.type == "cuda" and not readable:
        os.environ[name] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    try:
        yield
    finally:
        if before:
            os.environ[name] = before


def data_parallel_mpu(group: dist.ProcessGroup) -> Any:
    """Return process groups for DeepSpeed: this run's group, with its timeout, and no model parallelism."""
    return SimpleNamespace(
        get_data_parallel_group=lambda: group,
        get_data_parallel_world_size=lambda: dist.get_world_size(group),
        get_data_parallel_rank=lambda: dist.get_rank(group),
        get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(group),
        get_model_parallel_group=lambda: None,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )


class GuardedOptimizer:
    """The optimizer inside DeepSpeed's, for the loop. It skips updates with non-finite gradients.

    DeepSpeed updates group by group; hooks registered here are called once per optimizer step.
    """

    def __init__(self, inner: torch.optim.Optimizer, found_inf: Callable[[], torch.Tensor]) -> None:
        self._inner, self._found_inf, self._update = inner, found_inf, inner.step
        self._on_device = bool(inner.defaults.get("fused"))
        self._hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()  # a plain dict has no weak references
        self._begun = False
        inner.step = self._step  # type: ignore[method-assign]

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def next_step(self) -> None:
        """End the optimizer step."""
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


class MissingGradientCheck:
    """Count gradients in each backward, to report trained parameters without a gradient by name."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._names = [name for name, _ in named]
        self._seen = [False] * len(named)
        for i, (_, p) in enumerate(named):
            p.register_post_accumulate_grad_hook(partial(self._see, i))

    def _see(self, i: int, _: Any) -> None:
        self._seen[i] = True

    def check(self) -> None:
        """Raise `RunFailed` unless every trained parameter got a gradient since the last check."""
        missing = [name for name, seen in zip(self._names, self._seen, strict=True) if not seen]
        self._seen = [False] * len(self._names)
        if missing:
            raise RunFailed(
                f"{len(missing)} trained parameters got no gradient in a backward, first {missing[0]}: DeepSpeed would "
                "mix different parameters of different ranks; set strategy.find_unused_parameters: true, or do not "
                "train them"
            )


def zero_missing_gradients(model: nn.Module, *, each_module: bool) -> None:
    """Give every trained parameter a gradient, zeros if necessary, in the same order on every rank.

    A graph node that is created before a forward runs last in its backward, and every parameter's gradient waits for
    it. Without this, gradients of unused parameters would be ready earlier, and DeepSpeed fills its buckets in the
    order of readiness. `each_module`: parameters are gathered only while their own module computes (stage 3); call this
    after DeepSpeed has registered its hooks.
    """
    for module in model.modules() if each_module else [model]:
        own = [p for p in module.parameters(recurse=not each_module) if p.requires_grad]
        if own:
            _ZeroGradientHook(own, module)


class _ZeroGradientHook:
    """Delay the gradients of a module's parameters until the end of its backward."""

    def __init__(self, own: list[nn.Parameter], module: nn.Module) -> None:
        self._own: list[nn.Parameter] = own
        self._nothing: list[torch.Tensor] = []
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, prepend=True)  # before the weights are released

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._nothing.append(cast(torch.Tensor, _ZeroWithGradients.apply(*self._own)))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not self._nothing:
            return output
        nothing = self._nothing.pop()

        def add(value: Any) -> Any:
            differentiable = isinstance(value, torch.Tensor) and value.requires_grad
            return value + nothing.to(value.dtype) if differentiable else value

        return tree_map(add, output)


class _ZeroWithGradients(torch.autograd.Function):
    """Return 0, with gradient 0 for every parameter."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(p.shape, p.dtype) for p in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros((), dtype=d, device=gradients[0].device).expand(s) for s, d in ctx.like)


class DeepSpeedZero(LoopStrategy):
    """Train with a DeepSpeed engine. Subclasses define the stage and what depends on it."""

    keeps_master = True
    stage: int

    def __init__(self, config: Json | None, config_from: str | None, find_unused_parameters: bool) -> None:
        self._given, self._from, self._zeros = config, config_from, find_unused_parameters
        started = time.perf_counter()
        self._deepspeed = load_deepspeed()
        self._facts: Json = {
            "engine": "deepspeed",
            "version": str(self._deepspeed.__version__),
            "import_s": round(time.perf_counter() - started, 3),
        }
        self.engine_facts = self._facts

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._model, self._group, self._named = model, group, trained_parameters(model)
        if not self._named:
            raise SpecError("no parameter is trained: DeepSpeed needs at least one")
        device = self._named[0][1].device
        if _accelerator() != device.type:  # it is chosen once per process
            raise EnvironmentNotAble(
                f"DeepSpeed chose {_accelerator()} as its accelerator, but the model is on {device.type}; set "
                f"cluster.env: {{DS_ACCELERATOR: {device.type}}}"
            )
        started = time.perf_counter()
        self.engine_config = self._config = self._final(device, dist.get_world_size(group), clip_norm)
        self._complete = MissingGradientCheck(self._named)
        with silence_deepspeed(), readable_arch_list(device):
            engine, zero = self._initialize(make_optimizer)
        if self._zeros:
            zero_missing_gradients(model, each_module=self.stage == 3)
        self._engine, self._zero, self.module = engine, zero, engine
        self._inner: torch.optim.Optimizer = zero.optimizer
        self._facts["optimizer"] = type(self._inner).__name__
        self._bad = torch.zeros((), device=device)
        self.optimizer = GuardedOptimizer(self._inner, self._found_inf)  # type: ignore[assignment]
        self._facts["initialize_s"] = round(time.perf_counter() - started, 3)

    def _final(self, device: torch.device, world: int, clip_norm: float | None) -> Json:
        where = self._from or "strategy.config"
        expected = DeepSpeedExpectations(
            stage=self.stage, world_size=world, clip_norm=clip_norm or 0.0, device=device.type
        )
        config = complete_config(self._given, expected, where)
        if "train_batch_size" not in config:  # the spec does not set it; the loop defines the micro-batches
            config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
        bf16 = config.setdefault("bf16", {})
        if bf16.get("enabled", "auto") == "auto":
            bf16["enabled"] = self._trains_in_bf16(where)
        zero = config["zero_optimization"]
        if zero.get("reduce_bucket_size", "auto") == "auto":
            # DeepSpeed allocates a full bucket for any size of model
            zero["reduce_bucket_size"] = min(BUCKET_ELEMENTS, max(1, sum(p.numel() for _, p in self._named)))
        return without_auto(config)

    def _trains_in_bf16(self, where: str) -> bool:
        """Return whether DeepSpeed casts the full model to bf16; it always requires one dtype of trained parameters."""
        whole = self._named[0][1].dtype == torch.bfloat16
        others = self._model.named_parameters() if whole else self._named
        named = [self._named[0], *others]
        require_one_dtype(named, where=where, who="DeepSpeed", others="zero3 or pytorch_ddp")
        return whole

    def _initialize(self, make_optimizer: MakeOptimizer) -> tuple[Any, Any]:
        optimizer, groups = None, None
        if "optimizer" in self._config:
            decayed = [p for name, p in self._named if has_weight_decay(name, p)]
            plain = [p for name, p in self._named if not has_weight_decay(name, p)]
            groups = [g for g in ({"params": decayed}, {"params": plain, "weight_decay": 0.0}) if g["params"]]
        else:
            optimizer = make_optimizer(self._named)
        self._take_weights()
        engine, zero, *_ = self._deepspeed.initialize(
            model=self._model,
            optimizer=optimizer,
            model_parameters=groups,
            config=self._config,
            mpu=data_parallel_mpu(self._group),
            dist_init_required=False,
        )
        return engine, zero

    def _take_weights(self) -> None:
        """Prepare weights after parameter shapes are read, before the engine exists: stage 3 shards the model here."""

    def _found_inf(self) -> torch.Tensor:
        """Return 1 (on the device) if a gradient of this or an earlier step was not finite, else 0."""
        return torch.maximum(self._bad, _not_finite(_norm(self._zero, self._bad.device)))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: torch.Tensor) -> None:
        # The loss is already the micro-batch's share of the step: DeepSpeed must not divide it by the number of
        # micro-steps.
        self._engine.backward(loss, scale_wrt_gas=False)
        self._complete.check()

    def step(self) -> torch.Tensor:
        self._engine.step()
        self.optimizer.next_step()  # type: ignore[attr-defined]
        norm = _norm(self._zero, self._bad.device)
        self._bad = torch.maximum(self._bad, _not_finite(norm))
        return torch.where(norm < 0, torch.full_like(norm, math.nan), norm)

    def extra_weights(self) -> list[torch.Tensor]:
        """Return DeepSpeed's own copies of this rank's part of the weights."""
        return partition_tensors(self._zero)

    def finish_loading(self) -> None:
        """Apply values read into `weight_shards` and `state_ranges`, also to DeepSpeed's copies. Collective."""
        renew_copies(self.weight_shards(), self.state_ranges())
        plain_numbers(self._zero)


class DeepSpeedReplicated(DeepSpeedZero):
    """Train with stages 1 and 2: every rank holds all weights."""

    replicated, forward_has_collectives = True, False
    claims_overlap = False  # buckets are reduced after backward
    reduces_each_micro_step: bool

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        groups = len(self._inner.param_groups)
        gathered = sum(
            flat.numel() * p.element_size() * world
            for flat, (p, *_) in zip(partition_tensors(self._zero), self._zero.bit16_groups, strict=True)
        )
        times = accum if self.reduces_each_micro_step else 1
        flag = int(self._zero.check_grad_overflow)  # with bfloat16: a byte that flags non-finite gradients
        return [
            Traffic("all_reduce", "after_backward", None, sizes.trained_bytes * times),
            Traffic("all_reduce", "step", groups + flag, 4 * groups + flag),
            Traffic("all_gather", "step", None, gathered),
        ]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self._model, trained_only)

    def weight_shards(self) -> list[TensorShard]:
        return whole_weights([*self._named, *self._model.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return fragment_ranges(self._zero, self._named)


def _norm(zero: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(zero._global_grad_norm, dtype=torch.float32, device=device)


def _not_finite(norm: torch.Tensor) -> torch.Tensor:
    """Return whether the norm is invalid, which DeepSpeed reports as infinity or -1."""
    return (~torch.isfinite(norm) | (norm < 0)).float()


def partition_tensors(zero: Any) -> list[torch.Tensor]:
    """Return this rank's partitions, one per group: the tensors that the inner optimizer updates."""
    stage3 = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(stage3 if stage3 is not None else zero.single_partition_of_fp32_groups)


def fragment_ranges(zero: Any, named: Named) -> list[StateRange]:
    """Return ranges for stages 1 and 2: a group's parameters are concatenated and split evenly, padded at the end."""
    names, out = {p: name for name, p in named}, []
    flat: Any
    for flat, group in zip(partition_tensors(zero), zero.bit16_groups, strict=True):
        own = [(p, p._hp_mapping) for p in group if p._hp_mapping is not None]
        for p, at in own:
            inner, outer = at.hp_fragment_address, at.lp_fragment_address
            out.append(
                StateRange(
                    zero.optimizer, flat, inner.start, inner.numel, names[p], p.numel(), outer.start, copy_of=p.dtype
                )
            )
        if not own:  # only padding: its state must exist, but holds no values
            p = group[-1]
            out.append(StateRange(zero.optimizer, flat, 0, 0, names[p], p.numel(), p.numel(), copy_of=p.dtype))
    return out


def partition_ranges(zero: Any, named: Named) -> list[StateRange]:
    """Return ranges for stage 3: each parameter is split evenly, end-padded; a group's parts are concatenated."""
    out: list[StateRange] = []
    flats: Any = partition_tensors(zero)
    for name, p in named:
        at, start, _ = zero.grad_position[zero.get_param_id(p)]
        (offset, length), numel = _own(p), int(p.ds_numel)  # type: ignore[attr-defined]
        out.append(StateRange(zero.optimizer, flats[at], start, length, name, numel, offset, copy_of=p.dtype))
    return out


def partitions(named: Named) -> list[TensorShard]:
    """Return this rank's parts of the weights in stage 3."""
    out = []
    for name, p in named:
        offset, length = _own(p)
        sharded: Any = p
        own = sharded.ds_tensor.detach().view(-1)[:length]
        out.append(TensorShard(f"model/{name}", int(sharded.ds_numel), offset, own))
    return out


def renew_copies(weights: Sequence[TensorShard], ranges: Sequence[StateRange]) -> None:
    """Copy loaded weights into the tensors that the optimizers update, except master weights, which are loaded, too."""
    by_key = {shard.key: shard for shard in weights}
    for r in ranges:
        shard = by_key[f"model/{r.name}"]
        low = r.offset - shard.offset
        weight, copy = shard.tensor[low : low + r.length], r.of(r.parameter)
        copy.copy_(torch.where(copy.to(weight.dtype) == weight, copy, weight.to(copy.dtype)) if r.is_master else weight)


def plain_numbers(zero: Any) -> None:
    """Convert steps that were read as tensors to integers if the optimizer uses integers (DeepSpeed's own do)."""
    if type(zero.optimizer).__module__.startswith("torch."):  # torch's optimizers keep it in a tensor
        return
    for flat in partition_tensors(zero):
        state = zero.optimizer.state[flat]
        state.update({k: int(v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim == 0})


def _own(p: Any) -> tuple[int, int]:
    """Return where this rank's part of a parameter begins, and its number of elements without padding."""
    part, numel = p.ds_tensor.numel(), int(p.ds_numel)
    low = min(dist.get_rank(p.ds_process_group) * part, numel)
    return low, min(part, numel - low)
