"""Rows of collectives: by kind, by size, by the place of their launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from allranks.trace.averages import mean
from allranks.trace.names import bus_factor
from allranks.trace.pairing import Pair, Paired
from allranks.trace.rank import RankResult
from allranks.trace.rank_collectives import Collective
from allranks.trace.records import PHASES, CollectiveRow, LaunchRow
from allranks.trace.steps import US

BUCKETS = (
    (1 << 12, "<= 4 KiB"),
    (1 << 16, "<= 64 KiB"),
    (1 << 20, "<= 1 MiB"),
    (1 << 24, "<= 16 MiB"),
    (1 << 28, "<= 256 MiB"),
)


def _bucket(c: Collective) -> str | None:
    if c.bytes is None:
        return "size not told"
    return next((label for limit, label in BUCKETS if c.bytes <= limit), "> 256 MiB")


def collective_rows(paired: Paired, *, by_size: bool = False) -> tuple[CollectiveRow, ...]:
    """Rows by kind, or by kind and size."""
    pairs: dict[tuple[str, str | None], list[Pair]] = defaultdict(list)
    alone: dict[tuple[str, str | None], list[Collective]] = defaultdict(list)
    for p in paired.pairs:
        pairs[p.kind, _bucket(p.first) if by_size else None].append(p)
    for _, c in [*paired.unpaired, *paired.alone]:
        alone[c.kind, _bucket(c) if by_size else None].append(c)
    order = [label for _, label in BUCKETS] + ["> 256 MiB", "size not told", None]
    keys = sorted({*pairs, *alone}, key=lambda k: (k[0], order.index(k[1])))
    return tuple(
        _collective_row(kind, label, pairs.get((kind, label), []), alone.get((kind, label), [])) for kind, label in keys
    )


def _collective_row(kind: str, label: str | None, pairs: list[Pair], alone: list[Collective]) -> CollectiveRow:
    every = [c for p in pairs for c in p.members.values()] + alone
    durations = [c.duration for c in every]
    sizes = {c.size for c in every}
    measured = [(p.first.bytes, p.first.size, p.transfer) for p in pairs] + [
        (c.bytes, c.size, c.duration) for c in alone
    ]
    sized = [(b, n, t) for b, n, t in measured if b is not None and t > 0]
    time, bus = sum(t for _, _, t in sized), [(b * bus_factor(kind, n), t) for b, n, t in sized if n]
    known = [c.bytes for c in every if c.bytes is not None]
    transfer = sum(p.transfer * len(p.members) for p in pairs)
    moved = sum(b for b, _, _ in sized)
    return CollectiveRow(
        kind=kind,
        group_size=next(iter(sizes)) if len(sizes) == 1 else None,
        size_bucket=label,
        count=len(every),
        bytes=sum(known) if known else None,
        total_s=sum(durations) * US,
        transfer_s=transfer * US if pairs else None,
        wait_s=sum(c.duration - p.transfer for p in pairs for c in p.members.values() if not p.startup) * US
        if pairs
        else None,
        mean_s=mean(durations) * US,
        max_s=max(durations) * US,
        algbw_bytes_s=moved / (time * US) if moved else None,
        busbw_bytes_s=sum(b for b, _ in bus) / (sum(t for _, t in bus) * US) if bus and moved else None,
    )


def launch_rows(ranks: Mapping[int, RankResult]) -> tuple[LaunchRow, ...]:
    """Rows by rank, step, kind, and the phase of the launch."""
    rows: dict[tuple[int, int | None, str, int], list[Collective]] = defaultdict(list)
    for rank, result in ranks.items():
        for c in result.collectives:
            rows[rank, c.step, c.kind, c.phase].append(c)
    return tuple(
        LaunchRow(
            rank=rank,
            step=step,
            kind=kind,
            phase=PHASES[phase],
            count=len(found),
            bytes=None if any(c.bytes is None for c in found) else sum(c.bytes or 0 for c in found),
            time_s=sum(c.duration for c in found) * US,
        )
        for (rank, step, kind, phase), found in sorted(
            rows.items(), key=lambda i: (i[0][0], i[0][1] or 0, i[0][2], i[0][3])
        )
    )
