"""Bugs that people really wrote, planted into strategies of a test's ranks: the parity test must see each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from allranks.train.strategies import bucket_ddp_async, flat, fsdp2, gradients, scatter, simple_ddp, simple_ddp_ga, simple_ddp_hook, zero1, zero2, zero3
from allranks.train.world import World

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
}
_planted = ""


def reader(world: World) -> int:
    """Whose rows this rank reads."""
    return 0 if _planted == "sampler_fed_with_local_rank" else world.rank


def plant(name: str, world: World) -> None:
    """From here on this process has the bug."""
    global _planted  # noqa: PLW0603 - a process has one bug at most
    _planted = name
    getattr(_Bugs, name, lambda world: None)(world)


class _Bugs:
    @staticmethod
    def reduces_the_parameter(world: World) -> None:
        # picotron's DataParallelNaive: the hook's argument is the parameter
        def reduce(self: Any, turn: int) -> None:
            parameter = self._named[len(self._named) - 1 - turn][1]
            dist.all_reduce(parameter.data, group=self._group)
            parameter.data.div_(world.size)

        simple_ddp_hook.SimpleDDPHook._reduce = reduce  # type: ignore[method-assign]

    @staticmethod
    def bucket_order_differs(world: World) -> None:
        if world.rank == 1:
            usual = bucket_ddp_async.trained
            bucket_ddp_async.trained = lambda model: usual(model)[::-1]  # type: ignore[attr-defined]

    @staticmethod
    def no_division(world: World) -> None:
        def backward(self: Any, loss: torch.Tensor) -> None:
            loss.backward()
            for _, parameter in self._named:
                dist.all_reduce(gradients.gradient_of(parameter), group=self._group)

        simple_ddp.SimpleDDP.backward = backward  # type: ignore[method-assign]

    @staticmethod
    def last_micro_batch_left_out(world: World) -> None:
        whole = simple_ddp_ga.SimpleDDPAccumulating.backward

        def backward(self: Any, loss: torch.Tensor) -> None:
            whole(self, loss * 0 if self._micro.last else loss)

        simple_ddp_ga.SimpleDDPAccumulating.backward = backward  # type: ignore[method-assign]

    @staticmethod
    def no_synchronisation(world: World) -> None:
        simple_ddp_ga.SimpleDDPAccumulating.backward = lambda self, loss: loss.backward()  # type: ignore[method-assign]

    @staticmethod
    def shard_boundary_off_by_one(world: World) -> None:
        usual = flat.Flat.__init__

        def init(self: Any, *args: Any) -> None:
            usual(self, *args)
            if self.low:
                self.low, self.high = self.low - 1, self.high - 1

        flat.Flat.__init__ = init  # type: ignore[method-assign]

    @staticmethod
    def no_division_in_zero1(world: World) -> None:
        usual = zero1.Zero1._reduce

        def reduce(self: Any, at: int) -> None:
            self._buckets[at].flat.mul_(self._world)
            usual(self, at)

        zero1.Zero1._reduce = reduce  # type: ignore[method-assign]

    @staticmethod
    def no_division_in_zero2(world: World) -> None:
        usual = scatter.ScatteredGradients.__init__

        def init(self: Any, *args: Any) -> None:
            usual(self, *args)
            self._world = 1

        scatter.ScatteredGradients.__init__ = init  # type: ignore[method-assign]

    no_division_in_zero3 = no_division_in_zero2

    @staticmethod
    def no_gathering_in_backward(world: World) -> None:
        # memory of the right size, whatever lies in it
        usual = zero3.Zero3._before_backward

        def before_backward(self: Any, i: int) -> None:
            usual(self, i)
            for whole in self._units[i].flats:
                whole.whole.fill_(1.0)

        zero3.Zero3._before_backward = before_backward  # type: ignore[method-assign]

    @staticmethod
    def adapters_not_averaged(world: World) -> None:
        fsdp2.average_together = lambda parameters, group: [gradients.gradient_of(p) for p in parameters]  # type: ignore[assignment]

    @staticmethod
    def adapters_summed(world: World) -> None:
        usual = fsdp2.average_together

        def summed(parameters: Any, group: Any) -> None:
            usual(parameters, group)
            for p in parameters:
                p.grad.mul_(world.size)

        fsdp2.average_together = summed

    @staticmethod
    def last_micro_step_not_scattered(world: World) -> None:
        micro_steps, usual, backward = 0, scatter.reduce_scatter, zero2.Zero2.backward

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

        scatter.reduce_scatter = own_part  # type: ignore[assignment]
        zero2.Zero2.backward = counted  # type: ignore[method-assign]
