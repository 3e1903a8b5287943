"""Find slow or lossy links between hosts from the TCP counters in ``links`` events. Pure.

Only the kernel's own evidence counts: segments that had to be sent again, and the time per byte that data was on its way, without the
time in which the receiver did not read. Links that use no TCP (InfiniBand, shared memory) are not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from allranks.utils.formatting import as_records
from allranks.utils.tcp_links import LinkCounters

LOSSY_SHARE = 0.01
MIN_RESENT = 20
SLOW_FACTOR = (
    3.0  # time per byte, relative to the fastest quarter of the other links: those of a slow node are all slow
)
MIN_BUSY_SHARE = 0.2  # of the time; a link that is rarely used delays no rank
MIN_BYTES = 1 << 20


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What went from the ranks of one host to another one. ``relative`` is the time per byte against the fast ones of the others."""

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
        found = [s.link(*key, _usual(rates, key), rates.get(key)) for key, s in sums.items()]
        return sorted(found, key=lambda k: (not (k.slow or k.lossy), -(k.relative or 0.0), k.host, k.peer))


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
        grown = [
            now.acked_bytes - (before.acked_bytes if before else 0),
            now.segments - (before.segments if before else 0),
            now.resent - (before.resent if before else 0),
        ]
        busy = now.busy_s - (before.busy_s if before else 0.0)
        on_way = busy - (now.receiver_s - (before.receiver_s if before else 0.0))
        if min(grown) < 0 or busy < 0:
            return
        self.ranks.append(rank)
        self.sent_bytes += grown[0]
        self.segments += grown[1]
        self.resent += grown[2]
        self.on_way_s += max(on_way, 0.0)
        self.busy_share = max(self.busy_share, max(on_way, 0.0) / seconds)
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
            slow=relative is not None and relative >= SLOW_FACTOR and self.busy_share >= MIN_BUSY_SHARE,
            lossy=share is not None and share >= LOSSY_SHARE and self.resent >= MIN_RESENT,
        )


def link_message(link: Link) -> str:
    """Return the message for the user."""
    parts = []
    if link.slow and link.bytes_per_s is not None:
        parts.append(
            f"{link.bytes_per_s / 1e6:.1f} MB/s, {link.relative:.1f} times the time per byte of the fastest other links, busy {link.busy_share:.0%} of the time"
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
