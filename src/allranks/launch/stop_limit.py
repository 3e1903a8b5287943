"""Decide how long ranks that were asked to stop may take to write their checkpoint, from what the run has measured.

The events of one rank say which phase it is in and how long steps, evaluations and saves have taken. Each phase has its
own limit: ranks that make progress are not killed, stalled ones are. All processes that may kill ranks use it: the
command, an agent without its driver, the supervisor that has lost an agent.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from allranks.planning.records import LaunchPlan
from allranks.rundir.events import decode_line
from allranks.rundir.paths import RunDir
from allranks.utils.inputs import read_appended

POLL_S = 1.0
HISTORY_BYTES = 1 << 22
RECENT_STEPS = 20
STEPS = 3
"""The step in which a stop was requested, and those until all ranks have agreed on it: one on a CPU, two on a GPU."""
FACTOR = 2.0
"""How many times the longest measured step, evaluation or save the next one may take."""
LEAST_S = 10.0
"""For steps, however short: a busy machine or file system delays the next one."""
UNKNOWN_S = 600.0
"""For the first step or evaluation, if hangs are not monitored; otherwise the limit of the hang monitor."""
COMPARISON_S = 3.0
"""The ranks of a comparison have nothing to save and do not look for a stop: waiting longer gains nothing."""
NOTHING_TRAINED = ("start", "prepare", "build", "prove")


class StopLimit:
    """The time limit of a stop. It begins when this is made, and again with each phase.

    Args:
        least_s: the limit of ranks that have nothing to save, and the least for others.
        rank: the rank whose events are read.
    """

    def __init__(self, run: RunDir, plan: LaunchPlan, least_s: float, rank: int = 0) -> None:
        comparison = run.compare.exists()
        self._file, self._least_s = run.events_of(rank), min(least_s, COMPARISON_S) if comparison else least_s
        self._saves = plan.batch is not None and not comparison
        self._unknown_s = plan.hang.long_s if plan.hang else UNKNOWN_S
        self._since = time.monotonic()
        self._read_at, self._offset = float("-inf"), 0
        self._attempt, self._started = max(run.attempts(), default=1), False
        self._phase: dict[str, Any] = {"name": "start"}
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._evaluation_s = self._save_s = 0.0
        self._read_if_due(self._since)

    def expired(self, now: float) -> bool:
        """Return whether the ranks have had their time at `now` (`time.monotonic`)."""
        self._read_if_due(now)
        return now - self._since > self.limit_s

    @property
    def limit_s(self) -> float:
        """Return the limit of the current phase."""
        phase = self._phase["name"]
        if not self._saves or phase in NOTHING_TRAINED:
            return self._least_s
        if phase == "save":
            limit_s = max(self._phase.get("limit_s", self._unknown_s), FACTOR * self._save_s)
        elif phase == "evaluate":
            limit_s = FACTOR * self._evaluation_s or self._unknown_s
        else:
            limit_s = LEAST_S + FACTOR * STEPS * max(self._steps) if self._steps else self._unknown_s
        return max(limit_s, self._least_s)

    def measured_s(self, now: float) -> float:
        """Return how long a stop takes by the longest recent step and save; 0 before a full save was measured."""
        self._read_if_due(now)
        return STEPS * max(self._steps) + self._save_s if self._steps and self._save_s else 0.0

    @property
    def work(self) -> str:
        """Describe what the ranks do before they end; empty if they have nothing to save."""
        phase = self._phase["name"]
        if not self._saves or phase in NOTHING_TRAINED:
            return ""
        first = {"save": "", "evaluate": "finish the evaluation and the next step, and "}
        return f"the ranks {first.get(phase, 'finish their step and the next, and ')}write a full checkpoint"

    @property
    def text(self) -> str:
        """Describe what the ranks do before they end, and their limit."""
        if work := self.work:
            return f"{work} within {self.limit_s:.0f} s"
        why = "no step was trained yet; " if self._saves else ""
        return f"{why}ranks that still run after {self.limit_s:.0f} s are killed"

    def _read_if_due(self, now: float) -> None:
        """Read what the rank has recorded since the last call."""
        if not self._saves or now - self._read_at <= POLL_S:
            return
        first, self._read_at = self._read_at < 0, now
        try:
            data, skipped = read_appended(self._file, self._offset, HISTORY_BYTES)
        except OSError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += skipped + end
        self._started = self._started or skipped > 0  # the record of the start is among what is not read
        began = self._phase
        for line in data[:end].splitlines():
            if (event := decode_line(line)) is not None:
                self._take(event)
        if self._phase is not began and not first:
            self._since = now

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self._steps.extend(event.get("step_times_s") or [event.get("step_time_s", 0.0)])
        elif kind == "checkpoint":
            if event.get("mode") == "full":
                self._save_s = max(self._save_s, event.get("written_s", 0.0))
        elif kind == "start":
            self._started = event.get("attempt") == self._attempt
        elif kind == "phase" and self._started:
            if self._phase["name"] == "evaluate":
                self._evaluation_s = max(self._evaluation_s, event["time"] - self._phase["time"])
            self._phase = event
