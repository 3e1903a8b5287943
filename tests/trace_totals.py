"""Sums of a trace report's collectives by step, which tests compare with what the ranks did."""

from __future__ import annotations

from collections import defaultdict

from allranks.analysis.trace.records import Phase, Record, TraceReport


class CollectiveTotals(Record, frozen=True):
    """Collectives of one kind in one step of one rank. `bytes` is None if the size of one of them is unknown."""

    count: int
    bytes: int | None
    time_s: float


def collectives_per_step(
    report: TraceReport, rank: int, phase: Phase | None = None
) -> dict[int | None, dict[str, CollectiveTotals]]:
    """Return by step and kind the collectives that a rank launched, in one phase (`"backward"`: launched there,
    whenever it ran) or in all.

    Steps without collectives are included, empty. Without step marks the only key is None.
    """
    found = next((r for r in report.ranks if r.rank == rank), None)
    steps: list[int | None] = [s.step for s in found.steps] if found else []
    out: dict[int | None, dict[str, CollectiveTotals]] = {step: {} for step in steps or [None]}
    sums: dict[tuple[int | None, str], list[CollectiveTotals]] = defaultdict(list)
    for row in report.launches:
        if row.rank == rank and phase in (None, row.phase):
            sums[row.step, row.kind].append(CollectiveTotals(count=row.count, bytes=row.bytes, time_s=row.time_s))
    for (step, kind), rows in sums.items():
        sizes = [r.bytes for r in rows]
        out.setdefault(step, {})[kind] = CollectiveTotals(
            count=sum(r.count for r in rows),
            bytes=None if None in sizes else sum(s or 0 for s in sizes),
            time_s=sum(r.time_s for r in rows),
        )
    return out
