"""Collectives that were paired across ranks: who waited for whom, and who came last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from allranks.trace.averages import mean
from allranks.trace.clocks import Clock
from allranks.trace.pairing import Pair, Paired
from allranks.trace.rank import RankResult
from allranks.trace.records import Pairing, PairReport, StragglerRow
from allranks.trace.steps import US

SHOWN_PAIRS = 50
TIED_US = 0.5  # two ranks that came within this much came together


def pairing_report(paired: Paired, clocks: Mapping[int, Clock], zero: float) -> Pairing:
    """All pairs in figures, and the `SHOWN_PAIRS` with the longest waits; ``zero``: the moment 0 of the common clock."""
    pairs = paired.pairs
    real = [p for p in pairs if not p.startup]
    longest = sorted(pairs, key=lambda p: -sum(p.waits().values()))[:SHOWN_PAIRS]
    return Pairing(
        paired=len(pairs),
        by_sequence=sum(p.by_sequence for p in pairs),
        by_order=sum(not p.by_sequence for p in pairs),
        unpaired=len(paired.unpaired),
        transfer_s=sum(p.transfer * len(p.members) for p in real) * US,
        wait_s=sum(w for p in real for w in p.waits().values()) * US,
        longest=tuple(_pair_report(p, clocks, zero) for p in longest),
    )


def _pair_report(p: Pair, clocks: Mapping[int, Clock], zero: float) -> PairReport:
    ranks = sorted(p.members)
    waits = p.waits()
    return PairReport(
        kind=p.kind,
        group=p.first.group or "",
        key=p.key,
        step=p.first.step,
        bytes=p.first.bytes,
        transfer_s=p.transfer * US,
        last_rank=min(ranks, key=lambda r: waits[r]),
        ranks=tuple(ranks),
        wait_s=tuple(waits[r] * US for r in ranks),
        start_s=tuple((clocks[r].common(p.members[r].start) - zero) * US for r in ranks),
        end_s=tuple((clocks[r].common(p.members[r].end) - zero) * US for r in ranks),
    )


def straggler_rows(pairs: Iterable[Pair], ranks: Mapping[int, RankResult]) -> tuple[StragglerRow, ...]:
    """Who came last, and how long the first waited for it. A tie has no last."""
    waited: dict[int, list[float]] = {r: [] for r in ranks}
    late: dict[int, list[float]] = {r: [] for r in ranks}
    for p in pairs:
        if p.startup:
            continue
        waits = p.waits()
        for rank, wait in waits.items():
            waited[rank].append(wait)
        order = sorted(waits, key=lambda r: waits[r])
        if waits[order[1]] - waits[order[0]] > TIED_US:
            late[order[0]].append(waits[order[-1]])
    rows = [
        StragglerRow(
            rank=r,
            pairs=len(waited[r]),
            last=len(late[r]),
            last_share=len(late[r]) / len(waited[r]),
            wait_s=sum(waited[r]) * US,
            caused_wait_s=sum(late[r]) * US,
            mean_late_s=mean(late[r]) * US if late[r] else 0.0,
            max_late_s=max(late[r], default=0.0) * US,
        )
        for r in sorted(ranks)
        if waited[r]
    ]
    return tuple(sorted(rows, key=lambda row: -row.caused_wait_s))
