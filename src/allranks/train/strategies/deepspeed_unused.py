"""Parameters that get no gradient in a backward: DeepSpeed's ranks would reduce different ones together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from allranks.errors import RunFailed


class NoneMissing:
    """Counts gradients as they come, so that a backward that left some out is told, by the parameter's name."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._names = [name for name, _ in named]
        self._seen = [False] * len(named)
        for i, (_, p) in enumerate(named):
            p.register_post_accumulate_grad_hook(partial(self._see, i))

    def _see(self, i: int, _: Any) -> None:
        self._seen[i] = True

    def check(self) -> None:
        """Raises:
        RunFailed: a trained parameter got no gradient since the last check.
        """
        missing = [name for name, seen in zip(self._names, self._seen, strict=True) if not seen]
        self._seen = [False] * len(self._names)
        if missing:
            raise RunFailed(
                f"{len(missing)} trained parameters got no gradient in a backward, first {missing[0]}: DeepSpeed's ranks would mix "
                "different parameters; set strategy.find_unused_parameters: true, or do not train them"
            )


def reach_all(model: nn.Module, *, each_module: bool) -> None:
    """Give every trained parameter a gradient, of zeros if need be.

    Args:
        each_module: a parameter is whole only while its own module computes (stage 3).
    """
    if not each_module:
        model.register_forward_hook(partial(_add_nothing, [p for p in model.parameters() if p.requires_grad]))
        return
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own:
            module.register_forward_hook(partial(_add_nothing, own))


def _add_nothing(own: list[nn.Parameter], module: nn.Module, args: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    nothing = cast(torch.Tensor, sum(p.flatten()[0].float() * 0.0 for p in own))
    return tree_map(lambda t: t + nothing.to(t.dtype) if _differentiable(t) else t, output)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
