"""Conclude from a comparison: which strategy is fastest, and which needs least memory. Pure.

Each sentence is a rule on measured figures, and is left out where the figures do not carry it.
"""

from __future__ import annotations

from typing import Any

from allranks.experiments.gates import ComparisonRow, load_conclusions
from allranks.utils.text import format_bytes

Json = dict[str, Any]
SAME_MEMORY = 0.05
"""Relative difference of peaks below which no strategy is said to need less memory."""


def recommend_strategy(measured: Json, rows: list[ComparisonRow]) -> list[str]:
    """Return the conclusions, one sentence or a few each."""
    good = [r for r in rows if r.figures]
    if not good:
        return ["No strategy passed its gates, so there is no recommendation."]
    ranked = sorted(good, key=_tokens_per_s, reverse=True)
    loaded = load_conclusions(measured, [row.strategy for row in good])
    return [*loaded, _fastest_here(measured, ranked), *_memory(ranked)]


def _tokens_per_s(row: ComparisonRow) -> float:
    return row.figures["tokens_per_s"]["median"] if row.figures else 0.0


def _alike(one: Json, other: Json) -> bool:
    """Return whether the ranges of two speeds overlap."""
    a, b = one["tokens_per_s"], other["tokens_per_s"]
    return a["max"] >= b["min"] and b["max"] >= a["min"]


def _fastest_here(measured: Json, ranked: list[ComparisonRow]) -> str:
    first = ranked[0]
    assert first.figures is not None
    sentence = (
        f"{measured['world_size']} ranks on {measured['nodes']} node{'s' * (measured['nodes'] > 1)} "
        f"({measured['device']})"
    )
    speed = first.figures["tokens_per_s"]
    text = (
        f"Fastest on {sentence}: {first.strategy} with {speed['median']:,.0f} tokens/s [{speed['min']:,.0f} to "
        f"{speed['max']:,.0f}]"
    )
    share, overlap = exposed_share(first.figures), first.figures["overlap"]
    if share is not None:
        text += f"; {share:.0%} of its profiled step is exposed communication"
        text += f", {overlap:.0%} of its communication is hidden" if overlap else ""
    alike = [r.strategy for r in ranked[1:] if r.figures and _alike(r.figures, first.figures)]
    return text + (f". Not distinguishable from it in this measurement: {', '.join(alike)}." if alike else ".")


def _memory(ranked: list[ComparisonRow]) -> list[str]:
    first = ranked[0].figures
    least = min(ranked, key=lambda r: r.figures["memory"]["peak_bytes"] if r.figures else float("inf"))
    if first is None or least.figures is None:
        return []
    low, high = (f["memory"]["peak_bytes"] for f in (least.figures, first))
    if low >= (1 - SAME_MEMORY) * high:
        return []
    slower = 1 - _tokens_per_s(least) / _tokens_per_s(ranked[0])
    speed = "not distinguishable in speed" if _alike(least.figures, first) else f"{slower:.0%} slower here"
    text = (
        f"Least memory: {least.strategy}, peak {format_bytes(low)} against {format_bytes(high)} of "
        f"{ranked[0].strategy}, {speed}."
    )
    saved = first["memory"]["state_bytes"] - least.figures["memory"]["state_bytes"]
    if saved > 0:
        text += f" {format_bytes(saved)} of it are weights, gradients and optimizer state."
    return [text]


def exposed_share(figures: dict[str, Any]) -> float | None:
    """Return the share of a step that is exposed communication; None if the profile does not show it.

    Both times are of the profiled window, because profiled steps are slower than timed ones.
    """
    whole, exposed = figures["profiled_step_s"], figures["exposed_comm_s"]
    return exposed / whole if whole > 0 and 0 <= exposed <= whole else None
