"""LoRA's forward with fewer passes over the layer's output.

PEFT computes ``base(x) + B(A(dropout(x))) * scaling``: after the base product, three passes over a tensor of the layer's
full width, and again in backward. Here the scaling is put on the r-wide product in the middle, and the second product
adds itself to the base's output (``addmm``). The same numbers up to rounding; weights and files are PEFT's own.

Only plain LoRA on linear layers takes this way (one active adapter, not merged, no variant, equal dtypes, nobody's hooks
on the layers within); everything else goes PEFT's. DeepSpeed's stage 3 gathers a layer's weights in such hooks.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def fuse_lora(model: nn.Module) -> int:
    """Give every plain LoRA linear layer of a PEFT model the shorter forward; how many."""
    from peft.tuners.lora.layer import Linear

    found = 0
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.forward = MethodType(_forward, module)
            found += 1
    return found


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    active = layer.active_adapters
    if (
        args
        or kwargs
        or len(active) != 1
        or layer.disable_adapters
        or layer.merged
        or active[0] not in layer.lora_A
        or layer.lora_variant
    ):
        return type(layer).forward(layer, x, *args, **kwargs)
    name = active[0]
    down, up, base = layer.lora_A[name], layer.lora_B[name], layer.base_layer
    if (
        up.bias is not None
        or any(part._forward_pre_hooks or part._forward_hooks for part in (down, up, base))
        or x.dtype != down.weight.dtype
        or base.weight.dtype != up.weight.dtype
        or torch.is_autocast_enabled(x.device.type)
    ):
        return type(layer).forward(layer, x, *args, **kwargs)
    middle = F.linear(layer.lora_dropout[name](x), down.weight) * layer.scaling[name]
    result = F.linear(x, base.weight, base.bias)
    return torch.addmm(result.flatten(0, -2), middle.flatten(0, -2), up.weight.t()).view(result.shape)
