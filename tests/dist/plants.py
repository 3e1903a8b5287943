"""Bugs that people really wrote, planted into strategies of a test's ranks: the parity test must see each."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from allranks.spec.strategies import hf_trainer as hf_arguments
from allranks.train import strategies
from allranks.train.checkpoint import loader
from allranks.train.distributed import DistContext
from allranks.train.engines import deepspeed_engine, deepspeed_zero, hf_trainer
from allranks.train.evaluation import Evaluator
from allranks.train.models import lora_experts, moe
from allranks.train.strategies import base, data_parallel, fsdp2, gradient_sync, sharded_optimizer, zero

HAVE_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
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
    **(
        {
            "divided_by_micro_steps_too": ("deepspeed_zero1", "accumulation"),
            "loss_without_the_ranks_factor": ("deepspeed_zero2", "plain"),
            "gradients_as_they_come": ("deepspeed_zero2", "unused_in_block"),
            "each_step_taken_for_the_last": ("deepspeed_zero1", "accumulation"),
        }
        if HAVE_DEEPSPEED
        else {}
    ),
}
# with these weights are right: PEFT's own forward, or one layer after the other, computes the same
LORA_PLANTS = {
    "hooks_within_lora": ("pytorch_ddp", "lora_on_bf16"),
    "hooks_on_lora": ("zero1", "lora_on_bf16"),
    "experts_of_other_ranks": ("pytorch_zero3", "moe_lora_on_bf16"),
}
_planted = ""


def reader(world: DistContext) -> int:
    """Whose rows this rank reads."""
    return 0 if _planted in ("sampler_fed_with_local_rank", "trainer_same_rows") else world.rank


def plant(name: str, world: DistContext) -> None:
    """From here on this process has the bug."""
    global _planted  # noqa: PLW0603 - a process has one bug at most
    _planted = name
    getattr(_Bugs, name, lambda world: None)(world)


class _Bugs:
    @staticmethod
    def trainer_without_wrapper(world: DistContext) -> None:
        """On a CPU `ddp_backend` alone: two processes are counted, no model is wrapped."""
        usual = hf_arguments.complete_arguments
        hf_arguments.complete_arguments = lambda *args: usual(*args) | {"use_cpu": False}

    @staticmethod
    def trainer_without_wrapper_unchecked(world: DistContext) -> None:
        _Bugs.trainer_without_wrapper(world)
        hf_trainer.check_wrapped = lambda *args: None

    @staticmethod
    def trainer_without_wrapper_to_the_end(world: DistContext) -> None:
        _Bugs.trainer_without_wrapper_unchecked(world)
        hf_trainer.check_norms = lambda *args: None

    @staticmethod
    def trainer_alone(world: DistContext) -> None:
        """Neither `use_cpu` nor `ddp_backend`: each rank is a world of its own."""
        usual = hf_arguments.complete_arguments
        hf_arguments.complete_arguments = lambda *args: {
            k: v for k, v in usual(*args).items() if k not in ("use_cpu", "ddp_backend")
        }

    @staticmethod
    def trainer_other_rows(world: DistContext) -> None:
        """A sampler in between: the rows of the step after, on one rank."""
        usual = hf_trainer.RowDataset.__init__

        def init(self: Any, order: Any, make: Any, first: int, last: int) -> None:
            usual(self, order, make, first + world.rank, last + world.rank)

        hf_trainer.RowDataset.__init__ = init  # type: ignore[method-assign]

    @staticmethod
    def trainer_skips_rows(world: DistContext) -> None:
        """A loader that leaves a step out, on all ranks, once training goes on."""
        usual = hf_trainer.RowDataset.__iter__

        def iterate(self: Any) -> Any:
            accum = len(self._order.micro_batches(0))
            for number, micro in enumerate(usual(self)):
                if not accum <= number < 2 * accum:
                    yield micro

        hf_trainer.RowDataset.__iter__ = iterate  # type: ignore[method-assign]

    @staticmethod
    def trainer_averages(world: DistContext) -> None:
        """The Trainer divides by the number of micro-steps on its own, as it does with losses that it holds for
        means."""
        hf_trainer.RanksTrainer.loss_is_scaled_for_ga = False

    @staticmethod
    def trainer_averages_unchecked(world: DistContext) -> None:
        _Bugs.trainer_averages(world)
        hf_trainer.RanksTrainer._refuse_other_loss = lambda self, used: None  # type: ignore[method-assign]

    @staticmethod
    def trainer_mean_loss(world: DistContext) -> None:
        """The mean over this rank's own tokens, as the Trainer takes it by default for such a model, instead of over
        all ranks'."""

        def compute_loss(
            self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            self._running.enter("forward")
            loss = model(inputs)
            self._running.add(inputs, loss)
            self._share = loss / inputs.tokens_trained / self.args.gradient_accumulation_steps
            return self._share

        hf_trainer.RanksTrainer.compute_loss = compute_loss  # type: ignore[method-assign]

    @staticmethod
    def router_loss_without_weights(world: DistContext) -> None:
        """Every micro-batch counts alike, whatever tokens it trains."""
        usual = moe.RouterLoss.of
        alike = partial(replace, tokens_trained=20)
        moe.RouterLoss.of = lambda self, output, batch: usual(self, output, alike(batch))  # type: ignore

    @staticmethod
    def router_loss_not_divided(world: DistContext) -> None:
        """The sum of the ranks' losses instead of their mean; what is logged is right."""
        usual = moe.RouterLoss.of
        moe.RouterLoss.of = lambda self, output, batch: usual(self, output, batch) * world.size  # type: ignore

    @staticmethod
    def hooks_within_lora(world: DistContext) -> None:
        """As of a strategy that gathers the weights of each inner layer, which says nothing of it."""
        _hook_when_set_up(data_parallel.PyTorchDDP, "lora_A.default")

    @staticmethod
    def hooks_on_lora(world: DistContext) -> None:
        """As of a strategy that gathers the weights of each adapted layer."""
        _hook_when_set_up(zero.Zero1, "_proj")

    @staticmethod
    def experts_of_other_ranks(world: DistContext) -> None:
        """transformers' mark of experts that are divided among ranks."""
        usual = lora_experts._adapters

        def adapters(chain: Any, experts: Any) -> Any:
            experts._is_expert_parallel = True
            return usual(chain, experts)

        lora_experts._adapters = adapters

    @staticmethod
    def reduces_the_parameter(world: DistContext) -> None:
        # picotron's DataParallelNaive: the hook's argument is the parameter
        def reduce(self: Any, gradient: torch.Tensor) -> None:
            parameter = next(p for _, p in self._named if p.grad is gradient)
            dist.all_reduce(parameter.data, group=self._group)
            parameter.data.div_(world.size)

        data_parallel.SimpleDDPHook._reduce = reduce  # type: ignore[method-assign]

    @staticmethod
    def bucket_order_differs(world: DistContext) -> None:
        if world.rank == 1:
            usual = base.trained_parameters
            base.trained_parameters = lambda model: usual(model)[::-1]

    @staticmethod
    def no_division(world: DistContext) -> None:
        def backward(self: Any, loss: torch.Tensor) -> None:
            loss.backward()
            for _, parameter in self._named:
                dist.all_reduce(gradient_sync.gradient_of(parameter), group=self._group)

        data_parallel.SimpleDDP.backward = backward  # type: ignore[method-assign]

    @staticmethod
    def last_micro_batch_left_out(world: DistContext) -> None:
        whole = data_parallel.SimpleDDPAccumulating.backward

        def backward(self: Any, loss: torch.Tensor) -> None:
            whole(self, loss * 0 if self._micro.last else loss)

        data_parallel.SimpleDDPAccumulating.backward = backward  # type: ignore[method-assign]

    @staticmethod
    def no_synchronisation(world: DistContext) -> None:
        data_parallel.SimpleDDPAccumulating.backward = lambda self, loss: loss.backward()  # type: ignore[method-assign]

    @staticmethod
    def shard_boundary_off_by_one(world: DistContext) -> None:
        usual = sharded_optimizer.FlatParameter.__init__

        def init(self: Any, *args: Any) -> None:
            usual(self, *args)
            if self.low:
                self.low, self.high = self.low - 1, self.high - 1

        sharded_optimizer.FlatParameter.__init__ = init  # type: ignore[method-assign]

    @staticmethod
    def no_division_in_zero1(world: DistContext) -> None:
        usual = gradient_sync.BucketAllReduce._reduce

        def reduce(self: Any, at: int) -> None:
            self._buckets[at].flat.mul_(self._world)
            usual(self, at)

        gradient_sync.BucketAllReduce._reduce = reduce  # type: ignore[method-assign]

    @staticmethod
    def no_division_in_zero2(world: DistContext) -> None:
        usual = sharded_optimizer.GradientReduceScatter.__init__

        def init(self: Any, *args: Any, **more: Any) -> None:
            usual(self, *args, **more)
            self._world = 1

        sharded_optimizer.GradientReduceScatter.__init__ = init  # type: ignore[method-assign]

    no_division_in_zero3 = no_division_in_zero2

    @staticmethod
    def no_gathering_in_backward(world: DistContext) -> None:
        # memory of the right size, whatever lies in it
        usual = zero.Zero3._before_backward

        def before_backward(self: Any, i: int) -> None:
            usual(self, i)
            for whole in self._units[i].flats:
                whole.whole.fill_(1.0)

        zero.Zero3._before_backward = before_backward  # type: ignore[method-assign]

    @staticmethod
    def adapters_not_averaged(world: DistContext) -> None:
        own = gradient_sync.gradient_of
        fsdp2.average_gradients = lambda parameters, group: [own(p) for p in parameters]  # type: ignore

    @staticmethod
    def adapters_summed(world: DistContext) -> None:
        usual = fsdp2.average_gradients

        def summed(parameters: Any, group: Any) -> None:
            usual(parameters, group)
            for p in parameters:
                p.grad.mul_(world.size)

        fsdp2.average_gradients = summed

    @staticmethod
    def adapters_of_experts_not_averaged(world: DistContext) -> None:
        usual = fsdp2.average_gradients
        fsdp2.average_gradients = lambda parameters, group: usual([p for p in parameters if p.numel() < 500], group)

    @staticmethod
    def routers_rounded(world: DistContext) -> None:
        moe.keep_routers_in_float32 = lambda model: None  # type: ignore[assignment]

    @staticmethod
    def update_left_on_the_host(world: DistContext) -> None:
        sharded_optimizer.FlatParameter.take_update = lambda self: None  # type: ignore[method-assign]

    @staticmethod
    def stale_weights_on_the_host(world: DistContext) -> None:
        # an optimizer that goes on from what it once copied, though the weights on the device are others
        usual = fsdp2.clip_and_update
        first: dict[int, torch.Tensor] = {}

        def update(optimizer: Any, parameters: Any, *more: Any) -> torch.Tensor:
            for p in parameters:
                p.data.copy_(first.setdefault(id(p), p.data.clone()))
            return usual(optimizer, parameters, *more)

        fsdp2.clip_and_update = update

    @staticmethod
    def adapters_averaged_in_each_micro_step(world: DistContext) -> None:
        # right numbers, A times the messages: parity cannot see it
        usual = fsdp2.FSDP2.backward

        def backward(self: Any, loss: torch.Tensor) -> None:
            usual(self, loss)
            fsdp2.average_gradients([p for _, p in self._kept], self._group)

        fsdp2.FSDP2.backward = backward  # type: ignore[method-assign]

    @staticmethod
    def last_micro_step_not_scattered(world: DistContext) -> None:
        micro_steps, usual, backward = 0, sharded_optimizer.reduce_scatter, zero.Zero2.backward

        class Done:
            def wait(self) -> None: ...

        def own_part(out: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
            if micro_steps % 3:
                return usual(out, whole, group)
            out.copy_(whole.view(world.size, -1)[world.rank])
            return Done()

        def counted(self: Any, loss: torch.Tensor) -> None:
            nonlocal micro_steps
            micro_steps += 1
            backward(self, loss)

        sharded_optimizer.reduce_scatter = own_part  # type: ignore[assignment]
        zero.Zero2.backward = counted  # type: ignore[method-assign]

    @staticmethod
    def divided_by_micro_steps_too(world: DistContext) -> None:
        # DeepSpeed's own default, right for a loss that is a micro-batch's mean
        deepspeed_engine.DeepSpeedZero.backward = lambda self, loss: self._engine.backward(loss)  # type: ignore

    @staticmethod
    def loss_without_the_ranks_factor(world: DistContext) -> None:
        usual = deepspeed_engine.DeepSpeedZero.backward
        deepspeed_engine.DeepSpeedZero.backward = lambda self, loss: usual(self, loss / world.size)  # type: ignore

    @staticmethod
    def gradients_as_they_come(world: DistContext) -> None:
        # zeros added to the loss: a parameter that a rank does not use is ready before all others there
        def reach(model: Any, *, each_module: bool) -> None:
            own = [p for p in model.parameters() if p.requires_grad]
            model.register_forward_hook(lambda module, args, loss: loss + sum(p.flatten()[0] * 0.0 for p in own))

        deepspeed_engine.zero_missing_gradients = reach  # type: ignore[attr-defined]

    @staticmethod
    def each_step_taken_for_the_last(world: DistContext) -> None:
        from contextlib import nullcontext

        deepspeed_engine.DeepSpeedZero.accumulate = lambda self: nullcontext()  # type: ignore[method-assign]

    @staticmethod
    def own_shards_alone(world: DistContext) -> None:
        usual = deepspeed_zero.DeepSpeedZero3.weight_shards
        deepspeed_zero.DeepSpeedZero3.weight_shards = lambda self: [  # type: ignore[method-assign]
            replace(s, numel=s.tensor.numel(), offset=0, everywhere=True) for s in usual(self)
        ]

    @staticmethod
    def own_part_and_zeros(world: DistContext) -> None:
        # of the right shape: only what the other ranks hold is missing
        usual = deepspeed_zero.DeepSpeedZero3.weight_shards

        def padded(shard: Any) -> Any:
            whole = torch.zeros(shard.numel, dtype=shard.tensor.dtype)
            whole[shard.offset : shard.offset + shard.tensor.numel()] = shard.tensor
            return replace(shard, offset=0, tensor=whole, everywhere=True)

        deepspeed_zero.DeepSpeedZero3.weight_shards = lambda self: [padded(s) for s in usual(self)]  # type: ignore

    @staticmethod
    def fragments_one_element_late(world: DistContext) -> None:
        usual = deepspeed_engine.fragment_ranges

        def late(zero: Any, named: Any) -> Any:
            return [replace(r, offset=r.offset + 1, length=r.length - 1) if r.offset else r for r in usual(zero, named)]

        deepspeed_engine.fragment_ranges = late  # type: ignore[attr-defined]

    @staticmethod
    def evaluations_of_the_first_weights(world: DistContext) -> None:
        """As of an evaluation of a copy of the weights that is made once."""
        made: list[Any] = []
        create, run, first = strategies.create, Evaluator.run, dict[int, list[torch.Tensor]]()

        def evaluate(self: Any) -> Any:
            weights = [s.tensor for s in made[-1].weight_shards() if s.key.startswith("model/")]
            now = [weight.clone() for weight in weights]
            for weight, old in zip(weights, first.setdefault(id(self), now), strict=True):
                weight.data.copy_(old)
            found = run(self)
            for weight, new in zip(weights, now, strict=True):
                weight.data.copy_(new)
            return found

        strategies.create = lambda *args: made.append(create(*args)) or made[-1]  # type: ignore[assignment]
        Evaluator.run = evaluate  # type: ignore[method-assign]

    @staticmethod
    def moments_of_another_parameter(world: DistContext) -> None:
        usual = loader.allocate_state

        def allocate(ranges: Any, stored: Any) -> Any:
            out = usual(ranges, stored)
            at = [i for i, s in enumerate(out) if s.key.endswith("/exp_avg")]
            for i, j in itertools.pairwise(at):
                if out[i].numel == out[j].numel:
                    out[i], out[j] = replace(out[i], key=out[j].key), replace(out[j], key=out[i].key)
            return out

        loader.allocate_state = allocate  # type: ignore[attr-defined]

    @staticmethod
    def moments_of_another_rank(world: DistContext) -> None:
        usual = sharded_optimizer.flat_states

        def states(flats: Any, optimizer: Any) -> Any:
            own = [(f.low, f.high) for f in flats]
            for f in flats:  # the others' ranges, in this rank's pieces
                f.low, f.high = (0, f.part) if world.rank == 1 else (f.low, f.high)
            out = usual(flats, optimizer)
            for f, (low, high) in zip(flats, own, strict=True):
                f.low, f.high = low, high
            return out

        sharded_optimizer.flat_states = states  # type: ignore[attr-defined]

    @staticmethod
    def padding_taken_for_weights(world: DistContext) -> None:
        def own(p: Any) -> tuple[int, int]:
            return dist.get_rank(p.ds_process_group) * p.ds_tensor.numel(), p.ds_tensor.numel()

        deepspeed_engine._own = own

    @staticmethod
    def copies_not_filled(world: DistContext) -> None:
        deepspeed_engine.renew_copies = lambda weights, ranges: None  # type: ignore[attr-defined]

    @staticmethod
    def input_without_gradient(world: DistContext) -> None:
        deepspeed_zero._differentiate_input = lambda block, args: None

    @staticmethod
    def whole_weights_kept(world: DistContext) -> None:
        def finish_loading(self: Any) -> None:
            deepspeed_engine.renew_copies(self.weight_shards(), self.state_ranges())

        deepspeed_zero.DeepSpeedZero3.finish_loading = finish_loading  # type: ignore[method-assign]


def _hook_when_set_up(strategy: Any, ending: str) -> None:
    usual = strategy.setup

    def setup(self: Any, module: torch.nn.Module, *args: Any) -> None:
        usual(self, module, *args)
        for name, part in module.named_modules():
            if name.endswith(ending):
                part.register_forward_pre_hook(lambda module, args: None)

    strategy.setup = setup
