"""All ranks call their collectives in one order, whatever part of the model a batch uses. torch's fake group."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.spec.records import TrainSpec
from allranks.train import strategies
from allranks.train.loop import adamw
from allranks.train.strategies import sharded_optimizer, zero

BLOCKS, WIDTH = 4, 8


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Block(nn.Module):
    """A residual block with two experts, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return x + self.last(self.experts[chosen](x))


class Model(nn.Module):
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


def calls_of(chosen: list, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """Kind, elements and group of each collective of a step whose blocks use these experts."""
    found: list[tuple[str, int, str]] = []

    def recorded(kind: str, call: Any) -> Any:
        def record(out: torch.Tensor, given: torch.Tensor, where: dist.ProcessGroup) -> Any:
            found.append((kind, max(out.numel(), given.numel()), where.group_name))
            return call(out, given, where)

        return record

    with monkeypatch.context() as m:
        m.setattr(zero, "all_gather", recorded("all_gather", zero.all_gather))
        m.setattr(sharded_optimizer, "reduce_scatter", recorded("reduce_scatter", sharded_optimizer.reduce_scatter))
        m.setattr(zero, "require_same_order", lambda *a: None)  # it compares with the other rank
        strategy: Any = strategies.create("zero3", {})
        strategy.setup(Model(), adamw(TrainSpec()), group, 1.0)
        found.clear()
        strategy.backward(strategy.module(chosen))
        strategy.step()
    return found


@pytest.mark.parametrize("other", [[1, 1, 1, 1], [0, 0, 1, 0], [1, 0, 0, 1]])
def test_zero3_gathers_and_reduces_in_one_order_with_unused_experts(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, other: list[int]
) -> None:
    calls = calls_of([0] * BLOCKS, group, monkeypatch)
    assert calls_of(other, group, monkeypatch) == calls
    assert len({name for *_, name in calls}) == 1, "one communicator: NCCL's order between two is not defined"


def test_zero3_reduces_a_block_while_others_compute(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [kind for kind, *_ in calls_of([0] * BLOCKS, group, monkeypatch)]
    assert kinds[: len(kinds) - 1 - kinds[::-1].index("all_gather")].count("reduce_scatter") >= BLOCKS - 2
