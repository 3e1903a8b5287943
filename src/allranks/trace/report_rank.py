"""One rank's part of a report, its times on the clock that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.trace.clocks import Clock
from allranks.trace.rank import DRAWN_SPANS, RankResult
from allranks.trace.records import PHASES, Band, MemoryReport, PhaseRow, PhaseSpan, RankReport, StepReport
from allranks.trace.steps import US


def rank_report(rank: int, result: RankResult, clock: Clock, zero: float, trimmed: bool) -> RankReport:
    """``zero``: the moment 0 of the common clock; ``trimmed``: the first step was cut to where all profilers ran."""

    def at(t: float) -> float:
        return (clock.common(t) - zero) * US

    steps = tuple(
        StepReport(
            step=s.number,
            start_s=at(s.start),
            end_s=at(s.end),
            trimmed=trimmed and i == 0 and clock.pairs > 0,
            breakdown=result.by_step[i],
            phases=tuple(result.phases[i]),
        )
        for i, s in enumerate(result.steps)
    )
    spans = (("compute", result.busy.compute), ("comm", result.busy.comm), ("copy", result.busy.copy))
    return RankReport(
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
        clock_offset_s=clock.offset * US,
        clock_pairs=clock.pairs,
        clock_spread_s=clock.spread * US if clock.spread is not None else None,
        zero_us=zero - clock.base + clock.offset,
        start_s=at(result.start),
        end_s=at(result.end),
        total=result.total,
        steps=steps,
        phases=_sum_phases(result.phases),
        bands=tuple(Band(kind=k, spans=tuple((at(a), at(b)) for a, b in m)) for k, m in spans if m),  # type: ignore[arg-type]
        phase_spans=tuple(
            PhaseSpan(phase=PHASES[p], start_s=at(a), end_s=at(b)) for a, b, p in result.phase_segments[:DRAWN_SPANS]
        ),
        memory=tuple(
            MemoryReport(
                device=device,
                peak_bytes=peak,
                last_bytes=last,
                peak_reserved_bytes=reserved,
                n_events=n,
                points=tuple((at(t), size) for t, size in points),
            )
            for device, (peak, last, reserved, n, points) in sorted(result.memory.items())
        ),
    )


def _sum_phases(rows: Sequence[Sequence[PhaseRow]]) -> tuple[PhaseRow, ...]:
    return tuple(
        PhaseRow(
            phase=name,
            host_s=sum(r[i].host_s for r in rows),
            busy_s=sum(r[i].busy_s for r in rows),
            comm_s=sum(r[i].comm_s for r in rows),
        )
        for i, name in enumerate(PHASES)
    )
