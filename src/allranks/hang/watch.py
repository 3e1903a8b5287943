"""The agent's watch over the ranks of its node: notices a silence, takes evidence, and lets one of the agents judge.

Agents of several nodes talk through files of the run folder that are there from the start: a board for alarms, and one file of
evidence a node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import psutil

from allranks.hang import procfs
from allranks.hang.board import Board
from allranks.hang.collect import Collector, save
from allranks.hang.judge import judge
from allranks.hang.limits import Limits, limit, strict
from allranks.hang.pulse import SCRIPT, Beat, Page, offered
from allranks.hang.records import Alarm, HangReport, NodeEvidence
from allranks.rundir import RunDir, write_json

LOOK_S = 0.5
PAUSED_S = 5.0  # this process itself was stopped for so long: nobody's silence counts
WORKS_S = 1.0
BUSY_SHARE = 0.02  # of a core
BUSY_BYTES = 1 << 16
ALL_ANSWER_S = 12.0
NEXT_JUDGE_S = 3.0
VERDICT_S = 25.0
ENDED = ("done",)


class HangWatch(threading.Thread):
    """Watches until `stop`. ``end`` is called once the verdict is there, to end the ranks of this node.

    Args:
        host: this node's name in the names of log files.
        hosts: the host of each rank of the job, as the plan or the meeting place names it.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        node: int,
        host: str,
        ranks: Iterable[int],
        hosts: dict[int, str],
        limits: Limits,
        collector: Collector,
        end: Callable[[], None],
    ) -> None:
        super().__init__(name="hangs", daemon=True)
        self._run, self._attempt, self._node, self._own, self._limits = run, attempt, node, host, limits
        self._hosts, self._collector, self._end = hosts, collector, end
        self.pages = {rank: Page() for rank in ranks}
        self._board = Board(run.hang(attempt) / "alarm")
        self._floor = time.monotonic()
        self._worked: dict[int, tuple[float, float, int]] = {}  # when looked at, CPU seconds, bytes
        self._last_said: dict[int, tuple[dict[str, int], int]] = {}
        self._heard_at: dict[int, float] = {}
        self._active: dict[int, float] = {}  # when it last was seen at work
        self._ended = threading.Event()
        self._busy = threading.Lock()

    def offer(self) -> str:
        """What the ranks find in their environment."""
        return offered([self.pages[rank] for rank in sorted(self.pages)])

    def begin(self) -> None:
        """Make the files that others will look for, and start to watch."""
        self._board.hang_up()
        self._run.hang_node(self._attempt, self._node).touch()
        self.start()

    def run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            if now - last > PAUSED_S:
                self._floor = now
            last = now
            try:
                alarm = self._board.alarm() or self._silence(now)
                if alarm is not None:
                    with self._busy:
                        self._examine(alarm)
                    return
            except (
                OSError,
                psutil.Error,
            ) as error:  # a full disk, a lost file system: the training decides what becomes of it
                logging.warning("the watch for hangs of node %s ends: %s", self._node, error)
                return

    def stop(self) -> None:
        """No more watching; what is under way is finished. Files that say nothing are removed."""
        self._ended.set()
        with self._busy:
            pass
        for path in (self._run.hang_node(self._attempt, self._node), self._board.path):
            try:
                if path.stat().st_size == 0:
                    path.unlink()
            except OSError:
                continue
        for folder in (self._run.hang(self._attempt), self._run.hang(self._attempt).parent):
            try:
                folder.rmdir()
            except OSError:
                return

    def _beats(self) -> dict[int, Beat]:
        found = {rank: page.read() for rank, page in self.pages.items()}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def _silence(self, now: float) -> Alarm | None:
        """The first rank that has been silent for too long."""
        beats = {rank: beat for rank, beat in self._beats().items() if beat.phase not in ENDED}
        if any(procfs.has_ended(beat.pid) for beat in beats.values()):
            return None  # the others wait for one that has died, which is noticed elsewhere
        for rank, beat in beats.items():
            since = max(beat.at, self._floor)
            if beat.phase == SCRIPT:
                since = max(since, self._heard(rank, beat, now))
            if not strict(beat):
                since = max(since, self._at_work(rank, beat, now))
            most = limit(self._limits, beat)
            if now - since > most:
                return self._tell(rank, beat, since, now, most)
        return None

    def _at_work(self, rank: int, beat: Beat, now: float) -> float:
        """When this rank was last seen to compute, read or write."""
        at, cpu, size = self._worked.get(rank, (0.0, 0.0, 0))
        if now - at >= WORKS_S:
            new_cpu, new_size = procfs.work_done(beat.pid)
            if new_cpu - cpu > BUSY_SHARE * (now - at) or new_size - size > BUSY_BYTES or not at:
                self._active[rank] = now
            self._worked[rank] = (now, new_cpu, new_size)
        return self._active.get(rank, 0.0)

    def _heard(self, rank: int, beat: Beat, now: float) -> float:
        """When a program of the user's own last called a collective or wrote into its log."""
        log = self._run.log_of(self._attempt, self._own, rank)
        said = (beat.sequences, log.stat().st_size if log.exists() else 0)
        if self._last_said.get(rank) != said:
            self._last_said[rank], self._heard_at[rank] = said, now
        return self._heard_at[rank]

    def _tell(self, rank: int, beat: Beat, since: float, now: float, most: float) -> Alarm:
        host = self._hosts[rank]
        clock = time.time()
        alarm = Alarm(
            node=self._node, host=host, rank=rank, phase=beat.phase, part=beat.part, step=beat.step,
            since=round(clock - (now - since), 3), time=round(clock, 3), limit_s=most,
        )  # fmt: skip
        self._board.raise_alarm(alarm)
        return alarm

    def _examine(self, alarm: Alarm) -> None:
        began = time.monotonic()
        logging.warning("rank %s of %s has made no progress for %.0f s", alarm.rank, alarm.host, alarm.limit_s)
        save(self._run.hang_node(self._attempt, self._node), self._collector.node(self.pages, self._beats()))
        while not self._board.judged and time.monotonic() - began < VERDICT_S:
            waited = time.monotonic() - began
            evidence = self._evidence()
            whole = len({e.node for e in evidence}) == self._nodes
            mine = self._node == 0 if whole else waited > ALL_ANSWER_S + NEXT_JUDGE_S * self._node
            if mine or (whole and waited > ALL_ANSWER_S):
                self._judge(alarm, evidence)
                break
            time.sleep(0.2)
        self._end()

    @property
    def _nodes(self) -> int:
        per_node = len(self.pages)
        return -(-len(self._hosts) // per_node)

    def _evidence(self) -> list[NodeEvidence]:
        found = []
        for node in range(self._nodes):
            try:
                found.append(
                    msgspec.json.decode(self._run.hang_node(self._attempt, node).read_bytes(), type=NodeEvidence)
                )
            except (OSError, msgspec.DecodeError):  # not there yet, or half written
                continue
        return found

    def _judge(self, alarm: Alarm, evidence: list[NodeEvidence]) -> None:
        report = judge(evidence, self._hosts, alarm, self._attempt, time.time())
        report = msgspec.structs.replace(report, files=str(self._run.hang(self._attempt)))
        publish(self._run, report)
        self._board.tell_judged(self._node)


def publish(run: RunDir, report: HangReport) -> None:
    """hang.json, and an event of the rank that fell out (or of rank 0)."""
    from allranks.observe.events import EventLog

    write_json(run.hang_report(report.attempt), msgspec.to_builtins(report))
    first = report.fallen[0] if report.fallen else None
    rank = first.rank if first and first.rank is not None else 0
    log = EventLog(run.events_of(rank), rank)
    log.write(
        "hang",
        attempt=report.attempt,
        kind=report.kind,
        host=first.host if first else None,
        ranks=[f.rank for f in report.fallen],
        where=first.where if first else "",
        message=report.sentence,
        since=report.alarm.since,
        limit_s=report.alarm.limit_s,
        noticed=report.alarm.time,
    )
    log.close()
