"""The negative control: ranks that never talk. It is in no registry."""

from __future__ import annotations

import torch

from allranks.train.strategies.simple_ddp import SimpleDDP


class Unsynchronised(SimpleDDP):
    """`simple_ddp` without its all-reduce."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
