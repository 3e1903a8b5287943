"""Profilers that started at different times: who started first seems to wait for the others, in the first step only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allranks.trace.averages import median
from allranks.trace.clocks import Clock
from allranks.trace.names import SYNCHRONISING
from allranks.trace.pairing import Pair
from allranks.trace.rank import RankResult
from allranks.trace.records import StartupTrim
from allranks.trace.steps import US, breakdown, total

OF_STEP = 0.05  # a skew below this share of a step is not worth trimming
OF_LATER = 3.0  # nor one that later steps show too: then ranks differ, not profilers


def trim_startup(
    ranks: Mapping[int, RankResult], pairs: Sequence[Pair], clocks: Mapping[int, Clock]
) -> StartupTrim | None:
    """Begins each rank's first step where a collective first made the ranks level, if their profilers started apart. Changes the results.

    The waiting of all collectives of that step is left out of waiting and stragglers too: a rank that is behind stays so until the step's end.
    """
    shared = [r for r in ranks if ranks[r].steps and clocks[r].pairs]
    if len(shared) < 2:
        return None
    skew = _spread(ranks, clocks, shared, 0)
    if not _is_startup(ranks, clocks, shared, skew):
        return None
    step = ranks[shared[0]].steps[0].number
    late = max(shared, key=lambda r: clocks[r].common(ranks[r].steps[0].start))
    firsts = _first_level(pairs, shared, step, late)
    if not firsts:
        return None
    removed, fake = {}, {}
    for rank in shared:
        p = firsts[rank]
        fake[rank] = p.waits()[rank] * US
        removed[rank] = _begin_at(ranks[rank], p.members[rank].end) * US
    for p in pairs:
        p.startup = p.first.step == step
    where = firsts[late]
    return StartupTrim(
        skew_s=skew * US,
        until=f"the end of the first {where.first.kind} in step {step} ({where.key})",
        removed_s=removed,
        fake_wait_s=fake,
    )


def _spread(ranks: Mapping[int, RankResult], clocks: Mapping[int, Clock], shared: Sequence[int], step: int) -> float:
    starts = [clocks[r].common(ranks[r].steps[step].start) for r in shared]
    return max(starts) - min(starts)


def _is_startup(
    ranks: Mapping[int, RankResult], clocks: Mapping[int, Clock], shared: Sequence[int], skew: float
) -> bool:
    if len({ranks[r].steps[0].number for r in shared}) > 1:
        return False
    shortest = min(len(ranks[r].steps) for r in shared)
    later = [_spread(ranks, clocks, shared, n) for n in range(1, shortest)]
    lengths = [s.end - s.start for r in shared for s in ranks[r].steps[1:] or ranks[r].steps]
    return skew > OF_STEP * median(lengths) and skew > OF_LATER * (median(later) if later else 0.0)


def _first_level(pairs: Sequence[Pair], shared: Sequence[int], step: int, late: int) -> dict[int, Pair]:
    """By rank the first collective that it shares with the latest starter, else the first it shares with anyone; {} if one has none."""
    firsts: dict[int, Pair] = {}
    usable = [p for p in pairs if p.first.step == step and p.first.kind in SYNCHRONISING]
    for wanted in (True, False):
        for p in usable:
            if wanted and late not in p.members:
                continue
            for rank in p.members:
                firsts.setdefault(rank, p)
    return firsts if all(r in firsts for r in shared) else {}


def _begin_at(result: RankResult, t: float) -> float:
    """Moves the begin of a rank's first step; returns what was removed."""
    step = result.steps[0]
    t = min(max(t, step.start), step.end)
    removed = t - step.start
    step.start = t
    result.start = t
    result.by_step[0] = breakdown(result.first, step.start, step.end)
    result.busy = result.busy.within(step.start, result.end)
    result.total = total(result.by_step)
    return removed
