"""Multiply by frozen weights in 8-bit floats next to LoRA (``model.float8``).

For ``x @ W^T``, the rows of x and of W are cast to float8_e4m3fn, each row by a scale of its own: its largest absolute
value over 448. Products are summed in float32 and multiplied by both scales. Backward's ``dy @ W`` casts the rows of dy
and the columns of W. Weights stay as they are and are cast anew in each pass: what is loaded, sharded, saved and
exported does not change. Adapters, embeddings, output projection and attention are computed as without.

On a GPU, torch's scaled products do it (compute capability 8.9 and later). Elsewhere the same values are multiplied in
float32, which is slower than without. torchao's layers do the same for layers that are trained; here the casts are
shared by layers of one input (`lora`), and no gradient of a weight is computed.

Before the first step, `verify_products` compares the product of each layer with that without, on the same input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from allranks.errors import EnvironmentNotAble, ProofFailed, SpecError
from allranks.spec.records import FLOAT8_MULTIPLE, NF4_PIECE
from allranks.train.data.batches import Batch
from allranks.train.distributed import DistContext, from_first
from allranks.train.models.quantized_base import layers_to_quantize
from allranks.train.patches import replace_forward

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
LIMIT = 0.1
"""Largest difference of a product to that without float8, both as root mean squares: 20 dB."""
TOKENS = 1024  # of a layer's input
_FLAG = "in_float8"


class Cast(NamedTuple):
    """A matrix (N, K) in float8, and the scales of its rows (N, 1) in float32."""

    values: torch.Tensor
    scales: torch.Tensor


def cast_rows(matrix: torch.Tensor) -> Cast:
    """Return a matrix (N, K) in float8, one scale per row."""
    at_once = max(NF4_PIECE // matrix.shape[1], 1)
    if len(matrix) <= at_once or torch.compiler.is_compiling():  # a compiler makes one pass of it
        return _cast_rows(matrix)
    made = Cast(matrix.new_empty(matrix.shape, dtype=DTYPE), matrix.new_empty(len(matrix), 1, dtype=torch.float32))
    for part, *into in zip(*(t.split(at_once) for t in (matrix, *made)), strict=True):
        for whole, own in zip(into, _cast_rows(part), strict=True):
            whole.copy_(own)
    return made


def _cast_rows(matrix: torch.Tensor) -> Cast:
    scales = matrix.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return Cast((matrix / scales).to(DTYPE).contiguous(), scales)


def scaled_product(a: Cast, b: Cast, dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b^T``, (N, M)."""
    if a.values.is_cuda:
        scales = {"scale_a": a.scales, "scale_b": b.scales.t()}
        return torch._scaled_mm(a.values, b.values.t(), **scales, out_dtype=dtype, use_fast_accum=True)
    return ((a.values.float() @ b.values.float().t()) * a.scales * b.scales.t()).to(dtype)


def in_float8(layer: nn.Module) -> bool:
    """Return whether a layer's product is computed in float8 now."""
    return getattr(layer, _FLAG, False)


@contextmanager
def without_float8(model: nn.Module) -> Iterator[None]:
    """Compute all layers in the dtype of their weights within this context."""
    layers = [module for module in model.modules() if in_float8(module)]
    for layer in layers:
        vars(layer)[_FLAG] = False
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)[_FLAG] = True


def use_float8(model: nn.Module, device: torch.device) -> list[str]:
    """Let the frozen linear layers of the blocks compute in float8; return remarks.

    Raises:
        EnvironmentNotAble: this GPU has no such products.
        SpecError: the model has no such layers.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 9)
    if capability < (8, 9) or (device.type == "cuda" and torch.version.hip is not None):
        name = torch.cuda.get_device_name(device)
        raise EnvironmentNotAble(
            f"model.float8: {name} has no products in float8_e4m3fn, which need an NVIDIA GPU of compute capability "
            "8.9 or later (Ada, Hopper, Blackwell); set it to false"
        )
    layers = [layer for _, _, layer in layers_to_quantize(model) if layer.out_features % FLOAT8_MULTIPLE == 0]
    for layer in layers:
        vars(layer)[_FLAG] = True
        replace_forward(layer, MethodType(_forward, layer))
    if not layers:
        raise SpecError(
            f"model.float8: the blocks of {type(model).__name__} have no linear layers for it; set it to false"
        )
    note = "" if device.type == "cuda" else ", emulated in float32: this device has no such products"
    return [f"model.float8: {len(layers)} linear layers of the blocks multiply in float8_e4m3fn{note}"]


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return a layer's output, where `lora` does not compute it."""
    if not in_float8(layer) or layer.weight.requires_grad:
        return nn.Linear.forward(layer, x)
    kind = x.device.type
    x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    y: torch.Tensor = _Product.apply(x, layer.weight)  # type: ignore[assignment]
    return y if layer.bias is None else y + layer.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """``x @ W^T``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return scaled_product(cast_rows(x.flatten(0, -2)), cast_rows(weight), x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,), slope = ctx.saved_tensors, slopes[0]
        if not ctx.needs_input_grad[0]:
            return None, None
        slope_x = scaled_product(cast_rows(slope.flatten(0, -2)), cast_rows(weight.t()), slope.dtype)
        return slope_x.unflatten(0, slope.shape[:-1]), None


def verify_products(world: DistContext, loss_model: nn.Module, batch: Batch) -> tuple[float, str, float]:
    """Return by how much float8 changes the product of a layer at most, relative to it; that layer; and by which share
    it changes the loss of a micro-batch. Collective.

    Each layer is measured on the input that it has without float8: differences of logits grow with the depth of a model
    and its weights, also if every product is right.

    Raises:
        ProofFailed: on every rank, if the first is more than `LIMIT`.
    """
    errors: dict[str, torch.Tensor] = {}

    def measure(name: str, layer: nn.Linear, args: tuple[torch.Tensor]) -> None:
        x = args[0].flatten(0, -2)[:TOKENS].to(layer.weight.dtype)
        y = F.linear(x, layer.weight)  # it also stands in for its gradient in backward's product
        pairs = (x, layer.weight, y), (y, layer.weight.t(), y @ layer.weight)
        errors[name] = torch.stack([_error(*pair) for pair in pairs]).max()

    loss_model.eval()
    with torch.no_grad(), ExitStack() as hooks:
        changed = loss_model(batch)
        for name, layer in loss_model.named_modules():
            if in_float8(layer):  # with a hook, its LoRA is computed by PEFT, which calls the layer
                hook = layer.register_forward_pre_hook(partial(measure, name))  # type: ignore[arg-type]
                hooks.callback(hook.remove)
        with without_float8(loss_model):
            change = float(changed / loss_model(batch) - 1)
    loss_model.train()
    layers, differences = list(errors), torch.stack(list(errors.values()))
    worst = int(differences.argmax())  # of NaN, if there is one
    layer, off, change = from_first(world, (layers[worst], float(differences[worst]), change))
    if not off <= LIMIT:
        raise ProofFailed(
            f"model.float8: the products of {layer} differ by {off:.2%} (root mean square) from those in the dtype of "
            f"the weights; at most {LIMIT:.0%} is allowed. Set model.float8: false for this model"
        )
    return off, layer, change


def _error(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    off = (scaled_product(cast_rows(a), cast_rows(b), a.dtype) - exact).norm(dtype=torch.float32)
    return off / exact.norm(dtype=torch.float32).clamp_min(1e-12)
