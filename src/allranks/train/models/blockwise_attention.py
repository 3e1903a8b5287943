"""Causal attention of one sequence on a CPU, some queries at a time, as batched matrix products.

For a block of n queries at positions a .. a + n - 1, and e = a + n (per key and value head, whose R query heads are
rows of one matrix):

    S = scale Q K[:e]^T + mask (R n, e),  P = exp(S - log sum exp S),  O = P V[:e]
    dV[:e] += P^T dO,  dS = P * (dP - sum(P * dP)) with dP = dO V[:e]^T,  dQ = scale dS K[:e],  dK[:e] += scale dS^T Q

Backward computes S and P again, from the log-sums that forward returns, so that nothing of the square of the length is
kept; two matrices of `MATRIX_ELEMENTS` at most are in use. Scores are multiplied by log2(e) with the scale: torch's
exp2 takes a third of the time of its exp. torch's own kernel for CPUs does the same arithmetic in one call, for one
head at a time; its products are so small that packing their operands takes much of the time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

LENGTHS = range(224, 2049)
"""Sequence lengths, in tokens, at which blocks are faster than torch's kernel on one thread; it uses several better."""
BLOCK_TOKENS = 64
MATRIX_ELEMENTS = 1 << 19

_LOG2_E = math.log2(math.e)
_softmax_backward = torch.ops.aten._softmax_backward_data.out


def blocks_pay(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether one sequence is computed faster here than by torch's kernel; tensors (..., H, L, D)."""
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.float32
        and query.shape[-2] == key.shape[-2]
        and query.shape[-2] in LENGTHS
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and torch.get_num_threads() == 1
    )


class _Part(NamedTuple):
    """Key/value ``heads``, queries ``rows``, keys up to them ``seen``; ``last``: no later block adds to gradients."""

    heads: slice
    rows: slice
    seen: slice
    last: bool


def _block(heads: int, group: int, length: int) -> tuple[int, int]:
    """Return the queries, and the key and value heads, that are computed at a time."""
    rows = min(BLOCK_TOKENS, length)
    return rows, min(heads, max(1, MATRIX_ELEMENTS // (group * rows * length)))


def _parts(heads: int, group: int, length: int) -> Iterator[_Part]:
    """Yield all parts; the last queries come first: their block is the one that sees all keys."""
    rows, together = _block(heads, group, length)
    for first in range(0, heads, together):
        for start in range((length - 1) // rows * rows, -1, -rows):
            end = min(start + rows, length)
            yield _Part(slice(first, min(first + together, heads)), slice(start, end), slice(0, end), end == length)


@lru_cache(maxsize=8)
def _future(rows: int) -> torch.Tensor:
    """Return what is added to the scores of `rows` queries for their own keys: -inf for later ones."""
    with torch.inference_mode(False):
        return torch.full((rows, rows), -torch.inf).triu(1)


_kept = threading.local()


class _Matrices:
    """Memory for the (heads, R n, e) matrices of a part, used again for the next, and in the next call: new memory of
    this size for each call would fragment the heap."""

    def __init__(self, count: int, heads: int, group: int, length: int) -> None:
        rows, together = _block(heads, group, length)
        elements = together * group * rows * length
        memory: list[torch.Tensor] = getattr(_kept, "memory", [])
        if len(memory) < count or memory[0].numel() < elements:
            size = max([elements, *(m.numel() for m in memory)])
            with torch.inference_mode(False):
                memory = _kept.memory = [torch.empty(size) for _ in range(max(count, len(memory)))]
        self._memory = [m[:elements] for m in memory[:count]]

    def of(self, heads: int, rows: int, columns: int) -> list[torch.Tensor]:
        size = heads * rows * columns
        return [memory[:size].view(heads, rows, columns) for memory in self._memory]


def _scores(into: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scale: float, group: int) -> None:
    """Write ``(scale query @ key^T + mask) log2(e)`` into a matrix.

    Args:
        query: (heads, R n, D), by head, then position. ``key``: (heads, e, D), the last n at the queries' positions.
    """
    torch.baddbmm(into, query, key.transpose(1, 2), beta=0, alpha=scale * _LOG2_E, out=into)
    heads, rows, columns = into.shape
    own = rows // group
    into.view(heads, group, own, columns)[..., columns - own :].add_(_future(own))


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, out: torch.Tensor, sums: torch.Tensor
) -> None:
    """Write the output of attention, and the logarithms of the softmax's sums, into tensors.

    Args:
        query: (H, L, D) float32. ``key``, ``value``: (G, L, D); head h of the queries reads head h // (H / G).
        out: (H, L, D), any strides. ``sums``: (H, L), any strides.
    """
    heads, (_, length, width) = key.shape[0], query.shape
    group = query.shape[0] // heads
    queries, outputs, logs = (t.unflatten(0, (heads, group)) for t in (query, out, sums))
    matrices = _Matrices(1, heads, group, length)
    for part in _parts(heads, group, length):
        shape = -1, group, part.rows.stop - part.rows.start
        q = queries[part.heads, :, part.rows].reshape(-1, group * shape[2], width)
        (p,) = matrices.of(q.shape[0], q.shape[1], part.seen.stop)
        _scores(p, q, key[part.heads, part.seen], scale, group)
        largest = p.amax(-1, keepdim=True)
        torch.exp2(p.sub_(largest), out=p)
        each = p.sum(-1, keepdim=True)
        output = torch.bmm(p, value[part.heads, part.seen]).div_(each)
        outputs[part.heads, :, part.rows] = output.view(*shape, width)
        logs[part.heads, :, part.rows] = each.log2_().add_(largest).div_(_LOG2_E).view(shape)


def backward(
    slope: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sums: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value.

    Args:
        slope: gradient of the output, (H, L, D).
        sums: the logarithms of the softmax's sums, (H, L), of any kernel.
    """
    heads, (_, length, width) = key.shape[0], query.shape
    group = query.shape[0] // heads
    queries, slopes, logs = (t.unflatten(0, (heads, group)) for t in (query, slope, sums))
    of_query = query.new_empty(heads, group, length, width)
    of_key, of_value = (query.new_empty(heads, width, length) for _ in range(2))
    matrices = _Matrices(2, heads, group, length)
    for part in _parts(heads, group, length):
        rows = group * (part.rows.stop - part.rows.start)
        q, s = (t[part.heads, :, part.rows].reshape(-1, rows, width) for t in (queries, slopes))
        k, v = key[part.heads, part.seen], value[part.heads, part.seen]
        p, d = matrices.of(q.shape[0], rows, part.seen.stop)
        _scores(p, q, k, scale, group)
        torch.exp2(p.sub_(logs[part.heads, :, part.rows].reshape(-1, rows, 1) * _LOG2_E), out=p)
        torch.bmm(s, v.transpose(1, 2), out=d)
        _add(of_value[part.heads, :, part.seen], s, p, 1.0, part)
        _softmax_backward(d, p, -1, torch.float32, grad_input=d)
        _add(of_key[part.heads, :, part.seen], q, d, scale, part)
        gradient = torch.bmm(d, k).view(q.shape[0], group, -1, width)
        torch.mul(gradient, scale, out=of_query[part.heads, :, part.rows])
    return of_query.flatten(0, 1), of_key.transpose(1, 2), of_value.transpose(1, 2)


def _add(gradient: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, part: _Part) -> None:
    """Add ``scale left^T @ right`` to a gradient, (heads, D, e); the first part, which sees all keys, writes it."""
    torch.baddbmm(gradient, left.transpose(1, 2), right, beta=0 if part.last else 1, alpha=scale, out=gradient)
