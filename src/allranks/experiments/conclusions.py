"""Conclude from a comparison: which strategy is fastest, which needs least memory, what more ranks would do. Pure.

Each sentence is a rule on measured figures, and is left out where the figures do not carry it. Step times on more ranks
are predicted with an alpha-beta model that is fitted to measured collectives: a ring collective over W ranks takes
``hops * alpha + sent * beta``, alpha seconds per message, beta seconds per byte (Hockney 1994; ring algorithms: Thakur,
Rabenseifner and Gropp 2005). An all-reduce takes 2(W-1) hops and sends 2(W-1)/W of its bytes, a reduce-scatter or
all-gather half of both, a broadcast W-1 hops and all bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

from allranks.experiments.gates import ComparisonRow, load_conclusions
from allranks.utils.text import format_bytes

Json = dict[str, Any]
MAX_MODEL_ERROR = 0.2
"""Largest error with which the model predicts: of its fit to the measured collectives, and of a strategy's
measured step time."""
SAME_MEMORY = 0.05
"""Relative difference of peaks below which no strategy is said to need less memory."""


def recommend_strategy(
    measured: Json, rows: list[ComparisonRow]
) -> tuple[list[str], CommunicationModel | None, list[Prediction]]:
    """Return sentences, the fitted model, and predictions by strategy and number of ranks."""
    good = [r for r in rows if r.figures]
    if not good:
        return ["No strategy passed its gates, so there is no recommendation."], None, []
    found = fit_communication_model(collective_timings(measured), measured["world_size"])
    ranked = sorted(good, key=_tokens_per_s, reverse=True)
    loaded = load_conclusions(measured, [row.strategy for row in good])
    text = [*loaded, _fastest_here(measured, ranked), *_memory(ranked)]
    if found is None:
        return text, None, []
    errors = {row.strategy: model_error(row.figures, found, measured["world_size"]) for row in good if row.figures}
    predicted = _predictions(measured, good, found, errors)
    return [*text, *_outlook(found, predicted, errors)], found, predicted


def collective_timings(measured: Json) -> list[tuple[str, float, float]]:
    """Return (kind, bytes, seconds) of collectives: the shortest of each kind and size, because longer ones include
    waiting."""
    best: dict[tuple[str, int], float] = {}
    for rank in measured["ranks"]:
        for known in rank.values():
            for kind, size, seconds in known["verified"].get("window", {}).get("collectives", []):
                best[kind, size] = min(best.get((kind, size), seconds), seconds)
    return [(kind, size, seconds) for (kind, size), seconds in best.items()]


def _tokens_per_s(row: ComparisonRow) -> float:
    return row.figures["tokens_per_s"]["median"] if row.figures else 0.0


def _alike(one: Json, other: Json) -> bool:
    """Return whether the ranges of two speeds overlap."""
    a, b = one["tokens_per_s"], other["tokens_per_s"]
    return a["max"] >= b["min"] and b["max"] >= a["min"]


def _fastest_here(measured: Json, ranked: list[ComparisonRow]) -> str:
    first = ranked[0]
    assert first.figures is not None
    here = (
        f"{measured['world_size']} ranks on {measured['nodes']} node{'s' * (measured['nodes'] > 1)} "
        f"({measured['device']})"
    )
    speed = first.figures["tokens_per_s"]
    text = (
        f"Fastest on {here}: {first.strategy} with {speed['median']:,.0f} tokens/s [{speed['min']:,.0f} to "
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


def _predictions(
    measured: Json, good: list[ComparisonRow], found: CommunicationModel, errors: dict[str, float]
) -> list[Prediction]:
    out: list[Prediction] = []
    if found.residual > MAX_MODEL_ERROR:
        return out
    for row in good:
        if row.figures is None or errors[row.strategy] > MAX_MODEL_ERROR:
            continue
        repeats = measured["ranks"][0][row.strategy]["repeats"]
        tokens = median(sum(r["tokens"]) / max(len(r["tokens"]), 1) for r in repeats)
        for world in PREDICTED_WORLD_SIZES:
            if world > measured["world_size"]:
                step_s, speed = predict_step_time(row.figures, found, tokens, measured["world_size"], world)
                out.append(
                    Prediction(
                        strategy=row.strategy,
                        ranks=world,
                        step_time_s=step_s,
                        tokens_per_s=speed,
                        error=errors[row.strategy],
                    )
                )
    return out


def _outlook(found: CommunicationModel, predicted: list[Prediction], errors: dict[str, float]) -> list[str]:
    bandwidth = f"{1 / found.beta_s / 1e9:.2f} GB/s" if found.beta_s > 0 else "no measurable time per byte"
    text = [
        f"Communication model, fitted to {found.points} sizes of collectives: {found.alpha_s * 1e6:.0f} us per "
        f"message, {bandwidth}; its error is {found.residual:.0%} (root mean square)."
    ]
    if found.residual > MAX_MODEL_ERROR:
        return [
            *text,
            f"Nothing is predicted for more ranks, because this error is above {MAX_MODEL_ERROR:.0%}: the collectives "
            "did not take a constant time per message and per byte, as on a machine with other work or with more "
            "ranks than cores.",
        ]
    missed = [f"{name} ({_percent(error)})" for name, error in errors.items() if error > MAX_MODEL_ERROR]
    if missed:
        text.append(
            f"Not predicted, because the model misses the measured step time by more than {MAX_MODEL_ERROR:.0%}: "
            f"{', '.join(missed)}."
        )
    if not predicted:
        return text
    said: dict[str, list[str]] = {}
    for world in sorted({p.ranks for p in predicted}):
        said.setdefault(_fastest([p for p in predicted if p.ranks == world], found), []).append(f"{world:,}")
    turns = [f"on {', '.join(worlds)} ranks {who}" for who, worlds in said.items()]
    text.append(f"Predicted, not measured (same links, same batch per rank): {'; '.join(turns)}.")
    return text


def _percent(error: float) -> str:
    return (
        f"by {error:.0%}"
        if error < 10
        else "its profile is inconsistent"
        if error == float("inf")
        else "by more than 1000%"
    )


def _fastest(predicted: list[Prediction], found: CommunicationModel) -> str:
    """Return the strategy with the best prediction on some number of ranks, and those within the error of the model."""
    slack = max(0.05, found.residual, *(p.error for p in predicted))
    here = sorted(predicted, key=lambda p: -p.tokens_per_s)
    close = [p.strategy for p in here if p.tokens_per_s >= (1 - slack) * here[0].tokens_per_s]
    if len(close) == len(here) > 1:
        return "no strategy is clearly faster"
    return close[0] + (f" (within {slack:.0%}: {', '.join(close[1:])})" if close[1:] else "")


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

    The measured step is kept, and the modelled growth of its exposed communication from `measured` to `world` ranks is
    added. More ranks are never predicted to make a step shorter, so speed grows at most in proportion to the ranks.
    """
    growth = communication_time_s(figures["collectives"], found, world) - communication_time_s(
        figures["collectives"], found, measured
    )
    step_s = figures["step_time_s"]["median"] + (1.0 - (figures["overlap"] or 0.0)) * max(growth, 0.0)
    return step_s, world * tokens_per_rank_step / step_s
