"""Progress of a user's own program: what it reports with ``allranks.report``, as events of its rank. Standard library and events only.

An event ``progress`` summarizes the reports since the one before it: ``step`` and ``loss`` as given last, ``tokens`` added up,
``reports`` their number, ``last`` the time of the last one. ``source`` is ``report``, or ``log`` for what the agent has read in the log of rank 0
(`allranks.launch.monitor.log_progress`).
"""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from typing import Any

from allranks.errors import RunFailed
from allranks.rundir.events import EventLog
from allranks.rundir.heartbeat import heartbeat

WRITE_INTERVAL_S = 1.0  # the first report is written at once, and the last one when the program ends
PROGRESS = "progress"
REPORTED, READ_IN_LOG = "report", "log"


class ProgressReporter:
    """Collect the reports of one rank. It does nothing before `open`, and in processes that the rank has forked."""

    def __init__(self) -> None:
        self._log: EventLog | None = None
        self._owner = 0
        self._lock = threading.Lock()
        self._pending: dict[str, Any] = {}
        self._written_at = 0.0
        self._warned: set[str] = set()

    def open(self, log: EventLog) -> None:
        """Write reports to this log from now on."""
        self._log, self._owner = log, os.getpid()

    def report(self, step: Any, loss: Any, tokens: Any) -> None:
        """Record one report; see `allranks.report`."""
        if self._log is None or os.getpid() != self._owner:
            return
        found = {
            "step": self._checked("step", step, _count),
            "loss": self._checked("loss", loss, float),
            "tokens": self._checked("tokens", tokens, _count),
        }
        heartbeat.beat()
        with self._lock:
            known = {name: value for name, value in found.items() if value is not None}
            if "tokens" in known:
                known["tokens"] += self._pending.get("tokens", 0)
            self._pending |= known
            self._pending["reports"] = self._pending.get("reports", 0) + 1
            self._pending["last"] = round(time.time(), 6)
            now = time.monotonic()
            if now - self._written_at >= WRITE_INTERVAL_S or not self._written_at:
                self._written_at = now
                self._write()

    def close(self) -> None:
        """Write what has not been written, and ignore later reports."""
        if self._log is None or os.getpid() != self._owner:
            return
        with self._lock:
            self._write()
            self._log = None

    def _write(self) -> None:
        if not self._pending or self._log is None:
            return
        try:
            self._log.write(PROGRESS, source=REPORTED, **self._pending)
        except RunFailed as error:  # a full disk; the program continues
            self._warn("events", str(error))
        self._pending = {}

    def _checked(self, name: str, value: Any, convert: Any) -> Any:
        """Return the value as a number; None, after one warning, if it is none. A report never ends a program."""
        if value is None:
            return None
        try:
            return convert(value)
        except Exception as error:  # noqa: BLE001 - a value may be any object, such as a tensor of several elements
            self._warn(name, f"{name}={value!r:.80} is no number and is ignored ({type(error).__name__}: {error})")
            return None

    def _warn(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"allranks.report: {text}", RuntimeWarning, stacklevel=5)


def _count(value: Any) -> int:
    """Return a number that is whole and not negative."""
    number = float(value)
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise ValueError("expected a whole number that is not negative")
    return int(value)


# One per process, as the heartbeat is: the program reports through it from anywhere.
reporter = ProgressReporter()
