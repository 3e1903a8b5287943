"""How far the weights of two trainings are apart, told in a way that means the same for every model and learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch


def update_error(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """The norm of the difference of the weights over the norm of what the reference training has changed.

    0 is bitwise equal; 1 is as wrong as not having trained at all. A norm over all weights, because AdamW divides by the
    gradient's own size: where a gradient is rounding noise, a single weight may differ by a whole learning rate.

    Raises:
        KeyError: the names are not the same.
    """
    if ours.keys() != reference.keys() or ours.keys() != start.keys():
        raise KeyError(f"not the same weights: {sorted(ours.keys() ^ reference.keys())[:3]}")
    apart = moved = 0.0
    for name, wanted in reference.items():
        apart += float((ours[name].double() - wanted.double()).square().sum())
        moved += float((wanted.double() - start[name].double()).square().sum())
    if apart == 0.0:
        return 0.0
    return (apart / moved) ** 0.5 if moved else float("inf")


def norm_error(ours: Sequence[float | None], reference: Sequence[float]) -> float:
    """The largest relative difference of the gradients' norms of any step.

    Beside `update_error`, because AdamW's update does not depend on the gradient's size, and clipping takes it away: ranks
    that forget to divide by their number move the weights as they should. Infinite where a step is missing, or where its
    norm is None, not a number, or not 0 though the reference's is.
    """
    if len(ours) != len(reference):
        return math.inf
    return max((_apart(n, r) for n, r in zip(ours, reference, strict=True)), default=0.0)


def _apart(ours: float | None, reference: float) -> float:
    if ours is None or not math.isfinite(ours) or not math.isfinite(reference):
        return math.inf
    if ours == reference:
        return 0.0
    return abs(ours - reference) / reference if reference else math.inf
