"""Monitor the ranks of one node, raise an alarm when a rank is silent for longer than its limit, and collect evidence.

Training steps use the limit of the spec. Long phases (joining, data, model, first step, evaluation, checkpoints) may
take almost ``cluster.timeout_s``, after which the collective in which the other ranks wait would end them and the
evidence. A user's own program has no phases (`ScriptSilence`). docs/hangs.md has the rules.

The agent sends alarm and evidence to the driver; the driver decides (`allranks.launch.monitor.hang_rules`). The
evidence is also saved in the run folder, for nodes that the driver cannot reach.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from allranks.analysis.stacks import is_build_lock_stack, is_collective_stack
from allranks.launch.monitor import procfs
from allranks.launch.monitor.evidence import EvidenceCollector, save_evidence
from allranks.launch.monitor.procfs import ProcessWork
from allranks.launch.monitor.records import HangAlarm
from allranks.planning.records import Limits
from allranks.rundir.heartbeat import PREPARE_PHASE, SCRIPT_PHASE, TRAIN_PHASE, Heartbeat, HeartbeatPage
from allranks.rundir.paths import RunDir

LONGEST_GAP_FACTOR = 3.0  # times the longest silence that this rank has shown before, while it trained


def silence_limit_s(limits: Limits, beat: Heartbeat) -> float:
    """Return this rank's current silence limit in seconds. Ranks with long steps get more, up to ``long_s``."""
    if not only_heartbeats_count(beat):
        return limits.long_s
    return min(max(limits.step_s, LONGEST_GAP_FACTOR * beat.longest_s), limits.long_s)


def only_heartbeats_count(beat: Heartbeat) -> bool:
    """Return whether only heartbeats count as progress, and not also collectives, log lines, I/O and CPU time."""
    return beat.phase == TRAIN_PHASE


LOOK_S = 0.5
PAUSED_S = 5.0  # this process itself was stopped for so long: no silence counts
VERDICT_S = 40.0  # time for the driver's verdict; then the ranks are stopped without one
ENDED_PHASES = ("done",)
STOPPED_STATE = "T"  # by SIGSTOP or SIGTSTP


class _Sample(NamedTuple):
    """What a rank had done by the time `at`. ``progress`` changes with each collective and each line of its log."""

    at: float
    work: ProcessWork
    progress: Hashable


@dataclass(frozen=True)
class WatchedNode:
    """The node that a `HangMonitor` is for.

    Attributes:
        named: its name in messages.
        host: its name in the names of log files.
        pages: the heartbeat page of each of its ranks.
    """

    run: RunDir
    attempt: int
    node: int
    named: str
    host: str
    pages: Mapping[int, HeartbeatPage]


