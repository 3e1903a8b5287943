"""Compute PEFT's LoRA on fused expert weights for the tokens of each expert, without the full product of its factors.

PEFT adds ``scaling * B_e @ A_e`` of all experts to a copy of their weights before the experts compute, and backward
makes a gradient of that size. Here (x_e: the tokens that are routed to expert e; W_e (O, I), A_e (r, I), B_e (O, r))::

    m_e = x_e @ A_e^T, y_e = x_e @ W_e^T + scaling * m_e @ B_e^T

with tokens sorted by expert: by grouped matrix products on GPUs, expert by expert on CPUs. The order of operations is
that of transformers' ``grouped_mm``, which classes decorated with ``use_experts_implementation`` share. PEFT's own
forward computes other classes, quantized or expert-parallel weights, merged adapters and several active ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from allranks.train.models.lora import sole_adapter
from allranks.train.patches import replace_forward

_ADAPTERS = "lora_of_experts"  # attribute of the experts while adapted ones compute
_EXPECTED = ("has_gate", "has_bias", "is_transposed", "num_experts")  # of a decorated class
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PARAMETERS = {True: ("gate_up_proj", "down_proj"), False: ("up_proj", "down_proj")}  # by `has_gate`


class ExpertLoRA(NamedTuple):
    """Adapter of one fused parameter of E experts: PEFT's A (r E, I) by expert, and B (O, r E) by rank, then expert."""

    down: nn.Parameter
    up: nn.Parameter
    scaling: float


def fuse_expert_lora(model: nn.Module) -> tuple[int, int]:
    """Replace the forward of experts with LoRA.

    Returns:
        How many modules of experts compute adapters here, and how many with PEFT's own forward.
    """
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = [m for m in model.modules() if isinstance(m, ParamWrapper)]
    inner = {id(wrapper.base_layer) for wrapper in wrappers}
    fused = plain = 0
    for wrapper in wrappers:
        if id(wrapper) in inner:
            continue  # another wrapper holds it
        chain = _chain(wrapper)
        experts = chain[-1].base_layer
        if not _is_known(experts, [w.parameter_name for w in chain]):
            plain += 1
            continue
        for layer in chain:
            replace_forward(layer, MethodType(_wrapper_forward, layer))
        replace_forward(experts, MethodType(_experts_forward, experts))
        fused += 1
    return fused, plain


def _chain(wrapper: Any) -> list[Any]:
    """Return the nested wrappers of one module of experts, outer ones first: each adapts one parameter."""
    chain = [wrapper]
    while isinstance(chain[-1].base_layer, type(wrapper)):
        chain.append(chain[-1].base_layer)
    return chain


def _is_known(experts: Any, adapted: list[str]) -> bool:
    if not all(hasattr(experts, name) for name in _EXPECTED) or not hasattr(type(experts).forward, "__wrapped__"):
        return False
    return set(adapted) <= set(_PARAMETERS[experts.has_gate]) and len(set(adapted)) == len(adapted)


def _wrapper_forward(wrapper: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    experts = wrapper.get_base_layer()
    if _ADAPTERS in vars(experts):  # an outer wrapper has set them
        return wrapper.base_layer(hidden, *args, **kwargs)
    adapters = None if len(args) != 2 or kwargs else _adapters(_chain(wrapper), experts)
    if adapters is None:
        return type(wrapper).forward(wrapper, hidden, *args, **kwargs)
    with _adapted(experts, adapters):
        return wrapper.base_layer(hidden, *args)


@contextmanager
def _adapted(experts: nn.Module, adapters: dict[str, ExpertLoRA]) -> Iterator[None]:
    vars(experts)[_ADAPTERS] = adapters
    try:
        yield
    finally:
        del vars(experts)[_ADAPTERS]


def _adapters(chain: list[Any], experts: Any) -> dict[str, ExpertLoRA] | None:
    """Return the adapters by the parameter's name, or None if PEFT's own forward is needed."""
    if getattr(experts, "_is_expert_parallel", False) or hasattr(experts, "parametrizations"):
        return None
    adapters = {}
    for wrapper in chain:
        name, parameter = sole_adapter(wrapper), wrapper.get_param()
        # A belongs to the inputs and B to the outputs; early versions did not swap them by the weight's layout
        swapped = getattr(wrapper, "_did_swap_in_out_features", experts.is_transposed)
        trained = torch.is_grad_enabled() and parameter.requires_grad
        if name is None or trained or parameter.dtype not in _DTYPES or swapped is experts.is_transposed:
            return None
        if wrapper.lora_B[name].bias is not None:
            return None
        adapters[wrapper.parameter_name] = ExpertLoRA(
            wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name]
        )
    return adapters


