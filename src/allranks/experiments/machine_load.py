"""Judge which measurements of a comparison an overloaded machine has disturbed, and say so with the evidence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from allranks.utils.cpu_load import CpuUse, MachineLoad, describe_load, judge_machine

Json = dict[str, Any]


def _worst(loads: Sequence[Json | None]) -> MachineLoad | None:
    """Return the load of the host that lost the largest share, from the records of all ranks; None if a record is missing."""
    hosts: dict[str, list[CpuUse]] = {}
    for load in loads:
        try:
            hosts.setdefault(str((load or {})["host"]), []).append(msgspec.convert(load, CpuUse))
        except (KeyError, msgspec.ValidationError):
            return None
    found = [judge_machine(host, uses) for host, uses in hosts.items()]
    known = [load for load in found if load.taken_share is not None]
    return max(known, key=lambda load: load.taken_share or 0.0) if known else None


def repeat_loads(measured: Json, name: str) -> list[MachineLoad | None]:
    """Return the load of the most disturbed host in each repeat of a strategy; None where it is not known."""
    ranks = [rank[name]["repeats"] for rank in measured["ranks"]]
    return [_worst([repeats[k].get("load") for repeats in ranks]) for k in range(len(ranks[0]))]


def counted_repeats(measured: Json, name: str) -> list[int]:
    """Return the numbers of the repeats that figures use: those that were not disturbed; all if there are no others."""
    loads = repeat_loads(measured, name)
    good = [k for k, load in enumerate(loads) if load is None or not load.overloaded]
    return good or list(range(len(loads)))


def load_figures(measured: Json, name: str) -> Json:
    """Return how many repeats were timed, counted and disturbed, and the largest share of CPU time that was taken.

    ``taken_share`` is None if it is not known in any repeat; ``undisturbed`` is False if all repeats were disturbed.
    """
    loads = repeat_loads(measured, name)
    shares = [load.taken_share for load in loads if load is not None and load.taken_share is not None]
    disturbed = sum(load is not None and load.overloaded for load in loads)
    return {
        "repeats": len(loads),
        "counted": len(counted_repeats(measured, name)),
        "disturbed": disturbed,
        "taken_share": max(shares) if shares else None,
        "undisturbed": disturbed < len(loads),
    }


def load_marks(measured: Json, name: str) -> list[str]:
    """Return remarks on a strategy's measurements that an overloaded machine disturbed."""
    loads, marks = repeat_loads(measured, name), []
    disturbed = [load for load in loads if load is not None and load.overloaded]
    if disturbed and len(disturbed) == len(loads):
        worst = max(disturbed, key=lambda load: load.taken_share or 0.0)
        marks.append(
            f"timed on an overloaded machine in all {len(loads)} repeats: up to {worst.taken_share:.0%} of the CPU time was taken"
        )
    elif disturbed:
        marks.append(f"{len(disturbed)} of {len(loads)} repeats are not counted: the machine was overloaded")
    verified = _worst([rank[name]["verified"].get("load") for rank in measured["ranks"]])
    if verified is not None and verified.overloaded:
        marks.append(
            f"profiled on an overloaded machine ({verified.taken_share:.0%} of the CPU time was taken): exposed communication, idle and overlap are disturbed"
        )
    return marks


def load_conclusions(measured: Json, names: Sequence[str]) -> list[str]:
    """Return sentences on the overloaded machine with their evidence; none if it was not overloaded.

    Args:
        names: the strategies with figures.
    """
    loads = {name: [load for load in repeat_loads(measured, name) if load is not None] for name in names}
    every = [load for known in loads.values() for load in known]
    disturbed = [load for load in every if load.overloaded]
    if not disturbed:
        return []
    worst = max(disturbed, key=lambda load: load.taken_share or 0.0)
    total = sum(len(repeat_loads(measured, name)) for name in names)
    text = (
        f"{worst.host} was overloaded in {len(disturbed)} of {total} timed repeats: up to {worst.taken_share:.0%} of the CPU time of the "
        f"ranks was taken ({describe_load(worst)})."
        if len({load.host for load in disturbed}) == 1
        else f"The machines were overloaded in {len(disturbed)} of {total} timed repeats: on {worst.host} up to {worst.taken_share:.0%} of the "
        f"CPU time of the ranks was taken ({describe_load(worst)})."
    )
    spoiled = [name for name in names if not load_figures(measured, name)["undisturbed"]]
    if not spoiled:
        return [f"{text} These repeats are not counted."]
    which = "All figures" if len(spoiled) == len(names) else f"The figures of {', '.join(spoiled)}"
    return [f"{text} {which} are those of an overloaded machine; repeat the comparison on an idle one."]
