"""A model of communication time fitted to what was measured, and what it says of more ranks. Pure, no libraries.

A ring collective over W ranks takes ``hops * alpha + sent * beta``: alpha seconds a message, beta seconds a byte
(Hockney 1994; ring algorithms: Thakur, Rabenseifner and Gropp 2005). An all-reduce makes 2(W-1) hops and sends
2(W-1)/W of its bytes, a reduce-scatter or all-gather half of both, a broadcast W-1 hops and all bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

RANKS = (8, 16, 64, 256, 1024)


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a hop, seconds a byte, and how well that fits: the root mean square of the relative errors."""

    alpha_s: float
    beta_s: float
    residual: float
    points: int


def hops_and_share(kind: str, world: int) -> tuple[float, float]:
    """(messages one after the other, bytes sent by a rank for each byte of the collective)."""
    if kind == "all_reduce":
        return 2.0 * (world - 1), 2.0 * (world - 1) / world
    if kind == "broadcast":
        return world - 1.0, 1.0
    return world - 1.0, (world - 1) / world


def fit(points: Sequence[tuple[str, float, float]], world: int) -> Fit | None:
    """Least squares of relative errors over (kind, bytes, seconds), both coefficients at least zero; None where fewer
    than two sizes were seen."""
    seen = [(*hops_and_share(kind, world), size, t) for kind, size, t in points if size > 0 and t > 0]
    if len({size for _, _, size, _ in seen}) < 2:
        return None
    # divided by the time, so that small and large messages count alike
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
    return Fit(alpha_s=alpha, beta_s=beta, residual=(sum(e * e for e in errors) / len(errors)) ** 0.5, points=len(seen))


def comm_s(collectives: Sequence[dict[str, Any]], found: Fit, world: int) -> float:
    """Seconds a step for (kind, count, bytes), if nothing is hidden."""
    total = 0.0
    for c in collectives:
        hops, share = hops_and_share(c["kind"], world)
        total += c["count"] * hops * found.alpha_s + share * c["bytes"] * found.beta_s
    return total


def predict(figures: dict[str, Any], found: Fit, tokens_per_rank_step: float, world: int) -> dict[str, float]:
    """Step time and tokens/s on `world` ranks, each with the batch that it has now: what was computed stays, what was
    exposed grows as the model says."""
    exposed_share = 1.0 - (figures["overlap"] or 0.0)
    step = figures["step_time_s"]["median"]
    rest = max(step - figures["exposed_comm_s"], 0.0)
    step_s = rest + exposed_share * comm_s(figures["collectives"], found, world)
    return {"ranks": world, "step_time_s": step_s, "tokens_per_s": world * tokens_per_rank_step / step_s}
