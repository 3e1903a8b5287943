"""Find ranks that are always slower than the others in their own work, and slow or lossy links between hosts. Pure:
uses the events of the ranks only.

With synchronous training, every rank's step takes as long as that of the slowest rank, so step times show nothing.
``own_s`` of a step event is the time before the rank had to wait: data and forward passes, without waits inside them;
``own_backward_s`` and ``own_optimizer_s`` are the same for backward passes and optimizer, if they can be measured (see
`allranks.train.step_timers`). ``own_queued_s`` etc. is the part of each in which the rank had no core.

A rank is slow if it differs from the others without the time that was taken from it. If that time explains the
difference, the machine is the reason, not the rank.

Links are judged by the TCP counters in ``links`` events. Only the kernel's own evidence counts: segments that had to be
sent again, and the time per byte that data was on its way, without the time in which the receiver did not read. Links
that use no TCP (InfiniBand, shared memory) are not known.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from allranks.analysis.machine_load import (
    LoadRecord,
    Lost,
    hosts_of,
    load_of_hosts,
    load_records,
    lost_time,
    machine_message,
    read_load,
    records_during,
)
from allranks.rundir.events import WARMUP_STEPS
from allranks.utils.kernel_counters import LinkCounters
from allranks.utils.text import as_records

SLOW_FACTOR = 1.4  # relative to the median of the other ranks
WINDOW_STEPS = 20  # number of logged steps used
MIN_SLOW_SHARE = 0.8  # share of them that must be slow
MIN_STEP_SHARE = 0.05  # share of a step; a shorter wait is not significant
MIN_DIFFERENCE_S = 0.001
CLOCK_ERROR_S = 0.002
OWN, BACKWARD, OPTIMIZER = "own_s", "own_backward_s", "own_optimizer_s"
MEASURE_NAMES = {OWN: "own work (data and forward)", BACKWARD: "backward passes", OPTIMIZER: "optimizer"}
QUEUED = {OWN: "own_queued_s", BACKWARD: "own_backward_queued_s", OPTIMIZER: "own_optimizer_queued_s"}
Events = list[dict[str, Any]]
Times = dict[int, list[float]]
Reason = Literal["own", "machine", "unknown"]
"""Why a rank differs: its own work; the machine, which took its CPU time; or it is unknown if CPU time was taken."""
LOAD_RECORDS = 200
MAX_LINKS_REPORTED = 3


class RankPace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of one rank: the median of its own time per step, and its ratio to the median of the other ranks.

    The same for backward passes and optimizer, or None if they cannot be measured. ``queued_share``: the part of all of
    them in which it had no core. ``slow_in``: the measures in which it is slow. ``reason``: None if it does not differ.
    """

    rank: int
    host: str | None
    own_s: float
    relative: float
    backward_s: float | None = None
    backward_relative: float | None = None
    optimizer_s: float | None = None
    optimizer_relative: float | None = None
    queued_share: float | None = None
    slow: bool
    slow_in: tuple[str, ...] = ()
    reason: Reason | None = None

    @property
    def ratios(self) -> dict[str, float]:
        """Return the ratio of each measure."""
        known = {OWN: self.relative, BACKWARD: self.backward_relative, OPTIMIZER: self.optimizer_relative}
        return {kind: ratio for kind, ratio in known.items() if ratio is not None}


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The pace of all ranks, slowest first. ``factor`` is the ratio from which a rank is reported as slow."""

    factor: float
    steps: int
    ranks: list[RankPace]

    @property
    def slow(self) -> list[RankPace]:
        """Return the ranks reported as slow."""
        return [r for r in self.ranks if r.slow]


class _Measure(msgspec.Struct, frozen=True):
    """One measure of one rank. Sums over all steps: ``queued_s`` (None if not known), ``spent_s`` (whole measure)."""

    median_s: float
    relative: float
    spent_s: float
    queued_s: float | None
    differs: bool
    slow: bool


def measure_pace(
    times: Mapping[str, Times],
    steps_s: list[float],
    hosts: Mapping[int, str],
    queued: Mapping[str, Times] | None = None,
    lost: Mapping[int, Lost] | None = None,
) -> Pace | None:
    """Return the ranks' pace over the same steps; None if it cannot be determined (one rank, too few steps).

    Args:
        times: for each measure, each rank's own time of each step, in seconds, in the same order of steps. `OWN` is
        needed.
        steps_s: durations of these complete steps on any rank.
        hosts: the host of each rank.
        queued: the part of `times` in which the rank had no core; without it the reason of a difference is not known.
        lost: what a rank may have lost beyond that.
    """
    step_s = statistics.median(steps_s) if steps_s else 0.0
    measures = {
        kind: _measured(times.get(kind, {}), (queued or {}).get(kind, {}), step_s, lost or {}) for kind in MEASURE_NAMES
    }
    if not measures[OWN]:
        return None
    rows = [_row(rank, hosts.get(rank), {k: f[rank] for k, f in measures.items() if f}) for rank in measures[OWN]]
    count = min(len(values) for values in times[OWN].values())
    return Pace(factor=SLOW_FACTOR, steps=count, ranks=sorted(rows, key=lambda r: (-max(r.ratios.values()), r.rank)))


def _row(rank: int, host: str | None, measures: dict[str, _Measure]) -> RankPace:
    known = [m for m in measures.values() if m.queued_s is not None]
    spent = sum(m.spent_s for m in known)
    times: dict[str, Any] = {}
    for kind, part in ((OWN, ""), (BACKWARD, "backward_"), (OPTIMIZER, "optimizer_")):
        if measure := measures.get(kind):
            times[f"{part or 'own_'}s"] = round(measure.median_s, 6)
            times[f"{part}relative"] = round(measure.relative, 3)
    slow = tuple(kind for kind, measure in measures.items() if measure.slow)
    return RankPace(
        rank=rank,
        host=host,
        **times,
        queued_share=round(min(sum(m.queued_s or 0.0 for m in known) / spent, 1.0), 4) if spent > 0 else None,
        slow=bool(slow),
        slow_in=slow,
        reason=_reason(measures),
    )


def _reason(measures: dict[str, _Measure]) -> Reason | None:
    slow = [m for m in measures.values() if m.slow]
    if slow:
        return "unknown" if any(m.queued_s is None for m in slow) else "own"
    return "machine" if any(m.differs for m in measures.values()) else None


def _measured(times: Times, queued: Times, step_s: float, lost: Mapping[int, Lost]) -> dict[int, _Measure]:
    count = min((len(values) for values in times.values()), default=0)
    if len(times) < 2 or count < WINDOW_STEPS:
        return {}
    wall = {rank: values[-count:] for rank, values in times.items()}
    known = queued.keys() == times.keys() and all(_agree(times[rank], values) for rank, values in queued.items())
    taken = {rank: queued[rank][-count:] if known else [0.0] * count for rank in wall}
    work = {rank: [max(w - q, 0.0) for w, q in zip(wall[rank], taken[rank], strict=True)] for rank in wall}
    least = {rank: [v * (1 - lost[rank].share) for v in work[rank]] if rank in lost else work[rank] for rank in work}
    medians = {rank: statistics.median(values) for rank, values in work.items()}
    measures = {}
    for rank, values in wall.items():
        usual = statistics.median([median for other, median in medians.items() if other != rank])
        measures[rank] = _Measure(
            median_s=statistics.median(values),
            relative=medians[rank] / usual if usual > 0 else 1.0,
            spent_s=sum(values),
            queued_s=sum(taken[rank]) if known else None,
            differs=_differs(values, {r: v for r, v in wall.items() if r != rank}, step_s),
            slow=_differs(least[rank], {r: v for r, v in work.items() if r != rank}, step_s),
        )
    return measures


def _agree(times: list[float], queued: list[float]) -> bool:
    """Return whether the time without a core is known for each step, and less than its time."""
    return len(times) == len(queued) and all(0 <= q <= t + CLOCK_ERROR_S for t, q in zip(times, queued, strict=True))


def _differs(own: list[float], others: Times, step_s: float) -> bool:
    """Return whether a rank takes longer than the others, by a significant time, and in nearly all of these steps."""
    middle, usual = statistics.median(own), statistics.median([statistics.median(v) for v in others.values()])
    if middle < SLOW_FACTOR * usual or middle - usual < max(MIN_DIFFERENCE_S, MIN_STEP_SHARE * step_s):
        return False
    slow = sum(t >= SLOW_FACTOR * statistics.median([v[i] for v in others.values()]) for i, t in enumerate(own))
    return slow >= MIN_SLOW_SHARE * len(own)


def straggler_message(pace: RankPace) -> str:
    """Return the message for the user."""
    where = f" on {pace.host}" if pace.host else ""
    ratios = pace.ratios
    kind = max(pace.slow_in or (OWN,), key=lambda k: ratios.get(k, 0.0))
    verb = "take" if kind == BACKWARD else "takes"
    text = (
        f"rank {pace.rank}{where} is slow: its {MEASURE_NAMES[kind]} {verb} {ratios.get(kind, 0.0):.1f} times the "
        f"median of the others in the last {WINDOW_STEPS} steps; the others wait for it"
    )
    if pace.reason == "unknown":
        text += ". It is not known whether its CPU time was taken by other processes (no /proc/<pid>/schedstat)"
    return text


def pace_of_run(ranks: dict[int, Events]) -> Pace | None:
    """Return the pace over all steps after warm-up of a run's last attempt."""
    hosts = hosts_of(ranks)
    lost = {rank: lost_time(load_records(events)) for rank, events in ranks.items()}
    return pace_of_steps({rank: [e for e in events if counts(e)] for rank, events in ranks.items()}, hosts, lost)


