"""Compute PEFT's LoRA layers of one input together, in the dtype of their input.

PEFT computes ``base(x) + B(A(dropout(x))) * scaling`` layer by layer, adapters in float32: below bfloat16 layers it
copies x to float32 for each layer, and makes three passes over a float32 tensor of the layer's full width, and again in
backward. Here (x: (N, I), layer i of n with W_i (O_i, I), A_i (r_i, I), B_i (O_i, r_i), scaling s_i):

    m = x @ [A_1; ...; A_n]^T                       one product for all layers that read x (q, k, v; gate, up)
    y_i = s_i m_i @ B_i^T + b_i, y_i += x @ W_i^T     added in place
    dm_i = s_i dy_i @ B_i, dB_i = s_i dy_i^T @ m_i
    dx = dm @ [A_1; ...; A_n] + sum_i dy_i @ W_i      summed in one tensor
    [dA_1; ...; dA_n] = dm^T @ x

The narrow product comes first: the wide one then reads the sum while it computes, instead of a second pass over a wide
tensor that takes longer than its arithmetic; and the sum is rounded once less where it is large. m and dm are stored
transposed, (sum r_i, N): for narrow products, kernels for CPUs are several times faster in that form.

Frozen weights in 4 bits (`nf4`) are dequantised one at a time, in each pass. With ``model.float8`` (`float8`), the wide
products come first, and the narrow ones are added to them.

Backward keeps x once and m; nothing of width O_i. With dropout, each layer's adapter has its own input, as in PEFT: the
products with A are separate, and backward also keeps which elements were dropped (`adapter_dropout`), and drops them
again. Adapters keep their own dtype (float32); in each pass they are cast to the dtype of x, or under autocast to
autocast's.

Weights, names, files, initialization and scaling are PEFT's own. Its own forward computes whatever is not plain LoRA on
a linear layer with a frozen base, and layers with hooks on their inner modules, which may gather weights. (Under
DeepSpeed's stage 3 the hooks are on the block: `train.engines.deepspeed_zero.gather_together`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from allranks.train.models.adapter_dropout import LowMemoryDropout, drop_, dropped
from allranks.train.models.float8 import Cast, cast_rows, in_float8, scaled_product
from allranks.train.models.nf4 import NF4Linear, dequantize
from allranks.train.patches import replace_forward

SHARED_INPUTS = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"query", "key", "value"}),
    frozenset({"q_lin", "k_lin", "v_lin"}),
    frozenset({"q_a_proj", "kv_a_proj_with_mqa"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"w1", "w3"}),
)
"""Names of layers of one module that usually read the same tensor; whether they do is checked in each forward pass."""
_GROUP = "lora_input_group"
Weight = torch.Tensor | Callable[[], torch.Tensor]
"""A weight, or what dequantises it."""


def fuse_lora(model: nn.Module) -> int:
    """Replace the forward of every plain LoRA linear layer of a PEFT model; return the number of layers."""
    from peft.tuners.lora.layer import Linear

    fused = 0
    for parent in model.modules():
        adapted = ((n, m) for n, m in parent.named_children() if type(m) is Linear)
        layers = {n: m for n, m in adapted if type(m.base_layer) in (nn.Linear, NF4Linear)}
        for layer in layers.values():
            vars(layer).pop(_GROUP, None)
            replace_forward(layer, MethodType(_forward, layer))
            fused += 1
        for names in SHARED_INPUTS:
            members = [layer for name, layer in layers.items() if name in names]
            if len({layer.in_features for layer in members}) == 1 < len(members):
                group = InputGroup(members)
                for position, layer in enumerate(members):
                    vars(layer)[_GROUP] = group, position
    return fused


@dataclass(eq=False)
class InputGroup:
    """Layers that are computed together when the first of them is called; the others return what was computed for the
    same tensor.

    If a layer is not called with that tensor, the layers do not share their input, and are computed one by one from
    then on. Layers are known by their position: their ids would differ between blocks, and a program that was compiled
    for one block would not serve the others.
    """

    layers: list[Any]
    shared: bool = True
    source: torch.Tensor | None = None
    results: dict[int, torch.Tensor] = field(default_factory=dict)

    def take(self, position: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return a layer's result if it was computed from this very tensor."""
        if self.source is not x or position not in self.results:
            return None
        result = self.results.pop(position)
        if not self.results:
            self.source = None
        return result

    def keep(self, x: torch.Tensor, results: dict[int, torch.Tensor]) -> None:
        """Keep results until their layers are called."""
        self.source, self.results = x, results

    def drop_unused(self) -> None:
        """Forget results that were not used. Not in backward: there, checkpointed blocks repeat what forward did."""
        if self.results and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1:
            self.shared = False
        self.source, self.results = None, {}


