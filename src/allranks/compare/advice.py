"""Which strategy is best here, why, and how that would change. A few sentences from the figures. Pure."""

from __future__ import annotations

from statistics import median
from typing import Any

from allranks.compare.judge import Row
from allranks.compare.model import RANKS, Fit, fit, predict
from allranks.report.text import bytes_text

Json = dict[str, Any]


def points(measured: Json) -> list[tuple[str, float, float]]:
    """(kind, bytes, seconds) of collectives: the shortest of each kind and size, since the rest of a duration is waiting."""
    best: dict[tuple[str, int], float] = {}
    for rank in measured["ranks"]:
        for known in rank.values():
            for kind, size, seconds in known["verified"].get("window", {}).get("collectives", []):
                best[kind, size] = min(best.get((kind, size), seconds), seconds)
    return [(kind, size, seconds) for (kind, size), seconds in best.items()]


def advise(measured: Json, rows: list[Row]) -> tuple[list[str], Fit | None, list[Json]]:
    """Sentences, the fitted model, and predictions by strategy and number of ranks."""
    good = [r for r in rows if r.figures]
    if not good:
        return ["No strategy passed its gates: there is nothing to choose from."], None, []
    found = fit(points(measured), measured["world_size"])
    ranked = sorted(good, key=_rate, reverse=True)
    text = [_best(measured, ranked), *_memory(ranked)]
    predicted = _predictions(measured, good, found) if found else []
    if found:
        text += _outlook(found, predicted)
    return text, found, predicted


def _rate(row: Row) -> float:
    return row.figures["tokens_per_s"]["median"] if row.figures else 0.0


def _best(measured: Json, ranked: list[Row]) -> str:
    first = ranked[0]
    assert first.figures is not None
    here = f"{measured['world_size']} ranks on {measured['nodes']} node{'s' * (measured['nodes'] > 1)} ({measured['device']})"
    alike = [
        r.strategy
        for r in ranked[1:]
        if r.figures and r.figures["tokens_per_s"]["max"] >= first.figures["tokens_per_s"]["min"]
    ]
    overlap = first.figures["overlap"]
    why = f"{first.figures['exposed_comm_s'] / first.figures['step_time_s']['median']:.0%} of its step is communication that nothing hides"
    if overlap:
        why += f", {overlap:.0%} of its communication is hidden"
    text = f"Fastest on {here}: {first.strategy} with {_rate(first):,.0f} tokens/s; {why}."
    if alike:
        text += f" Not told apart from it by this measurement: {', '.join(alike)}."
    return text


def _memory(ranked: list[Row]) -> list[str]:
    least = min(ranked, key=lambda r: r.figures["memory"]["peak_bytes"] if r.figures else 0)
    first = ranked[0]
    if least is first or not least.figures or not first.figures:
        return []
    slower = 1 - _rate(least) / _rate(first)
    return [
        f"Least memory: {least.strategy}, peak {bytes_text(least.figures['memory']['peak_bytes'])} against "
        f"{bytes_text(first.figures['memory']['peak_bytes'])} of {first.strategy}, {slower:.0%} slower here. Its savings grow with "
        "weights and optimizer state; activations are the same for all."
    ]


def _predictions(measured: Json, good: list[Row], found: Fit) -> list[Json]:
    out = []
    for row in good:
        assert row.figures is not None
        repeats = measured["ranks"][0][row.strategy]["repeats"]
        tokens = median(sum(r["tokens"]) / max(len(r["tokens"]), 1) for r in repeats)
        out += [{"strategy": row.strategy, **predict(row.figures, found, tokens, world)} for world in RANKS]
    return out


def _outlook(found: Fit, predicted: list[Json]) -> list[str]:
    bandwidth = f"{1 / found.beta_s / 1e9:.2f} GB/s" if found.beta_s > 0 else "no measurable time a byte"
    text = [
        f"Model of communication, fitted to {found.points} sizes of collectives: {found.alpha_s * 1e6:.0f} us a message, {bandwidth}; "
        f"it misses what was measured by {found.residual:.0%} (root mean square)."
    ]
    said: dict[str, list[str]] = {}
    for world in RANKS:
        said.setdefault(_fastest([p for p in predicted if p["ranks"] == world], found), []).append(f"{world:,}")
    turns = [f"on {', '.join(worlds)} ranks {who}" for who, worlds in said.items()]
    text.append(
        f"Predicted, not measured (same links, same batch a rank): {'; '.join(turns)}. A larger model moves all lines alike, since bytes and "
        "computation grow together; more ranks with the same bytes a rank cost messages, which favours few large buckets; slower "
        "links favour strategies that send less (data parallelism, ZeRO 1 and 2 without accumulation) over ZeRO 3."
    )
    return text


def _fastest(predicted: list[Json], found: Fit) -> str:
    """Who is predicted to be fastest on some number of ranks, and whom the model, with its error, cannot tell from it."""
    slack = max(0.05, found.residual)
    here = sorted(predicted, key=lambda p: -p["tokens_per_s"])
    close = [p["strategy"] for p in here if p["tokens_per_s"] >= (1 - slack) * here[0]["tokens_per_s"]]
    if len(close) == len(here) > 1:
        return "no strategy stands out"
    return close[0] + (f" (within {slack:.0%}: {', '.join(close[1:])})" if close[1:] else "")
