"""Dropout of the inputs of adapters: drawn with few random numbers, and kept for backward in few bytes.

``nn.Dropout`` draws 64 random bits per element on a CPU and keeps a mask in the dtype of its input. Here, rare drops
are drawn by their gaps: between two dropped elements there are ``floor(log(u) / log(1 - p))`` kept ones, u uniform: one
draw per dropped element, whose positions are kept (L. Devroye, Non-Uniform Random Variate Generation, 1986, chapter
X.2). Above `planning.memory.activations.INDEXED_DROPOUT`, 16 bits are drawn and a byte is kept per element.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from allranks.planning.memory.activations import INDEXED_DROPOUT

_SMALLEST = 2.0**-33  # half of the distance between two of the uniform numbers


class LowMemoryDropout(nn.Module):
    """Dropout for few random numbers and little memory on a CPU; on a GPU it is ``F.dropout``.

    With more than `INDEXED_DROPOUT`, the probability is rounded to a multiple of 2^-16, and kept elements are scaled by
    the rounded value, so the mean is exact.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._dropped = round(p * 65536)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drops:
            return x
        if x.is_cuda or torch.compiler.is_compiling():
            return F.dropout(x, self.p, training=True)
        which, scale = self.draw(x)
        return dropped(x, which) * scale

    @property
    def drops(self) -> bool:
        """Whether a forward pass drops elements."""
        return self.training and self._dropped > 0

    def draw(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return which elements of `x` are dropped, for `dropped` and `drop_`, and the factor of kept elements.

        The former has 1 where an element is kept, else 0, in the shape of x and one byte each; or it has the positions
        of dropped elements in the flattened x, int64.
        """
        if x.is_cuda or torch.compiler.is_compiling():  # random_ would end the compiled graph
            return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.p), 1 / (1 - self.p)
        if self.p <= INDEXED_DROPOUT:
            return _positions(x.numel(), self.p), 1 / (1 - self.p)
        n, first = x.numel(), self._dropped - 32768  # the smallest int16 that is kept
        words = torch.empty((n + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.int16).clamp_(first - 1, first) - (first - 1)  # comparisons are not vectorized
        return kept.to(torch.int8)[:n].view(x.shape), 65536 / (65536 - self._dropped)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _positions(n: int, p: float) -> torch.Tensor:
    """Return the positions (int64, increasing) of the elements of n that are dropped, each with probability p."""
    mean = n * p
    draws = int(mean + 6 * math.sqrt(mean) + 16)
    chunks, last = [], -1
    while last < n:
        words = torch.empty((draws + 1) // 2, dtype=torch.int64).random_(-(2**63), None).view(torch.int32)
        uniform = words.to(torch.float32).mul_(2.0**-32).add_(0.5).clamp_(min=_SMALLEST)
        gaps = uniform.log_().mul_(1 / math.log1p(-p)).to(torch.int32)
        chunks.append(gaps.add_(1).cumsum(0).add_(last))
        last = int(chunks[-1][-1])
    positions = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    return positions[: int(torch.searchsorted(positions, n))].clone()


def dropped(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Return a copy of `x` with 0 where an element is dropped, as `LowMemoryDropout.draw` says."""
    if which.dtype == torch.int64:
        return x.flatten().index_fill(0, which, 0.0).view(x.shape)
    return x * which.reshape(x.shape)


def drop_(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Set elements of a contiguous tensor to 0, in place; return it."""
    if which.dtype == torch.int64:
        x.view(-1).index_fill_(0, which, 0.0)
        return x
    return x.mul_(which.reshape(x.shape))


def replace_dropout(model: nn.Module) -> int:
    """Replace every ``nn.Dropout`` of LoRA layers with `LowMemoryDropout`; return their number."""
    replaced = 0
    for module in model.modules():
        layers = getattr(module, "lora_dropout", None)
        if isinstance(layers, nn.ModuleDict):
            for name, layer in layers.items():
                if type(layer) is nn.Dropout:
                    layers[name] = LowMemoryDropout(layer.p)
                    replaced += 1
    return replaced
