"""Find out from ``cpu_load`` events what happened to the ranks' CPU time: given, taken by others, or unknown. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from allranks.utils.kernel_counters import COMPETING, CpuUse, MachineLoad, add_uses, describe_load, judge_machine
from allranks.utils.text import as_dict, as_dicts, as_records

TAKEN_SHARE = 0.2
"""Share of the ranks' CPU time that must have been taken for a run to report it."""
Events = list[dict[str, Any]]


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Time per second of a rank's work that its main thread may have lost, beyond its own time without a core.

    Attributes:
        threads_share: torch's other threads had no core, and the main thread may have waited for them.
        stolen_share: the hypervisor or a CPU quota stopped it.
    """

    threads_share: float = 0.0
    stolen_share: float = 0.0

    @property
    def share(self) -> float:
        """Return the sum, at most 1."""
        return min(self.threads_share + self.stolen_share, 1.0)


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One ``cpu_load`` event: the CPU time of a rank from ``begin`` to ``end``, in seconds since the epoch."""

    begin: float
    end: float
    compute_threads: int | None
    use: CpuUse


def read_load(event: Mapping[str, Any]) -> LoadRecord | None:
    """Return a ``cpu_load`` event as a record; None if it is another event or damaged."""
    if event.get("event") != "cpu_load":
        return None
    try:
        use = msgspec.convert(event, CpuUse)
        end = msgspec.convert(event.get("time"), float)
        threads = msgspec.convert(event.get("compute_threads"), int | None)
    except msgspec.ValidationError:
        return None
    if not math.isfinite(end) or not math.isfinite(use.seconds) or use.seconds <= 0:
        return None
    return LoadRecord(begin=end - use.seconds, end=end, compute_threads=threads, use=use)


def load_records(events: Events) -> list[LoadRecord]:
    """Return the load records of a rank's last attempt."""
    begins = [i for i, e in enumerate(events) if e["event"] == "start"]
    last = events[begins[-1] :] if begins else events
    return [record for event in last if (record := read_load(event))]


def hosts_of(ranks: Mapping[int, Events]) -> dict[int, str]:
    """Return the host of each rank in its last attempt."""
    return {rank: e["host"] for rank, events in ranks.items() for e in events if e["event"] == "start" and "host" in e}


def records_during(records: Sequence[LoadRecord], begin: float, end: float) -> list[LoadRecord]:
    """Return the records that overlap with a time."""
    return [r for r in records if r.begin < end and r.end > begin]


def lost_time(records: Sequence[LoadRecord]) -> Lost:
    """Return what a rank may have lost beside its main thread's own time without a core; nothing if not known."""
    use = add_uses([r.use for r in records])
    if use is None:
        return Lost()
    threads = stolen = 0.0
    several = any(r.compute_threads is None or r.compute_threads > 1 for r in records)
    if several and use.queued_s is not None and use.queued_main_s is not None:
        threads = max(use.queued_s - use.queued_main_s, 0.0) / use.seconds
    if use.steal_s and use.machine_s is not None:
        stolen += use.steal_s / (use.steal_s + use.machine_s)
    if use.throttled_s:
        stolen += use.throttled_s / use.seconds
    return Lost(threads_share=threads, stolen_share=stolen)


def load_of_hosts(ranks: Mapping[int, Sequence[LoadRecord]], hosts: Mapping[int, str]) -> list[MachineLoad]:
    """Return the load of each host whose ranks all have records, by name."""
    of_host: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        of_host.setdefault(host, []).append(rank)
    loads = []
    for host, members in sorted(of_host.items()):
        uses = [add_uses([r.use for r in ranks.get(rank, ())]) for rank in members]
        known = [u for u in uses if u is not None]
        if len(known) == len(members):
            threads = [r.compute_threads for rank in members for r in ranks.get(rank, ()) if r.compute_threads]
            loads.append(
                msgspec.structs.replace(judge_machine(host, known), compute_threads=max(threads, default=None))
            )
    return loads


def loads_of_run(ranks: Mapping[int, Events]) -> list[MachineLoad]:
    """Return the load of each host over all training steps of a run's last attempt."""
    return load_of_hosts({rank: load_records(events) for rank, events in ranks.items()}, hosts_of(ranks))


def machine_message(load: MachineLoad, differs: bool) -> str | None:
    """Return the message for the user; None if the machine needs none.

    Args:
        differs: whether a rank on this host seems to be slow only because it had no core.
    """
    because = describe_load(load)
    not_slow = "; no rank is called slow for it" if differs else ""
    if load.taken_share is not None and (load.taken_share >= TAKEN_SHARE or (differs and load.overloaded)):
        return (
            f"{load.host} is overloaded: {load.taken_share:.0%} of the CPU time of its ranks was taken "
            f"({because}){not_slow}"
        )
    if load.competing_share is not None and load.competing_share >= COMPETING and differs:
        fewer_threads = "" if load.compute_threads == 1 else ", or a smaller OMP_NUM_THREADS"
        return (
            f"the ranks on {load.host} compete for its cores: {load.competing_share:.0%} of the CPU time that they "
            f"want goes to each other ({because}){not_slow}. Use fewer ranks per node{fewer_threads}"
        )
    return None


def machine_notes(metrics: Mapping[str, Any]) -> list[str]:
    """Return the messages for the machines of metrics.json; damaged records are left out."""
    ranks = as_dicts(as_dict(metrics.get("own_time")).get("ranks"))
    differing = {str(r.get("host")) for r in ranks if r.get("reason") == "machine"}
    loads = as_records(metrics.get("machine_load"), MachineLoad)
    return [text for load in loads if (text := machine_message(load, load.host in differing))]