class _Parts(NamedTuple):
    """Weights of a plain LoRA layer."""

    base: nn.Linear | NF4Linear
    down: nn.Parameter
    up: nn.Parameter
    scaling: float
    dropout: nn.Module


def _parts(layer: Any, dtype: torch.dtype) -> _Parts | None:
    """Return the weights of a layer that can be computed here; None: PEFT's own forward is needed."""
    name = sole_adapter(layer)
    if name is None:
        return None
    down, up, base, dropout = layer.lora_A[name], layer.lora_B[name], layer.base_layer, layer.lora_dropout[name]
    known = isinstance(dropout, (nn.Identity, LowMemoryDropout)) or not dropout.training
    hooks = any(part._forward_pre_hooks or part._forward_hooks for part in (down, up, base, dropout))
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters(recurse=False))
    other_dtype = not isinstance(base, NF4Linear) and base.weight.dtype != dtype
    if up.bias is not None or other_dtype or hooks or trained or not known:
        return None
    return _Parts(base, down.weight, up.weight, layer.scaling[name], dropout)


def sole_adapter(layer: Any) -> str | None:
    """Return the active adapter's name; None if PEFT's layer has several, none, merged ones, or a variant of LoRA."""
    active = layer.active_adapters
    if len(active) != 1 or layer.disable_adapters or layer.merged or layer.lora_variant:
        return None
    return active[0] if active[0] in layer.lora_A else None


