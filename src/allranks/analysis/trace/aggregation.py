"""Build the report of a run from the results of its ranks.

Collectives are summed by kind, size and launch location, and paired across ranks to find waits and last ranks; kernels,
and operators are summed over ranks; times use a clock common to all ranks. Problems report damaged files, missing ranks
and clocks that could not be aligned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import structs

from allranks.analysis.trace import records
from allranks.analysis.trace.activity import KIND_NAMES, TimeTotals
from allranks.analysis.trace.alignment import (
    CollectivePair,
    PairingResult,
    RankClock,
    align_clocks,
    pair_collectives,
    trim_startup,
)
from allranks.analysis.trace.collectives import Collective
from allranks.analysis.trace.events import bus_factor
from allranks.analysis.trace.files import TraceSet
from allranks.analysis.trace.intervals import mean
from allranks.analysis.trace.rank import RankResult, UnreadableTrace
from allranks.analysis.trace.steps import SECONDS_PER_US
from allranks.utils.text import format_list

SIZE_BUCKETS = (
    (1 << 12, "<= 4 KiB"), (1 << 16, "<= 64 KiB"), (1 << 20, "<= 1 MiB"), (1 << 24, "<= 16 MiB"),
    (1 << 28, "<= 256 MiB"),
)  # fmt: skip


def _size_bucket(c: Collective) -> str | None:
    if c.bytes is None:
        return "size not told"
    return next((label for limit, label in SIZE_BUCKETS if c.bytes <= limit), "> 256 MiB")


def collective_rows(paired: PairingResult, *, by_size: bool = False) -> tuple[records.CollectiveRow, ...]:
    """Return rows by kind, or by kind and size."""
    pairs: dict[tuple[str, str | None], list[CollectivePair]] = defaultdict(list)
    alone: dict[tuple[str, str | None], list[Collective]] = defaultdict(list)
    for p in paired.pairs:
        pairs[p.kind, _size_bucket(p.first) if by_size else None].append(p)
    for _, c in [*paired.unpaired, *paired.alone]:
        alone[c.kind, _size_bucket(c) if by_size else None].append(c)
    order = [label for _, label in SIZE_BUCKETS] + ["> 256 MiB", "size not told", None]
    keys = sorted({*pairs, *alone}, key=lambda k: (k[0], order.index(k[1])))
    return tuple(
        _collective_row(kind, label, pairs.get((kind, label), []), alone.get((kind, label), [])) for kind, label in keys
    )


def _collective_row(
    kind: str, label: str | None, pairs: list[CollectivePair], alone: list[Collective]
) -> records.CollectiveRow:
    every = [c for p in pairs for c in p.members.values()] + alone
    durations = [c.duration for c in every]
    sizes = {c.size for c in every}
    measured = [(p.first.bytes, p.first.size, p.transfer) for p in pairs] + [
        (c.bytes, c.size, c.duration) for c in alone
    ]
    sized = [(b, n, t) for b, n, t in measured if b is not None and t > 0]
    time, bus = sum(t for _, _, t in sized), [(b * bus_factor(kind, n), t) for b, n, t in sized if n]
    known = [c.bytes for c in every if c.bytes is not None]
    distinct = sorted(set(known))
    transfer = sum(p.transfer * len(p.members) for p in pairs)
    moved = sum(b for b, _, _ in sized)
    return records.CollectiveRow(
        kind=kind,
        group_size=next(iter(sizes)) if len(sizes) == 1 else None,
        size_bucket=label,
        count=len(every),
        bytes=sum(known) if known else None,
        distinct_bytes=tuple(distinct if len(distinct) <= records.MAX_DISTINCT_SIZES else (distinct[0], distinct[-1])),
        n_distinct=len(distinct),
        total_s=sum(durations) * SECONDS_PER_US,
        transfer_s=transfer * SECONDS_PER_US if pairs else None,
        wait_s=sum(c.duration - p.transfer for p in pairs for c in p.members.values() if not p.startup) * SECONDS_PER_US
        if pairs
        else None,
        mean_s=mean(durations) * SECONDS_PER_US,
        max_s=max(durations) * SECONDS_PER_US,
        algbw_bytes_s=moved / (time * SECONDS_PER_US) if moved else None,
        busbw_bytes_s=sum(b for b, _ in bus) / (sum(t for _, t in bus) * SECONDS_PER_US) if bus and moved else None,
    )


def launch_rows(ranks: Mapping[int, RankResult]) -> tuple[records.LaunchRow, ...]:
    """Return rows by rank, step, kind, and the phase of the launch."""
    rows: dict[tuple[int, int | None, str, int], list[Collective]] = defaultdict(list)
    for rank, result in ranks.items():
        for c in result.collectives:
            rows[rank, c.step, c.kind, c.phase].append(c)
    return tuple(
        records.LaunchRow(
            rank=rank,
            step=step,
            kind=kind,
            phase=records.PHASES[phase],
            count=len(launches),
            bytes=None if any(c.bytes is None for c in launches) else sum(c.bytes or 0 for c in launches),
            time_s=sum(c.duration for c in launches) * SECONDS_PER_US,
        )
        for (rank, step, kind, phase), launches in sorted(
            rows.items(), key=lambda i: (i[0][0], i[0][1] or 0, i[0][2], i[0][3])
        )
    )


MAX_SHOWN_PAIRS = 50
TIED_US = 0.5  # ranks that arrive within this time count as simultaneous


def pairing_report(paired: PairingResult, clocks: Mapping[int, RankClock], zero: float) -> records.Pairing:
    """Summarize all pairs, and list the `SHOWN_PAIRS` with the longest waits; ``zero``: time 0 of the common clock."""
    pairs = paired.pairs
    real = [p for p in pairs if not p.startup]
    longest = sorted(pairs, key=lambda p: -sum(p.waits().values()))[:MAX_SHOWN_PAIRS]
    return records.Pairing(
        paired=len(pairs),
        by_sequence=sum(p.by_sequence for p in pairs),
        by_order=sum(not p.by_sequence for p in pairs),
        unpaired=len(paired.unpaired),
        transfer_s=sum(p.transfer * len(p.members) for p in real) * SECONDS_PER_US,
        wait_s=sum(w for p in real for w in p.waits().values()) * SECONDS_PER_US,
        longest=tuple(_pair_report(p, clocks, zero) for p in longest),
    )


def _pair_report(p: CollectivePair, clocks: Mapping[int, RankClock], zero: float) -> records.PairReport:
    ranks = sorted(p.members)
    waits = p.waits()
    return records.PairReport(
        kind=p.kind,
        group=p.first.group or "",
        key=p.key,
        step=p.first.step,
        bytes=p.first.bytes,
        transfer_s=p.transfer * SECONDS_PER_US,
        last_rank=min(ranks, key=lambda r: waits[r]),
        ranks=tuple(ranks),
        wait_s=tuple(waits[r] * SECONDS_PER_US for r in ranks),
        start_s=tuple((clocks[r].common(p.members[r].start) - zero) * SECONDS_PER_US for r in ranks),
        end_s=tuple((clocks[r].common(p.members[r].end) - zero) * SECONDS_PER_US for r in ranks),
    )


def straggler_rows(
    pairs: Iterable[CollectivePair], ranks: Mapping[int, RankResult]
) -> tuple[records.StragglerRow, ...]:
    """Return which ranks arrived last, and how long the first one waited for them. A tie has no last rank."""
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
        records.StragglerRow(
            rank=r,
            pairs=len(waited[r]),
            last=len(late[r]),
            last_share=len(late[r]) / len(waited[r]),
            wait_s=sum(waited[r]) * SECONDS_PER_US,
            caused_wait_s=sum(late[r]) * SECONDS_PER_US,
            mean_late_s=mean(late[r]) * SECONDS_PER_US if late[r] else 0.0,
            max_late_s=max(late[r], default=0.0) * SECONDS_PER_US,
        )
        for r in sorted(ranks)
        if waited[r]
    ]
    return tuple(sorted(rows, key=lambda row: -row.caused_wait_s))


def file_problems(rank: int, result: RankResult) -> list[records.Problem]:
    """Return the problems with the trace of one rank."""
    problems = list(result.remarks)
    if result.skipped:
        text = f"has {result.skipped} events that could not be parsed completely; the other parts are used"
        problems.insert(0, ("warning", "damaged_events", text))
    if result.damage:
        text = (
            f"is truncated or damaged: {result.damage}. The figures use the {result.n_events} events before that "
            "position"
        )
        problems.insert(0, ("warning", "truncated", text))
    return [records.Problem(severity, kind, text, result.path, rank) for severity, kind, text in problems]


def report_problems(
    ranks: Mapping[int, RankResult], clocks: Mapping[int, RankClock], missing: tuple[int, ...], world: int | None
) -> Iterator[records.Problem]:
    """Yield what limits the figures of all ranks together."""
    alone = [r for r, c in clocks.items() if not c.pairs]
    if len(ranks) > 1 and alone:
        text = f"the clocks of ranks {format_list(alone, 8)} could not be aligned: no collective in common"
        yield records.Problem("warning", "not_aligned", text)
    if missing:
        text = (
            f"{len(ranks)} of {world} ranks were read; missing: {format_list(missing, 8)}. "
            "If a missing rank arrived last, waiting time is counted as transfer"
        )
        yield records.Problem("warning" if len(ranks) > 1 else "note", "missing_ranks", text)
    if without := sum(c.bytes is None for r in ranks.values() for c in r.collectives):
        text = f"{without} collectives have no size and are not in bytes and bandwidths (use record_shapes=True)"
        yield records.Problem("note", "no_sizes", text)


def rank_report(rank: int, result: RankResult, clock: RankClock, zero: float, trimmed: bool) -> records.RankReport:
    """Build the report of a rank; ``zero``: time 0 of the common clock; ``trimmed``: the first step was cut."""

    def at(t: float) -> float:
        return (clock.common(t) - zero) * SECONDS_PER_US

    steps = tuple(
        records.StepReport(
            step=s.number,
            start_s=at(s.start),
            end_s=at(s.end),
            trimmed=trimmed and i == 0 and clock.pairs > 0,
            breakdown=result.by_step[i],
            phases=tuple(result.phases[i]),
        )
        for i, s in enumerate(result.steps)
    )
    return records.RankReport(
        rank=rank,
        path=result.path,
        file_bytes=result.file_bytes,
        n_events=result.n_events,
        device=result.device,  # type: ignore[arg-type]
        device_name=result.device_name,
        world_size=result.world_size,
        backend=result.backend,
        whole=result.damage is None and result.skipped == 0,
        base_time_ns=result.base_ns,
        clock_offset_s=clock.offset * SECONDS_PER_US,
        clock_pairs=clock.pairs,
        clock_spread_s=clock.spread * SECONDS_PER_US if clock.spread is not None else None,
        zero_us=zero - clock.base + clock.offset,
        start_s=at(result.start),
        end_s=at(result.end),
        total=result.total,
        steps=steps,
        phases=_sum_phases(result.phases),
        memory=tuple(structs.replace(m, points=tuple((at(t), size) for t, size in m.points)) for m in result.memory),
    )


def _sum_phases(rows: Sequence[Sequence[records.PhaseRow]]) -> tuple[records.PhaseRow, ...]:
    return tuple(
        records.PhaseRow(
            phase=name, **{part: sum(getattr(r[i], part) for r in rows) for part in ("host_s", "busy_s", "comm_s")}
        )
        for i, name in enumerate(records.PHASES)
    )


MAX_TOP_ROWS = 50


def top_rows(parts: Iterable[TimeTotals]) -> tuple[records.TopRow, ...]:
    """Return the `SHOWN_TOPS` names with the most time."""
    rows: dict[str, list[float]] = {}
    for part in parts:
        for name, (count, time, longest, kind) in part.items():
            row = rows.setdefault(name, [0, 0.0, 0.0, kind])
            row[0] += count
            row[1] += time
            row[2] = max(row[2], longest)
    whole = sum(row[1] for row in rows.values()) or 1.0
    ranked = sorted(rows.items(), key=lambda item: -item[1][1])[:MAX_TOP_ROWS]
    return tuple(
        records.TopRow(
            name=name,
            kind=KIND_NAMES[int(kind)],  # type: ignore[arg-type]
            count=int(count),
            total_s=time * SECONDS_PER_US,
            mean_s=time / count * SECONDS_PER_US,
            max_s=longest * SECONDS_PER_US,
            share=time / whole,
        )
        for name, (count, time, longest, kind) in ranked
    )


GPU_DEFINITION = (
    "Compute: kernels except communication, all streams merged. Communication: NCCL, RCCL and similar kernels. Copies: "
    "memcpy and memset. Synchronisation events and annotations are not counted as work."
)
CPU_DEFINITION = (
    "Compute: outermost operators on all threads except gloo's; a node that may contain a blocking hook counts with "
    "its own time only while no communication runs. Communication: gloo's spans (they include waiting for other ranks) "
    "and operators that wait for a collective."
)


def build_report(
    trace_set: TraceSet, results: Sequence[tuple[int, RankResult | UnreadableTrace]]
) -> records.TraceReport | None:
    """Return the report of one run or window; None if none of its files could be read."""
    problems = list(trace_set.problems)
    ranks: dict[int, RankResult] = {}
    for rank, result in results:
        if isinstance(result, UnreadableTrace):
            problems.append(records.Problem("error", result.kind, result.message, result.path, rank))
        else:
            ranks[rank] = result
            problems += file_problems(rank, result)
    if not ranks:
        return None
    paired = pair_collectives(ranks)
    clocks = align_clocks(ranks, paired.pairs)
    problems += paired.problems
    startup = trim_startup(ranks, paired.pairs, clocks)
    if startup is not None:
        text = (
            f"the ranks' profilers started up to {startup.skew_s * 1e3:.3f} ms apart; step times start after "
            f"{startup.until}"
        )
        problems.append(records.Problem("note", "startup_skew", text))
    world = max((r.world_size for r in ranks.values() if r.world_size), default=trace_set.world)
    missing = tuple(r for r in range(world) if r not in ranks) if world else ()
    problems += report_problems(ranks, clocks, missing, world)
    zero = min(clocks[r].common(result.start) for r, result in ranks.items())
    device = "gpu" if any(r.device == "gpu" for r in ranks.values()) else "cpu"
    return records.TraceReport(
        name=trace_set.name,
        path=str(trace_set.path),
        window=trace_set.window,
        device=device,
        backend=next((r.backend for r in ranks.values() if r.backend), None),
        world_size=world,
        missing_ranks=missing,
        definition=GPU_DEFINITION if device == "gpu" else CPU_DEFINITION,
        ranks=tuple(rank_report(r, ranks[r], clocks[r], zero, startup is not None) for r in sorted(ranks)),
        collectives=collective_rows(paired),
        sizes=collective_rows(paired, by_size=True),
        launches=launch_rows(ranks),
        pairing=pairing_report(paired, clocks, zero),
        stragglers=straggler_rows(paired.pairs, ranks),
        startup=startup,
        top_kernels=top_rows([r.kernels for r in ranks.values()]),
        top_operators=top_rows([r.operators for r in ranks.values()]),
        problems=tuple(problems),
    )
