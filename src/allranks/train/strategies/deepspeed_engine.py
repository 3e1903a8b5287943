"""What the three DeepSpeed strategies do: DeepSpeed's own engine, on this run's ranks, with this loop's arithmetic.

DeepSpeed is imported when a strategy is set up, not before: it takes seconds, and they are recorded apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import SpecError
from allranks.train.shards import Shard, StateRange, whole_weights
from allranks.train.strategies.common import replicated_weights, require_one_dtype, trained
from allranks.train.strategies.contract import MakeOptimizer
from allranks.train.strategies.deepspeed_config import Asked, completed, without_auto
from allranks.train.strategies.deepspeed_library import load_deepspeed, quiet, require_accelerator
from allranks.train.strategies.deepspeed_shards import fragment_ranges, plain_numbers, renew_copies
from allranks.train.strategies.deepspeed_state import flats, load_optimizer_state, optimizer_state
from allranks.train.strategies.deepspeed_unused import NoneMissing, reach_all
from allranks.train.strategies.deepspeed_views import Guarded, OnlyData
from allranks.train.strategies.traffic import Sizes, Traffic

Json = dict[str, Any]
BUCKET = 500_000_000  # DeepSpeed's default, elements; it allocates a whole bucket, however small the model is


class DeepSpeedZero:
    """One engine. The stage, and what follows from it, are the subclasses' own."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    rehearse = False
    keeps_master = True
    stage: int
    replicated: bool
    lockstep: bool

    def __init__(self, config: Json | None, config_from: str | None, find_unused_parameters: bool) -> None:
        self._given, self._from, self._zeros = config, config_from, find_unused_parameters
        self.config: Json = {}
        started = time.perf_counter()
        self._deepspeed = load_deepspeed()
        self.facts: Json = {
            "engine": "deepspeed",
            "version": str(self._deepspeed.__version__),
            "import_s": round(time.perf_counter() - started, 3),
        }

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, group: dist.ProcessGroup, clip_norm: float | None
    ) -> None:
        self._model, self._group, self._named = model, group, trained(model)
        if not self._named:
            raise SpecError("nothing is trained: DeepSpeed needs a parameter to train")
        device = self._named[0][1].device
        require_accelerator(device)
        started = time.perf_counter()
        self.config = self._final(device, dist.get_world_size(group), clip_norm)
        self._complete = NoneMissing(self._named)
        with quiet():
            engine, zero = self._initialize(make_optimizer)
        if self._zeros:
            reach_all(model, each_module=self.stage == 3)
        self._engine, self._zero, self.module = engine, zero, engine
        self._inner: torch.optim.Optimizer = zero.optimizer
        self.facts["optimizer"] = type(self._inner).__name__
        self._bad = torch.zeros((), device=device)
        self.optimizer = Guarded(self._inner, self._found_inf)  # type: ignore[assignment]
        self.facts["initialize_s"] = round(time.perf_counter() - started, 3)

    def _final(self, device: torch.device, world: int, clip_norm: float | None) -> Json:
        where = self._from or "strategy.config"
        asked = Asked(stage=self.stage, world_size=world, clip_norm=clip_norm or 0.0, device=device.type)
        config = completed(self._given, asked, where)
        if "train_batch_size" not in config:  # no spec has said; the loop's micro-batches are what they are
            config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
        bf16 = config.setdefault("bf16", {})
        if bf16.get("enabled", "auto") == "auto":
            bf16["enabled"] = self._trains_in_bf16(where)
        zero = config["zero_optimization"]
        if zero.get("reduce_bucket_size", "auto") == "auto":
            zero["reduce_bucket_size"] = min(BUCKET, max(1, sum(p.numel() for _, p in self._named)))
        return without_auto(config)

    def _trains_in_bf16(self, where: str) -> bool:
        """DeepSpeed casts the whole model where its bf16 is on, and wants one dtype of what is trained in any case."""
        whole = self._named[0][1].dtype == torch.bfloat16
        named = self._model.named_parameters() if whole else self._named
        require_one_dtype(named, self._named[0], where=where, who="DeepSpeed", others="zero3 or pytorch_ddp")
        return whole

    def _initialize(self, make_optimizer: MakeOptimizer) -> tuple[Any, Any]:
        own = "optimizer" not in self.config
        decayed = [p for _, p in self._named if p.ndim >= 2]
        plain = [p for _, p in self._named if p.ndim < 2]
        optimizer = make_optimizer(self._named) if own else None
        self._take_weights()
        engine, zero, *_ = self._deepspeed.initialize(
            model=self._model,
            optimizer=optimizer,
            model_parameters=None
            if own
            else [g for g in ({"params": decayed}, {"params": plain, "weight_decay": 0.0}) if g["params"]],
            config=self.config,
            mpu=OnlyData(self._group),
            dist_init_required=False,
        )
        return engine, zero

    def _take_weights(self) -> None:
        """Before the engine is made, and after whoever asks parameters for their shape: stage 3 cuts the model here."""

    def _found_inf(self) -> torch.Tensor:
        """1 where this step's or an earlier step's gradient was not finite, on the device."""
        return torch.maximum(self._bad, _not_finite(_norm(self._zero, self._bad.device)))

    @contextmanager
    def _held_back(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self._held_back()

    def backward(self, loss: torch.Tensor) -> None:
        # The loss is already the micro-batch's share of the step: DeepSpeed must not divide it by the micro-steps.
        self._engine.backward(loss, scale_wrt_gas=False)
        self._complete.check()

    def step(self) -> torch.Tensor:
        self._engine.step()
        self.optimizer.next_step()  # type: ignore[attr-defined]
        norm = _norm(self._zero, self._bad.device)
        self._bad = torch.maximum(self._bad, _not_finite(norm))
        return torch.where(norm < 0, torch.full_like(norm, math.nan), norm)

    @property
    def shards(self) -> list[torch.Tensor]:
        """What this rank keeps of the weights beside the model's own tensors."""
        return flats(self._zero)

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        raise NotImplementedError

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _put_weights(self, weights: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def weight_shards(self) -> list[Shard]:
        raise NotImplementedError

    def state_ranges(self) -> list[StateRange]:
        raise NotImplementedError

    def loaded(self) -> None:
        """What was read into `weight_shards` and `state_ranges` holds from here on, in the copies too. Every rank calls."""
        renew_copies(self.weight_shards(), self.state_ranges())
        plain_numbers(self._zero)

    def state_dict(self) -> dict[str, Any]:
        buffers = {n: b.to("cpu", copy=True) for n, b in self._model.named_buffers()}
        weights = self.weights(trained_only=True)
        return {"model": weights | buffers, "optimizer": optimizer_state(self._zero, self._named, self._group)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        buffers = dict(self._model.named_buffers())
        if odd := ({n for n, _ in self._named} | buffers.keys()) ^ state["model"].keys():
            raise KeyError(f"state does not fit the model: {sorted(odd)[:3]}")
        with torch.no_grad():
            self._put_weights(state["model"])
            for name, buffer in buffers.items():
                buffer.copy_(state["model"][name])
            self._zero.refresh_fp32_params()
            load_optimizer_state(self._zero, self._named, state["optimizer"])


class DeepSpeedReplicated(DeepSpeedZero):
    """Stages 1 and 2: every rank holds all weights."""

    replicated, lockstep = True, False
    claims_overlap = False  # buckets are reduced when backward has ended
    reduces_each_micro_step: bool

    def traffic(self, sizes: Sizes, world: int, accum: int) -> list[Traffic]:
        groups = len(self._inner.param_groups)
        gathered = sum(
            flat.numel() * p.element_size() * world for flat, p in zip(flats(self._zero), self._firsts(), strict=True)
        )
        times = accum if self.reduces_each_micro_step else 1
        flag = int(self._zero.check_grad_overflow)  # with bfloat16: a byte that says whether a gradient is not finite
        return [
            Traffic("all_reduce", "after_backward", None, sizes.trained_bytes * times),
            Traffic("all_reduce", "step", groups + flag, 4 * groups + flag),
            Traffic("all_gather", "step", None, gathered),
        ]

    def _firsts(self) -> list[nn.Parameter]:
        return [group[0] for group in self._zero.bit16_groups]

    def weights(self, trained_only: bool) -> dict[str, torch.Tensor]:
        return replicated_weights(self._model, trained_only)

    def weight_shards(self) -> list[Shard]:
        return whole_weights([*self._named, *self._model.named_buffers()])

    def state_ranges(self) -> list[StateRange]:
        return fragment_ranges(self._zero, self._named)

    def _put_weights(self, weights: dict[str, torch.Tensor]) -> None:
        for name, p in self._named:
            p.data.copy_(weights[name])


def _norm(zero: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(zero._global_grad_norm, dtype=torch.float32, device=device)


def _not_finite(norm: torch.Tensor) -> torch.Tensor:
    """DeepSpeed tells an invalid norm as infinity, or as -1."""
    return (~torch.isfinite(norm) | (norm < 0)).float()
