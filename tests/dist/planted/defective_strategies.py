"""Strategies that are not what they say; a test puts them into the registry of its own run."""

import torch
import torch.distributed as dist

from allranks.train.strategies.data_parallel import SimpleDDPAccumulating
from allranks.train.strategies.gradient_sync import gradient_of


class Silent(SimpleDDPAccumulating):  # leaves synchronisation out
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Late(SimpleDDPAccumulating):  # claims overlap, but reduces after backward
    claims_overlap = True


class Twice(SimpleDDPAccumulating):  # sends every gradient twice
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for _, parameter in self._named:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.clone(), group=self._group)


class Lazy(SimpleDDPAccumulating):  # leaves out every third update
    turn = 0

    def step(self) -> torch.Tensor:
        self.turn += 1
        if self.turn % 3:
            return super().step()
        self.optimizer.zero_grad()
        return torch.zeros(())


class Broken(SimpleDDPAccumulating):  # fails on one rank before it talks
    def backward(self, loss: torch.Tensor) -> None:
        raise RuntimeError("not today")


class Undivided(SimpleDDPAccumulating):  # forgets the division by the number of ranks, which AdamW hides
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss * dist.get_world_size(self._group))


class Tiring(SimpleDDPAccumulating):  # stops reducing after the first seven steps
    turn = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.turn += self._micro.last
        if self.turn <= 7:
            super().backward(loss)
        else:
            loss.backward()


class Halfway(SimpleDDPAccumulating):
    # sends all gradients, but takes the average of only every second one; the others stay this rank's own
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if not self._micro.last:
            return
        for i, (_, parameter) in enumerate(self._named):
            sent = gradient_of(parameter).clone()
            dist.all_reduce(sent, group=self._group)
            if i % 2:
                parameter.grad = sent.div_(dist.get_world_size(self._group))


class LocalNorm(SimpleDDPAccumulating):
    # clips by the norm of this rank's own gradient before averaging, and reports the norm of the average
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if not self._micro.last:
            return
        gradients = [gradient_of(p) for _, p in self._named]
        own = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            dist.all_reduce(gradient, group=self._group)
            gradient.div_(dist.get_world_size(self._group))
        self._norms = own, torch.nn.utils.get_total_norm(gradients)

    def step(self) -> torch.Tensor:
        own, norm = self._norms
        if self._clip_norm is not None:  # the ranks would drift apart: rank 0's norm counts
            dist.broadcast(own, src=0, group=self._group)
            for _, parameter in self._named:
                assert parameter.grad is not None
                parameter.grad.mul_(torch.clamp(self._clip_norm / own, max=1.0))
        clip, self._clip_norm = self._clip_norm, None
        super().step()
        self._clip_norm = clip
        return norm
