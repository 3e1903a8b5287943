"""A state that one strategy saved, in the form in which another keeps it."""

from __future__ import annotations

from typing import Any

import torch

MASTER = "master"  # an optimizer state's key: float32 weights beside those of a model in lower precision


def fitted(state: dict[str, Any], *, keeps_master: bool) -> dict[str, Any]:
    """Moments in the dtype of their weights, and no master weights, unless the strategy keeps them (`keeps_master`).

    Fused optimizers want one dtype of weights and moments. Where both are float32 nothing changes.
    """
    if keeps_master:
        return state
    weights = state["model"]
    fit = {
        name: {k: _as(v, weights[name].dtype) for k, v in moments.items() if k != MASTER}
        for name, moments in state["optimizer"].items()
    }
    return {**state, "optimizer": fit}


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.ndim else value
