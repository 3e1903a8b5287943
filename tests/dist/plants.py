"""Bugs that people really wrote, planted into strategies of a test's ranks: the parity test must see each."""

import importlib.util
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim

from allranks.spec.strategies import hf_trainer as hf_arguments
from allranks.train import strategies
from allranks.train.checkpoint import loader
from allranks.train.distributed import DistContext
from allranks.train.engines import deepspeed_engine, deepspeed_zero, hf_trainer
from allranks.train.evaluation import Evaluator
from allranks.train.models import lora_experts, moe
from allranks.train.strategies import base, data_parallel, fsdp2, gradient_sync, sharded_optimizer, zero

HAVE_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAVE_DEEPSPEED, reason="needs pip install 'allranks[deepspeed]'")
# what is planted: the strategy and the variant with which it shows
PLANTS = {
    "reduces_the_parameter": ("simple_ddp_hook", "plain"),
    "bucket_order_differs": ("bucket_ddp_async", "plain"),
    "no_division": ("simple_ddp", "accumulation"),
    "sampler_fed_with_local_rank": ("simple_ddp", "plain"),
    "last_micro_batch_left_out": ("simple_ddp_ga", "accumulation"),
    "no_synchronisation": ("simple_ddp_ga", "plain"),
    "shard_boundary_off_by_one": ("zero1", "plain"),
    "no_division_in_zero1": ("zero1", "plain"),
    "no_division_in_zero2": ("zero2", "plain"),
    "no_division_in_zero3": ("zero3", "plain"),
    "no_gathering_in_backward": ("zero3", "plain"),
    "last_micro_step_not_scattered": ("zero2", "accumulation"),
    "adapters_not_averaged": ("pytorch_zero3", "lora_whole"),
    "adapters_summed": ("pytorch_zero2", "lora_whole"),
    "trainer_averages_unchecked": ("hf_trainer", "accumulation"),
    "trainer_mean_loss": ("hf_trainer", "plain"),
    "adapters_of_experts_not_averaged": ("pytorch_zero3", "moe_lora"),
    "routers_rounded": ("pytorch_zero3", "moe_bf16"),
    "router_loss_without_weights": ("pytorch_ddp", "moe_router_loss"),
    "router_loss_not_divided": ("zero2", "moe_router_loss"),
    "update_left_on_the_host": ("zero1", "host_moments"),
    "stale_weights_on_the_host": ("pytorch_zero3", "host_moments"),
}
if HAVE_DEEPSPEED:
    PLANTS |= {
        "divided_by_micro_steps_too": ("deepspeed_zero1", "accumulation"),
        "loss_without_the_ranks_factor": ("deepspeed_zero2", "plain"),
        "gradients_as_they_come": ("deepspeed_zero2", "unused_in_block"),
        "each_step_taken_for_the_last": ("deepspeed_zero1", "accumulation"),
    }
# with these weights are right: PEFT's own forward, or one layer after the other, computes the same
LORA_PLANTS = {
    "hooks_within_lora": ("pytorch_ddp", "lora_on_bf16"),
    "hooks_on_lora": ("zero1", "lora_on_bf16"),
    "experts_of_other_ranks": ("pytorch_zero3", "moe_lora_on_bf16"),
}
_planted = ""
Swap = tuple[Any, str, Callable[..., Any]]
"""What is replaced, and by what: a function of the world, what was there, and the arguments of the call."""


def reader(world: DistContext) -> int:
    return 0 if _planted in ("sampler_fed_with_local_rank", "trainer_same_rows") else world.rank


def plant(name: str, world: DistContext) -> None:
    """From here on this process has the bug."""
    global _planted  # noqa: PLW0603 - a process has one bug at most
    _planted = name
    for owner, attribute, function in BUGS.get(name, ()):
        instead(owner, attribute, partial(function, world))
    if name.startswith("trainer_averages"):  # as the Trainer does with losses that it holds for means
        hf_trainer.RanksTrainer.loss_is_scaled_for_ga = False


