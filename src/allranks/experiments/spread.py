"""Give every figure of a comparison its range. Pure.

Times of the timed steps vary over the repeats: each repeat counts with its median. Shares of the profiled steps vary over ranks and
steps. Bytes vary over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import msgspec

Json = dict[str, Any]
TIMED = ("step_time_s", "forward_s", "backward_s", "optimizer_s")
PROFILED = ("comm_s", "exposed_comm_s", "idle_s", "compute_s")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and the range of the values behind it: one per repeat, per rank and profiled step, or per rank."""

    value: float
    min: float
    max: float
    samples: int


def spread_of(figure: float, values: Iterable[float]) -> Spread:
    """Return the range of `values`; it includes the figure, which may be a median over more than they are."""
    found = list(values)
    return Spread(value=figure, min=min([figure, *found]), max=max([figure, *found]), samples=len(found))


def figure_spreads(figures: Json, ranks: Sequence[Json], repeats: Sequence[int], rates: Sequence[float]) -> Json:
    """Return {figure: {value, min, max, samples}} for the figures of one strategy.

    Args:
        figures: the strategy's figures, with the medians.
        ranks: what each rank measured of this strategy.
        repeats: the numbers of the repeats that count.
        rates: tokens/s of each of them.
    """
    windows = [r["verified"]["window"] for r in ranks]
    steps = [step for window in windows for step in window.get("steps") or [window]]
    found = {"tokens_per_s": spread_of(figures["tokens_per_s"]["median"], rates)}
    for part in TIMED:
        figure = figures[part]["median"] if part == "step_time_s" else figures[part]
        found[part] = spread_of(figure, [median(t for r in ranks for t in r["repeats"][k][part]) for k in repeats])
    for part in PROFILED:
        found[part] = spread_of(figures[part], [step[part] for step in steps])
    whole = figures["profiled_step_s"]
    found["profiled_step_s"] = spread_of(whole, [step["step_s"] for step in steps])
    for share, part in (("exposed_share", "exposed_comm_s"), ("idle_share", "idle_s")):
        if 0 <= figures[part] <= whole and whole > 0:  # otherwise the profile contradicts itself
            found[share] = spread_of(figures[part] / whole, _ratios(steps, lambda s, p=part: (s[p], s["step_s"])))
    if figures["overlap"] is not None:
        hidden = _ratios(steps, lambda s: (s["overlapped_comm_s"], s["comm_s"]))
        found["overlap"] = spread_of(figures["overlap"], hidden)
    for key, figure in figures["memory"].items():
        found[key] = spread_of(figure, [_bytes(r["verified"]["memory"], key) for r in ranks])
    return msgspec.to_builtins(found)


def _ratios(steps: Sequence[Json], parts: Callable[[Json], tuple[float, float]]) -> list[float]:
    return [part / whole for part, whole in map(parts, steps) if whole > 0]


def _bytes(memory: Json, key: str) -> float:
    if key == "state_bytes":
        return sum(v for k, v in memory.items() if k != "peak_bytes")
    return memory[key]


def find_spread(figures: Json, name: str) -> Spread | None:
    """Return one figure with its range; None if it is not known."""
    known = figures["spread"].get(name)
    return Spread(**known) if known is not None else None
