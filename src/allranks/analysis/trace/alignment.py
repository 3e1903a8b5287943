"""Match collectives across ranks, align the clocks of the ranks and correct for profilers that started at different
times.

Collectives are matched by communicator and sequence number, otherwise by order. Paired collectives end at the same time
on all ranks, which gives the common clock. If profilers started at different times, the first one seems to wait for the
others, but only in the first step.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from allranks.analysis.trace.collectives import Collective
from allranks.analysis.trace.events import POINT_TO_POINT, SYNCHRONISING
from allranks.analysis.trace.intervals import median
from allranks.analysis.trace.rank import RankResult
from allranks.analysis.trace.records import Problem, StartupTrim
from allranks.analysis.trace.steps import SECONDS_PER_US, compute_breakdown, sum_breakdowns
from allranks.utils.text import format_bytes

MAX_SHOWN_MISMATCHES = 10  # mismatches listed individually
# ranks may split an all-to-all unevenly; with a larger ratio, matching by order has paired two different ones
MAX_SIZE_RATIO = 8.0
Key = tuple[object, ...]


class CollectivePair(Struct):
    """One collective on several ranks."""

    key: str
    by_sequence: bool
    members: dict[int, Collective]
    startup: bool = False  # its wait is caused by a profiler that started later

    @property
    def first(self) -> Collective:
        return next(iter(self.members.values()))

    @property
    def kind(self) -> str:
        """Return the collective's kind; a send and its receive count as one."""
        kinds = {c.kind for c in self.members.values()}
        return kinds.pop() if len(kinds) == 1 else "send_recv"

    @property
    def transfer(self) -> float:
        """Return the shortest duration, which is the time after all ranks have arrived. Needs no common clock."""
        return min(c.duration for c in self.members.values())

    def waits(self) -> dict[int, float]:
        transfer = self.transfer
        return {r: c.duration - transfer for r, c in self.members.items()}


class PairingResult(Struct):
    """The result of pairing."""

    pairs: list[CollectivePair]
    unpaired: list[tuple[int, Collective]]  # found on one rank only, although others that were read should have them
    alone: list[tuple[int, Collective]]  # their group has no other rank that was read
    problems: list[Problem]


def pair_collectives(ranks: Mapping[int, RankResult]) -> PairingResult:
    """Pair the collectives of all ranks that were read."""
    pairing = PairingResult([], [], [], [])
    numbered: dict[Key, dict[int, Collective]] = defaultdict(dict)
    ordered: dict[int, list[Collective]] = {r: [] for r in ranks}
    for rank, result in ranks.items():
        seen: Counter[Key] = Counter()
        for c in result.collectives:
            if c.kind in ("send", "recv") and c.source is None and len(ranks) > 2:
                pairing.alone.append((rank, c))  # the peer is unknown
                continue
            if c.group is None or c.seq is None:
                ordered[rank].append(c)
                continue
            key = (c.group, _route(c), c.seq)
            numbered[*key, seen[key]][rank] = c
            seen[key] += 1
    for members in numbered.values():
        first = next(iter(members.values()))
        _keep(pairing, f"seq {first.seq}", True, members, _expected(first, ranks))
    _pair_by_order(pairing, ordered, all(result.steps for result in ranks.values()))
    pairing.pairs.sort(key=lambda p: p.first.start)
    return pairing


def _route(c: Collective) -> Key:
    """Return what a collective has in common with its match: the two ranks of a send, else the kind."""
    return ("p2p", c.source, c.target) if c.kind in POINT_TO_POINT else (c.kind,)


def _expected(c: Collective, ranks: Mapping[int, object]) -> list[int]:
    """Return the ranks that were read and should have this collective."""
    if c.kind in POINT_TO_POINT and c.source is not None and c.target is not None:
        return [r for r in (c.source, c.target) if r in ranks]
    if c.members is not None:
        return [r for r in c.members if r in ranks]
    return list(ranks) if c.size is None or c.size >= len(ranks) else []


def _keep(
    pairing: PairingResult, key: str, by_sequence: bool, members: dict[int, Collective], expected: Sequence[int]
) -> None:
    if len(members) > 1:
        pairing.pairs.append(CollectivePair(key, by_sequence, members))
        return
    ((rank, only),) = members.items()
    (pairing.unpaired if len(expected) > 1 else pairing.alone).append((rank, only))


