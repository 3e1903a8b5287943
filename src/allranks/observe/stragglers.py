"""Which rank is steadily slower than the others in work of its own. Pure: step events in, names out.

With synchronous training every rank's step takes as long as that of the slowest, so steps tell nothing. ``own_s`` of a step
event is what the rank did before it had to wait for anybody: its data and its forward passes, without waiting in them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

FACTOR = 1.4  # of the median of the others
WINDOW = 20  # logged steps that are looked at
STEADY = 0.8  # of them must be slow
WORTH = 0.05  # of a step: below it nobody waits long enough to care
LEAST_S = 0.001
SKIPPED = 5  # steps of warm-up
Events = list[dict[str, Any]]


class RankPace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: the median of its own time in a step, and that relative to the median of the others."""

    rank: int
    host: str | None
    own_s: float
    relative: float
    slow: bool


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks, the slowest first. ``factor`` is the one from which on a rank is named."""

    factor: float
    steps: int
    ranks: list[RankPace]

    @property
    def slow(self) -> list[RankPace]:
        """Those that are named."""
        return [r for r in self.ranks if r.slow]


def judge(own: dict[int, list[float]], steps_s: list[float], hosts: dict[int, str]) -> Pace | None:
    """The ranks' pace over the same steps; None where it cannot be told (one rank, too few steps).

    Args:
        own: each rank's own time of each step, in seconds, in the same order of steps.
        steps_s: what these steps took as a whole, on any rank.
    """
    count = min((len(values) for values in own.values()), default=0)
    if len(own) < 2 or count < WINDOW:
        return None
    taken = {rank: values[-count:] for rank, values in own.items()}
    middle = {rank: statistics.median(values) for rank, values in taken.items()}
    step = statistics.median(steps_s) if steps_s else 0.0
    rows = []
    for rank in taken:
        usual = _median_of_others(middle, rank)
        relative = middle[rank] / usual if usual > 0 else 1.0
        wide = middle[rank] - usual >= max(LEAST_S, WORTH * step)
        slow = relative >= FACTOR and wide and _steady(taken, rank, count)
        rows.append(
            RankPace(
                rank=rank, host=hosts.get(rank), own_s=round(middle[rank], 6), relative=round(relative, 3), slow=slow
            )
        )
    return Pace(factor=FACTOR, steps=count, ranks=sorted(rows, key=lambda r: (-r.relative, r.rank)))


def _median_of_others(values: dict[int, float], rank: int) -> float:
    return statistics.median([v for r, v in values.items() if r != rank])


def _steady(taken: dict[int, list[float]], rank: int, count: int) -> bool:
    """Whether it is slow in nearly all of these steps, and not only in some."""
    slow = sum(
        taken[rank][i] >= FACTOR * _median_of_others({r: v[i] for r, v in taken.items()}, rank) for i in range(count)
    )
    return slow >= STEADY * count


def sentence(found: RankPace) -> str:
    """For a person."""
    where = f" on {found.host}" if found.host else ""
    return (
        f"rank {found.rank}{where} is slow: its own work (data and forward) takes {found.relative:.1f} times the median of the others "
        f"in the last {WINDOW} steps; they wait for it"
    )


class Stragglers:
    """Listens to the events of all ranks while a run goes on, and names a slow rank once."""

    def __init__(self) -> None:
        self._own: dict[int, deque[tuple[int, float]]] = {}
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._hosts: dict[int, str] = {}
        self._size = 0
        self._named: set[int] = set()

    def take(self, event: dict[str, Any]) -> list[str]:
        """One event; what there is to say after it."""
        kind, rank = event.get("event"), event.get("rank")
        if kind == "start" and isinstance(rank, int):
            self._hosts[rank] = str(event.get("host") or "")
            self._size = int(event.get("world_size") or 0)
            self._own.pop(rank, None)
        if kind != "step" or "own_s" not in event or event["step"] <= SKIPPED:
            return []
        self._own.setdefault(event["rank"], deque(maxlen=2 * WINDOW)).append((event["step"], event["own_s"]))
        if event["rank"] == 0:
            self._steps.append(event["step_time_s"])
        return self._look() if len(self._own) == self._size else []

    def _look(self) -> list[str]:
        common = set.intersection(*({step for step, _ in values} for values in self._own.values()))
        last = sorted(common)[-WINDOW:]
        if len(last) < WINDOW or last[-1] % 5:  # it is enough to look now and then
            return []
        own = {rank: [v for step, v in values if step in set(last)] for rank, values in self._own.items()}
        pace = judge(own, list(self._steps), self._hosts)
        fresh = [r for r in (pace.slow if pace else []) if r.rank not in self._named]
        self._named |= {r.rank for r in fresh}
        return [sentence(r) for r in fresh]


def of_run(ranks: dict[int, Events]) -> Pace | None:
    """The pace over all steps after warm-up of a run's last story (see `summary.of_last_story`)."""
    own = {rank: {e["step"]: e["own_s"] for e in _steps(events)} for rank, events in ranks.items()}
    if len(own) < 2 or not all(own.values()):
        return None
    common = sorted(set.intersection(*(set(steps) for steps in own.values())))
    hosts = {rank: e["host"] for rank, events in ranks.items() for e in events if e["event"] == "start" and "host" in e}
    first = next(iter(ranks.values()))
    return judge(
        {rank: [steps[s] for s in common] for rank, steps in own.items()},
        [e["step_time_s"] for e in _steps(first)],
        hosts,
    )


def _steps(events: Iterable[dict[str, Any]]) -> Events:
    return [
        e
        for e in events
        if e["event"] == "step"
        and e["step"] > SKIPPED
        and isinstance(e.get("own_s"), int | float)
        and isinstance(e.get("step_time_s"), int | float)
    ]