def left_to_peft(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of LoRA layers that PEFT's own forward computes, by reason; without adapters of parameters."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    reasons: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or isinstance(layer, ParamWrapper):
            continue
        if "forward" not in vars(layer):
            reasons.setdefault(f"layers of class {type(layer.base_layer).__name__}", []).append(name)
        elif sole_adapter(layer) is None:
            reasons.setdefault("a variant of LoRA, or not one adapter alone", []).append(name)
    return reasons


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    parts = None if args or kwargs else _parts(layer, dtype)
    if parts is None:
        return type(layer).forward(layer, x, *args, **kwargs)
    group, position = vars(layer).get(_GROUP, (None, 0))
    if group is not None and group.shared and torch.is_grad_enabled():
        ready = group.take(position, x)
        if ready is not None:
            return ready
        group.drop_unused()
        together = _together(group, position, parts, dtype)
        if together is not None and group.shared:
            results = dict(enumerate(_compute(x.to(dtype), together)))
            own = results.pop(position)
            group.keep(x, results)
            return own
    return _compute(x.to(dtype), [parts])[0]


def _together(group: InputGroup, position: int, parts: _Parts, dtype: torch.dtype) -> list[_Parts] | None:
    """Return the weights of a group's layers; None if one other than `position` has hooks, which may gather weights."""
    weights: list[_Parts] = []
    for i, layer in enumerate(group.layers):
        theirs = parts if i == position else _parts(layer, dtype)
        if theirs is None or (i != position and (layer._forward_pre_hooks or layer._forward_hooks)):
            return None
        weights.append(theirs)
    return weights


def _compute(x: torch.Tensor, layers: Sequence[_Parts]) -> tuple[torch.Tensor, ...]:
    masks: list[torch.Tensor | None] = []
    scales: list[float] = []
    for layer in layers:
        drops = isinstance(layer.dropout, LowMemoryDropout) and layer.dropout.drops
        mask, factor = layer.dropout.draw(x) if drops else (None, 1.0)  # type: ignore[operator]
        masks.append(mask)
        scales.append(layer.scaling * factor)
    bases, biases = [p.base.weight for p in layers], [p.base.bias for p in layers]
    blocks = [p.base.scales if isinstance(p.base, NF4Linear) else None for p in layers]
    eights = tuple(in_float8(p.base) for p in layers)
    downs, ups = [p.down for p in layers], [p.up for p in layers]
    tensors = (*masks, *bases, *blocks, *biases, *downs, *ups)
    return LoRALinears.apply(x, tuple(scales), eights, *tensors)  # type: ignore[return-value]


class LoRALinears(torch.autograd.Function):
    """Frozen linear layers with LoRA on one input; see the top of this file."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scales: tuple[float, ...], eights: tuple[bool, ...], *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the layers' outputs (..., O_i).

        Args:
            x: (..., I), in the dtype of the base weights.
            scales: s_i, the scaling of each adapter times the factor of kept elements.
            eights: whether the product with W_i is computed in float8.
            tensors: for all layers what their dropout drops (each None, or from `LowMemoryDropout.draw`), W_i, the
                scales of W_i where it is quantised (`nf4`; else None), biases (each may be None), A_i, and B_i.
        """
        n, dtype = len(scales), x.dtype
        masks, bases, blocks, biases, downs, ups = (tensors[i * n : (i + 1) * n] for i in range(6))
        rows = x.reshape(-1, x.shape[-1])
        if _dropped(masks):
            parts = [down.to(dtype) @ _masked(rows, mask).t() for mask, down in zip(masks, downs, strict=True)]
        else:
            parts = [_stacked(downs, dtype) @ rows.t()]
        outputs = []
        cast: Cast | None = None  # once for all layers
        for base, own, bias, up, scale, part, eight in zip(
            bases, blocks, biases, ups, scales, _split(parts, downs), eights, strict=True
        ):
            if eight:
                cast = cast_rows(rows) if cast is None else cast
                y = torch.addmm(scaled_product(cast, cast_rows(base), dtype), part.t(), up.to(dtype).t(), alpha=scale)
                outputs.append((y if bias is None else y + bias).view(*x.shape[:-1], y.shape[-1]))
                continue
            wide = base if own is None else dequantize(base, own, dtype)
            y = _sum([part.t(), rows], [up.to(dtype).t(), wide.t()], [scale, 1.0], bias)
            del wide  # before the next one is made
            outputs.append(y.view(*x.shape[:-1], y.shape[-1]))
        ctx.scales, ctx.eights, ctx.middles = scales, eights, len(parts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parts, *masks, *bases, *blocks, *downs, *ups)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: torch.Tensor | None) -> Any:  # type: ignore[override]
        """Return the gradients of x, each A_i and each B_i; the base is frozen."""
        scales: tuple[float, ...] = ctx.scales
        x, *tensors = ctx.saved_tensors
        parts, tensors = tensors[: ctx.middles], tensors[ctx.middles :]
        n, dtype = len(scales), x.dtype
        masks, bases, blocks, downs, ups = (tensors[i * n : (i + 1) * n] for i in range(5))
        rows = x.reshape(-1, x.shape[-1])
        slopes_up: list[torch.Tensor | None] = []
        slope_parts = [torch.empty_like(part) for part in parts]
        wide: tuple[list[torch.Tensor], list[Weight]] = ([], [])
        eights: list[tuple[torch.Tensor, torch.Tensor]] = []
        shares = _split(parts, downs), _split(slope_parts, downs)
        layers = zip(slopes, bases, blocks, ups, scales, *shares, ctx.eights, strict=True)
        for slope, base, own, up, scale, part, into, eight in layers:
            if slope is None:
                into.zero_()
                slopes_up.append(None)
                continue
            slope_rows = slope.reshape(-1, slope.shape[-1])
            into.addmm_(up.to(dtype).t(), slope_rows.t(), beta=0, alpha=scale)
            slopes_up.append((part @ slope_rows).t().to(up.dtype, memory_format=torch.contiguous_format).mul_(scale))
            if eight:
                eights.append((slope_rows, base))
                continue
            wide[0].append(slope_rows)
            wide[1].append(base if own is None else partial(dequantize, base, own, dtype))
        slope_x: torch.Tensor | None = None
        wanted = ctx.needs_input_grad[0] and bool(wide[0] or eights)
        if _dropped(masks):
            slopes_down = []
            if wanted:
                slope_x = _sum(*wide, [1.0] * len(wide[0])) if wide[0] else torch.zeros_like(rows)
            for mask, down, slope_part in zip(masks, downs, slope_parts, strict=True):
                slopes_down.append(slope_part @ _masked(rows, mask))
                if slope_x is not None:
                    product = slope_part.t() @ down.to(dtype)
                    slope_x.add_(product if mask is None else drop_(product, mask))
        else:
            slopes_down = (slope_parts[0] @ rows).split([len(down) for down in downs])
            if wanted:
                firsts, seconds = [slope_parts[0].t(), *wide[0]], [_stacked(downs, dtype), *wide[1]]
                slope_x = _sum(firsts, seconds, [1.0] * len(firsts))
        for slope_rows, base in eights if wanted else ():
            assert slope_x is not None
            slope_x = slope_x + scaled_product(cast_rows(slope_rows), cast_rows(base.t()), dtype)
        slopes_down = [
            None if slope is None else slope_down.to(down.dtype)
            for slope, slope_down, down in zip(slopes, slopes_down, downs, strict=True)
        ]
        slope_x = None if slope_x is None else slope_x.view(x.shape)
        return slope_x, None, None, *[None] * (4 * n), *slopes_down, *slopes_up


