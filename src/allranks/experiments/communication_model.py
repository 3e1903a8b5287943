"""Fit an alpha-beta model of communication to measured collectives, and predict step times on more ranks.

A ring collective over W ranks takes ``hops * alpha + sent * beta``: alpha seconds per message, beta seconds per byte
(Hockney 1994; ring algorithms: Thakur, Rabenseifner and Gropp 2005). An all-reduce takes 2(W-1) hops and sends
2(W-1)/W of its bytes, a reduce-scatter or all-gather half of both, a broadcast W-1 hops and all bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

PREDICTED_WORLD_SIZES = (8, 16, 64, 256, 1024)


class CommunicationModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per hop, seconds per byte, and the error of the fit: the root mean square of the relative errors."""

    alpha_s: float
    beta_s: float
    residual: float
    points: int


def hops_and_share(kind: str, world: int) -> tuple[float, float]:
    """Return (sequential messages, bytes sent by a rank per byte of the collective)."""
    if kind == "all_reduce":
        return 2.0 * (world - 1), 2.0 * (world - 1) / world
    if kind == "broadcast":
        return world - 1.0, 1.0
    return world - 1.0, (world - 1) / world


def fit_communication_model(points: Sequence[tuple[str, float, float]], world: int) -> CommunicationModel | None:
    """Fit the relative errors over (kind, bytes, seconds) by least squares, with both coefficients at least zero.

    Return None for fewer than two sizes.
    """
    seen = [(*hops_and_share(kind, world), size, t) for kind, size, t in points if size > 0 and t > 0]
    if len({size for _, _, size, _ in seen}) < 2:
        return None
    # divided by the time, so that small and large messages have equal weight
    xs = [(hops / t, share * size / t) for hops, share, size, t in seen]
    aa, bb = sum(x * x for x, _ in xs), sum(y * y for _, y in xs)
    ab, a1, b1 = sum(x * y for x, y in xs), sum(x for x, _ in xs), sum(y for _, y in xs)
    det = aa * bb - ab * ab
    alpha, beta = ((a1 * bb - b1 * ab) / det, (b1 * aa - a1 * ab) / det) if det > 0 else (-1.0, -1.0)
    if alpha < 0:
        alpha, beta = 0.0, b1 / bb
    elif beta < 0:
        alpha, beta = a1 / aa, 0.0
    errors = [alpha * x + beta * y - 1 for x, y in xs]
    return CommunicationModel(
        alpha_s=alpha, beta_s=beta, residual=(sum(e * e for e in errors) / len(errors)) ** 0.5, points=len(seen)
    )


def communication_time_s(collectives: Sequence[dict[str, Any]], found: CommunicationModel, world: int) -> float:
    """Return the seconds per step for (kind, count, bytes), without overlap."""
    total = 0.0
    for c in collectives:
        hops, share = hops_and_share(c["kind"], world)
        total += c["count"] * hops * found.alpha_s + share * c["bytes"] * found.beta_s
    return total


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Step time and speed of a strategy on another number of ranks, with the same links and the same batch per rank.

    ``error`` is how far the model is from the measured step time on the measured number of ranks, relative to it.
    """

    strategy: str
    ranks: int
    step_time_s: float
    tokens_per_s: float
    error: float


def model_error(figures: dict[str, Any], found: CommunicationModel, world: int) -> float:
    """Return how far the model is from the measured step time, relative to it; infinite if the profile is inconsistent.

    The model replaces the exposed communication of the step by what it computes for the step's collectives.

    Args:
        world: the measured number of ranks.
    """
    share = exposed_share(figures)
    if share is None:
        return float("inf")
    modelled = (1.0 - (figures["overlap"] or 0.0)) * communication_time_s(figures["collectives"], found, world)
    step = figures["step_time_s"]["median"]
    return abs(modelled - share * step) / step


def exposed_share(figures: dict[str, Any]) -> float | None:
    """Return the share of a step that is exposed communication; None if the profile does not show it.

    Both times are of the profiled window, because profiled steps are slower than timed ones.
    """
    whole, exposed = figures["profiled_step_s"], figures["exposed_comm_s"]
    return exposed / whole if whole > 0 and 0 <= exposed <= whole else None


def predict_step_time(
    figures: dict[str, Any], found: CommunicationModel, tokens_per_rank_step: float, measured: int, world: int
) -> tuple[float, float]:
    """Return (step time in seconds, tokens/s) on `world` ranks.

    The measured step is kept, and the modelled growth of its exposed communication from `measured` to `world` ranks is added. More ranks
    are never predicted to make a step shorter, so speed grows at most in proportion to the ranks.
    """
    growth = communication_time_s(figures["collectives"], found, world) - communication_time_s(
        figures["collectives"], found, measured
    )
    step_s = figures["step_time_s"]["median"] + (1.0 - (figures["overlap"] or 0.0)) * max(growth, 0.0)
    return step_s, world * tokens_per_rank_step / step_s