def _experts_forward(experts: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the experts' weighted outputs (N, H) for inputs (N, H), chosen experts (N, k) and their weights (N, k)."""
    adapters: dict[str, ExpertLoRA] | None = vars(experts).get(_ADAPTERS)
    if adapters is None:
        return type(experts).forward(experts, hidden, *args, **kwargs)
    chosen, shares = args
    tokens, k = chosen.shape
    expert_of, order = torch.sort(chosen.reshape(-1))
    # as transformers: bincount needs a sync on GPUs, and histc takes integers on GPUs only
    numbers = expert_of.float() if expert_of.device.type in ("cpu", "mps") else expert_of.int()
    counts = torch.histc(numbers, bins=experts.num_experts, min=0, max=experts.num_experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(experts, name)
        down, up, scaling = adapters.get(name) or (None, None, 1.0)
        out = GroupedLoRA.apply(rows.to(weight.dtype), weight, down, up, scaling, ends, experts.is_transposed)
        return out + getattr(experts, f"{name}_bias")[expert_of] if experts.has_bias else out  # type: ignore[operator]

    first, second = _PARAMETERS[experts.has_gate]
    inner = linear(hidden[order // k], first)
    out = linear(experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner), second)
    if getattr(experts, "has_post_expert_norm", False):
        out = experts.post_expert_norm(out)
    out = out * shares.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return out[back].view(tokens, k, -1).sum(dim=1).to(hidden.dtype)


class GroupedLoRA(torch.autograd.Function):
    """Frozen linear layers of experts, with LoRA, on rows sorted by expert. Backward keeps the rows and the rank-r
    products.

    Parameters are kept themselves, not views of them: strategies that gather weights replace their memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        down: torch.Tensor | None,
        up: torch.Tensor | None,
        scale: float,
        ends: torch.Tensor,
        transposed: bool,
    ) -> torch.Tensor:
        """Return (S, O).

        Args:
            rows: (S, I), sorted by expert.
            weight: (E, O, I), or (E, I, O) if `transposed`, in the dtype of `rows`.
            down: A (r E, I), in any dtype; None without an adapter.
            up: B (O, r E).
            scale: the adapter's scaling.
            ends: (E,) int32, the number of rows up to the end of each expert's.
            transposed: the layout of `weight`.
        """
        rows = rows.contiguous()
        grouped = Groups.of(rows, weight, ends)
        out = grouped.product(rows, weight if transposed else weight.transpose(-2, -1))
        middle = None
        if down is not None and up is not None:
            middle = grouped.product(rows, grouped.each_down(down, rows.dtype).transpose(-2, -1))
            grouped.add_product(out, middle, grouped.each_up(up, rows.dtype).transpose(-2, -1), scale)
        ctx.scale, ctx.transposed = scale, transposed
        ctx.grouped = None if isinstance(grouped, GpuGroups) else grouped  # the host's numbers need a sync
        ctx.save_for_backward(None if down is None else rows, middle, weight, down, up, ends)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of the rows, of A and of B; the experts are frozen."""
        rows, middle, weight, down, up, ends = ctx.saved_tensors
        grouped: Groups = GpuGroups(ends) if ctx.grouped is None else ctx.grouped
        slope = slope.contiguous()
        slope_rows = None
        if ctx.needs_input_grad[0]:
            slope_rows = grouped.product(slope, weight.transpose(-2, -1) if ctx.transposed else weight)
        if down is None:
            return slope_rows, *[None] * 6
        count, r = len(weight), len(down) // len(weight)
        slope_middle = grouped.product(slope, grouped.each_up(up, slope.dtype)).mul_(ctx.scale)
        if slope_rows is not None:
            grouped.add_product(slope_rows, slope_middle, grouped.each_down(down, slope.dtype), 1.0)
        slope_down = grouped.outer(slope_middle, rows)[:, :r].to(down.dtype).reshape(down.shape)
        slope_up = grouped.outer(slope, middle)[..., :r].permute(1, 2, 0).to(up.dtype).mul_(ctx.scale)
        return slope_rows, None, slope_down, slope_up.reshape(len(up), r * count), *[None] * 3


class Groups:
    """Matrix products of each expert's rows with its own matrix."""

    def __init__(self, ends: torch.Tensor) -> None:
        host = ends.tolist()
        self._parts = [
            (e, start, end) for e, (start, end) in enumerate(zip([0, *host], host, strict=False)) if start < end
        ]
        self._count = len(host)

    def each_down(self, down: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return A of each expert, (E, r, I), in `dtype`."""
        return self._padded(down.reshape(self._count, -1, down.shape[1]), 1, dtype)

    def each_up(self, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return B of each expert, (E, O, r), in `dtype`."""
        return self._padded(up.reshape(len(up), -1, self._count).permute(2, 0, 1), 2, dtype)

    @staticmethod
    def of(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Groups:
        """Return grouped products of the GPU if it has them for these sizes, else products in a loop."""
        return GpuGroups(ends) if GpuGroups.fits(rows, weight) else Groups(ends)

    def _padded(self, factor: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return A or B with the rank (dimension `dim`) padded with zeros to what `product` needs."""
        return factor.to(dtype).contiguous()

    def product(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Return (S, K) of the rows (S, J) and the matrices (E, J, K)."""
        out = rows.new_empty(len(rows), matrices.shape[2])
        for e, start, end in self._parts:
            torch.mm(rows[start:end], matrices[e], out=out[start:end])
        return out

    def add_product(self, out: torch.Tensor, rows: torch.Tensor, matrices: torch.Tensor, scale: float) -> None:
        """Add ``scale * product(rows, matrices)`` to `out`, in place."""
        for e, start, end in self._parts:
            out[start:end].addmm_(rows[start:end], matrices[e], alpha=scale)

    def outer(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return (E, J, K): each expert's ``left^T @ right`` of rows (S, J) and (S, K); zeros for one without rows."""
        out = left.new_zeros(self._count, left.shape[1], right.shape[1])
        for e, start, end in self._parts:
            torch.mm(left[start:end].t(), right[start:end], out=out[e])
        return out


class GpuGroups(Groups):
    """Grouped matrix products of torch on a GPU, without a host sync; for checks of the layer see tests/gpu."""

    def __init__(self, ends: torch.Tensor) -> None:
        self._ends, self._count = ends, len(ends)

    @staticmethod
    def fits(rows: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether torch has the kernel: bfloat16, rows of 16-byte multiples, compute capability at least 8.0."""
        return (
            rows.is_cuda
            and rows.dtype == weight.dtype == torch.bfloat16
            and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
            and hasattr(F, "grouped_mm")
            and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        )

    def _padded(self, factor: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        missing = -factor.shape[dim] % 8
        factor = factor.to(dtype)
        if missing:
            factor = F.pad(factor, (0, missing) if dim == 2 else (0, 0, 0, missing))
        return factor.contiguous()

    def product(self, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(rows, matrices, offs=self._ends)

    def add_product(self, out: torch.Tensor, rows: torch.Tensor, matrices: torch.Tensor, scale: float) -> None:
        out.add_(self.product(rows, matrices), alpha=scale)

    def outer(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = F.grouped_mm(left.t(), right, offs=self._ends)
        sizes = torch.diff(self._ends, prepend=self._ends.new_zeros(1))
        return out.masked_fill_((sizes == 0)[:, None, None], 0)
