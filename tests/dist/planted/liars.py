"""Strategies that are not what they say; a test puts them into the registry of its own run."""

from __future__ import annotations

import torch
import torch.distributed as dist

from allranks.train.strategies.simple_ddp import SimpleDDPAccumulating


class Silent(SimpleDDPAccumulating):
    """Leaves synchronisation out."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Late(SimpleDDPAccumulating):
    """Claims overlap, but reduces after backward."""

    claims_overlap = True


class Twice(SimpleDDPAccumulating):
    """Sends every gradient twice."""

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for _, parameter in self._named:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.clone(), group=self._group)


class Lazy(SimpleDDPAccumulating):
    """Leaves out every third update."""

    turn = 0

    def step(self) -> torch.Tensor:
        self.turn += 1
        if self.turn % 3:
            return super().step()
        self.optimizer.zero_grad()
        return torch.zeros(())


class Broken(SimpleDDPAccumulating):
    """Fails on one rank before it talks."""

    def backward(self, loss: torch.Tensor) -> None:
        raise RuntimeError("not today")


class Undivided(SimpleDDPAccumulating):
    """Forgets the division by the number of ranks. AdamW hides that: its update does not depend on the gradient's size."""

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss * dist.get_world_size(self._group))
