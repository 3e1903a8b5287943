"""The copy of a background save: which state it holds, and what waits for it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from allranks.train.checkpoint.snapshot import CpuCopies, PartCollector, UpdateGuard
from allranks.train.checkpoint.writer import PublishedFiles, RankParts
from allranks.train.strategies.data_parallel import Single
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


class Trained(Single):
    """A strategy whose optimizer has state for each weight."""

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        self._hold(module, named, lambda own: torch.optim.AdamW([p for _, p in own], lr=0.1), None, None)  # type: ignore[arg-type]
        self.update()

    def update(self) -> None:
        self.module().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def collector_of(strategy: Trained) -> PartCollector:
    whole = {n: (t.dtype, t.shape) for n, t in strategy.module.state_dict().items()}
    return PartCollector(strategy, PublishedFiles((("weight",),), {"weight": "weight"}, whole, adapted=True), 0, 1)


def test_buffers_are_copied_before_training_goes_on_and_nothing_else() -> None:
    module = Counting()
    collector = collector_of(Trained(module))
    for forward in (1, 2):  # the second time with the views of the first
        parts = collector.collect({}, copy_buffers=True)
        module()
        saved = {s.key: s.tensor.tolist() for s in parts.state}
        assert saved["model/seen"] == [forward] * 3
        assert parts.owned["weight"].data_ptr() == module.weight.data_ptr()
        live = {s.key: s.tensor for s in collector.collect({}).state}
        assert live["model/seen"].tolist() == [forward + 1] * 3


def test_the_next_checkpoint_uses_the_same_views_and_gets_the_new_values() -> None:
    strategy = Trained(Counting())
    collector = collector_of(strategy)
    before = collector.collect({})
    old = {s.key: s.tensor.clone() for s in before.state} | {"weight": before.owned["weight"].clone()}
    strategy.update()
    after = collector.collect({})
    assert after.owned["weight"] is before.owned["weight"] and after.state is before.state
    new = {s.key: s.tensor for s in after.state} | {"weight": after.owned["weight"]}
    assert {key for key in old if not torch.equal(old[key], new[key])} == set(old)
    assert {key: new[key].numel() for key in new}["scalar/weight/step"] == 1
    assert collector.collect(None).state == ()


@pytest.mark.parametrize("moved", ["weight", "moment", "number", "buffer"])
def test_views_are_made_anew_if_a_tensor_is_elsewhere(moved: str) -> None:
    module = Counting()
    strategy = Trained(module)
    collector = collector_of(strategy)
    collector.collect({})
    state = strategy.optimizer.state[module.weight]
    with torch.no_grad():
        if moved == "weight":
            module.weight.data = torch.full((4,), 7.0)
        elif moved == "buffer":
            module.seen = torch.full((3,), 7.0)
        else:
            key = {"moment": "exp_avg", "number": "step"}[moved]
            state[key] = torch.full_like(state[key], 7.0)
    found = collector.collect({})
    values = {s.key: s.tensor.tolist() for s in found.state} | {"weight": found.owned["weight"].tolist()}
    assert [key for key, value in values.items() if set(value) == {7.0}] == [
        {
            "weight": "weight",
            "buffer": "model/seen",
            "moment": "optimizer/weight/exp_avg",
            "number": "scalar/weight/step",
        }[moved]
    ]


def test_a_buffer_and_a_value_of_the_state_that_come_later_are_saved() -> None:
    module = Counting()
    module.register_buffer("later", None)
    strategy = Trained(module)
    collector = collector_of(strategy)
    keys = {s.key for s in collector.collect({}).state}
    module.later = torch.ones(2)
    keys |= {"model/later"}
    assert {s.key for s in collector.collect({}).state} == keys
    module.register_buffer("latest", torch.ones(2))
    keys |= {"model/latest"}
    assert {s.key for s in collector.collect({}, copy_buffers=True).state} == keys
    strategy.optimizer.state[module.weight]["scale"] = 2.0
    keys |= {"scalar/weight/scale"}
    assert {s.key for s in collector.collect({}).state} == keys


def test_views_of_the_other_mode_hold_no_memory_that_was_replaced() -> None:
    module = Counting()
    collector = collector_of(Trained(module))
    old = weakref.ref(collector.collect(None).owned["weight"])
    collector.collect({})
    assert old() is not None and collector.collect(None).owned["weight"] is old()
    module.weight.data = torch.full((4,), 7.0)
    collector.collect({})
    assert old() is None


def test_a_save_of_weights_alone_does_not_depend_on_where_the_state_is() -> None:
    strategy = Trained(Counting())
    collector = collector_of(strategy)
    before = collector.collect(None).owned["weight"]
    state = strategy.optimizer.state[strategy._named[0][1]]
    state["exp_avg"] = state["exp_avg"].clone()
    assert collector.collect(None).owned["weight"] is before


def test_a_rank_without_state_waits_with_its_update_too() -> None:
    strategy = Trained(Counting())
    strategy.state_ranges = list  # type: ignore[method-assign]
    collector = collector_of(strategy)
    collector.collect({})
    assert collector.optimizers() == {strategy.optimizer}


@pytest.mark.parametrize("step", [3, torch.tensor(3), torch.tensor(3.0, dtype=torch.float64)])
def test_what_is_a_copy_is_read_again_for_each_checkpoint(step: Any) -> None:
    module = Counting()
    strategy = Trained(module)
    collector = collector_of(strategy)
    strategy.optimizer.state[module.weight]["step"] = step
    for expected in (3, 4):
        parts = {s.key: s.tensor for s in collector.collect({}).state}
        assert parts["scalar/weight/step"].tolist() == [expected]
        if isinstance(step, torch.Tensor):
            step += 1
        else:
            strategy.optimizer.state[module.weight]["step"] = 4


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