def pace_of_steps(ranks: dict[int, Events], hosts: Mapping[int, str], lost: Mapping[int, Lost]) -> Pace | None:
    """Return the pace from step events: each measure over the steps for which every rank reports it."""
    if len(ranks) < 2:
        return None
    first = next(iter(ranks.values()))
    times = {kind: _times(ranks, kind, kind) for kind in MEASURE_NAMES}
    queued = {kind: _times(ranks, kind, QUEUED[kind]) for kind in MEASURE_NAMES}
    return measure_pace(times, [e["step_time_s"] for e in first], hosts, queued, lost)


def _times(ranks: dict[int, Events], kind: str, name: str) -> Times:
    """Return the values of `name` in the steps for which every rank reports `kind`; missing ones are left out."""
    reported = {rank: {e["step"]: e for e in events if is_number(e.get(kind))} for rank, events in ranks.items()}
    common = sorted(set.intersection(*(set(steps) for steps in reported.values())))
    return {rank: [steps[s][name] for s in common if is_number(steps[s].get(name))] for rank, steps in reported.items()}


def counts(event: dict[str, Any]) -> bool:
    """Return whether an event is a step after warm-up with its own time."""
    return (
        event.get("event") == "step"
        and isinstance(event.get("rank"), int)
        and isinstance(event.get("step"), int)
        and event["step"] > WARMUP_STEPS
        and is_number(event.get(OWN))
        and is_number(event.get("step_time_s"))
    )


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class StragglerDetector:
    """Read the events of all ranks during a run."""

    def __init__(self) -> None:
        self._last: dict[int, deque[dict[str, Any]]] = {}
        self._loads: dict[int, deque[LoadRecord]] = {}
        self._links = LinkReader()
        self._hosts: dict[int, str] = {}
        self._size = 0
        self._named: set[int] = set()
        self._named_hosts: set[str] = set()
        self._named_links: set[tuple[str, str]] = set()

    def take(self, event: dict[str, Any]) -> list[str]:
        """Process one event; return the messages that result."""
        rank = event.get("rank")
        if not isinstance(rank, int):
            return []
        if event.get("event") == "start":
            self._start(rank, event)
        elif (record := read_load(event)) is not None:
            self._loads.setdefault(rank, deque(maxlen=LOAD_RECORDS)).append(record)
        elif event.get("event") == "links":
            self._links.take(event)
            return self._look_at_links()
        if not counts(event):
            return []
        self._last.setdefault(rank, deque(maxlen=2 * WINDOW_STEPS)).append(event)
        return self._look() if len(self._last) == self._size else []

    def _start(self, rank: int, event: dict[str, Any]) -> None:
        self._hosts[rank] = str(event.get("host") or "")
        size = event.get("world_size")
        self._size = size if isinstance(size, int) else 0
        self._last.pop(rank, None)
        self._loads.pop(rank, None)
        self._links.start(rank, self._hosts[rank])

    def _look(self) -> list[str]:
        common = set.intersection(*({e["step"] for e in events} for events in self._last.values()))
        last = sorted(common)[-WINDOW_STEPS:]
        if len(last) < WINDOW_STEPS or last[-1] % 5:  # checked every few steps only
            return []
        steps = {rank: [e for e in events if last[0] <= e["step"] <= last[-1]] for rank, events in self._last.items()}
        loads = self._loads_during(steps)
        if len(loads) < self._size and any(QUEUED[OWN] in e for events in steps.values() for e in events):
            return []  # the ranks will still report it
        pace = pace_of_steps(steps, self._hosts, {rank: lost_time(records) for rank, records in loads.items()})
        ranks = pace.ranks if pace else []
        fresh = [r for r in ranks if r.slow and r.rank not in self._named]
        self._named |= {r.rank for r in fresh}
        return [
            *map(straggler_message, fresh),
            *self._machines(loads, {r.host for r in ranks if r.reason == "machine"}),
        ]

    def _loads_during(self, steps: dict[int, Events]) -> dict[int, list[LoadRecord]]:
        """Return the load records of the ranks that cover the steps at least in part."""
        loads = {}
        for rank, events in steps.items():
            times = [t for e in events if isinstance(t := e.get("time"), int | float)]
            if times and (during := records_during(list(self._loads.get(rank, ())), min(times), max(times))):
                loads[rank] = during
        return loads

    def _machines(self, loads: dict[int, list[LoadRecord]], differing: set[str | None]) -> list[str]:
        said = []
        for load in load_of_hosts(loads, self._hosts):
            text = machine_message(load, load.host in differing)
            if text and load.host not in self._named_hosts:
                self._named_hosts.add(load.host)
                said.append(text)
        return said

    def _look_at_links(self) -> list[str]:
        fresh = [k for k in self._links.links() if (k.slow or k.lossy) and (k.host, k.peer) not in self._named_links][
            : max(MAX_LINKS_REPORTED - len(self._named_links), 0)
        ]
        self._named_links |= {(k.host, k.peer) for k in fresh}
        return [link_message(k) for k in fresh]


