"""Find out on one node whether a user's own program hangs: silence of all its ranks, and what they do meanwhile. Pure.

Such a program reports no phases. Progress is a line in a log, a new collective or a call of ``allranks.report``. Silence alone
proves nothing: a rank may evaluate, compile or prepare data. Therefore two limits apply:

- the shorter one if no rank works: each of them is in a collective, or idle (no CPU time, no reads or writes) with the stack that
  it had when its silence began;
- the longer one if a rank works, and others wait in a collective: an endless loop cannot be told from a long computation.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping

import msgspec

from allranks.analysis.stacks import is_build_lock_stack, is_collective_stack
from allranks.launch.monitor.procfs import ProcessWork
from allranks.planning.records import Limits

MEDIAN_FACTOR = 10.0  # times the median interval between two signs of progress
KEPT_INTERVALS = 201
MIN_INTERVALS = 10  # with fewer, the median is that of the program's start
CALM_S = 5.0  # of silence, before the ranks' work is measured
ACTIVITY_INTERVAL_S = 1.0
BUSY_SHARE = 0.02  # of a core
BUSY_BYTES = 1 << 16


class RankSample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a rank at one time. ``progress`` differs from its last value if the rank has made progress.

    ``work`` is None if it was not measured, which takes milliseconds.
    """

    progress: Hashable
    work: ProcessWork | None = None
    stack: tuple[str, ...] = ()
    others_needed: bool = (
        False  # it has called a collective, or waits for the first one or for the build of an extension
    )


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Silence of all ranks of a node that is longer than its limit."""

    rank: int
    since: float
    limit_s: float
    stuck: bool
    waiting: bool


class _Rank:
    def __init__(self, now: float, sample: RankSample) -> None:
        self.progress, self.progress_at = sample.progress, now
        self.worked_at, self.stack = now, sample.stack
        self.sampled_at, self.work = now, sample.work
        self.now = sample

    @property
    def waits(self) -> bool:
        return is_collective_stack(self.now.stack)

    @property
    def builds(self) -> bool:
        """Whether it waits for a build, which may be that of another job and take minutes."""
        return is_build_lock_stack(self.now.stack)

    @property
    def is_stuck(self) -> bool:
        return self.waits or (bool(self.stack) and self.now.stack == self.stack and not self.builds)


class ScriptSilence:
    """Signs of progress of a node's ranks.

    Args:
        limits: ``step_s`` and ``long_s`` are the shorter and the longer limit.
        device: on ``cuda`` a thread that waits for the GPU uses a whole core, so its CPU time with an unchanged stack is
            no work; that of its children, such as compilers, is.
    """

    def __init__(self, limits: Limits, device: str) -> None:
        self._limits, self._device = limits, device
        self._ranks: dict[int, _Rank] = {}
        self._intervals: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._progress_at: float | None = None

    @property
    def limit_s(self) -> float:
        """Return the shorter limit: that of the spec, or 10 times the median interval of progress, if that is more."""
        usual = statistics.median(self._intervals) if len(self._intervals) >= MIN_INTERVALS else 0.0
        return max(self._limits.step_s, MEDIAN_FACTOR * usual)

    def wants_activity(self, now: float) -> bool:
        """Return whether the next samples should say how much the ranks work: only after some silence, once a second."""
        silent_s = now - (self._progress_at if self._progress_at is not None else now)
        latest = max((known.sampled_at for known in self._ranks.values() if known.work is not None), default=0.0)
        return silent_s >= min(CALM_S, self._limits.step_s / 4) and now - latest >= ACTIVITY_INTERVAL_S

    def look(self, now: float, floor: float, samples: Mapping[int, RankSample]) -> Silence | None:
        """Take a sample of every running rank; return a silence that is too long.

        Args:
            floor: no silence before this time counts.
        """
        self._ranks = {rank: known for rank, known in self._ranks.items() if rank in samples}
        progressed = [self._update(rank, sample, now) for rank, sample in samples.items()]
        if any(progressed):
            if self._progress_at is not None:
                self._intervals.append(now - self._progress_at)
            self._progress_at = now
        if not self._ranks or not any(s.others_needed for s in samples.values()):
            return None
        silent = max(floor, *(known.progress_at for known in self._ranks.values()))
        quiet = max(silent, *(0.0 if known.waits else known.worked_at for known in self._ranks.values()))
        waiting = any(known.waits or known.builds for known in self._ranks.values())
        limit_s = self.limit_s
        longer_s = max(self._limits.long_s, limit_s)
        stuck = now - quiet > limit_s and all(known.is_stuck for known in self._ranks.values())
        if not stuck and now - silent <= longer_s:
            return None
        rank = max(self._ranks, key=lambda r: (not self._ranks[r].waits, self._ranks[r].worked_at, -r))
        return Silence(rank=rank, since=silent, limit_s=limit_s if stuck else longer_s, stuck=stuck, waiting=waiting)

    def _update(self, rank: int, sample: RankSample, now: float) -> bool:
        """Record a sample; return whether the rank has made progress."""
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(now, sample)
            return True
        known.now = sample
        progressed = sample.progress != known.progress
        if progressed:
            known.progress, known.progress_at = sample.progress, now
            known.stack, known.work = sample.stack, None
        self._activity(known, sample, now)
        return progressed

    def _activity(self, known: _Rank, sample: RankSample, now: float) -> None:
        """Record whether a rank works; it counts as working until that has been measured."""
        passed_s = now - known.sampled_at
        work, before = sample.work, known.work
        if work is None or before is None:
            if before is None:
                known.worked_at, known.sampled_at, known.work = now, now, work
        elif passed_s >= ACTIVITY_INTERVAL_S:
            cpu_s = work.cpu_s - before.cpu_s
            if self._device == "cuda" and sample.stack == known.stack:
                cpu_s = work.children_cpu_s - before.children_cpu_s
            if cpu_s > BUSY_SHARE * passed_s or work.io_bytes - before.io_bytes > BUSY_BYTES:
                known.worked_at, known.stack = now, sample.stack
            known.sampled_at, known.work = now, work
