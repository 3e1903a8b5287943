"""From the results of ranks to the report of a run."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.trace.clocks import align
from allranks.trace.files import TraceSet
from allranks.trace.pairing import pair
from allranks.trace.rank import RankResult, Unreadable
from allranks.trace.records import Problem, TraceReport
from allranks.trace.report_collectives import collective_rows, launch_rows
from allranks.trace.report_pairs import pairing_report, straggler_rows
from allranks.trace.report_problems import about_clocks, about_file, about_missing, about_sizes, about_steps
from allranks.trace.report_rank import rank_report
from allranks.trace.report_tops import module_rows, top_rows
from allranks.trace.startup import trim_startup

ON_GPU = (
    "Compute: kernels that are not communication, all streams merged. Communication: NCCL, RCCL and like kernels. Copies: memcpy and memset. "
    "Synchronisation events and annotations are no work."
)
ON_CPU = (
    "Compute: outermost operators on all threads but gloo's; a node that can hold a blocking hook counts by its own time only while no "
    "communication runs. Communication: gloo's spans (they include waiting for other ranks) and operators that wait for a collective."
)


def build_report(found: TraceSet, results: Sequence[tuple[int, RankResult | Unreadable]]) -> TraceReport | None:
    """The report of one run or window; None if none of its files could be read."""
    problems = list(found.problems)
    ranks: dict[int, RankResult] = {}
    for rank, result in results:
        if isinstance(result, Unreadable):
            problems.append(
                Problem(severity="error", kind=result.kind, message=result.message, file=result.path, rank=rank)
            )
        else:
            ranks[rank] = result
            problems += about_file(rank, result)
    if not ranks:
        return None
    paired = pair(ranks)
    clocks = align(ranks, paired.pairs)
    problems += paired.problems + about_clocks(ranks, clocks)
    startup = trim_startup(ranks, paired.pairs, clocks)
    if startup is not None:
        text = f"the ranks' profilers started up to {startup.skew_s * 1e3:.3f} ms apart; step times now begin after {startup.until}"
        problems.append(Problem(severity="note", kind="startup_skew", message=text))
    world = max((r.world_size for r in ranks.values() if r.world_size), default=found.world)
    missing = tuple(r for r in range(world) if r not in ranks) if world else ()
    problems += about_steps(ranks)
    problems += about_missing(missing, world, len(ranks)) + about_sizes(ranks)
    zero = min(clocks[r].common(result.start) for r, result in ranks.items())
    device = "gpu" if any(r.device == "gpu" for r in ranks.values()) else "cpu"
    return TraceReport(
        name=found.name,
        path=str(found.path),
        window=found.window,
        device=device,
        backend=next((r.backend for r in ranks.values() if r.backend), None),
        world_size=world,
        missing_ranks=missing,
        definition=ON_GPU if device == "gpu" else ON_CPU,
        ranks=tuple(rank_report(r, ranks[r], clocks[r], zero, startup is not None) for r in sorted(ranks)),
        collectives=collective_rows(paired),
        sizes=collective_rows(paired, by_size=True),
        launches=launch_rows(ranks),
        pairing=pairing_report(paired, clocks, zero),
        stragglers=straggler_rows(paired.pairs, ranks),
        startup=startup,
        top_kernels=top_rows([r.kernels for r in ranks.values()]),
        top_operators=top_rows([r.operators for r in ranks.values()]),
        modules=module_rows(ranks),
        problems=tuple(problems),
    )
