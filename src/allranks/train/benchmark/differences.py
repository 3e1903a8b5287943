"""Measure how far one training is from another: weights, and the figures of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch


def update_error(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """Return the norm of the weights' difference divided by the norm of the reference's update.

    0 means bitwise equal, 1 as wrong as untrained weights. The norm covers all weights, because AdamW divides by the size of the
    gradient: if a gradient is rounding noise, a single weight may differ by a full learning rate.

    Raises:
        KeyError: the names differ.
    """
    if ours.keys() != reference.keys() or ours.keys() != start.keys():
        raise KeyError(f"the names of the weights differ: {sorted(ours.keys() ^ reference.keys())[:3]}")
    apart = moved = 0.0
    for name, wanted in reference.items():
        apart += float((ours[name].double() - wanted.double()).square().sum())
        moved += float((wanted.double() - start[name].double()).square().sum())
    if apart == 0.0:
        return 0.0
    return (apart / moved) ** 0.5 if moved else float("inf")


def relative_error(ours: Sequence[float | None], reference: Sequence[float]) -> float:
    """Return the largest relative difference of a figure, such as the gradient's norm, over all steps.

    Norms complement `update_error`: AdamW's update does not depend on the size of the gradient, so sums that are not divided by
    the world size would go unnoticed. Infinite if a step is missing, or if its figure is None, NaN, or not 0 while the reference's is.
    """
    if len(ours) != len(reference):
        return math.inf
    return max((_relative_difference(n, r) for n, r in zip(ours, reference, strict=True)), default=0.0)


def _relative_difference(ours: float | None, reference: float) -> float:
    if ours is None or not math.isfinite(ours) or not math.isfinite(reference):
        return math.inf
    if ours == reference:
        return 0.0
    return abs(ours - reference) / abs(reference) if reference else math.inf
