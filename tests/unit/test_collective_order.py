"""What strategies do in a step, in one process: the order of their collectives, and what `offload: optimizer` copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.spec.records import TrainSpec
from allranks.train import strategies
from allranks.train.data.batches import NoiseBatch
from allranks.train.loop import adamw
from allranks.train.strategies import sharded_optimizer, zero
from allranks.train.tasks import Mlp, MlpConfig, MlpLoss
from tests.unit.small_models import Watch

BLOCKS, WIDTH = 4, 8


class Block(nn.Module):
    """A residual block with two experts, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return x + self.last(self.experts[chosen](x))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, chosen: list[int]) -> torch.Tensor:
        x = self.embedding(torch.ones(2, WIDTH))
        for block, expert in zip(self.blocks, chosen, strict=True):
            x = block(x, expert)
        return self.head(x).sum()


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[int]], list[tuple[str, int, str]]]]:
    """Kind, elements and group of each collective of a step of one of two ranks whose blocks use these experts."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    calls: list[tuple[str, int, str]] = []

    def record(module: Any, kind: str) -> None:
        call = getattr(module, kind)

        def recorded(out: torch.Tensor, given: torch.Tensor, where: dist.ProcessGroup) -> Any:
            calls.append((kind, max(out.numel(), given.numel()), where.group_name))
            return call(out, given, where)

        monkeypatch.setattr(module, kind, recorded)

    def step(chosen: list[int]) -> list[tuple[str, int, str]]:
        strategy: Any = strategies.create("zero3", {})
        strategy.setup(Mixture(), adamw(TrainSpec()), dist.group.WORLD, 1.0)
        calls.clear()
        strategy.backward(strategy.module(chosen))
        strategy.step()
        return list(calls)

    record(zero, "all_gather")
    record(sharded_optimizer, "reduce_scatter")
    monkeypatch.setattr(zero, "require_same_order", lambda *a: None)  # it compares with the other rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield step
    dist.destroy_process_group()


@pytest.mark.parametrize("other", [[1, 1, 1, 1], [0, 0, 1, 0], [1, 0, 0, 1]])
def test_zero3_gathers_and_reduces_in_one_order_with_unused_experts(calls_of: Any, other: list[int]) -> None:
    calls = calls_of([0] * BLOCKS)
    assert calls_of(other) == calls
    assert len({name for *_, name in calls}) == 1, "one communicator: NCCL's order between two is not defined"


def test_zero3_reduces_the_gradients_of_a_block_while_earlier_blocks_compute(calls_of: Any) -> None:
    kinds = [kind for kind, *_ in calls_of([0] * BLOCKS)]
    last_gather = len(kinds) - 1 - kinds[::-1].index("all_gather")
    assert kinds[:last_gather].count("reduce_scatter") >= BLOCKS - 2


NAMES = ["zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"]
MLP_WIDTH = 16


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def copies(tensors: list[torch.Tensor]) -> tuple[dict[str, int], Watch]:
    """Elements that are copied to some tensors, and from them, and what counts them."""
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
    counts = {"into": 0, "out of": 0}

    def count(func: Any, args: Any, out: Any) -> None:
        if func is torch.ops.aten.copy_:
            for name, tensor in zip(counts, args[:2], strict=True):
                counts[name] += tensor.numel() * any(low <= tensor.data_ptr() < high for low, high in spans)

    return counts, Watch(count)


def made(name: str, offload: str, group: dist.ProcessGroup) -> Any:
    torch.manual_seed(3)
    strategy: Any = strategies.create(name, {"offload": offload})
    module = MlpLoss(Mlp(MlpConfig(width=MLP_WIDTH)))
    strategy.setup(module, adamw(TrainSpec(lr=1e-2)), group, 1.0)
    return strategy


def backward(strategy: Any, step: int) -> None:
    rows = torch.randn(2, 4, MLP_WIDTH, generator=torch.Generator().manual_seed(step))
    strategy.backward(strategy.module(NoiseBatch(rows[0], rows[1])))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_copies_gradients_and_new_weights_and_nothing_else(name: str, group: dist.ProcessGroup) -> None:
    strategy = made(name, "optimizer", group)
    shards = [shard.tensor for shard in strategy.weight_shards()]
    numel = sum(p.numel() for p in MlpLoss(Mlp(MlpConfig(width=MLP_WIDTH))).parameters())
    for step in range(2):
        backward(strategy, step)
        counts, watch = copies(shards)
        with watch:
            strategy.step()
        assert counts == {"into": numel, "out of": 0}, "new weights come; the host has the weights"


@pytest.mark.parametrize("name", NAMES)
def test_updates_equal_those_on_the_device_also_after_loading(name: str, group: dist.ProcessGroup) -> None:
    host, device = made(name, "optimizer", group), made(name, "none", group)
    for step in range(4):
        for strategy in (host, device):
            backward(strategy, step)
            strategy.step()
            if step == 1:  # as a resume reads other weights
                for shard in strategy.weight_shards():
                    shard.tensor.mul_(0.5)
                strategy.finish_loading()
    a, b = (strategy.weights(trained_only=True) for strategy in (host, device))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) for n in a)
