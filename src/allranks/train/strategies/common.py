"""Parts that several strategies share: clipping that never waits for the device, and plain state dicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import SpecError


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters that get gradients, each once (tied weights appear under their first name)."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def require_one_dtype(
    named: Iterable[tuple[str, nn.Parameter]], first: tuple[str, nn.Parameter], *, where: str, who: str, others: str
) -> None:
    """Refuse parameters of another dtype than that of `first`; `who` trains in one, `others` name strategies that need not.

    Raises:
        SpecError: it names two that differ.
    """
    for name, p in named:
        if p.is_floating_point() and p.dtype != first[1].dtype:
            raise SpecError(
                f"{where}: {name} is {p.dtype}, {first[0]} is {first[1].dtype}: {who} trains in one dtype; set model.dtype so that they "
                f"agree, or take {others}"
            )


def clip_and_update(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    clip_norm: float | None,
    shards_of: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Clip by the global norm and update, unless a gradient is not finite; then nothing at all changes, now and later.

    The decision stays on the device: fused optimizers take it as ``found_inf``. It is sticky, so that the weights
    are still those before the bad step when the host learns of it some steps later.

    Where the parameters are this rank's shards, `shards_of` is the group over which their norms are added: one
    all-reduce of a float32 number. Where they are on the host, `device` is the one of the group's collectives.

    Returns:
        The norm before clipping, a float32 scalar on that device.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).float()
    home, norm = norm.device, norm.to(device or norm.device)
    if shards_of is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=shards_of)
        norm = squared.sqrt()
    here = norm.to(parameters[0].device if parameters else home)
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, here)
    skip_if_not_finite(optimizer, here)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def skip_if_not_finite(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> None:
    """Tell a fused optimizer to leave out the step that follows, and all later ones, if the norm is not finite."""
    bad = (~torch.isfinite(norm)).float()
    earlier = getattr(optimizer, "found_inf", None)
    optimizer.found_inf = bad if earlier is None else torch.maximum(bad, earlier)  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def replicated_weights(model: nn.Module, trained_only: bool) -> dict[str, torch.Tensor]:
    """Whole weights of a model that every rank holds, copied to the CPU of rank 0; ``{}`` elsewhere."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    return {
        n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters() if p.requires_grad or not trained_only
    }


def replicated_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Trained weights, buffers and optimizer state of a model that every rank holds whole, copied to the CPU."""
    wanted = {name: p.detach() for name, p in trained(model)} | dict(model.named_buffers())
    return {
        "model": {name: t.to("cpu", copy=True) for name, t in wanted.items()},
        "optimizer": states_by_name(trained(model), optimizer),
    }


def states_by_name(named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{parameter's name: {"exp_avg": ..., ...}}`` on the CPU, the same for every strategy.

    Rates and decays are not state: they follow from the spec and the step.
    """
    return {name: _to_cpu(optimizer.state[p]) for name, p in named if p in optimizer.state}


def load_states_by_name(
    named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, states: dict[str, Any]
) -> None:
    """Take back what `states_by_name` gave."""
    for name, p in named:
        if name in states:
            optimizer.state[p] = {k: v.to(p.device, copy=True) for k, v in states[name].items()}


def load_replicated_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take back what `replicated_state` gave."""
    load_weights(model, state["model"])
    load_states_by_name(trained(model), optimizer, state["optimizer"])


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Trained weights and buffers into a model that holds them whole.

    Raises:
        KeyError: the names are not the model's.
    """
    targets = {name: p.data for name, p in trained(model)} | dict(model.named_buffers())
    missing, extra = targets.keys() - weights.keys(), weights.keys() - targets.keys()
    if missing or extra:
        raise KeyError(f"state does not fit the model: missing {sorted(missing)[:3]}, not known {sorted(extra)[:3]}")
    for name, target in targets.items():
        target.copy_(weights[name])


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _to_cpu(v) for k, v in value.items()}
    return [_to_cpu(v) for v in value] if isinstance(value, list) else value
