"""Watch the events of a run: report slow ranks, overloaded machines and slow links, each once."""

from __future__ import annotations

from collections import deque
from typing import Any

from allranks.analysis.machine_load import (
    LoadRecord,
    load_of_hosts,
    lost_time,
    machine_message,
    read_load,
    records_during,
)
from allranks.analysis.slow_links import LinkReader, link_message
from allranks.analysis.stragglers import OWN, QUEUED, WINDOW_STEPS, Events, counts, pace_of_steps, straggler_message

LOAD_RECORDS = 200
MAX_LINKS_REPORTED = 3


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
        found = {}
        for rank, events in steps.items():
            times = [t for e in events if isinstance(t := e.get("time"), int | float)]
            if times and (during := records_during(list(self._loads.get(rank, ())), min(times), max(times))):
                found[rank] = during
        return found

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
