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
    """Give every trained parameter a gradient, of zeros if need be, and on every rank in the same order.

    A node of the graph that is made before a forward runs last in its backward; every parameter waits for it. Without that a
    parameter that is used on one rank alone would come earlier on the others, and DeepSpeed fills its buckets as they come.

    Args:
        each_module: a parameter is whole only while its own module computes (stage 3). Call this after DeepSpeed has put its
            hooks in. Otherwise the gradients of the whole model come together at the end of backward.
    """
    if not each_module:
        _Waits([p for p in model.parameters() if p.requires_grad], model)
        return
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own:
            _Waits(own, module)


class _Waits:
    """Makes the parameters wait for the end of a module's backward."""

    def __init__(self, own: list[nn.Parameter], module: nn.Module) -> None:
        self._own: list[nn.Parameter] = own
        self._nothing: list[torch.Tensor] = []
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, prepend=True)  # before the weights are given back

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._nothing.append(cast(torch.Tensor, _Nothing.apply(*self._own)))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or not self._nothing:
            return output
        nothing = self._nothing.pop()
        return tree_map(lambda t: t + nothing.to(t.dtype) if _differentiable(t) else t, output)


class _Nothing(torch.autograd.Function):
    """0, whose gradient with respect to every parameter is 0."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(p.shape, p.dtype) for p in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros((), dtype=d, device=gradients[0].device).expand(s) for s, d in ctx.like)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