def _pair_by_order(pairing: PairingResult, ordered: dict[int, list[Collective]], by_step: bool) -> None:
    """Pair the n-th collective of one kind, size and group of a step with the n-th on the other ranks."""
    rows: dict[Key, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, collectives in ordered.items():
        for c in collectives:
            rows[c.step if by_step else None, c.group, _route(c), _common_bytes(c)][rank].append(c)
    steps = [c.step for pairing in ordered.values() for c in pairing if c.step is not None]
    for members in rows.values():
        first = next(iter(members.values()))[0]
        expected = _expected(first, ordered)
        counts = {r: len(members.get(r, ())) for r in expected}
        # without a size it may belong to a group without the others
        if len(set(counts.values())) > 1 and first.size is not None and len(pairing.problems) < MAX_SHOWN_MISMATCHES:
            pairing.problems.append(_count_problem(first, counts))
        # a profiler that started within a step missed its start: align from the end
        from_end = first.step is None or first.step == min(steps, default=None)
        for n, group in _rows_of(members, from_end):
            if _sizes_differ(group):
                pairing.unpaired += list(group.items())
            else:
                _keep(pairing, f"{_order_name(first)}, number {n + 1}", False, group, expected)


def _common_bytes(c: Collective) -> int | None:
    """Return the size that a collective has on all ranks; None if it is unknown or may differ between them."""
    return None if c.uneven and c.kind not in POINT_TO_POINT else c.bytes


def _rows_of(members: dict[int, list[Collective]], from_end: bool) -> list[tuple[int, dict[int, Collective]]]:
    longest = max(len(m) for m in members.values())
    out = []
    for n in range(longest):
        group = {}
        for rank, mine in members.items():
            at = n - (longest - len(mine)) if from_end else n
            if 0 <= at < len(mine):
                group[rank] = mine[at]
        out.append((n, group))
    return out


def _sizes_differ(group: Mapping[int, Collective]) -> bool:
    sizes = [c.bytes for c in group.values() if c.bytes is not None]
    return len(sizes) > 1 and max(sizes) > MAX_SIZE_RATIO * max(min(sizes), 1)


def _count_problem(first: Collective, counts: dict[int, int]) -> Problem:
    usual = Counter(counts.values()).most_common(1)[0][0]
    odd = ", ".join(f"rank {r} has {n}" for r, n in sorted(counts.items()) if n != usual)
    text = f"{_order_name(first)}: {odd}, the others have {usual}; some may be matched wrongly"
    return Problem("warning", "missing_collective", text)


def _order_name(c: Collective) -> str:
    where = f"step {c.step}, " if c.step is not None else ""
    each = "" if (size := _common_bytes(c)) is None else f" of {format_bytes(size, digits=4)}"
    return f"{where}{c.kind}{each}"


class RankClock(Struct):
    """A rank's clock relative to the common one, which is that of the lowest rank. Microseconds."""

    base: float  # added to `ts`, so that all ranks count from the same wall-clock time
    offset: float = 0.0  # then subtracted
    pairs: int = 0
    spread: float | None = None

    def common(self, t: float) -> float:
        """Convert the file's `ts` to the common clock."""
        return t + self.base - self.offset


def align_clocks(ranks: Mapping[int, RankResult], pairs: Sequence[CollectivePair]) -> dict[int, RankClock]:
    """Return offsets from the median difference of end times; ranks without common ones keep their clock."""
    reference = min(ranks)
    bases = {r: result.base_ns for r, result in ranks.items()}
    known = all(bases.values()) or not any(bases.values())
    clocks = {r: RankClock((bases[r] - bases[reference]) / 1000 if known else 0.0) for r in ranks}
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


def _common_ends(
    pairs: Sequence[CollectivePair], clocks: Mapping[int, RankClock]
) -> dict[tuple[int, int], list[float]]:
    """Return differences of end times by pair of ranks; a collective links its lowest rank to its others."""
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


MIN_SKEW_PER_STEP = 0.05  # a skew below this share of a step is not trimmed
MIN_SKEW_PER_LATER_SKEW = 3.0  # nor one that later steps show too: then the ranks differ, not the profilers


def trim_startup(
    ranks: Mapping[int, RankResult], pairs: Sequence[CollectivePair], clocks: Mapping[int, RankClock]
) -> StartupTrim | None:
    """Start each rank's first step at the first synchronising collective, if profilers started at different times.

    Changes the results. Waiting in that step's collectives is not counted: a late rank stays late until the step ends.
    """
    shared = [r for r in ranks if ranks[r].steps and clocks[r].pairs]
    if len(shared) < 2 or len({ranks[r].steps[0].number for r in shared}) > 1:
        return None
    starts = [[clocks[r].common(s.start) for s in ranks[r].steps] for r in shared]
    skew, *later = [max(of_step) - min(of_step) for of_step in zip(*starts, strict=False)]
    lengths = [s.end - s.start for r in shared for s in ranks[r].steps[1:] or ranks[r].steps]
    if skew <= max(MIN_SKEW_PER_STEP * median(lengths), MIN_SKEW_PER_LATER_SKEW * median(later or [0.0])):
        return None
    step = ranks[shared[0]].steps[0].number
    late = max(shared, key=lambda r: clocks[r].common(ranks[r].steps[0].start))
    firsts = _first_synchronising(pairs, shared, step, late)
    if not firsts:
        return None
    removed, fake = {}, {}
    for rank in shared:
        p = firsts[rank]
        fake[rank] = p.waits()[rank] * SECONDS_PER_US
        removed[rank] = _trim_first_step(ranks[rank], p.members[rank].end) * SECONDS_PER_US
    for p in pairs:
        p.startup = p.first.step == step
    where = firsts[late]
    return StartupTrim(
        skew_s=skew * SECONDS_PER_US,
        until=f"the end of the first {where.first.kind} in step {step} ({where.key})",
        removed_s=removed,
        fake_wait_s=fake,
    )


def _first_synchronising(
    pairs: Sequence[CollectivePair], shared: Sequence[int], step: int, late: int
) -> dict[int, CollectivePair]:
    """Return by rank the first collective, if possible with the latest starter; {} if a rank has none."""
    firsts: dict[int, CollectivePair] = {}
    usable = [p for p in pairs if p.first.step == step and p.first.kind in SYNCHRONISING]
    for p in sorted(usable, key=lambda p: late not in p.members):
        for rank in p.members:
            firsts.setdefault(rank, p)
    return firsts if all(r in firsts for r in shared) else {}


def _trim_first_step(result: RankResult, t: float) -> float:
    """Move the start of a rank's first step; return the removed time."""
    step = result.steps[0]
    t = min(max(t, step.start), step.end)
    removed = t - step.start
    step.start = t
    result.start = t
    result.by_step[0] = compute_breakdown(result.first, step.start, step.end)
    result.total = sum_breakdowns(result.by_step)
    return removed
