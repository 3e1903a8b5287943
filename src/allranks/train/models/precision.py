"""Apply mixed precision: forward passes run in a lower dtype than trained weights, their gradients and optimizer state.

Trained weights have the plan's ``param_dtype`` (float32), frozen ones its ``dtype``. Where the two differ, forward
passes run under ``torch.autocast``, as in the usual recipe (Micikevicius et al. 2018, with bfloat16 and without loss
scaling). Strategies that gather weights for a forward pass gather them in the compute dtype (`compute_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from allranks.train.models.moe import routers_of
from allranks.train.models.weight_loader import (
    is_unmaterialized,
    origin_of,
    replace_parameters,
    unmaterialized_parameter,
)
from allranks.train.patches import replace_forward

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ATTRIBUTE = "compute_dtype"


def cast_trained_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Store every trained floating-point parameter in `dtype`, whether its weights are already loaded or not."""

    def make(name: str, p: nn.Parameter) -> nn.Parameter | None:
        if not p.requires_grad or not p.is_floating_point() or p.dtype == dtype:
            return None
        if is_unmaterialized(p) and not p.is_meta:
            return unmaterialized_parameter(p.shape, dtype, p.device, origin_of(p) or "", trained=True)
        return nn.Parameter(p.detach().to(dtype), requires_grad=True)

    replace_parameters(model, make)


def use_autocast(model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Run forward passes under autocast if the model trains weights of another dtype than `dtype`; return if so.

    Adapters on a frozen base are not changed: PEFT computes them in their own dtype. Routers of experts and the
    residual stream behind a trained embedding stay in float32.
    """
    if not any(p.dtype != dtype and ".lora_" not in n for n, p in model.named_parameters() if p.requires_grad):
        return False
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    replace_forward(base, torch.autocast(device.type, dtype=dtype)(base.forward))
    setattr(model, _ATTRIBUTE, dtype)
    for router in routers_of(base).values():
        if router.weight.dtype == torch.float32:
            replace_forward(router, _without_autocast(router.forward, device.type))
    for module in base.modules():
        fused = [n for n, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.requires_grad]
        if fused:
            replace_forward(module, _with_cast(module, fused, dtype))
        if isinstance(module, nn.LayerNorm) and module.elementwise_affine and not module.weight.requires_grad:
            replace_forward(module, MethodType(_layer_norm, module))
    embedding = None
    with suppress(AttributeError, NotImplementedError):  # as transformers says of a model without one
        embedding = base.get_input_embeddings()
    if embedding is not None and any(p.requires_grad for p in embedding.parameters()):
        embedding.register_forward_hook(lambda module, args, output: output.float())
    return True


def compute_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of forward passes if it differs from that of trained weights (`use_autocast`), else None.

    Args:
        module: the model, or a module with its loss around it.
    """
    inner = getattr(module, "model", None)
    return getattr(module, _ATTRIBUTE, None) or getattr(inner, _ATTRIBUTE, None)


def keeps_own_dtype(model: nn.Module) -> set[nn.Parameter]:
    """Return parameters that are never cast to the compute dtype: those of routers."""
    return {p for router in routers_of(model).values() for p in router.parameters()}


def _with_cast(module: Any, names: list[str], dtype: torch.dtype) -> Callable[..., Any]:
    """Cast the weights of fused experts explicitly: autocast does not cover transformers' grouped matrix products."""
    forward = module.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        own = vars(module)  # has precedence over the module's parameters
        own.update({name: module._parameters[name].to(dtype) for name in names})
        try:
            return forward(*args, **kwargs)
        finally:
            for name in names:
                del own[name]

    return run


def _layer_norm(module: nn.LayerNorm, hidden: torch.Tensor) -> torch.Tensor:
    """Apply a frozen layer norm to a float32 residual stream in float32, as GPU autocast does; CPUs need one dtype."""
    weight, bias = (p if p is None else p.to(hidden.dtype) for p in (module.weight, module.bias))
    return F.layer_norm(hidden, module.normalized_shape, weight, bias, module.eps)


def _without_autocast(forward: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    @wraps(forward)
    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(hidden.float(), *args, **kwargs)

    return run
