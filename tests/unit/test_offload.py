"""With ``offload: optimizer`` gradients go to the host, new weights come back; the host keeps its copy of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.spec.records import TrainSpec
from allranks.train import strategies
from allranks.train.data.batches import NoiseBatch
from allranks.train.loop import adamw
from allranks.train.tasks import Mlp, MlpConfig, MlpLoss

NAMES = ["zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"]
WIDTH = 16


@pytest.fixture(autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Copies(TorchDispatchMode):
    """Counts elements that are copied to some tensors, and from them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        self.into = self.out_of = 0

    def _within(self, tensor: torch.Tensor) -> bool:
        return any(low <= tensor.data_ptr() < high for low, high in self._spans)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            self.into += args[0].numel() * self._within(args[0])
            self.out_of += args[1].numel() * self._within(args[1])
        return func(*args, **(kwargs or {}))


def made(name: str, offload: str) -> Any:
    torch.manual_seed(3)
    strategy: Any = strategies.create(name, {"offload": offload})
    module = MlpLoss(Mlp(MlpConfig(width=WIDTH)))
    assert dist.group.WORLD is not None
    strategy.setup(module, adamw(TrainSpec(lr=1e-2)), dist.group.WORLD, 1.0)
    return strategy


def gradients(strategy: Any, step: int) -> None:
    rows = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))
    strategy.backward(strategy.module(NoiseBatch(rows[0], rows[1])))


def weights(strategy: Any) -> dict[str, torch.Tensor]:
    return strategy.weights(trained_only=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_copies_gradients_and_new_weights_and_nothing_else(name: str) -> None:
    strategy = made(name, "optimizer")
    shards = [shard.tensor for shard in strategy.weight_shards()]
    numel = sum(p.numel() for p in MlpLoss(Mlp(MlpConfig(width=WIDTH))).parameters())
    for step in range(2):
        gradients(strategy, step)
        with Copies(shards) as copies:
            strategy.step()
        assert copies.into == numel, "new weights"
        assert copies.out_of == 0, "the host has the weights"


@pytest.mark.parametrize("name", NAMES)
def test_updates_equal_those_on_the_device_also_after_loading(name: str) -> None:
    host, device = made(name, "optimizer"), made(name, "none")
    for step in range(4):
        for strategy in (host, device):
            gradients(strategy, step)
            strategy.step()
            if step == 1:  # as a resume reads other weights
                for shard in strategy.weight_shards():
                    shard.tensor.mul_(0.5)
                strategy.finish_loading()
    a, b = weights(host), weights(device)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)
