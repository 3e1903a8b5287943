"""One clock for all ranks: paired collectives end on all of them together."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from allranks.trace.averages import median
from allranks.trace.names import SYNCHRONISING
from allranks.trace.pairing import Pair
from allranks.trace.rank import RankResult


class Clock(Struct):
    """A rank's clock against the common one, which is that of the lowest rank. Microseconds."""

    base: float  # added to `ts`, so that all ranks count from the same wall-clock moment
    offset: float = 0.0  # subtracted then
    pairs: int = 0
    spread: float | None = None

    def common(self, t: float) -> float:
        """The file's `ts` on the common clock."""
        return t + self.base - self.offset


def align(ranks: Mapping[int, RankResult], pairs: Sequence[Pair]) -> dict[int, Clock]:
    """Offsets by the median difference of ends, from rank to rank along common collectives. Ranks without any keep their own clock."""
    reference = min(ranks)
    bases = {r: result.base_ns for r, result in ranks.items()}
    known = all(bases.values()) or not any(bases.values())
    clocks = {r: Clock((bases[r] - bases[reference]) / 1000 if known else 0.0) for r in ranks}
    ends = _common_ends(pairs, clocks)
    done = {reference}
    queue = deque(done)
    while queue:
        one = queue.popleft()
        for other in sorted(ranks):
            differences = ends.get((one, other))
            if other in done or not differences:
                continue
            middle = median(differences)
            clock = clocks[other]
            clock.offset = clocks[one].offset + middle
            clock.pairs = len(differences)
            clock.spread = median(abs(d - middle) for d in differences)
            done.add(other)
            queue.append(other)
    clocks[reference].pairs = max((c.pairs for c in clocks.values()), default=0)
    return clocks


def _common_ends(pairs: Sequence[Pair], clocks: Mapping[int, Clock]) -> dict[tuple[int, int], list[float]]:
    """Differences of ends (second minus first) by pair of ranks; each collective links its lowest rank to its others."""
    out: dict[tuple[int, int], list[float]] = defaultdict(list)
    for p in pairs:
        if p.first.kind not in SYNCHRONISING:
            continue
        lowest = min(p.members)
        end = p.members[lowest].end + clocks[lowest].base
        for rank, c in p.members.items():
            if rank != lowest:
                difference = c.end + clocks[rank].base - end
                out[lowest, rank].append(difference)
                out[rank, lowest].append(-difference)
    return out
