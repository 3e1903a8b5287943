"""The scans of all files together, and the candidate causes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import PurePath

from msgspec import Struct, field

from allranks.analysis.diagnose.lines import times_comparable
from allranks.analysis.diagnose.records import FileScan, LogSignal

_RANK_FILE = re.compile(r"(?:^|[._-])rank[._-]?(\d+)(?=[._-]|$)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_HOST_FILE = re.compile(r"^([A-Za-z][\w-]*(?:\.[\w-]+)*?)\.(?:rank\d+\.log|(?:slurmd|dmesg|kern|syslog|messages)\b)")


SURVIVAL_LINES = 3
REPEATED = 3
END_LINES, END_PART = (
    60,
    0.1,
)  # a log ends in progress if its last progress is within so many lines, or this part, of its end
# Their reports end a process: what a shell script prints afterwards does not mean that the job survived.
ENDING_EMITTERS = frozenset({"launcher", "mpi", "slurm_client", "slurm_daemon", "shell", "kernel"})


class CandidateCause(Struct, kw_only=True):
    """A possible cause, with evidence for and against it."""

    id: str
    score: float
    signals: list[LogSignal] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    cause: str | None = None  # replaces the catalogue's sentence if more is known
    title: str | None = None
    fix: str | None = None
    next_test: str | None = None
    rank: int | None = None
    host: str | None = None
    explained: bool = False  # a consequence of another candidate
    elsewhere: bool = False  # the failed rank is none of those that report it

    @property
    def time(self) -> float | None:
        times = [s.time for s in self.signals if s.time is not None]
        return min(times) if times else None


class DiagnosisCase:
    """The scans of all files, with queries across them."""

    def __init__(self, names: list[str], scans: list[FileScan]) -> None:
        self.names, self.scans = names, scans
        self._attribute()
        self.signals: list[LogSignal] = [s for scan in scans for s in scan.signals]
        self.candidates: dict[str, CandidateCause] = {}
        self.unsure_hosts: frozenset[str] = frozenset()  # their clocks cannot be compared with the others
        self.quiet_ends: list[LogSignal] = []  # ranks that exited with a code and no message
        self.own_kills: set[tuple[int, int]] = set()  # files and lines about ranks that allranks itself ended

    def facts(self, name: str) -> list[LogSignal]:
        """Return the signals of one fact, in order of files and lines."""
        return self._facts.get(name, [])

    @cached_property
    def _facts(self) -> dict[str, list[LogSignal]]:
        found: dict[str, list[LogSignal]] = {}
        for signal in self.signals:
            if signal.kind == "fact":
                found.setdefault(signal.owner, []).append(signal)
        return found

    @cached_property
    def rank_hosts(self) -> dict[int, str]:
        """Return the host of each rank, if any line names it."""
        found: dict[int, str] = {}
        for scan in self.scans:
            for rank, host in scan.rank_hosts.items():
                found.setdefault(rank, host)
        for signal in self.signals:
            if signal.rank is not None and signal.host:
                found.setdefault(signal.rank, signal.host)
        return found

    @cached_property
    def world_size(self) -> int | None:
        """Return the number of ranks that the logs report."""
        sizes = [int(s.groups["nranks"]) for s in self.facts("comm_init")]
        sizes += [int(s.groups["world"]) for s in self.facts("world") if len(s.groups["world"]) < 7]
        return max(sizes, default=None)

    @cached_property
    def hosts(self) -> set[str]:
        """Return every host that a line names as its own."""
        return {host for scan in self.scans for host in scan.hosts} | {s.host for s in self.signals if s.host}

    @cached_property
    def tasks_are_ranks(self) -> bool:
        """Return whether Slurm's task numbers are ranks: there are more tasks than hosts."""
        numbers = [int(n) for s in self.facts("srun_exit") for n in _NUMBER.findall(s.groups["tasks"])]
        hosts = self.hosts | {host for scan in self.scans if (host := self.file_host(scan.file))}
        return max(numbers, default=0) >= max(len(hosts), 1)

    def went_on_after(self, signal: LogSignal) -> bool:
        """Return whether a line of progress or of completion follows the last of these messages in the same file."""
        scan = self.scans[signal.file]
        tally = scan.tallies.get(signal.rule)
        last = tally.last_line if tally else signal.line
        return max(scan.last_progress or 0, scan.last_done or 0) > last

    def survived(self, signal: LogSignal) -> bool:
        """Return whether the job went on after the last of these messages: `SURVIVAL_LINES` lines of progress, or its completion.

        One line of progress may be another rank's, which did not yet know of the failure. Nothing is survived that a user interrupted.
        """
        if "interrupt" in signal.groups:
            return False
        scan = self.scans[signal.file]
        tally = scan.tallies.get(signal.rule)
        last = tally.last_line if tally else signal.line
        later = sum(line > last for line in scan.late_progress)
        done = scan.last_done is not None and scan.last_done > last and signal.severity != "fatal"
        return later >= SURVIVAL_LINES or (done and (later > 0 or signal.emitter not in ENDING_EMITTERS))

    def repeats_to_end(self, signal: LogSignal) -> bool:
        """Return whether messages of this rule, at least `REPEATED`, go on to the end of the file's progress, as often as before."""
        scan = self.scans[signal.file]
        tally = scan.tallies.get(signal.rule)
        if tally is None or tally.count < REPEATED:
            return False
        first = min(s.line for s in scan.signals if s.rule == signal.rule)
        usual = (tally.last_line - first) / (tally.count - 1)
        return (scan.last_progress or 0) - tally.last_line <= 2 * usual + 1

    def after_completion(self, signal: LogSignal) -> bool:
        """Return whether the job had completed, and made no progress since, when a message was written."""
        scan = self.scans[signal.file]
        return scan.last_completed is not None and (scan.last_progress or 0) < scan.last_completed < signal.line

    def ends_well(self, file: int) -> bool:
        """Return whether a file ends in progress or completion."""
        scan = self.scans[file]
        last = max(scan.last_progress or 0, scan.last_done or 0, scan.last_ended or 0)
        return last > 0 and scan.lines - last <= max(END_LINES, END_PART * scan.lines)

    def propose(
        self, name: str, score: float, signals: Iterable[LogSignal] = (), *, cause: str | None = None
    ) -> CandidateCause:
        """Return the candidate of that class, new or existing, with at least this score."""
        candidate = self.candidates.setdefault(name, CandidateCause(id=name, score=0.0))
        candidate.score = max(candidate.score, score)
        known = {(s.file, s.line) for s in candidate.signals}
        candidate.signals += [s for s in signals if (s.file, s.line) not in known]
        candidate.cause = cause or candidate.cause
        return candidate

    def file_rank(self, file: int) -> int | None:
        """Return the rank of a file, by its name or because its lines name no other."""
        match = _RANK_FILE.search(PurePath(self.names[file]).name)
        ranks = self.scans[file].ranks
        return int(match.group(1)) if match else ranks[0] if len(ranks) == 1 else None

    def host_of(self, signal: LogSignal) -> str | None:
        """Return the host of a signal, by itself or by its rank."""
        return signal.host or (self.rank_hosts.get(signal.rank) if signal.rank is not None else None)

    def file_host(self, file: int) -> str | None:
        """Return the host of a file: by its name, because its lines name no other, or by its rank."""
        match = _HOST_FILE.match(PurePath(self.names[file]).name)
        if match:
            return match.group(1)
        hosts, rank = self.scans[file].hosts, self.file_rank(file)
        return hosts[0] if len(hosts) == 1 else self.rank_hosts.get(rank) if rank is not None else None

    def _attribute(self) -> None:
        """Assign the rank or host of a file to its signals without one, if the file has only one."""
        for scan in self.scans:
            name = PurePath(self.names[scan.file]).name
            rank_match, host_match = _RANK_FILE.search(name.split(".log")[0]), _HOST_FILE.match(name)
            own_rank = int(rank_match.group(1)) if rank_match else (scan.ranks[0] if len(scan.ranks) == 1 else None)
            own_host = host_match.group(1) if host_match else (scan.hosts[0] if len(scan.hosts) == 1 else None)
            for signal in scan.signals:
                if signal.rank is None and signal.local is None and rank_match:
                    signal.rank = own_rank
                if signal.host is None and (signal.rank is None or signal.rank == own_rank):
                    signal.host = own_host
            if own_rank is not None and own_host:
                scan.rank_hosts.setdefault(own_rank, own_host)


def sort_by_time(signals: Iterable[LogSignal]) -> list[LogSignal]:
    """Sort by time if both times can be compared, else by file and line."""
    listed = sorted(signals, key=lambda s: (s.file, s.line))
    times = [s.time for s in listed if s.time is not None]
    if len(times) < len(listed) or not all(times_comparable(times[0], t) for t in times):
        return listed
    return sorted(listed, key=lambda s: (s.time or 0.0, s.file, s.line))
