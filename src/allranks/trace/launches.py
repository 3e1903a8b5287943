"""Which collectives ran in each step, and where they were launched: what a comparison of strategies asks."""

from __future__ import annotations

from collections import defaultdict

from allranks.trace.records import Phase, Record, TraceReport


class Launched(Record, frozen=True):
    """Collectives of one kind in one step of one rank. `bytes` is None if one of them tells no size."""

    count: int
    bytes: int | None
    time_s: float


def by_place(report: TraceReport) -> tuple[dict[tuple[str, Phase], list[float]], bool, int]:
    """Sums of (count, bytes, seconds) by kind and phase over ranks and steps; whether all sizes are told; ranks times steps."""
    sums: dict[tuple[str, Phase], list[float]] = {}
    for r in report.launches:
        row = sums.setdefault((r.kind, r.phase), [0, 0, 0.0])
        row[0] += r.count
        row[1] += r.bytes or 0
        row[2] += r.time_s
    told = all(r.bytes is not None for r in report.launches)
    return sums, told, sum(max(len(r.steps), 1) for r in report.ranks)


def per_step(report: TraceReport, rank: int, phase: Phase | None = None) -> dict[int | None, dict[str, Launched]]:
    """By step and kind what a rank launched, in one phase (`"backward"`: launched there, wherever it ran then) or in all.

    Steps in which it launched nothing are there too, empty. Without step marks the only key is None.
    """
    found = report.rank(rank)
    steps: list[int | None] = [s.step for s in found.steps] if found else []
    out: dict[int | None, dict[str, Launched]] = {step: {} for step in steps or [None]}
    sums: dict[tuple[int | None, str], list[Launched]] = defaultdict(list)
    for row in report.launches:
        if row.rank == rank and phase in (None, row.phase):
            sums[row.step, row.kind].append(Launched(count=row.count, bytes=row.bytes, time_s=row.time_s))
    for (step, kind), rows in sums.items():
        sizes = [r.bytes for r in rows]
        out.setdefault(step, {})[kind] = Launched(
            count=sum(r.count for r in rows),
            bytes=None if None in sizes else sum(s or 0 for s in sizes),
            time_s=sum(r.time_s for r in rows),
        )
    return out
