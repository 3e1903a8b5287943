"""The copy of a background save: which state it holds, and what waits for it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from allranks.train.checkpoint.writer import CpuCopies, RankParts, UpdateGuard, with_buffers_copied
from allranks.train.strategies.shards import TensorShard


class Counting(nn.Module):
    """A module of which each forward pass changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self) -> torch.Tensor:
        self.seen += 1
        return self.weight.sum()


def parts_of(module: Counting) -> RankParts:
    seen = module.seen
    assert isinstance(seen, torch.Tensor)
    state = (TensorShard("model/seen", 3, 1, seen[1:]), TensorShard("optimizer/weight/exp_avg", 4, 0, torch.ones(4)))
    return RankParts({"weight": module.weight.detach(), "seen": seen}, (), state, None)


def test_buffers_are_copied_before_training_goes_on_and_nothing_else() -> None:
    module = Counting()
    parts = with_buffers_copied(parts_of(module), module)
    module()
    assert parts.owned["seen"].tolist() == [0, 0, 0] and parts.state[0].tensor.tolist() == [0, 0]
    assert parts.owned["weight"].data_ptr() == module.weight.data_ptr()


def test_copies_hold_the_values_of_their_moment_and_reuse_their_memory() -> None:
    module, copies = Counting(), CpuCopies()
    first = copies.of(parts_of(module))
    place = first.owned["weight"].data_ptr()
    with torch.no_grad():
        module.weight.add_(1)
    assert first.owned["weight"].tolist() == [1, 1, 1, 1]
    second = copies.of(parts_of(module))
    assert second.owned["weight"].tolist() == [2, 2, 2, 2]
    assert second.owned["weight"].data_ptr() == place
    assert [s.offset for s in second.state] == [1, 0]


def test_an_update_waits_until_the_state_is_copied_and_the_wait_is_counted() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer, guard = torch.optim.SGD([weight], lr=1.0), UpdateGuard()
    found: list[Any] = []

    def update() -> None:
        weight.grad = torch.ones(2)
        optimizer.step()

    def copy() -> None:
        found.append(weight.detach().clone())
        guard.end()

    for number in range(2):
        guard.begin([optimizer, optimizer])
        timer = threading.Timer(0.3, copy)
        timer.start()
        update()
        timer.join()
        assert found[number].tolist() == [1 - number] * 2, "the update came before the copy"
        assert 0.1 < guard.waited_s < 60
    update()
    assert weight.tolist() == [-2, -2]
    guard.begin([])
    assert guard.waited_s == 0
    guard.end()
