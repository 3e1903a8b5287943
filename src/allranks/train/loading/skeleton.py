"""A model that has its shapes but no weights yet.

Its parameters are *hollow*: of the right shape, dtype and device, but all elements lie on one, so that they need no memory.
(On the ``meta`` device PEFT would throw away what it draws for adapters, and a parameter could not be given storage in
place.) Buffers that no file holds, such as rotary frequencies, are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn


def hollow(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without memory of its own."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def hollow_parameter(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, origin: str, trained: bool
) -> nn.Parameter:
    """A parameter that waits for the weights of `origin`, and whose copies do too."""
    parameter = nn.Parameter(hollow(shape, dtype, device), requires_grad=trained)
    parameter.origin = origin  # type: ignore[attr-defined]
    parameter.__deepcopy__ = partial(_copy, parameter)  # type: ignore[attr-defined] - else a copy would be as large as its weights
    return parameter


def _copy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    made = hollow_parameter(
        parameter.shape, parameter.dtype, parameter.device, origin_of(parameter) or "", parameter.requires_grad
    )
    memo[id(parameter)] = made
    return made


def mark_filled(parameter: nn.Parameter) -> None:
    """It has its weights: it waits for nothing, and its copies have them too."""
    for name in ("origin", "__deepcopy__"):
        vars(parameter).pop(name, None)


def origin_of(parameter: torch.Tensor) -> str | None:
    """The name, in the bare model, of the weights that a parameter waits for."""
    return getattr(parameter, "origin", None)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether it has no memory of its own."""
    return tensor.is_meta or (tensor.numel() > 1 and not any(tensor.stride()))


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter | None]) -> None:
    """Put `make`'s parameter in the place of each; None leaves it. Tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter | None] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = make(f"{path}.{name}" if path else name, parameter)
            new = made[parameter]
            if new is not None:
                module._parameters[name] = new


def make_hollow(model: nn.Module, device: torch.device, dtypes: dict[str, torch.dtype] | None = None) -> None:
    """Take a model's weights away; `dtypes` are by name, where they are to be others."""
    known = dtypes or {}

    def make(name: str, p: nn.Parameter) -> nn.Parameter:
        return hollow_parameter(p.shape, known.get(name, p.dtype), device, name, p.requires_grad)

    replace_parameters(model, make)


def to_meta(model: nn.Module) -> None:
    """Move hollow parameters to the ``meta`` device: what `fully_shard` takes for parameters without content."""

    def make(name: str, p: nn.Parameter) -> nn.Parameter | None:
        if origin_of(p) is None or not is_hollow(p):
            return None
        return nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)

    replace_parameters(model, make)


def from_meta(model: Any, given: Iterable[str], dtypes: dict[str, torch.dtype], device: torch.device) -> None:
    """Finish a transformers model that was built on the ``meta`` device: parameters become hollow, all buffers and what no
    file gives (a new classification head) real, on the CPU, drawn or computed as transformers does.

    Args:
        given: names of parameters and buffers that files give; of a tied parameter any of its names.
        dtypes: by name.
        device: of the hollow parameters.
    """
    waits = set(given)
    origins: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if name in waits:
            origins.setdefault(id(p), name)

    def make(name: str, p: nn.Parameter) -> nn.Parameter:
        dtype = dtypes.get(name, p.dtype)
        if id(p) not in origins:
            return nn.Parameter(torch.empty(p.shape, dtype=dtype), requires_grad=p.requires_grad)
        made = hollow_parameter(p.shape, dtype, device, origins[id(p)], p.requires_grad)
        made._is_hf_initialized = True  # type: ignore[attr-defined] - transformers draws what does not say so
        return made

    replace_parameters(model, make)
    for path, module in model.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                full = f"{path}.{name}" if path else name
                module._buffers[name] = torch.zeros(buffer.shape, dtype=dtypes.get(full, buffer.dtype))
    model.initialize_weights()
    for parameter in model.parameters():
        if hasattr(parameter, "_is_hf_initialized"):
            del parameter._is_hf_initialized
