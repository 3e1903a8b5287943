"""The answer, read off the schedule. Time is painted into bit sets, one bit a microsecond: slow, plain, and no interval
arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from tests.tracegen.schedule import Collective, Scenario, StepOf, Timeline

BYTES = 4  # float32


@dataclass(frozen=True)
class StepTruth:
    """Microseconds of one rank's step; together compute, exposed_comm, memcpy_alone and idle make ``duration``."""

    start: int
    duration: int
    compute: int
    comm: int
    exposed_comm: int
    overlapped_comm: int
    memcpy: int
    memcpy_alone: int  # neither under compute nor under communication
    idle: int
    parts: dict[str, int]

    @property
    def overlap(self) -> float:
        """Share of communication that compute hides."""
        return self.overlapped_comm / self.comm


@dataclass(frozen=True)
class CollectiveTruth:
    """One collective; bandwidths in bytes per second. ``waits`` only of ranks that have it in their trace."""

    step: int
    group: str
    key: int
    kind: str
    part: str
    size_bytes: int
    transfer: int
    algbw: float
    busbw: float
    waits: dict[int, int]
    last_rank: int | None  # None where several came last together


@dataclass(frozen=True)
class Truth:
    """All that the analysis should find."""

    ranks: tuple[int, ...]
    steps: dict[tuple[int, int], StepTruth]  # (rank, step)
    collectives: tuple[CollectiveTruth, ...]
    offset_us: dict[int, int]  # against the first rank that is there

    def total(self, rank: int, field: str) -> int:
        """A field summed over the steps of a rank."""
        return sum(getattr(step, field) for (r, _), step in self.steps.items() if r == rank)


def answer(s: Scenario, timeline: Timeline) -> Truth:
    """Every figure of every rank that has a file."""
    ranks = tuple(r for r in range(s.world) if r not in s.absent)
    steps = {
        (r, n): _step(s, r, step, [c for c in timeline.collectives if c.step == n])
        for n, row in enumerate(timeline.steps)
        for r, step in enumerate(row)
        if r in ranks
    }
    first = s.offset_us.get(ranks[0], 0)
    return Truth(
        ranks=ranks,
        steps=steps,
        collectives=tuple(_collective(s, c, ranks) for c in timeline.collectives),
        offset_us={r: s.offset_us.get(r, 0) - first for r in ranks},
    )


def has(s: Scenario, rank: int, c: Collective) -> bool:
    """Whether a rank's trace shows the collective."""
    return (rank, c.step, c.index) != s.dropped


def _step(s: Scenario, rank: int, step: StepOf, collectives: list[Collective]) -> StepTruth:
    compute = comm = memcpy = 0
    for p in step.pieces:
        paint = _paint(step, p.start, p.end)
        compute |= paint if p.what == "compute" else 0
        memcpy |= paint if p.what == "memcpy" else 0
    for c in collectives:
        if has(s, rank, c):
            comm |= _paint(step, c.members[rank].arrived, c.members[rank].end)
    duration = step.end - step.start
    return StepTruth(
        start=step.start,
        duration=duration,
        compute=compute.bit_count(),
        comm=comm.bit_count(),
        exposed_comm=(comm & ~compute).bit_count(),
        overlapped_comm=(comm & compute).bit_count(),
        memcpy=memcpy.bit_count(),
        memcpy_alone=(memcpy & ~compute & ~comm).bit_count(),
        idle=duration - (compute | comm | memcpy).bit_count(),
        parts={name: end - start for name, (start, end) in step.parts.items()},
    )


def _paint(step: StepOf, start: int, end: int) -> int:
    return ((1 << (end - start)) - 1) << (start - step.start)


def _collective(s: Scenario, c: Collective, ranks: tuple[int, ...]) -> CollectiveTruth:
    size = c.elements * BYTES
    seconds = c.transfer / 1e6
    # what a ring sends a rank: NVIDIA nccl-tests, doc/PERFORMANCE.md
    factor = {"all_reduce": 2 * (s.world - 1) / s.world, "broadcast": 1.0}.get(c.kind, (s.world - 1) / s.world)
    there = {r: c.members[r].arrived for r in ranks if has(s, r, c)}
    order = sorted(there.values())
    last = [r for r, at in there.items() if at == order[-1]]
    return CollectiveTruth(
        step=c.step,
        group=c.group,
        key=c.key,
        kind=c.kind,
        part=c.part,
        size_bytes=size,
        transfer=c.transfer,
        algbw=size / seconds,
        busbw=size / seconds * factor,
        waits={r: c.members[r].end - c.transfer - at for r, at in there.items()},
        last_rank=last[0] if len(last) == 1 else None,
    )