def _dropped(masks: Sequence[torch.Tensor | None]) -> bool:
    return any(mask is not None for mask in masks)


def _masked(rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return rows if mask is None else dropped(rows, mask)


def _stacked(downs: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return downs[0].to(dtype) if len(downs) == 1 else torch.cat([d.to(dtype) for d in downs])


def _split(parts: Sequence[torch.Tensor], downs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the (r_i, N) tensor of each layer; without dropout all are rows of one tensor."""
    return parts if len(parts) == len(downs) else parts[0].split([len(down) for down in downs])


def _sum(
    firsts: list[torch.Tensor], seconds: list[Weight], scales: list[float], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``sum_i scales[i] * firsts[i] @ seconds[i] + bias``, (N, O), added up in one tensor.

    One operation for a compiler, which would copy the sum per product, and for selective recomputation, which keeps it.
    Otherwise there is one quantised weight at a time.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch.ops.allranks.sum_of_products(firsts, list(map(_made, seconds)), scales, bias)
    return _sum_in_place(firsts, seconds, scales, bias)


def _made(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight()


def _sum_in_place(
    firsts: Sequence[torch.Tensor], seconds: Sequence[Weight], scales: Sequence[float], bias: torch.Tensor | None
) -> torch.Tensor:
    second = _made(seconds[0])
    if bias is None:
        out = firsts[0].new_empty(firsts[0].shape[0], second.shape[1])
        out.addmm_(firsts[0], second, beta=0, alpha=scales[0])
    else:
        out = torch.addmm(bias, firsts[0], second, alpha=scales[0])
    del second
    for first, weight, scale in zip(firsts[1:], seconds[1:], scales[1:], strict=True):
        out.addmm_(first, _made(weight), alpha=scale)
    return out


@torch.library.custom_op("allranks::sum_of_products", mutates_args=())
def sum_of_products(
    firsts: Sequence[torch.Tensor], seconds: Sequence[torch.Tensor], scales: Sequence[float], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``sum_i scales[i] * firsts[i] @ seconds[i] + bias``, (N, O): see `_sum`."""
    return _sum_in_place(firsts, seconds, scales, bias)


@sum_of_products.register_fake
def _(firsts: Any, seconds: Any, scales: Any, bias: Any) -> torch.Tensor:
    return firsts[0].new_empty(firsts[0].shape[0], seconds[0].shape[1])