class HangMonitor(threading.Thread):
    """Monitor until `stop`. After an alarm of any node, examine the ranks of this node once.

    Args:
        channel: the agent's `launch.channel.ChannelClient`.
        device: ``cuda`` or ``cpu``: where the ranks compute.
        script: for a user's own program, which hangs only if all its nodes raise an alarm.
        raise_alarm: sends the alarm to the driver, or (None) withdraws it.
        end: stops the ranks of this node; always called after the examination, even if nothing can be written.
    """

    def __init__(
        self,
        watched: WatchedNode,
        limits: Limits,
        collector: EvidenceCollector,
        channel: Any,
        *,
        raise_alarm: Callable[[HangAlarm | None], None],
        end: Callable[[], None],
        device: str = "cpu",
        script: ScriptSilence | None = None,
    ) -> None:
        super().__init__(name="hangs", daemon=True)
        self._on, self._limits, self._collector, self._channel = watched, limits, collector, channel
        self._raise, self._end, self._script, self._device = raise_alarm, end, script, device
        self._suspects = False
        self._floor = time.monotonic()
        self._worked: dict[int, _Sample] = {}
        self._active: dict[int, float] = {}  # when it was last seen working
        self._stopped = threading.Event()

    def run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(LOOK_S):
            now = time.monotonic()
            # the machine was suspended, or this process stopped, and the ranks perhaps with it
            if now - last > PAUSED_S:
                self._floor = now
            last = now
            try:
                alarm = self._channel.orders.collect or (self.silence(now) if self._script is None else None)
                if alarm is None and self._script is not None:
                    self.suspect(self._script, now)
            except Exception as error:  # noqa: BLE001 - monitoring never ends a run: try again
                logging.warning("the hang monitor of %s failed: %s: %s", self._on.named, type(error).__name__, error)
                continue
            if alarm is not None:
                self._examine(alarm)
                return

    def stop(self) -> None:
        """Stop monitoring; a running examination is completed in bounded time."""
        self._stopped.set()
        if self.is_alive():
            self.join(timeout=VERDICT_S)

    def _examine(self, alarm: HangAlarm) -> None:
        """Collect evidence, send it to the driver, and stop the ranks after its verdict, whatever fails in between."""
        logging.warning("rank %s of %s has made no progress for %.0f s", alarm.rank, alarm.host, alarm.limit_s)
        began = time.monotonic()
        try:
            evidence = self._collector.node(self._on.pages, self.beats())
            self._channel.send_evidence(evidence)
            save_evidence(self._on.run.hang_node(self._on.attempt, self._on.node), evidence)
        except Exception as error:  # noqa: BLE001 - the thread must survive any error
            logging.warning("the evidence of %s is incomplete: %s: %s", self._on.named, type(error).__name__, error)
        # the driver compares all nodes first; if it cannot answer, the ranks must end all the same
        while not self._channel.orders.end and time.monotonic() - began < VERDICT_S and not self._stopped.is_set():
            time.sleep(0.1)
        self._end()

    def beats(self) -> dict[int, Heartbeat]:
        """Return each rank's last heartbeat; ranks without one are left out."""
        beats = {rank: page.read() for rank, page in self._on.pages.items()}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def silence(self, now: float) -> HangAlarm | None:
        """Return an alarm for the first rank that has made no progress for too long, after raising it."""
        beats = {rank: beat for rank, beat in self.beats().items() if beat.phase not in ENDED_PHASES}
        if any(procfs.has_ended(beat.pid) for beat in beats.values()):
            return None  # the others wait for a rank that has exited, which is detected elsewhere
        for rank, beat in beats.items():
            since = max(beat.at, self._floor)
            if not only_heartbeats_count(beat):
                since = max(since, self._at_work(rank, beat, now))
            most = silence_limit_s(self._limits, beat)
            if self._limits.step_s < now - since <= most and procfs.state_of(beat.pid)[:1] == STOPPED_STATE:
                most = self._limits.step_s  # the longer limits of phases do not apply to a process stopped by a signal
            if now - since > most:
                alarm = self._alarm(rank, since, now, phase=beat.phase, part=beat.part, step=beat.step, limit_s=most)
                self._raise(alarm)
                return alarm
        return None

    def _at_work(self, rank: int, beat: Heartbeat, now: float) -> float:
        """Return when this rank was last observed to call a collective, write a line, compute, read or write."""
        before = self._worked.get(rank)
        if before is None or now - before.at >= ACTIVITY_INTERVAL_S:
            sample = _Sample(now, procfs.work_of(beat.pid), (tuple(beat.sequences.items()), self._log_bytes(rank)))
            # on GPUs a rank that waits for one uses its core, too, except while it prepares the data without them
            own_cpu = self._device != "cuda" or beat.phase == PREPARE_PHASE
            if (
                before is None
                or sample.progress != before.progress
                or sample.work.is_busy(before.work, now - before.at, own_cpu=own_cpu)
            ):
                self._active[rank] = now
            self._worked[rank] = sample
        return self._active.get(rank, 0.0)

    def _log_bytes(self, rank: int) -> int:
        try:
            return self._on.run.log_of(self._on.attempt, self._on.host, rank).stat().st_size
        except OSError:
            return 0

    def suspect(self, script: ScriptSilence, now: float) -> None:
        """Raise or withdraw this node's alarm about a user's own program."""
        beats = {rank: beat for rank, beat in self.beats().items() if beat.phase not in ENDED_PHASES}
        measure = script.wants_activity(now)
        left = any(procfs.has_ended(beat.pid) for beat in beats.values())
        begins = any(beat.phase != SCRIPT_PHASE for beat in beats.values())
        suspected = (
            None
            if left or begins
            else script.look(now, self._floor, {r: self._sample(r, b, measure) for r, b in beats.items()})
        )
        if (suspected is not None) == self._suspects:
            return
        self._suspects = suspected is not None
        if suspected is None:
            self._raise(None)
            return
        place = {"phase": SCRIPT_PHASE, "part": "", "step": None, "limit_s": round(suspected.limit_s, 1)}
        kind = {"whole_job": True, "stuck": suspected.stuck, "waiting": suspected.waiting}
        self._raise(self._alarm(suspected.rank, suspected.since, now, **place, **kind))

    def _sample(self, rank: int, beat: Heartbeat, measure: bool) -> RankSample:
        return RankSample(
            progress=(beat.beats, tuple(beat.sequences.items()), self._log_bytes(rank)),
            work=procfs.work_of(beat.pid) if measure else None,
            stack=beat.stack,
            others_needed=any(beat.sequences.values())
            or is_collective_stack(beat.stack)
            or is_build_lock_stack(beat.stack),
        )

    def _alarm(self, rank: int, since: float, now: float, **fields: Any) -> HangAlarm:
        clock = time.time()
        began = round(clock - (now - since), 3)
        return HangAlarm(
            node=self._on.node, host=self._on.named, rank=rank, since=began, time=round(clock, 3), **fields
        )


MEDIAN_FACTOR = 10.0  # times the median interval between two signs of progress
KEPT_INTERVALS = 201
MIN_INTERVALS = 10  # with fewer, the median is that of the program's start
CALM_S = 5.0  # of silence, before the ranks' work is measured
ACTIVITY_INTERVAL_S = 1.0


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
        device: on ``cuda`` a thread that waits for the GPU uses a whole core, so its CPU time with an unchanged stack
            is no work; that of its children, such as compilers, is.
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
        """Return whether the next samples should say how much ranks work: once a second, only after some silence."""
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
            own_cpu = self._device != "cuda" or sample.stack != known.stack
            if work.is_busy(before, passed_s, own_cpu=own_cpu):
                known.worked_at, known.stack = now, sample.stack
            known.sampled_at, known.work = now, work
