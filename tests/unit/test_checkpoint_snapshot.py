"""What a rank collects for a checkpoint, and the copy of a background save."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allranks.train.checkpoint.snapshot import CpuCopies, collect_parts
from allranks.train.checkpoint.writer import PublishedFiles
from allranks.train.strategies.data_parallel import Single


class Counting(nn.Module):
    """A module of which each forward pass changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self) -> torch.Tensor:
        self.seen += 1
        return self.weight.sum()


class Trained(Single):
    """A strategy whose optimizer has state for each weight."""

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_parameters())
        group: Any = None
        self._hold(module, named, lambda own: torch.optim.AdamW([p for _, p in own], lr=0.1), group, None)
        self.update()

    def update(self) -> None:
        self.module().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_full_checkpoint_has_weights_buffers_and_the_optimizers_state_and_another_has_the_weights() -> None:
    strategy = Trained(Counting())
    whole = {n: (t.dtype, t.shape) for n, t in strategy.module.state_dict().items()}
    published = PublishedFiles((("weight",),), {"weight": "weight"}, whole, adapted=True)
    parts = collect_parts(strategy, published, 0, 1, {})
    assert list(parts.owned) == ["weight"] and parts.scattered == ()
    moments = [f"optimizer/weight/{key}" for key in ("exp_avg", "exp_avg_sq")]
    assert sorted(s.key for s in parts.state) == sorted(["model/seen", "scalar/weight/step", *moments])
    weights_only = collect_parts(strategy, published, 0, 1, None)
    assert list(weights_only.owned) == ["weight"] and weights_only.state == () and weights_only.random is None


def test_copies_hold_the_values_of_their_moment_and_reuse_their_memory() -> None:
    module, copies = Counting(), CpuCopies()
    strategy = Trained(module)
    whole = {n: (t.dtype, t.shape) for n, t in module.state_dict().items()}
    published = PublishedFiles((("weight",),), {"weight": "weight"}, whole, adapted=True)
    first = copies.of(collect_parts(strategy, published, 0, 1, {}))
    place = first.owned["weight"].data_ptr()
    weight = module.weight.tolist()
    strategy.update()
    assert first.owned["weight"].tolist() == weight != module.weight.tolist()
    assert {s.key: s.tensor.tolist() for s in first.state}["model/seen"] == [1, 1, 1]
    second = copies.of(collect_parts(strategy, published, 0, 1, {}))
    assert second.owned["weight"].tolist() == module.weight.tolist()
    assert {s.key: s.tensor.tolist() for s in second.state}["model/seen"] == [2, 2, 2]
    assert second.owned["weight"].data_ptr() == place
