"""How a mixture of experts shared its tokens out, from the events of a run. Pure."""

from __future__ import annotations

from typing import Any


def expert_load(story: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Shares of the tokens that the experts of each block got, over all training steps; None for a dense model.

    Returns:
        ``experts``: how many a block has; ``min`` and ``max``: the least and the greatest share in any block; ``layers``: for
        each block ``layer`` (its number), ``min``, ``mean`` and ``max`` share, ``most`` (the expert that got it) and ``unused``
        (experts that got nothing). Even work is a share of ``mean`` for each.
    """
    totals: dict[str, list[int]] = {}
    for event in story:
        if event["event"] == "experts":
            for layer, counts in event["layers"].items():
                before = totals.get(layer, [0] * len(counts))
                totals[layer] = [a + b for a, b in zip(before, counts, strict=True)]
    layers = [_layer(name, counts) for name, counts in totals.items() if sum(counts)]
    if not layers:
        return None
    return {
        "experts": max(len(counts) for counts in totals.values()),
        "min": min(layer["min"] for layer in layers),
        "max": max(layer["max"] for layer in layers),
        "layers": layers,
    }


def _layer(name: str, counts: list[int]) -> dict[str, Any]:
    whole = sum(counts)
    return {
        "layer": name,
        "min": min(counts) / whole,
        "mean": 1 / len(counts),
        "max": max(counts) / whole,
        "most": counts.index(max(counts)),
        "unused": counts.count(0),
    }
