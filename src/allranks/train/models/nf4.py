"""Store and compute linear layers whose frozen weights have 4 bits: NF4, as in QLoRA (Dettmers et al. 2023).

A weight (O, I) is cut into blocks of 64 elements of a row. Each element is the index of the nearest of 16 values, times
the block's scale, its largest absolute value. Two tensors hold it:

    weight (O, I / 2)   two elements per byte, the first one in the high bits, as bitsandbytes packs them
    scales (O, ...)     the scales in float32; or with double quantisation the row's smallest and largest scale in
                        float32, then each scale in 8 bits between them, rounded up

Both are uint8, so that nothing casts them, and a row needs no other row, so that FSDP2 may shard them by rows.
(bitsandbytes keeps scales beside its parameter, where FSDP2 does not shard them: its issue 1945.) The arithmetic is in
float32 on every device: all make the same bits of a weight. A pass dequantises one weight at a time, rounded once to
the dtype of compute, and does so again in backward.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from allranks.spec.records import NF4_BLOCK, NF4_DOUBLE, NF4_PIECE

VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution in [-1, 1], with an exact zero."""
REACH = max(high - low for low, high in pairwise(VALUES)) / 2
"""Largest distance of an element to its nearest value, over the block's scale."""
_TWO_FLOATS = 8  # bytes


def quantize(weight: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what an `NF4Linear` stores of a weight (O, I), where I is a multiple of 64: (weight, scales)."""
    values = torch.tensor(VALUES, device=weight.device)
    between = (values[1:] + values[:-1]) / 2
    packed, scales = [], []
    for part in weight.detach().split(max(NF4_PIECE // weight.shape[1], 1)):
        blocks = part.float().unflatten(1, (-1, NF4_BLOCK))
        own = _pack_scales(blocks.abs().amax(-1), mode)
        scale = _unpack_scales(own, blocks.shape[1]).unsqueeze(-1)
        codes = torch.bucketize(blocks / scale.clamp_min(torch.finfo(torch.float32).tiny), between, out_int32=True)
        pairs = codes.to(torch.uint8).view(len(part), -1, 2)
        packed.append((pairs[..., 0] << 4) | pairs[..., 1])
        scales.append(own)
    return torch.cat(packed), torch.cat(scales)


def dequantize(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight (O, I) that an `NF4Linear` stands for."""
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    at_once = max(NF4_PIECE // columns, 1)
    if rows <= at_once or torch.compiler.is_compiling():  # a compiler makes one pass of it
        return _dequantized(weight, scales).view(rows, columns).to(dtype)
    made = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    for into, part, own in zip(made.split(at_once), weight.split(at_once), scales.split(at_once), strict=True):
        into.copy_(_dequantized(part, own).view_as(into))
    return made


def _dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = F.embedding(weight.int(), _value_pairs(weight.device)).view(len(weight), -1, NF4_BLOCK)
    return values.mul_(_unpack_scales(scales, values.shape[1]).unsqueeze(-1))


_PAIRS: dict[torch.device, torch.Tensor] = {}


@torch.compiler.assume_constant_result
def _value_pairs(device: torch.device) -> torch.Tensor:
    """Return the two values of each byte, (256, 2)."""
    if device not in _PAIRS:
        values = torch.tensor(VALUES, device=device)
        _PAIRS[device] = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
    return _PAIRS[device]


def _pack_scales(scales: torch.Tensor, mode: str) -> torch.Tensor:
    if mode != NF4_DOUBLE:
        return scales.contiguous().view(torch.uint8)
    ends = torch.stack(scales.aminmax(dim=1), dim=1)  # type: ignore[arg-type]
    low, step = ends[:, :1], ((ends[:, 1:] - ends[:, :1]) / 255).clamp_min(torch.finfo(torch.float32).tiny)
    steps = ((scales - low) / step).ceil().clamp(0, 255)
    return torch.cat([ends.view(torch.uint8), steps.to(torch.uint8)], dim=1)


def _unpack_scales(scales: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the scale of each block in float32, (O, `blocks`)."""
    if scales.shape[1] == 4 * blocks:
        return scales.view(torch.float32)
    ends, steps = scales[:, :_TWO_FLOATS].contiguous().view(torch.float32), scales[:, _TWO_FLOATS:]
    return ends[:, :1] + steps * ((ends[:, 1:] - ends[:, :1]) / 255)


class NF4Linear(nn.Module):
    """A frozen linear layer in 4 bits; see the top of this file."""

    def __init__(self, like: nn.Linear, weight: nn.Parameter, scales: nn.Parameter) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.scales, self.bias = weight, scales, like.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product in the dtype of `x`, or of autocast."""
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self.weight, self.scales, bias)  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    """``x @ W^T + bias``, without W in the memory between forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(weight, scales)
        return F.linear(x, dequantize(weight, scales, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:  # type: ignore[override]
        weight, scales = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0]
        return (slopes[0] @ dequantize(weight, scales, slopes[0].dtype) if wanted else None), None, None, None