LOSSY_SHARE = 0.01
MIN_RESENT = 20
SLOW_LINK_FACTOR = (
    3.0  # time per byte, relative to the fastest quarter of the other links: those of a slow node are all slow
)
MIN_BUSY_SHARE = 0.2  # of the time; a link that is rarely used delays no rank
MIN_BYTES = 1 << 20


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What went from one host's ranks to another. ``relative``: time per byte against the others' fast ones."""

    host: str
    peer: str
    ranks: list[int]
    sent_bytes: int
    bytes_per_s: float | None
    busy_share: float
    resent_share: float | None
    rtt_s: float
    relative: float | None
    slow: bool
    lossy: bool


class LinkReader:
    """Collect ``links`` events of all ranks, and judge what has been sent since the first one of each rank."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[float, dict[str, LinkCounters]]] = {}
        self._last: dict[int, tuple[float, dict[str, LinkCounters]]] = {}
        self._hosts: dict[str, str] = {}
        self._host_of: dict[int, str] = {}

    def start(self, rank: int, host: str) -> None:
        """Start a rank: what its process before it sent does not count."""
        self._host_of[rank] = host
        self._first.pop(rank, None)
        self._last.pop(rank, None)

    def take(self, event: Mapping[str, Any]) -> None:
        """Process an event; other and damaged ones are ignored."""
        rank = event.get("rank")
        if event.get("event") != "links" or not isinstance(rank, int):
            return
        try:
            links = msgspec.convert(event.get("links"), list[LinkCounters])
            own = msgspec.convert(event.get("addresses"), list[str])
            time_s = msgspec.convert(event.get("time"), float)
        except msgspec.ValidationError:
            return
        if not all(math.isfinite(v) for k in links for v in (k.busy_s, k.receiver_s, k.rtt_s, time_s)):
            return
        self._hosts |= dict.fromkeys(own, self._host_of.get(rank, ""))
        counters = (time_s, {k.peer: k for k in links})
        self._first.setdefault(rank, counters)
        self._last[rank] = counters

    def links(self) -> list[Link]:
        """Return all links between hosts of this run, slow and lossy ones first."""
        sums: dict[tuple[str, str], _Sent] = {}
        for rank, (ended, last) in self._last.items():
            began, first = self._first[rank]
            host = self._host_of.get(rank, "")
            for peer, now in last.items():
                to = self._hosts.get(peer)
                if to and host and to != host and ended > began:
                    sums.setdefault((host, to), _Sent()).add(rank, ended - began, first.get(peer), now)
        rates = {key: s.on_way_s / s.sent_bytes for key, s in sums.items() if s.sent_bytes >= MIN_BYTES}
        links = [s.link(*key, _usual(rates, key), rates.get(key)) for key, s in sums.items()]
        return sorted(links, key=lambda k: (not (k.slow or k.lossy), -(k.relative or 0.0), k.host, k.peer))