def instead(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Put `function` in the place of what is there, which it gets as its first argument; return how to put it back."""
    usual = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: function(usual, *args, **more))
    return lambda: setattr(owner, name, usual)


def _other_rows(world: Any, usual: Any, self: Any, order: Any, make: Any, first: int, last: int) -> None:
    usual(self, order, make, first + world.rank, last + world.rank)


def _skipped_rows(world: Any, usual: Any, self: Any) -> Any:
    """A loader that leaves a step out, on all ranks, once training goes on."""
    accum = len(self._order.micro_batches(0))
    for number, micro in enumerate(usual(self)):
        if not accum <= number < 2 * accum:
            yield micro


def _mean_loss(world: Any, usual: Any, self: Any, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
    """The mean over this rank's own tokens, as the Trainer takes it by default for such a model."""
    self._running.enter("forward")
    loss = model(inputs)
    self._running.add(inputs, loss)
    self._share = loss / inputs.tokens_trained / self.args.gradient_accumulation_steps
    return self._share


def _hooked(ending: str) -> Callable[..., Any]:
    """As of a strategy that gathers the weights of each layer whose name ends so, and says nothing of it."""

    def setup(world: Any, usual: Any, self: Any, module: torch.nn.Module, *args: Any) -> None:
        usual(self, module, *args)
        for name, part in module.named_modules():
            if name.endswith(ending):
                part.register_forward_pre_hook(lambda module, args: None)

    return setup


def _expert_parallel(world: Any, usual: Any, chain: Any, experts: Any) -> Any:
    experts._is_expert_parallel = True  # transformers' mark of experts that are divided among ranks
    return usual(chain, experts)


def _reduced_parameter(world: Any, usual: Any, self: Any, gradient: torch.Tensor) -> None:
    # picotron's DataParallelNaive: the hook's argument is the parameter
    parameter = next(p for _, p in self._named if p.grad is gradient)
    dist.all_reduce(parameter.data, group=self._group)
    parameter.data.div_(world.size)


def _undivided(world: Any, usual: Any, self: Any, loss: torch.Tensor) -> None:
    loss.backward()
    for _, parameter in self._named:
        dist.all_reduce(gradient_sync.gradient_of(parameter), group=self._group)


def _late_boundary(world: Any, usual: Any, self: Any, *args: Any) -> None:
    usual(self, *args)
    if self.low:
        self.low, self.high = self.low - 1, self.high - 1


def _undivided_bucket(world: Any, usual: Any, self: Any, at: int) -> None:
    self._buckets[at].flat.mul_(self._world)
    usual(self, at)


def _world_of_one(world: Any, usual: Any, self: Any, *args: Any, **more: Any) -> None:
    usual(self, *args, **more)
    self._world = 1


def _ungathered(world: Any, usual: Any, self: Any, i: int) -> None:
    usual(self, i)
    for whole in self._units[i].flats:
        whole.whole.fill_(1.0)  # memory of the right size, whatever lies in it


def _summed(world: Any, usual: Any, parameters: Any, group: Any) -> None:
    usual(parameters, group)
    for p in parameters:
        p.grad.mul_(world.size)


_FIRST: dict[int, torch.Tensor] = {}


def _stale_update(world: Any, usual: Any, optimizer: Any, parameters: Any, *more: Any) -> torch.Tensor:
    """An optimizer that goes on from what it once copied, though the weights on the device are others."""
    for p in parameters:
        p.data.copy_(_FIRST.setdefault(id(p), p.data.clone()))
    return usual(optimizer, parameters, *more)


def _averaged_at_once(world: Any, usual: Any, self: Any, loss: torch.Tensor) -> None:
    """Right numbers, A times the messages: parity cannot see it."""
    usual(self, loss)
    fsdp2.average_gradients([p for _, p in self._kept], self._group)


class _Done:
    def wait(self) -> None: ...


_micro_step = [0]


def _counted(world: Any, usual: Any, self: Any, loss: torch.Tensor) -> None:
    _micro_step[0] += 1
    usual(self, loss)


def _scattered_in_some(world: Any, usual: Any, out: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
    if _micro_step[0] % 3:
        return usual(out, whole, group)
    out.copy_(whole.view(world.size, -1)[world.rank])
    return _Done()


def _zeros_added(world: Any, usual: Any, model: Any, *, each_module: bool) -> None:
    # zeros added to the loss: a parameter that a rank does not use is ready before all others there
    own = [p for p in model.parameters() if p.requires_grad]
    model.register_forward_hook(lambda module, args, loss: loss + sum(p.flatten()[0] * 0.0 for p in own))


def _own_shards(world: Any, usual: Any, self: Any) -> Any:
    return [replace(s, numel=s.tensor.numel(), offset=0, everywhere=True) for s in usual(self)]


def _padded_shards(world: Any, usual: Any, self: Any) -> Any:
    """Of the right shape: only what the other ranks hold is missing."""

    def padded(shard: Any) -> Any:
        whole = torch.zeros(shard.numel, dtype=shard.tensor.dtype)
        whole[shard.offset : shard.offset + shard.tensor.numel()] = shard.tensor
        return replace(shard, offset=0, tensor=whole, everywhere=True)

    return [padded(s) for s in usual(self)]


def _late_fragments(world: Any, usual: Any, zero: Any, named: Any) -> Any:
    return [replace(r, offset=r.offset + 1, length=r.length - 1) if r.offset else r for r in usual(zero, named)]


_made: list[Any] = []
_weights: dict[int, list[torch.Tensor]] = {}


def _first_weights(world: Any, usual: Any, self: Any) -> Any:
    """As of an evaluation of a copy of the weights that is made once."""
    weights = [s.tensor for s in _made[-1].weight_shards() if s.key.startswith("model/")]
    now = [weight.clone() for weight in weights]
    for weight, old in zip(weights, _weights.setdefault(id(self), now), strict=True):
        weight.data.copy_(old)
    found = usual(self)
    for weight, new in zip(weights, now, strict=True):
        weight.data.copy_(new)
    return found


def _exchanged_moments(world: Any, usual: Any, ranges: Any, stored: Any) -> Any:
    out = usual(ranges, stored)
    for i, j in itertools.pairwise([i for i, s in enumerate(out) if s.key.endswith("/exp_avg")]):
        if out[i].numel == out[j].numel:
            out[i], out[j] = replace(out[i], key=out[j].key), replace(out[j], key=out[i].key)
    return out


def _moments_of_others(world: Any, usual: Any, flats: Any, optimizer: Any) -> Any:
    own = [(f.low, f.high) for f in flats]
    for f in flats:  # the others' ranges, in this rank's pieces
        f.low, f.high = (0, f.part) if world.rank == 1 else (f.low, f.high)
    out = usual(flats, optimizer)
    for f, (low, high) in zip(flats, own, strict=True):
        f.low, f.high = low, high
    return out


def _padding_owned(world: Any, usual: Any, p: Any) -> tuple[int, int]:
    return dist.get_rank(p.ds_process_group) * p.ds_tensor.numel(), p.ds_tensor.numel()


def _copies_alone(world: Any, usual: Any, self: Any) -> None:
    deepspeed_engine.renew_copies(self.weight_shards(), self.state_ranges())


def _forgotten_skip(world: Any, usual: Any, self: Any, *more: Any) -> Any:
    out = usual(self, *more)
    self.found_inf = None
    return out


def _step_with_whole_gradients(world: Any, usual: Any, self: Any) -> torch.Tensor:
    self._gradients.give()
    for flat in self._flats:
        for _, parameter in flat.named:
            parameter.grad = torch.zeros_like(parameter)
    return base.clip_and_update(self.optimizer, [p for flat in self._flats for p in flat.pieces], None, self._group)


_alike = partial(replace, tokens_trained=20)  # every micro-batch counts alike, whatever tokens it trains
# on a CPU `ddp_backend` alone: two processes are counted, no model is wrapped
_UNWRAPPED: Swap = (hf_arguments, "complete_arguments", lambda w, usual, *args: usual(*args) | {"use_cpu": False})
_UNCHECKED: Swap = (hf_trainer, "check_wrapped", lambda *_: None)
_NO_WORLD = ("use_cpu", "ddp_backend")  # without them each rank is a world of its own
_Accumulating, _Stage3 = data_parallel.SimpleDDPAccumulating, deepspeed_zero.DeepSpeedZero3
_Zero = deepspeed_engine.DeepSpeedZero
_NEVER_FREED: Swap = (zero.GatheredUnit, "free", lambda w, usual, self: self.use())
_WORLD_OF_ONE: Swap = (sharded_optimizer.GradientReduceScatter, "__init__", _world_of_one)
BUGS: dict[str, list[Swap]] = {
    "trainer_without_wrapper": [_UNWRAPPED],
    "trainer_without_wrapper_unchecked": [_UNWRAPPED, _UNCHECKED],
    "trainer_without_wrapper_to_the_end": [_UNWRAPPED, _UNCHECKED, (hf_trainer, "check_norms", lambda *_: None)],
    "trainer_alone": [
        (hf_arguments, "complete_arguments", lambda w, u, *a: {k: v for k, v in u(*a).items() if k not in _NO_WORLD})
    ],
    "trainer_other_rows": [(hf_trainer.RowDataset, "__init__", _other_rows)],  # a step later, on one rank
    "trainer_skips_rows": [(hf_trainer.RowDataset, "__iter__", _skipped_rows)],
    "trainer_averages_unchecked": [(hf_trainer.RanksTrainer, "_refuse_other_loss", lambda *_: None)],
    "trainer_mean_loss": [(hf_trainer.RanksTrainer, "compute_loss", _mean_loss)],
    "router_loss_without_weights": [(moe.RouterLoss, "of", lambda w, usual, self, out, b: usual(self, out, _alike(b)))],
    # the sum of the ranks' losses instead of their mean; what is logged is right
    "router_loss_not_divided": [(moe.RouterLoss, "of", lambda w, usual, *args: usual(*args) * w.size)],
    "hooks_within_lora": [(data_parallel.PyTorchDDP, "setup", _hooked("lora_A.default"))],
    "hooks_on_lora": [(zero.Zero1, "setup", _hooked("_proj"))],
    "experts_of_other_ranks": [(lora_experts, "_adapters", _expert_parallel)],
    "reduces_the_parameter": [(data_parallel.SimpleDDPHook, "_reduce", _reduced_parameter)],
    "bucket_order_differs": [(base, "trained_parameters", lambda w, usual, m: usual(m)[:: -1 if w.rank == 1 else 1])],
    "no_division": [(data_parallel.SimpleDDP, "backward", _undivided)],
    "last_micro_batch_left_out": [
        (_Accumulating, "backward", lambda w, u, self, loss: u(self, loss * 0 if self._micro.last else loss))
    ],
    "no_synchronisation": [(_Accumulating, "backward", lambda w, usual, self, loss: loss.backward())],
    "shard_boundary_off_by_one": [(sharded_optimizer.FlatParameter, "__init__", _late_boundary)],
    "no_division_in_zero1": [(gradient_sync.BucketAllReduce, "_reduce", _undivided_bucket)],
    "no_division_in_zero2": [_WORLD_OF_ONE],
    "no_division_in_zero3": [_WORLD_OF_ONE],
    "no_gathering_in_backward": [(zero.Zero3, "_before_backward", _ungathered)],
    "adapters_not_averaged": [
        (fsdp2, "average_gradients", lambda w, u, ps, group: [gradient_sync.gradient_of(p) for p in ps])
    ],
    "adapters_summed": [(fsdp2, "average_gradients", _summed)],
    "adapters_of_experts_not_averaged": [
        (fsdp2, "average_gradients", lambda w, usual, ps, group: usual([p for p in ps if p.numel() < 500], group))
    ],
    "routers_rounded": [(moe, "keep_routers_in_float32", lambda *_: None)],
    "update_left_on_the_host": [(sharded_optimizer.FlatParameter, "take_update", lambda *_: None)],
    "stale_weights_on_the_host": [(fsdp2, "clip_and_update", _stale_update)],
    "adapters_averaged_in_each_micro_step": [(fsdp2.FSDP2, "backward", _averaged_at_once)],
    "last_micro_step_not_scattered": [
        (sharded_optimizer, "reduce_scatter", _scattered_in_some),
        (zero.Zero2, "backward", _counted),
    ],
    # DeepSpeed's own default, right for a loss that is a micro-batch's mean
    "divided_by_micro_steps_too": [(_Zero, "backward", lambda w, usual, self, loss: self._engine.backward(loss))],
    "loss_without_the_ranks_factor": [(_Zero, "backward", lambda w, usual, self, loss: usual(self, loss / w.size))],
    "gradients_as_they_come": [(deepspeed_engine, "zero_missing_gradients", _zeros_added)],
    "each_step_taken_for_the_last": [(_Zero, "accumulate", lambda *_: nullcontext())],
    "own_shards_alone": [(_Stage3, "weight_shards", _own_shards)],
    "own_part_and_zeros": [(_Stage3, "weight_shards", _padded_shards)],
    "fragments_one_element_late": [(deepspeed_engine, "fragment_ranges", _late_fragments)],
    "evaluations_of_the_first_weights": [
        (strategies, "create", lambda w, usual, *args: _made.append(usual(*args)) or _made[-1]),
        (Evaluator, "run", _first_weights),
    ],
    "moments_of_another_parameter": [(loader, "allocate_state", _exchanged_moments)],
    "moments_of_another_rank": [(sharded_optimizer, "flat_states", _moments_of_others)],
    "padding_taken_for_weights": [(deepspeed_engine, "_own", _padding_owned)],
    "copies_not_filled": [(deepspeed_engine, "renew_copies", lambda *_: None)],
    "input_without_gradient": [(deepspeed_zero, "_differentiate_input", lambda *_: None)],
    "whole_weights_kept": [(_Stage3, "finish_loading", _copies_alone)],
    "a_skip_that_does_not_last": [(optim.AdamW, "step", _forgotten_skip)],
    "never_freed": [_NEVER_FREED],
    "never_freed_and_gradients_whole": [_NEVER_FREED, (zero.Zero2, "step", _step_with_whole_gradients)],
}
