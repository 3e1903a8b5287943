"""Write events with the CPU time of a rank and of its machine, and with its TCP links, between steps."""

from __future__ import annotations

import time

import msgspec
import torch

from allranks.rundir.events import EventLog
from allranks.utils.cpu_load import sample_cpu, use_between
from allranks.utils.tcp_links import tcp_links

LOAD_INTERVAL_S = 0.5
LINKS_INTERVAL_S = 5.0
MIN_LOAD_S = 0.1
MIN_LINKS_S = 1.0
MAX_COST = 0.001
"""Share of the time that samples may take; they become rarer if one takes longer, as with thousands of threads or connections."""


class MachineSamples:
    """Write ``cpu_load`` and ``links`` events, each at most once per interval.

    Args:
        device: type of the device; on a CPU torch's threads compute beside the main thread.
    """

    def __init__(self, events: EventLog, device: str) -> None:
        self._events = events
        self._compute_threads = torch.get_num_threads() if device == "cpu" else None
        self._load_due = self._links_due = 0.0
        self.restart()

    def restart(self) -> None:
        """Leave out the CPU time since the last sample: it was no training."""
        self._last = sample_cpu()
        self._load_due = max(self._load_due, self._last.at_s + LOAD_INTERVAL_S)

    def write_if_due(self) -> None:
        """Write the events whose interval is over."""
        now = time.monotonic()
        if now >= self._load_due:
            self._write_load()
            self._load_due = _next_time(now, LOAD_INTERVAL_S)
        if now >= self._links_due:
            self._write_links()
            self._links_due = _next_time(now, LINKS_INTERVAL_S)

    def write_before_pause(self) -> None:
        """Write the measurements since the last events, unless the interval is too short."""
        now = time.monotonic()
        if now - self._last.at_s >= MIN_LOAD_S:
            self._write_load()
        if now >= self._links_due - LINKS_INTERVAL_S + MIN_LINKS_S:
            self._write_links()
            self._links_due = _next_time(now, LINKS_INTERVAL_S)

    def _write_load(self) -> None:
        first, self._last = self._last, sample_cpu()
        use = use_between(first, self._last)
        self._events.write("cpu_load", compute_threads=self._compute_threads, **msgspec.to_builtins(use))

    def _write_links(self) -> None:
        own, links = tcp_links()
        if links:
            self._events.write("links", addresses=own, links=msgspec.to_builtins(links))


def _next_time(began: float, interval_s: float) -> float:
    """Return when to sample again after a sample that began then and ends now."""
    now = time.monotonic()
    return now + max(interval_s, (now - began) / MAX_COST)
