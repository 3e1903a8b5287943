"""What a reader of a report must know of its files: damage, missing ranks, clocks that could not be aligned."""

from __future__ import annotations

from collections.abc import Mapping

from allranks.trace.clocks import Clock
from allranks.trace.rank import RankResult
from allranks.trace.records import Problem


def about_file(rank: int, result: RankResult) -> list[Problem]:
    """What is wrong with the trace of one rank."""
    out = []
    if result.damage:
        text = f"is cut or damaged: {result.damage}. The figures are of the {result.n_events} events before that"
        out.append(Problem(severity="warning", kind="truncated", message=text, file=result.path, rank=rank))
    if result.skipped:
        text = f"holds {result.skipped} events that could not be understood whole; what could not be read of them is left out"
        out.append(Problem(severity="warning", kind="damaged_events", message=text, file=result.path, rank=rank))
    out += [
        Problem(severity=s, kind=kind, message=text, file=result.path, rank=rank) for s, kind, text in result.remarks
    ]
    if result.world_size is None and result.collectives:
        text = "tells no world size (distributedInfo); missing ranks cannot be seen"
        out.append(Problem(severity="note", kind="no_metadata", message=text, file=result.path, rank=rank))
    return out


def about_steps(ranks: Mapping[int, RankResult]) -> list[Problem]:
    """Says if the ranks' windows are of different times."""
    steps = [{s.number for s in r.steps} for r in ranks.values()]
    if len(ranks) < 2 or not all(steps) or set.intersection(*steps):
        return []
    names = "; ".join(f"rank {r}: {x.steps[0].number} to {x.steps[-1].number}" for r, x in sorted(ranks.items())[:8])
    text = f"no step is in the traces of all ranks ({names}); they may be windows of different times"
    return [Problem(severity="warning", kind="steps_differ", message=text)]


def about_missing(missing: tuple[int, ...], world: int | None, read: int) -> list[Problem]:
    """Ranks of which there is no trace."""
    if not missing or world is None:
        return []
    names = ", ".join(str(r) for r in missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    text = f"{read} of {world} ranks were read; missing: {names}. If a missing rank came last, waiting is counted as transfer"
    return [Problem(severity="warning" if read > 1 else "note", kind="missing_ranks", message=text)]


def about_sizes(ranks: Mapping[int, RankResult]) -> list[Problem]:
    """Collectives of which the traces tell no size."""
    without = sum(c.bytes is None for r in ranks.values() for c in r.collectives)
    if not without:
        return []
    text = f"{without} collectives tell no size; bytes and bandwidths leave them out (record_shapes=True or a newer PyTorch tells sizes)"
    return [Problem(severity="note", kind="no_sizes", message=text)]


def about_clocks(ranks: Mapping[int, RankResult], clocks: Mapping[int, Clock]) -> list[Problem]:
    """Ranks whose clock could not be compared with the others\'."""
    alone = [r for r, c in clocks.items() if not c.pairs]
    if len(ranks) < 2 or not alone:
        return []
    names = ", ".join(str(r) for r in alone[:8])
    text = f"the clocks of ranks {names} could not be aligned: no collective in common; their moments are those of their own clocks"
    return [Problem(severity="warning", kind="not_aligned", message=text)]
