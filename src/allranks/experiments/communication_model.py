"""Fit an alpha-beta model of communication to the measurements, predict more ranks, and recommend a strategy.

A ring collective over W ranks takes ``hops * alpha + sent * beta``: alpha seconds per message, beta seconds per byte
(Hockney 1994; ring algorithms: Thakur, Rabenseifner and Gropp 2005). An all-reduce takes 2(W-1) hops and sends
2(W-1)/W of its bytes, a reduce-scatter or all-gather half of both, a broadcast W-1 hops and all bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from allranks.experiments.gates import ComparisonRow
from allranks.utils.formatting import format_bytes

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


def predict_step_time(
    figures: dict[str, Any], found: CommunicationModel, tokens_per_rank_step: float, world: int
) -> dict[str, float]:
    """Return step time and tokens/s on `world` ranks with the same batch per rank.

    Compute time stays constant; exposed communication scales by the model.
    """
    exposed_share = 1.0 - (figures["overlap"] or 0.0)
    step = figures["step_time_s"]["median"]
    rest = max(step - figures["exposed_comm_s"], 0.0)
    step_s = rest + exposed_share * communication_time_s(figures["collectives"], found, world)
    return {"ranks": world, "step_time_s": step_s, "tokens_per_s": world * tokens_per_rank_step / step_s}


Json = dict[str, Any]


def collective_timings(measured: Json) -> list[tuple[str, float, float]]:
    """Return (kind, bytes, seconds) of collectives: the shortest of each kind and size, because longer ones include waiting."""
    best: dict[tuple[str, int], float] = {}
    for rank in measured["ranks"]:
        for known in rank.values():
            for kind, size, seconds in known["verified"].get("window", {}).get("collectives", []):
                best[kind, size] = min(best.get((kind, size), seconds), seconds)
    return [(kind, size, seconds) for (kind, size), seconds in best.items()]


def recommend_strategy(
    measured: Json, rows: list[ComparisonRow]
) -> tuple[list[str], CommunicationModel | None, list[Json]]:
    """Return sentences, the fitted model, and predictions by strategy and number of ranks."""
    good = [r for r in rows if r.figures]
    if not good:
        return ["No strategy passed its gates, so there is no recommendation."], None, []
    found = fit_communication_model(collective_timings(measured), measured["world_size"])
    ranked = sorted(good, key=_tokens_per_s, reverse=True)
    text = [_best(measured, ranked), *_memory(ranked)]
    predicted = _predictions(measured, good, found) if found else []
    if found:
        text += _outlook(found, predicted)
    return text, found, predicted


def _tokens_per_s(row: ComparisonRow) -> float:
    return row.figures["tokens_per_s"]["median"] if row.figures else 0.0


def _best(measured: Json, ranked: list[ComparisonRow]) -> str:
    first = ranked[0]
    assert first.figures is not None
    here = f"{measured['world_size']} ranks on {measured['nodes']} node{'s' * (measured['nodes'] > 1)} ({measured['device']})"
    alike = [
        r.strategy
        for r in ranked[1:]
        if r.figures and r.figures["tokens_per_s"]["max"] >= first.figures["tokens_per_s"]["min"]
    ]
    overlap = first.figures["overlap"]
    why = f"{first.figures['exposed_comm_s'] / first.figures['step_time_s']['median']:.0%} of its step is exposed communication"
    if overlap:
        why += f", {overlap:.0%} of its communication is hidden"
    text = f"Fastest on {here}: {first.strategy} with {_tokens_per_s(first):,.0f} tokens/s; {why}."
    if alike:
        text += f" Not distinguishable from it in this measurement: {', '.join(alike)}."
    return text


def _memory(ranked: list[ComparisonRow]) -> list[str]:
    least = min(ranked, key=lambda r: r.figures["memory"]["peak_bytes"] if r.figures else 0)
    first = ranked[0]
    if least is first or not least.figures or not first.figures:
        return []
    slower = 1 - _tokens_per_s(least) / _tokens_per_s(first)
    return [
        f"Least memory: {least.strategy}, peak {format_bytes(least.figures['memory']['peak_bytes'])} against "
        f"{format_bytes(first.figures['memory']['peak_bytes'])} of {first.strategy}, {slower:.0%} slower here. The savings grow with "
        "weights and optimizer state; activations are the same for all strategies."
    ]


def _predictions(measured: Json, good: list[ComparisonRow], found: CommunicationModel) -> list[Json]:
    out = []
    for row in good:
        assert row.figures is not None
        repeats = measured["ranks"][0][row.strategy]["repeats"]
        tokens = median(sum(r["tokens"]) / max(len(r["tokens"]), 1) for r in repeats)
        out += [
            {"strategy": row.strategy, **predict_step_time(row.figures, found, tokens, world)}
            for world in PREDICTED_WORLD_SIZES
        ]
    return out


def _outlook(found: CommunicationModel, predicted: list[Json]) -> list[str]:
    bandwidth = f"{1 / found.beta_s / 1e9:.2f} GB/s" if found.beta_s > 0 else "no measurable time per byte"
    text = [
        f"Communication model, fitted to {found.points} sizes of collectives: {found.alpha_s * 1e6:.0f} us per message, {bandwidth}; "
        f"its error is {found.residual:.0%} (root mean square)."
    ]
    said: dict[str, list[str]] = {}
    for world in PREDICTED_WORLD_SIZES:
        said.setdefault(_fastest([p for p in predicted if p["ranks"] == world], found), []).append(f"{world:,}")
    turns = [f"on {', '.join(worlds)} ranks {who}" for who, worlds in said.items()]
    text.append(
        f"Predicted, not measured (same links, same batch per rank): {'; '.join(turns)}. With a larger model, all strategies change alike, because bytes and "
        "computation grow together; more ranks with the same bytes per rank cost messages, which favours few large buckets; slower "
        "links favour strategies that send less (data parallelism, ZeRO 1 and 2 without accumulation) over ZeRO 3."
    )
    return text


def _fastest(predicted: list[Json], found: CommunicationModel) -> str:
    """Return the strategy with the best prediction on some number of ranks, and those within the error of the model."""
    slack = max(0.05, found.residual)
    here = sorted(predicted, key=lambda p: -p["tokens_per_s"])
    close = [p["strategy"] for p in here if p["tokens_per_s"] >= (1 - slack) * here[0]["tokens_per_s"]]
    if len(close) == len(here) > 1:
        return "no strategy is clearly faster"
    return close[0] + (f" (within {slack:.0%}: {', '.join(close[1:])})" if close[1:] else "")
