"""Find ranks that are always slower than the others in their own work. Pure: uses step events only.

With synchronous training, every rank's step takes as long as that of the slowest rank, so step times show nothing. ``own_s`` of
a step event is the time before the rank had to wait: data and forward passes, without waits inside them;
``own_backward_s`` is the same for backward passes, if it can be measured (see `allranks.train.step_timers`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import msgspec

SLOW_FACTOR = 1.4  # relative to the median of the other ranks
WINDOW_STEPS = 20  # number of logged steps used
MIN_SLOW_SHARE = 0.8  # share of them that must be slow
MIN_STEP_SHARE = 0.05  # share of a step; a shorter wait is not significant
MIN_DIFFERENCE_S = 0.001
WARMUP_STEPS = 5
OWN, BACKWARD = "own_s", "own_backward_s"
MEASURE_NAMES = {OWN: "own work (data and forward)", BACKWARD: "backward passes"}
Events = list[dict[str, Any]]
Times = dict[int, list[float]]


class RankPace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of one rank: the median of its own time per step, and its ratio to the median of the other ranks.

    The same for its backward passes, or None if they cannot be measured.
    """

    rank: int
    host: str | None
    own_s: float
    relative: float
    backward_s: float | None = None
    backward_relative: float | None = None
    slow: bool
    slow_in: tuple[str, ...] = ()

    @property
    def most(self) -> float:
        """Return the larger of both ratios."""
        return max(self.relative, self.backward_relative or 0.0)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of all ranks, slowest first. ``factor`` is the ratio from which a rank is reported as slow."""

    factor: float
    steps: int
    ranks: list[RankPace]

    @property
    def slow(self) -> list[RankPace]:
        """Return the ranks reported as slow."""
        return [r for r in self.ranks if r.slow]


class _Measure(msgspec.Struct, frozen=True):
    median_s: float
    relative: float
    slow: bool


def measure_pace(own: Times, steps_s: list[float], hosts: dict[int, str], backward: Times | None = None) -> Pace | None:
    """Return the ranks' pace over the same steps; None if it cannot be determined (one rank, too few steps).

    Args:
        own: each rank's own time of each step, in seconds, in the same order of steps.
        steps_s: durations of these complete steps on any rank.
        hosts: the host of each rank.
        backward: as `own`, for the backward passes.
    """
    step_s = statistics.median(steps_s) if steps_s else 0.0
    first, second = _measured(own, step_s), _measured(backward or {}, step_s)
    if first is None:
        return None
    rows = [_row(rank, hosts.get(rank), found, (second or {}).get(rank)) for rank, found in first.items()]
    count = min(len(values) for values in own.values())
    return Pace(factor=SLOW_FACTOR, steps=count, ranks=sorted(rows, key=lambda r: (-r.most, r.rank)))


def _row(rank: int, host: str | None, own: _Measure, backward: _Measure | None) -> RankPace:
    slow = [kind for kind, found in ((OWN, own), (BACKWARD, backward)) if found is not None and found.slow]
    return RankPace(
        rank=rank,
        host=host,
        own_s=round(own.median_s, 6),
        relative=round(own.relative, 3),
        backward_s=round(backward.median_s, 6) if backward else None,
        backward_relative=round(backward.relative, 3) if backward else None,
        slow=bool(slow),
        slow_in=tuple(slow),
    )


def _measured(times: Times, step_s: float) -> dict[int, _Measure] | None:
    count = min((len(values) for values in times.values()), default=0)
    if len(times) < 2 or count < WINDOW_STEPS:
        return None
    taken = {rank: values[-count:] for rank, values in times.items()}
    middle = {rank: statistics.median(values) for rank, values in taken.items()}
    found = {}
    for rank in taken:
        usual = _median_of_others(middle, rank)
        relative = middle[rank] / usual if usual > 0 else 1.0
        wide = middle[rank] - usual >= max(MIN_DIFFERENCE_S, MIN_STEP_SHARE * step_s)
        found[rank] = _Measure(middle[rank], relative, relative >= SLOW_FACTOR and wide and _steady(taken, rank, count))
    return found


def _median_of_others(values: dict[int, float], rank: int) -> float:
    return statistics.median([v for r, v in values.items() if r != rank])


def _steady(taken: Times, rank: int, count: int) -> bool:
    """Return whether a rank is slow in nearly all of these steps."""
    slow = sum(
        taken[rank][i] >= SLOW_FACTOR * _median_of_others({r: v[i] for r, v in taken.items()}, rank)
        for i in range(count)
    )
    return slow >= MIN_SLOW_SHARE * count


def straggler_message(found: RankPace) -> str:
    """Return the message for the user."""
    where = f" on {found.host}" if found.host else ""
    ratios = {OWN: found.relative, BACKWARD: found.backward_relative or 0.0}
    kind = max(found.slow_in or (OWN,), key=lambda k: ratios[k])
    verb = "takes" if kind == OWN else "take"
    return (
        f"rank {found.rank}{where} is slow: its {MEASURE_NAMES[kind]} {verb} {ratios[kind]:.1f} times the median of the others "
        f"in the last {WINDOW_STEPS} steps; the others wait for it"
    )


class StragglerDetector:
    """Read the events of all ranks during a run, and report each slow rank once."""

    def __init__(self) -> None:
        self._last: dict[int, deque[dict[str, Any]]] = {}
        self._hosts: dict[int, str] = {}
        self._size = 0
        self._named: set[int] = set()

    def take(self, event: dict[str, Any]) -> list[str]:
        """Process one event; return the messages that result."""
        kind, rank = event.get("event"), event.get("rank")
        if kind == "start" and isinstance(rank, int):
            self._hosts[rank] = str(event.get("host") or "")
            size = event.get("world_size")
            self._size = size if isinstance(size, int) else 0
            self._last.pop(rank, None)
        if not _counts(event):
            return []
        self._last.setdefault(event["rank"], deque(maxlen=2 * WINDOW_STEPS)).append(event)
        return self._look() if len(self._last) == self._size else []

    def _look(self) -> list[str]:
        common = set.intersection(*({e["step"] for e in events} for events in self._last.values()))
        last = sorted(common)[-WINDOW_STEPS:]
        if len(last) < WINDOW_STEPS or last[-1] % 5:  # checked every few steps only
            return []
        pace = _pace(
            {rank: [e for e in events if e["step"] >= last[0]] for rank, events in self._last.items()}, self._hosts
        )
        fresh = [r for r in (pace.slow if pace else []) if r.rank not in self._named]
        self._named |= {r.rank for r in fresh}
        return [straggler_message(r) for r in fresh]


def pace_of_run(ranks: dict[int, Events]) -> Pace | None:
    """Return the pace over all steps after warm-up of a run's last attempt."""
    hosts = {rank: e["host"] for rank, events in ranks.items() for e in events if e["event"] == "start" and "host" in e}
    return _pace({rank: [e for e in events if _counts(e)] for rank, events in ranks.items()}, hosts)


def _pace(ranks: dict[int, Events], hosts: dict[int, str]) -> Pace | None:
    """Return the pace from step events: each measure over the steps for which every rank reports it."""
    if len(ranks) < 2:
        return None
    first = next(iter(ranks.values()))
    return measure_pace(_times(ranks, OWN), [e["step_time_s"] for e in first], hosts, _times(ranks, BACKWARD))


def _times(ranks: dict[int, Events], kind: str) -> Times:
    told = {rank: {e["step"]: e[kind] for e in events if _number(e.get(kind))} for rank, events in ranks.items()}
    common = sorted(set.intersection(*(set(steps) for steps in told.values())))
    return {rank: [steps[s] for s in common] for rank, steps in told.items()}


def _counts(event: dict[str, Any]) -> bool:
    return (
        event.get("event") == "step"
        and isinstance(event.get("rank"), int)
        and isinstance(event.get("step"), int)
        and event["step"] > WARMUP_STEPS
        and _number(event.get(OWN))
        and _number(event.get("step_time_s"))
    )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
