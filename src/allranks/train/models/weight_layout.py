"""Find where the elements of a model's tensors lie in stored tensors, if a conversion only moves them.

Transformers' own conversion runs on tensors without content. Each knows, for its flattened elements, which elements of which stored
tensors they are: experts that the files hold separately are one tensor of the model, as one range after another. Stacking, joining
and dividing keep this knowledge. Everything else (a transposition, arithmetic, whatever another version of transformers may do) raises
an exception, so that no conversion is described wrongly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

MOST_RANGES = 1 << 16  # of one tensor, per tensor that it is made of
LEAST_ELEMENTS = 1 << 13  # of a range on average, if stored tensors are cut: shorter ones are not worth a read each


class ElementRange(NamedTuple):
    """Elements of a flattened stored tensor that follow each other."""

    stored: str
    start: int
    length: int


class TracedTensor:
    """A tensor without content that knows which stored elements it consists of.

    Attributes:
        shape: of the tensor.
        ranges: its elements in the order of the flattened tensor.
    """

    def __init__(self, shape: Iterable[int], ranges: Iterable[ElementRange]) -> None:
        self.shape, self.ranges = torch.Size(shape), list(ranges)
        self._ends = list(accumulate(r.length for r in self.ranges))

    @classmethod
    def of(cls, stored: str, shape: Sequence[int]) -> TracedTensor:
        """Return a stored tensor as it is."""
        return cls(shape, [ElementRange(stored, 0, math.prod(shape))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = TRACED.get(func)
        return NotImplemented if known is None else known(*args, **(kwargs or {}))

    def contiguous(self) -> TracedTensor:
        """Return the tensor: only the order of its elements is known, not where they lie."""
        return self

    def elements(self, low: int, high: int) -> list[ElementRange]:
        """Return the elements from `low` to `high` of the flattened tensor."""
        found = []
        for i in range(bisect_right(self._ends, low), len(self.ranges)):
            name, start, length = self.ranges[i]
            begin = self._ends[i] - length
            skip = max(low - begin, 0)
            take = min(high, self._ends[i]) - begin - skip
            if take <= 0:
                break
            found.append(ElementRange(name, start + skip, take))
        return found

    def narrow(self, dim: int, start: int, length: int) -> TracedTensor:
        """Return the part with `length` indices from `start` in a dimension."""
        row, inner = self.shape[dim:].numel(), self.shape[dim + 1 :].numel()
        ranges = [
            found
            for i in _limited(self.shape[:dim].numel())
            for found in self.elements(i * row + start * inner, i * row + (start + length) * inner)
        ]
        return TracedTensor((*self.shape[:dim], length, *self.shape[dim + 1 :]), ranges)


def _limited(count: int) -> range:
    if count > MOST_RANGES:
        raise ValueError(f"more than {MOST_RANGES} ranges")
    return range(count)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    first = tensors[0].shape
    dim %= len(first)
    rows = [t.shape[dim:].numel() for t in tensors]
    ranges = [
        found
        for i in _limited(first[:dim].numel())
        for tensor, row in zip(tensors, rows, strict=True)
        for found in tensor.elements(i * row, (i + 1) * row)
    ]
    return TracedTensor((*first[:dim], sum(t.shape[dim] for t in tensors), *first[dim + 1 :]), ranges)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    dim %= len(tensors[0].shape) + 1
    return _cat([TracedTensor((*t.shape[:dim], 1, *t.shape[dim:]), t.ranges) for t in tensors], dim)


def _split(tensor: TracedTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[TracedTensor, ...]:
    dim %= len(tensor.shape)
    if isinstance(sizes, int):
        sizes = [min(sizes, tensor.shape[dim] - at) for at in range(0, tensor.shape[dim], sizes)]
    starts = accumulate(sizes, initial=0)
    return tuple(tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))


def _chunk(tensor: TracedTensor, chunks: int, dim: int = 0) -> tuple[TracedTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


TRACED: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.split: _split,
    torch.chunk: _chunk,
}


def ranges_of(traced: Any, parts: int) -> list[ElementRange]:
    """Return the ranges of a traced tensor; none if it is not one, or if they are too short to be read one by one.

    Args:
        parts: number of stored tensors that were converted.
    """
    if not isinstance(traced, TracedTensor):
        return []
    short = sum(r.length for r in traced.ranges) < LEAST_ELEMENTS * len(traced.ranges)
    return [] if short and len(traced.ranges) > parts else traced.ranges