def _usual(rates: Mapping[tuple[str, str], float], key: tuple[str, str]) -> float | None:
    """Return the longest time per byte in the fastest quarter of the other links; None if fewer than two are known."""
    others = sorted(rate for k, rate in rates.items() if k != key)
    return others[(len(others) - 1) // 4] if len(others) >= 2 else None


class _Sent:
    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.sent_bytes = self.segments = self.resent = 0
        self.on_way_s = self.busy_share = self.rtt_s = 0.0

    def add(self, rank: int, seconds: float, before: LinkCounters | None, now: LinkCounters) -> None:
        """Add what one rank sent. Counters that went back (connections were closed) are not used."""
        names = ("acked_bytes", "segments", "resent", "busy_s", "receiver_s")
        sent, segments, resent, busy, receiver = (
            getattr(now, name) - (getattr(before, name) if before else 0) for name in names
        )
        if min(sent, segments, resent, busy) < 0:
            return
        on_way = max(busy - receiver, 0.0)
        self.ranks.append(rank)
        self.sent_bytes += sent
        self.segments += segments
        self.resent += resent
        self.on_way_s += on_way
        self.busy_share = max(self.busy_share, on_way / seconds)
        self.rtt_s = max(self.rtt_s, now.rtt_s)

    def link(self, host: str, peer: str, usual: float | None, rate: float | None) -> Link:
        share = self.resent / self.segments if self.segments else None
        relative = rate / usual if rate is not None and usual else None
        return Link(
            host=host,
            peer=peer,
            ranks=sorted(self.ranks),
            sent_bytes=self.sent_bytes,
            bytes_per_s=round(self.sent_bytes / self.on_way_s) if self.on_way_s > 0 else None,
            busy_share=round(min(self.busy_share, 1.0), 4),
            resent_share=round(share, 5) if share is not None else None,
            rtt_s=self.rtt_s,
            relative=round(relative, 3) if relative is not None else None,
            slow=relative is not None and relative >= SLOW_LINK_FACTOR and self.busy_share >= MIN_BUSY_SHARE,
            lossy=share is not None and share >= LOSSY_SHARE and self.resent >= MIN_RESENT,
        )


def link_message(link: Link) -> str:
    """Return the message for the user."""
    parts = []
    if link.slow and link.bytes_per_s is not None:
        parts.append(
            f"{link.bytes_per_s / 1e6:.1f} MB/s, {link.relative:.1f} times the time per byte of the fastest other "
            f"links, busy {link.busy_share:.0%} of the time"
        )
    if link.lossy and link.resent_share is not None:
        parts.append(f"{link.resent_share:.1%} of its segments were sent again")
    ranks = ", ".join(map(str, link.ranks[:8])) + (", ..." if len(link.ranks) > 8 else "")
    return f"the link from {link.host} (rank {ranks}) to {link.peer} is slow: {'; '.join(parts)}"


def links_of_run(ranks: Mapping[int, Iterable[Mapping[str, Any]]]) -> list[Link]:
    """Return the links of a run's last attempt."""
    reader = LinkReader()
    for rank, events in ranks.items():
        for event in events:
            if event.get("event") == "start":
                reader.start(rank, str(event.get("host") or ""))
            reader.take(event)
    return reader.links()


def link_notes(metrics: Mapping[str, Any]) -> list[str]:
    """Return the messages for the slow links of metrics.json; damaged records are left out."""
    links = as_records(metrics.get("links"), Link)
    return [link_message(link) for link in links if link.slow or link.lossy]
