"""Causal attention within the rows of packed sequences on a CPU, each row by itself.

A row is computed in blocks where that is faster (`blockwise_attention`), else by torch's kernel. For torch.compile and
modes that watch operations it is one operation; otherwise a plain autograd function, which is faster to call.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from allranks.train.models import blockwise_attention

CPU_KERNEL = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def attention_in_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return the output (B, L, H, D) of causal attention within packed rows; `fits` says what is computed here.

    Args:
        query: (B, H, L, D). ``key``, ``value``: (B, K, L, D) with K dividing H.
        ends: as `PackedRows.ends`.
        window: as `RowMask.window`; longer rows get a mask of their own length squared.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch.ops.allranks.attention_in_rows(query, key, value, ends, scale, window)[0]
    return _Rows.apply(query, key, value, ends, scale, window)  # type: ignore[return-value]


def fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether `attention_in_rows` computes these tensors."""
    same_width = query.shape[-1] == value.shape[-1] and query.stride(-1) == value.stride(-1) == 1
    return CPU_KERNEL and query.device.type == "cpu" and same_width


def window_mask(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return the boolean causal mask (L, L) with a window; None if the window is not shorter than the row."""
    n = query.shape[2]
    if window is None or n <= window:
        return None
    return torch.ones(n, n, dtype=torch.bool, device=query.device).tril().triu(1 - window)


def spans_of(ends: torch.Tensor, length: int) -> list[tuple[int, int, int]]:
    """Return (sequence, first, last + 1) of each packed row. `ends`: as `PackedRows.ends`; `length`: of a sequence."""
    edges = ends.tolist()
    return [(a // length, a % length, a % length + b - a) for a, b in pairwise(edges)]


def _additive_mask(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    allowed = window_mask(query, window)
    if allowed is None:
        return None
    return torch.zeros(1, 1, *allowed.shape, dtype=query.dtype).masked_fill_(~allowed, -torch.inf)


def _in_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> bool:
    return (window is None or query.shape[2] <= window) and blockwise_attention.blocks_pay(query, key, value)


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _empty_outputs(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for what `attention_in_rows` returns."""
    batch, heads, length, width = query.shape
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(batch, length, heads, width), query.new_empty(batch, length, heads, dtype=kind)


def _rows_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, L, H, D), and the logarithms of the softmax's sums (B, L, H), float32."""
    out, sums = _empty_outputs(query)
    for i, low, high in spans_of(ends, query.shape[2]):
        q, k, v = (t[i : i + 1, :, low:high] for t in (query, key, value))
        if _in_blocks(q, k, v, window):
            places = (t[i, low:high].transpose(0, 1) for t in (out, sums))
            blockwise_attention.forward(q[0], k[0], v[0], _scale(q, scale), *places)
            continue
        mask = _additive_mask(q, window)
        o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        out[i : i + 1, low:high] = o.transpose(1, 2)
        sums[i : i + 1, low:high] = s.transpose(1, 2)
    return out, sums


_rows_operation = torch.library.custom_op("allranks::attention_in_rows", mutates_args=())(_rows_forward)


@_rows_operation.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_outputs(query)


def _rows_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    of_q, of_k, of_v = (torch.empty_like(t) for t in (query, key, value))
    for i, low, high in spans_of(ends, query.shape[2]):
        queries, there = (slice(i, i + 1), slice(None), slice(low, high)), (slice(i, i + 1), slice(low, high))
        q, k, v = (t[queries] for t in (query, key, value))
        if _in_blocks(q, k, v, window):
            slope, logs = (t[there][0].transpose(0, 1) for t in (gradient, sums))
            gradients = blockwise_attention.backward(slope, q[0], k[0], v[0], logs, _scale(q, scale))
        else:
            mask = _additive_mask(q, window)
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[there].transpose(1, 2), q, k, v, out[there].transpose(1, 2), sums[there].transpose(1, 2),
                0.0, mask is None, attn_mask=mask, scale=scale,
            )  # fmt: skip
        for whole, part in zip((of_q, of_k, of_v), gradients, strict=True):
            whole[queries] = part
    return of_q, of_k, of_v


_backward_operation = torch.library.custom_op("allranks::attention_in_rows_backward", mutates_args=())(_rows_backward)


@_backward_operation.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, ends: Any, scale: Any, window: Any) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ends, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, ends)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    query, key, value, out, sums, ends = ctx.saved_tensors
    gradients = torch.ops.allranks.attention_in_rows_backward(gradient, query, key, value, out, sums, ends, *ctx.rest)
    return *gradients, None, None, None


_rows_operation.register_autograd(_backward, setup_context=_save_for_backward)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        output = _rows_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, value, out, sums, ends = ctx.saved_tensors
        return *_rows_backward(gradient, query, key, value, out, sums, ends, *ctx.rest), None, None, None
