"""Judge whether CPU time was taken from the ranks of a machine, and by whom. Pure.

What others took is bounded from both sides: it is not more than the ranks waited for a core, and not more than others used. So
neither threads of the ranks that compete with each other count, nor processes that use cores which the ranks leave idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from allranks.utils.cpu_load import CpuUse, cores_of

OVERLOADED = 0.1
"""Share of the ranks' CPU time that must have been taken for a measurement to count as disturbed. Agent and command of a run take some, too."""
COMPETING = 0.2
"""Share of the ranks' CPU time that they wait for each other from which it is reported."""
CLOCK_ERROR_S = 0.02
"""Error of the kernel's count of busy time on each core: it counts in ticks."""
MIN_SECONDS = 0.05


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the CPU time of the ranks on one host. Shares are of the CPU time that the ranks wanted.

    ``taken_share`` is None if it is not known. ``others_cores`` and ``steal_cores`` are means over the time: 2.0 means that other
    processes, or the hypervisor, used two cores all the time. ``competing_share`` is what the ranks took from each other.
    """

    host: str
    seconds: float
    cores: int
    busy_threads: int | None
    taken_share: float | None
    others_cores: float | None
    steal_cores: float | None
    competing_share: float | None
    throttled_share: float | None

    @property
    def overloaded(self) -> bool:
        """Return whether others are known to have taken CPU time."""
        return self.taken_share is not None and self.taken_share >= OVERLOADED


def judge_machine(host: str, uses: Sequence[CpuUse]) -> MachineLoad:
    """Return what happened to the ranks of a host.

    Args:
        uses: one record of each rank on that host, for about the same time. All of them: the CPU time of a rank that is left out
            counts as that of other processes.
    """
    good = [u for u in uses if _sound(u)]
    cores = frozenset[int]().union(*(cores_of(u.cores) for u in good))
    seconds = min((u.seconds for u in good), default=0.0)
    known = [u for u in good if u.queued_s is not None and u.machine_s is not None]
    if len(known) < len(uses) or not known or seconds < MIN_SECONDS:
        return _unknown(host, seconds, len(cores))
    wanted = queued = taken = others = steal = 0.0
    for group in _groups(known):
        g = _judge_group(group, known)
        queued, taken, wanted = queued + g.queued, taken + g.taken, wanted + g.wanted
        others, steal = others + g.others, steal + g.steal
    throttled = [u.throttled_s / u.seconds for u in good if u.throttled_s is not None]
    threads = [u.busy_threads for u in good if u.busy_threads is not None]
    return MachineLoad(
        host=host,
        seconds=round(seconds, 3),
        cores=len(cores),
        busy_threads=sum(threads) if len(threads) == len(good) else None,
        taken_share=round(taken / wanted, 4) if wanted > 0 else 0.0,
        others_cores=round(others, 2),
        steal_cores=round(steal, 2),
        competing_share=round(max(queued - taken, 0.0) / wanted, 4) if wanted > 0 else 0.0,
        throttled_share=round(max(throttled), 4) if throttled else None,
    )


def _sound(use: CpuUse) -> bool:
    counted = (use.queued_s, use.queued_main_s, use.machine_s, use.steal_s, use.throttled_s)
    values = (use.seconds, use.cpu_s, *(v for v in counted if v is not None))
    return use.seconds > 0 and use.core_count > 0 and all(math.isfinite(v) and v >= 0 for v in values)


def _unknown(host: str, seconds: float, cores: int) -> MachineLoad:
    return MachineLoad(
        host=host,
        seconds=round(seconds, 3),
        cores=cores,
        busy_threads=None,
        taken_share=None,
        others_cores=None,
        steal_cores=None,
        competing_share=None,
        throttled_share=None,
    )


def _groups(uses: Sequence[CpuUse]) -> list[list[CpuUse]]:
    """Return the ranks by the cores that they may use."""
    groups: dict[str, list[CpuUse]] = {}
    for use in uses:
        groups.setdefault(use.cores, []).append(use)
    return list(groups.values())


class _Group(msgspec.Struct, frozen=True):
    """Rates of the ranks of one set of cores, in CPU-seconds per second."""

    wanted: float
    queued: float
    taken: float
    others: float
    steal: float


def _judge_group(group: list[CpuUse], every: Sequence[CpuUse]) -> _Group:
    cores = cores_of(group[0].cores)
    cpu = sum(u.cpu_s / u.seconds for u in group)
    throttled = max(
        (u.throttled_s or 0.0) / u.seconds for u in group
    )  # a quota stops threads without any other process
    queued = max(sum((u.queued_s or 0.0) / u.seconds for u in group) - throttled, 0.0)
    machine = sum((u.machine_s or 0.0) / u.seconds for u in group) / len(group)
    stolen = sum((u.steal_s or 0.0) / u.seconds for u in group) / len(group)
    # Ranks with other sets of cores may have run on these, too; in doubt they did.
    near = sum(u.cpu_s / u.seconds for u in every if u.cores != group[0].cores and cores_of(u.cores) & cores)
    error = CLOCK_ERROR_S * len(cores) / min(u.seconds for u in group)
    others = max(machine - cpu - near - error, 0.0)
    steal = stolen * min(cpu / machine, 1.0) if machine > 0 else 0.0
    steal = max(steal - error, 0.0)
    return _Group(cpu + queued + steal, queued, min(queued, others) + steal, others, stolen)


def add_uses(uses: Sequence[CpuUse]) -> CpuUse | None:
    """Return the sum of consecutive records of one rank; None without records or if its cores changed."""
    if not uses or len({u.cores for u in uses}) > 1:
        return None
    first = uses[0]
    threads = [u.busy_threads for u in uses if u.busy_threads is not None]
    return CpuUse(
        seconds=sum(u.seconds for u in uses),
        cores=first.cores,
        core_count=first.core_count,
        cpu_s=sum(u.cpu_s for u in uses),
        queued_s=_sum([u.queued_s for u in uses]),
        queued_main_s=_sum([u.queued_main_s for u in uses]),
        busy_threads=max(threads) if threads else None,
        machine_s=_sum([u.machine_s for u in uses]),
        steal_s=_sum([u.steal_s for u in uses]),
        throttled_s=_sum([u.throttled_s for u in uses]),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def describe_load(load: MachineLoad) -> str:
    """Return what took the CPU time, with numbers, for the end of a sentence."""
    parts = []
    if load.others_cores is not None and load.others_cores >= 0.05:
        parts.append(f"other processes used {load.others_cores:.1f} of {load.cores} cores")
    if load.steal_cores is not None and load.steal_cores >= 0.05:
        parts.append(f"the hypervisor took {load.steal_cores:.1f} of {load.cores} cores (steal)")
    if load.competing_share is not None and load.competing_share >= COMPETING:
        threads = f"{load.busy_threads} busy threads" if load.busy_threads else "the threads"
        parts.append(f"{threads} of its ranks share {load.cores} cores")
    if load.throttled_share is not None and load.throttled_share >= OVERLOADED:
        parts.append(f"its CPU quota stopped the ranks for {load.throttled_share:.0%} of the time")
    return "; ".join(parts) or f"on {load.cores} cores"
